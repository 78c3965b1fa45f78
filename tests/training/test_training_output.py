"""Lines of a run on a screen of any width: broken at words there, whole in log.txt."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bessemer.console import wrapped
from bessemer.errors import runnable
from bessemer.job import RunDirectory
from bessemer.registry import datasets, models, objectives
from bessemer.training.display import facts
from bessemer.training.launch import build_trainer
from bessemer.training.output import Output, names_own_code, next_commands, reward_line

NOTE = "note       the same data 20 times: small corpora overfit, and validation gets worse while training goes on"


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_long_lines_break_at_words_on_a_terminal_and_stay_whole_in_the_log(width: int, tmp_path: Path) -> None:
    output, screen = Output(RunDirectory(tmp_path / "a").create(), True), io.StringIO()
    output.console = Console(file=screen, force_terminal=True, width=width, no_color=True, highlight=False)
    output.open_log()
    output.say(NOTE)
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(NOTE.split()), "no word is cut"
    assert NOTE in output.directory.log.read_text()
    command = runnable("  bessemer sample runs/a-run-with-a-long-name --prompt 'Once upon a time there was'")
    output.say(command)
    assert command in screen.getvalue().replace("\r", ""), "a command can be copied"


def test_what_follows_stands_below_the_text_of_its_line() -> None:
    first, *others = wrapped(NOTE, 60)
    assert first.startswith("note       the same") and others and all(line[:11] == " " * 11 for line in others)
    assert wrapped("  | " + "word " * 30, 40)[1].startswith("  | ") is False
    path = "/a/path/" + "that-is-longer-than-the-screen/" * 4
    assert path in wrapped(f"run        {path}", 40)[-1]


def test_what_a_model_writes_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Previews show its text, and a model may come from anybody; log.txt is read on a terminal, too."""
    output, screen = Output(RunDirectory(tmp_path / "a").create(), True), io.StringIO()
    output.console = Console(file=screen, force_terminal=True, width=80, no_color=True, highlight=False)
    output.open_log()
    output.say("step  1  Once ▸\x1b]0;owned\x07\x1b[2J\x9b31m\tup\non")
    for text in (screen.getvalue(), output.directory.log.read_text()):
        assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text and "?]0;owned?" in text


OWN = """
import bessemer as bm
import flax.linen as nn
from bessemer.registry import datasets, models, objectives
from bessemer.objectives.pretrain import pretrain


@models.register("own_bigram")
class OwnBigram(bm.LanguageModel):
    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        return nn.Dense(self.vocab_size)(nn.Embed(self.vocab_size, 8)(input_ids))


@datasets.register("own_counting")
def counting():
    return [{"text": " ".join(str(first + n) for n in range(40))} for first in range(200)]


objectives.register("own_goal", chat=True)(pretrain)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_the_next_commands_of_a_run_with_own_parts_work_on_it(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command imports the user's code: they would fail on a model or data of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_next.py").write_text(OWN)

    def commands(**settings: Any) -> str:
        given = {**tiny, "plugins": ["own_next.py"], **{key.replace("__", "."): v for key, v in settings.items()}}
        trainer = build_trainer("quickstart", {key: v for key, v in given.items() if v is not None}, name="a")
        return "\n".join(next_commands(trainer.plan, [], "runs/a"))

    try:
        shipped = {f"model__{name}": None for name in ("depth", "width", "head_dim")} | {"optimization__name": "adamw"}
        own_model = commands(model__family="own_bigram", **shipped)
        code = "import own_next, bessemer as bm; print(bm.Run('\"'\"'runs/a'\"'\"').evaluate(['\"'\"'bpb'\"'\"']))"
        assert f" -c '{code}'" in own_model and "bessemer report runs/a --html" in own_model
        assert not any(f"bessemer {word}" in own_model for word in ("sample", "eval", "chat", "serve", "train"))
        assert code in commands(model__family="own_bigram", training__dataset="own_counting", **shipped)
        own_data = commands(training__dataset="own_counting")
        assert "bessemer sample runs/a" in own_data and "bessemer eval" not in own_data
        assert "bessemer chat runs/a" in commands(objective="own_goal")
        assert "bessemer chat" not in commands(objective="own_goal", model__family="own_bigram", **shipped)
        recipes_own = commands(training__dataset=None)
        assert (
            "bessemer train quickstart 'plugins=[own_next.py]' optimization.name=muon training.dataset=my.txt"
            in recipes_own
        )
    finally:
        for table in (models, datasets, objectives):
            for name in ("own_bigram", "own_counting", "own_goal"):
                table._entries.pop(name, None)
        sys.modules.pop("own_next", None)


def test_a_run_that_learns_nothing_from_its_rewards_says_so() -> None:
    rows = [{"step": step, "loss": 0.0, "reward": 0.0, "flat_groups": 1.0} for step in (1, 2)]
    first, warning = reward_line(rows)
    assert first == "reward of sampled answers: 0.000 at step 1, 0.000 at step 2"
    assert warning.startswith("warning: In every group all answers had the same reward")
    assert facts(rows[0]).startswith("loss 0.0000  reward 0.000")
    mixed = [*rows, {"step": 3, "reward": 0.5, "flat_groups": 0.5, "val_reward": 0.25}]
    assert reward_line(mixed) == ["reward on held-out prompts, greedy: 0.250 at step 3, 0.250 at step 3"]


def test_no_shipped_dataset_is_taken_for_code_of_the_users() -> None:
    assert not any(map(names_own_code, ("python-stdlib", "toy-text", "gsm8k")))
    assert names_own_code("my_parts.py:texts") and not names_own_code("corpus.txt")
