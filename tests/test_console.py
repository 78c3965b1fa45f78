"""Progress: a bar on a terminal, plain lines in a file."""

import io

import pytest

from bessemer import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("total", "expected"), [(2**31, "copying: 1.50 of 2.00 GiB"), (0, "copying: 1.50 GiB")])
def test_a_file_gets_plain_lines_with_the_bytes_so_far(monkeypatch, total, expected):
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.0)
    file = io.StringIO()
    with console.byte_progress("copying", total, file) as advance:
        advance(2**30)
        advance(2**29)
    assert file.getvalue().splitlines()[-1] == expected


def test_a_short_task_writes_nothing_to_a_file():
    file = io.StringIO()
    with console.show_progress("items", file) as display:
        display.update("scoring", 1, 2)
    assert file.getvalue() == ""


def test_a_terminal_shows_a_bar_of_bytes():
    screen = Terminal()
    with console.byte_progress("copying", 3_000_000, screen) as advance:
        advance(3_000_000)
    assert "copying" in screen.getvalue() and "3.0/3.0 MB" in screen.getvalue()
