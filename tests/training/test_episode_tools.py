"""Tool calls in the model's own chat template: what is trained is what was sampled, id by id, with results between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.stock_templates import FAMILIES
from tests.training.tiny_rl import build, grpo_settings

from bessemer.data.tokenize.chat import render, render_next, stop_ids, supervised_rows
from bessemer.generate.request import Handle, Sample
from bessemer.rl.environments.calculator import Calculator

pytestmark = pytest.mark.usefixtures("on_one_device")
TOOLS = list(Calculator.tools)
BY_NAME = {family.name: family for family in FAMILIES}
ASKED = "Compute 2*(3+4)"


def call_text(tokenizer: Any) -> str:
    """Return a call of the calculator as the template writes it, without the end of the turn."""
    call = {"name": "calculate", "arguments": {"expression": "2*(3+4)"}}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00001", "function": call}],
    }
    ((ids, mask), *_) = supervised_rows([{"role": "user", "content": ASKED}, answer], tokenizer, TOOLS)
    return tokenizer.decode([token for token, learnt in zip(ids, mask, strict=True) if learnt][:-1])


def in_pieces(text: str, tokenizer: Any) -> list[int]:
    """Return ids of the text, letter by letter."""
    return [token for letter in text for token in tokenizer.encode(letter)]


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5",
        pytest.param("ours/llama3_2", marks=pytest.mark.slow),
        pytest.param("ours/mistral_nemo", marks=pytest.mark.long),
    ],
)
def test_calls_and_results_are_trained_as_they_were_sampled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script stands in for what the engine sampled: it calls the calculator, letter by letter, and answers with the
    result; every fourth completion asks for an expression that cannot be computed."""
    tokenizer = BY_NAME[name].tokenizer
    end = stop_ids(tokenizer)[0]
    written = {"call": call_text(tokenizer), "broken": call_text(tokenizer).replace("2*(3+4)", "2*(3+"), "answer": "14"}
    ids = {what: [*in_pieces(text, tokenizer), end] for what, text in written.items()}

    def scripted(handle: Handle, sample: Sample) -> Sample:
        first = handle.request.n > 1  # a group's first turn is one request
        what = "answer" if not first else "broken" if sample.index == 3 else "call"
        logprobs = (-1.0,) * len(ids[what])
        return replace(sample, ids=tuple(ids[what]), text=written[what], logprobs=logprobs, finish="stop", stop=end)

    def samples(self: Handle) -> dict[int, Sample]:
        return {index: scripted(self, sample) for index, sample in self._samples.items()}

    monkeypatch.setattr(Handle, "samples", property(samples))
    rows = [{"prompt": ASKED, "answer": "14"}] * 8
    settings = grpo_settings(tmp_path, rows, {"architecture.block_size": 1024, "grpo.environment": "calculator"})
    folder = tmp_path / "template"
    tokenizer.save(folder)
    settings |= {"data.tokenizer": str(folder), "grpo.max_turns": 2, "training.steps": 2, "grpo.slots": 4}
    trainer = build(settings, tmp_path)
    sampler = trainer.sampler
    trainer.run()
    made = trainer.rollout

    if name == "qwen2_5":  # its tags are tokens, so writing the same text again would give other ids
        assert tokenizer.encode(written["call"]) != ids["call"][:-1]
    prompt = render([{"role": "user", "content": ASKED}], tokenizer, tools=TOOLS)
    assert len(sampler.played) == 16
    for number, episode in enumerate(sampler.played):
        what = "broken" if number % 4 == 3 else "call"
        turn = ids[what]
        result = episode.ids[len(turn) : len(episode.ids) - len(ids["answer"])]
        assert list(episode.ids) == [*turn, *result, *ids["answer"]]
        assert episode.mask == (1,) * len(turn) + (0,) * len(result) + (1,) * len(ids["answer"])
        text = tokenizer.decode(list(result))
        assert ("error: " in text) is (what == "broken") and ("14" in text) is (what == "call")
        called = {"role": "tool", "content": "14", "name": "calculate"}
        if what == "call":  # the result stands where the template puts it, and the template opens the answer
            between = render_next([called], tokenizer, before=[*prompt, *turn], ended=True, called=True, tools=TOOLS)
            assert list(result) == between
        row = {field: array[number] for field, array in made.rows.items()}
        length = int((row["segment_ids"] > 0).sum())
        whole = [*row["input_ids"][:length].tolist(), int(row["target_ids"][length - 1])]
        assert whole == [*prompt, *episode.ids]
        trained = row["target_ids"][row["loss_mask"] > 0].tolist()
        assert trained == [*turn, *ids["answer"]] and (row["target_ids"] >= 0).sum() == len(trained)
    np.testing.assert_array_equal(made.rewards["reward"], 1.0)
    counted = json.loads((trainer.run_directory.metrics).read_text().splitlines()[0])
    assert counted["env/turns"] == 2 and counted["env/failures"] == 0
    assert counted["env/tool_calls"] == 16 and counted["env/tool_errors"] == 4
