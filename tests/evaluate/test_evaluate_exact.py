"""Exact match: what counts as right, whose rows are asked, and what a result is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.evaluate.test_evaluate_generative import QUESTION, scripted

from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.evaluate.exact import held_out_rows, question
from bessemer.job import ExecutionSpec


def judged(answer: list[str], wanted: str, tmp_path: Path) -> dict[str, Any]:
    """The result for a model that writes `answer` to the one question it knows."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": QUESTION, "answer": wanted}) + "\n")
    spec = ExecutionSpec("judge", root=tmp_path)
    spec.run_directory.create(exist_ok=True)
    (result,) = Evaluator(spec, scripted(answer), [f"exact:{file}"], batch_size=2).run().values()
    assert result["task"] == f"exact:{file}" and list(spec.run_directory.eval.glob("exact-*_step0.json"))
    return result


def test_the_whole_answer_and_nothing_but_the_answer(tmp_path: Path) -> None:
    assert judged(["Nine.", "<|assistant_end|>"], "Nine.", tmp_path)["value"] == 1
    wrong = judged(["Nine. Or ten.", "<|assistant_end|>"], "Nine.", tmp_path)
    assert wrong["value"] == 0 and wrong["wrong"][0]["written"] == "Nine. Or ten."


def test_rows_and_their_parts() -> None:
    rows = held_out_rows("toy-sort")
    prompt, answer = question(rows[0], "row 1")
    assert prompt == rows[0]["messages"][:1] and answer == rows[0]["answer"]
    assert question({"question": "1 + 1?", "answer": "2"}, "row 1") == ("1 + 1?", "2")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("exact", "write exact:toy-reverse"),
        ("exact:toy-revers", "neither a .jsonl file nor one of .*toy-reverse"),
        ("exact:toy-preference", "no prompt with an answer"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, task: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Evaluator(ExecutionSpec("judge", root=tmp_path), scripted(["9"]), [task]).run()
