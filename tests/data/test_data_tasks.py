"""Synthetic task sets: right answers, parts that share no question, the same rows for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bessemer.cli.data import command
from bessemer.data import Sampling, TokenStore, open_store
from bessemer.data.sources.datasets import TASKS, part_of, question_of, task_rows
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.registry import datasets

CHATS = ["toy-arithmetic", "toy-reverse", "toy-sort"]


@pytest.mark.parametrize("name", TASKS)
def test_parts_share_no_question_whatever_the_seed(name: str) -> None:
    train = {question_of(row) for seed in (1, 2) for row in task_rows(name, "train", 300, seed)}
    held_out = {question_of(row) for seed in (1, 3) for row in task_rows(name, "val", 60, seed)}
    fewest = (150, 15) if name == "toy-guess" else (300, 60)  # of its games, many have the same numbers
    assert len(train) >= fewest[0] and len(held_out) >= fewest[1] and not train & held_out
    assert task_rows(name, "train", 20, 5) == task_rows(name, "train", 20, 5) != task_rows(name, "train", 20, 6)


def test_answers_are_right() -> None:
    for name in CHATS:
        for row in task_rows(name, "val", 50):
            question, answer = row["messages"][0]["content"], row["answer"]
            assert row["messages"][1] == {"role": "assistant", "content": answer}
            *_, word = words = question.split()
            wanted = {"Reverse": word[::-1], "Sort": "".join(sorted(word))}.get(words[0])
            assert answer == (wanted or str(int(words[1]) + int(words[3]))), question


def test_careless_answers_are_right_by_chance_at_every_length() -> None:
    """Both slips are commoner than their absence, so the most likely answer is wrong, and one in nine has neither."""
    rows = task_rows("toy-careless", "train", 6000)
    for length in (3, 4, 5):
        pairs = [(question_of(row).split()[1], row["answer"]) for row in rows]
        pairs = [(text[::-1], answer) for text, answer in pairs if len(text) == length]
        left_out = sum(len(answer) == length - 1 for _, answer in pairs) / len(pairs)
        right = sum(answer == wanted for wanted, answer in pairs) / len(pairs)
        assert left_out == pytest.approx(2 / 3, abs=0.05) and right == pytest.approx(1 / 9, abs=0.04)
        assert all(sorted(answer[:2]) == sorted(wanted[:2]) for wanted, answer in pairs if length > 3)
        assert all(answer[2:] in (wanted[2:], wanted[2:-1]) for wanted, answer in pairs)


def test_sums_with_a_calculator_are_right_where_it_is_called_with_the_numbers_asked_for() -> None:
    rows = task_rows("toy-tools", "train", 4000)
    right = called = 0
    for row in rows:
        said, answer = row["messages"][1]["content"], row["answer"]
        assert answer == str(sum(int(word) for word in question_of(row).split() if word.isdigit()))
        if isinstance(said, str):
            assert said != answer
            continue
        expression, output, text = (part["text"] for part in said)
        assert text == output == str(sum(map(int, expression.split("+"))))
        called += 1
        right += text == answer
    assert called / len(rows) == pytest.approx(0.25, abs=0.03) and right / called == pytest.approx(0.55, abs=0.06)


def test_games_are_played_by_the_rules_and_the_middle_always_wins() -> None:
    rows = task_rows("toy-guess", "train", 2000)
    lowest = first_wins = halved = 0
    for row in rows:
        asked, *turns = row["messages"]
        assert asked["content"] == f"Guess {row['low']} to {row['high']}" and row["high"] - row["low"] == 6
        guesses = [int(turn["content"]) for turn in turns[::2]]
        answers = [turn["content"] for turn in turns[1::2]]
        assert answers == ["higher" if guess < row["secret"] else "lower" for guess in guesses[: len(answers)]]
        assert (guesses[-1] == row["secret"]) or len(guesses) == 3
        lowest += guesses[0] == row["low"]
        wise = guesses[0] == row["low"] + 3 and row["low"] not in guesses[1:]
        halved, first_wins = halved + wise, first_wins + (wise and guesses[-1] == row["secret"])
    assert lowest / len(rows) == pytest.approx(0.6, abs=0.05) and halved > 100
    assert first_wins / halved > 0.9  # all but those that guessed the lowest where it is the middle


def test_the_preference_depends_on_the_prompt_alone() -> None:
    """Each answer is chosen for one prompt and rejected for another: a model cannot learn to like one text."""
    rows = task_rows("toy-preference", "train", 2000)
    for row in rows:
        brief = len(row["chosen"]) < len(row["rejected"])
        assert brief == ("briefly" in row["prompt"]) and {"prompt", "chosen", "rejected"} == set(row)
    assert {row["chosen"] for row in rows} & {row["rejected"] for row in rows}


def test_the_text_to_pretrain_on_knows_no_held_out_question() -> None:
    held_out = [question_of(row) for name in CHATS for row in task_rows(name, "val", 200)]
    text = "\n".join(row["text"] for row in task_rows("toy-text", "train", 4000))
    assert not [question for question in held_out if f"{question} is" in text]


def test_a_registered_set_brings_its_own_held_out_part(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["abc"], 268)
    store = open_store(Sampling("toy-text"), tokenizer, tmp_path)
    held_out = datasets.entry("toy-text").traits["held_out"]()
    assert len(TokenStore(store, "val").offsets) == len(held_out) + 1
    assert all(part_of({"prompt": question_of(row)}) == "val" for row in held_out)


def test_the_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = run(command, ["tasks"])
    assert listed.exit_code == 0 and all(name in listed.output for name in TASKS)
    file = tmp_path / "sort.jsonl"
    made = run(command, ["tasks", "toy-sort", "-o", str(file), "--count", "7", "--split", "val", "--seed", "4"])
    assert made.exit_code == 0, made.output
    assert [json.loads(line) for line in file.read_text().splitlines()] == task_rows("toy-sort", "val", 7, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toy-revers",), "toy-reverse"),
        (("toy-sort", "test"), "train or val"),
        (("toy-sort", "val", 0), "at least 1"),
        (("toy-preference", "val", 5000), "no 5000 different rows"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(InputError, match=words):
        task_rows(*arguments)
