"""The preview callback: due steps only, live parameters, a file without duplicates after a resume."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from bessemer.topology import make_topology
from bessemer.training import feed, launch
from bessemer.training.callbacks.base import Callbacks
from bessemer.training.callbacks.preview import PROMPTS, Preview, beginning, one_line
from bessemer.training.callbacks.tracker import Tracker
from tiny_run import random_params


@pytest.fixture(scope="module")
def built(tiny, home, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
        settings = {**tiny, "training.steps": 6, "logging.preview_prompts": [], "architecture.block_size": 64}
        made = launch.build_trainer("quickstart", settings, name="p", root=tmp_path_factory.mktemp("runs"))
    made.state = made.state.replace(params=random_params(made.model))
    return made


@pytest.fixture
def loop(built, tmp_path, monkeypatch):
    """A loop that only counts steps, over a real trainer."""
    said, flushed = [], []
    monkeypatch.setattr(built, "say", said.append)
    monkeypatch.setattr(built, "spec", dataclasses.replace(built.spec, root=tmp_path))
    built.run_directory.create()
    built.step = 0
    return SimpleNamespace(
        trainer=built,
        step=0,
        steps=6,
        said=said,
        flushed=flushed,
        flush=lambda: flushed.append(True),
        callbacks=Callbacks([]),
        paused=contextlib.nullcontext,
    )


def run(loop, preview, stop=None):
    loop.trainer.step = loop.step
    preview.on_train_begin(loop)
    while loop.step < (stop or loop.steps):
        loop.step += 1
        loop.trainer.step = loop.step
        preview.on_batch_end(loop)
    if stop is None:
        preview.on_train_end(loop)


def rows(loop):
    return [json.loads(line) for line in loop.trainer.run_directory.samples.read_text().splitlines()]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("of it.\n\nA line\nand more", "A line\nand more"),
        ("of it<|bos|>One.<|bos|>Two.", "One."),  # documents without a line end, as in JSON lines
        ("of one long document", "one long document"),
        ("the end\n<|bos|>import os", "import os"),
        ("<|bos|>", ""),
    ],
)
def test_held_out_text_begins_at_a_line_a_document_or_a_word(row, prompt):
    assert beginning(row, re.compile(re.escape("<|bos|>"))) == prompt


@pytest.mark.slow
def test_previews_at_due_steps_and_after_the_end(loop):
    before = feed.calls
    run(loop, Preview(interval=2))
    assert [row["step"] for row in rows(loop)] == [2] * 7 + [4] * 7 + [6] * 7
    assert [row["prompt"] for row in rows(loop)[:7]] == list(PROMPTS)
    assert len(loop.flushed) == 3 and feed.calls - before == 3  # one read a preview, and only by `fetch`
    assert len([line for line in loop.said if line.startswith("step")]) == 6
    assert all(len(line) <= 80 for line in loop.said if line.startswith("step"))
    first, *others = (rows(loop)[i : i + 7] for i in (0, 7, 14))
    for other in others:  # the parameters did not change, so neither do greedy continuations
        assert [row["completion"] for row in other] == [row["completion"] for row in first]


def test_a_resumed_run_has_the_rows_of_an_undisturbed_one(loop):
    run(loop, Preview(interval=2))
    whole = rows(loop)
    loop.step = 3
    run(loop, Preview(interval=2))
    assert rows(loop) == whole
    loop.step = 0
    run(loop, Preview(interval=2), stop=1)
    assert rows(loop) == []


def test_own_prompts_and_only_at_the_end(loop):
    run(loop, Preview(interval=-1, prompts=["The cat", "The dog"]))
    assert [(row["step"], row["prompt"]) for row in rows(loop)] == [(6, "The cat"), (6, "The dog")]


def test_without_a_tokenizer_it_says_so_and_stays_silent(loop, monkeypatch):
    monkeypatch.setattr(loop.trainer, "model_parts", loop.trainer.model_parts._replace(tokenizer=None))
    run(loop, Preview(interval=2))
    assert loop.said == ["no previews: they need a tokenizer"]
    assert not loop.trainer.run_directory.samples.exists()


def test_one_line_fits():
    line = one_line(SimpleNamespace(prompt="a\nb", text=" c" * 80))
    assert line.startswith("a\\nb ▸ c") and len(line) == 66 and line.endswith("…")


@pytest.mark.parametrize("width", [26, 40, 66, 200])
def test_prompt_and_answer_are_both_shown(width):
    long = "What is the name of the city that lies where the two rivers of that country meet? Answer in a word."
    for prompt, text in ((long, " Khartoum"), (long, " It is" * 40), ("Say hi.", " hi" * 40), ("Say hi.", " hi")):
        line = one_line(SimpleNamespace(prompt=prompt, text=text), width)
        asked, answer = line.split(" ▸")
        assert len(line) <= width and len(asked) >= min(len(prompt), width // 2 - 2)
        assert len(answer) >= min(len(text), width // 2 - 2) and asked[:3] == prompt[:3]


def test_data_of_ones_own_is_previewed_with_its_own_text(tiny, tmp_path, monkeypatch):
    """Neither with the prompts of a recipe's demonstration nor with the shipped ones."""
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
    recipe = tmp_path / "toy.yaml"
    recipe.write_text("training: {dataset: python-stdlib}\nlogging: {preview_prompts: [The key is]}\n")

    def texts(**given):
        settings = {key: value for key, value in tiny.items() if not key.startswith("training.dataset")}
        made = launch.build_trainer(recipe, {**settings, **given}, name="q", root=tmp_path)
        [preview] = [one for one in made.make_callbacks() if isinstance(one, Preview)]
        return list(preview.starts(made, made.tokenizer)[0])

    mine = {"training.dataset": tiny["training.dataset"]}
    found = texts(**mine)
    assert found and "The key is" not in found and not {*found} & {*PROMPTS}
    corpus = Path(tiny["training.dataset"]).read_text()
    assert all(text.strip() in corpus for text in found)
    assert texts(**mine, **{"logging.preview_prompts": ["My own"]}) == ["My own"]
    assert texts(**mine, **{"logging.preview_prompts": []}) == list(PROMPTS)


def test_samples_reach_the_trackers(loop):
    tracker, written = Tracker(), []
    tracker.sinks = [SimpleNamespace(write_samples=lambda step, lines: written.append((step, lines)))]
    loop.callbacks = Callbacks([tracker])
    run(loop, Preview(interval=-1, prompts=["The cat"]))
    (row,) = rows(loop)
    assert written == [(6, [f"The cat ▸ {row['completion']}"])]
