"""Lines of a run on a screen of any width: broken at words there, whole in log.txt."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bessemer.console import wrapped
from bessemer.errors import runnable
from bessemer.job import RunDirectory
from bessemer.training.console.output import Output

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
