"""The texts of the repository follow docs/prose.yaml, and the checker finds what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.prose import ROOT, findings, markdown, problems, python, rules, wrap


def test_nothing_is_found_in_the_texts_of_the_repository() -> None:
    assert [str(one) for one in findings()] == []


@pytest.mark.parametrize(
    "text",
    [
        "There is one file a command.",
        "Weights that are\nno numbers end the run.",
        "'x' is to be an object.",
        "We normalise, and analyse the behaviour.",
        "A grey centre of the labelled catalogue.",
        "Towards the end, in whose favour?",
    ],
)
def test_phrases_and_british_spellings_are_found(text: str) -> None:
    assert list(problems(text))


@pytest.mark.parametrize(
    "text",
    ["Otherwise raise a precise error: your source promises four hours.", "The caller called a smaller exercise."],
)
def test_american_words_are_left_alone(text: str) -> None:
    assert list(problems(text)) == []


def test_code_is_not_read_and_lines_are_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n`colour` and [here](grey.md)\n\n```text\nnormalise\n```\n\nA colour.\n")
    assert [one.line for one in markdown(page)] == [9]


def test_a_block_of_code_ends_with_the_fence_it_began_with(tmp_path: Path) -> None:
    """An underline of tildes inside a block once hid the rest of its page."""
    page = tmp_path / "page.md"
    page.write_text("```\nsome code\n     ~~~~\n```\n\nA colour.\n")
    assert [one.line for one in markdown(page)] == [6]


def test_docstrings_and_help_texts_are_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""The colour."""\ncolour = field("a/b", help="size of the centre")\n# a comment: behaviour\n')
    assert [one.line for one in python(module)] == [1, 2]


def test_long_lines_are_wrapped_without_a_change_of_meaning() -> None:
    code = "`" + "x y " * 20 + "`"
    long = "word " * 30
    text = f"# Title {long}\n\n{long}{code} - not a list\n\n- item {long}\n  goes on\n- second\n\n| {long} |\n|---|\n"
    made = wrap(text)
    lines = made.splitlines()
    assert wrap(made) == made
    assert [line for line in lines if len(line) > 120] == [f"# Title {long}", f"| {long} |"]
    assert code in made and not any(line.startswith("- not") for line in lines)
    assert "\n  word" in made and "goes on\n- second\n" in made
    assert made.split() == text.split()


def test_exempt_pages_exist() -> None:
    assert all((ROOT / name).is_file() for name in rules().wide | rules().unchecked)
