"""The parts of a rollout that need no model: which rows a step takes, what a row holds, prompts and their columns."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.tiny_run import tiny_tokenizer

from bessemer.data import Sampling
from bessemer.data.tokenize.chat import supervised
from bessemer.errors import InputError, StorageError
from bessemer.models.llama import Llama
from bessemer.models.moe import EXPERT_IDS
from bessemer.objectives.grpo import GrpoSettings
from bessemer.registry import datasets
from bessemer.rl.prompts import (
    PromptPlan,
    PromptRows,
    end_ids,
    group_of,
    numbered_split,
    prompt_of,
    read_rows,
    read_split,
)
from bessemer.rl.rollout import FIELDS, Passes, Rollout, check_rollout, completion_rows, fit_routes, spread
from bessemer.storage.weights import to_bytes


def chat_row(question: str, answer: str) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "answer": answer}


def test_every_completion_once_a_pass_and_groups_whole():
    passes = Passes(batch_size=8, group_size=4, parts=3, iterations=2, seed=1)
    assert (passes.steps, passes.prompts, passes.rows) == (6, 6, 24)
    assert passes.place(13) == (2, 1)
    for number in (0, 1):
        turns = [[passes.indices(number, 3 * turn + part) for part in range(3)] for turn in range(2)]
        for parts in turns:
            assert sorted(np.concatenate(parts)) == list(range(24))
            for rows in parts:
                groups = (rows // 4).reshape(-1, 4)
                assert (groups == groups[:, :1]).all()
        assert not np.array_equal(np.concatenate(turns[0]), np.concatenate(turns[1]))
    np.testing.assert_array_equal(passes.indices(1, 2), Passes(8, 4, 3, 2, 1).indices(1, 2))


def test_a_row_is_a_prompt_with_its_completion_and_the_end_is_trained():
    """Against the rows that supervised data gives for the same conversation."""
    tokenizer = tiny_tokenizer()
    row = chat_row("two dogs", "and a cat")
    ids, mask = supervised(row["messages"], tokenizer)
    first = mask.index(1)
    prompt, completion = ids[:first], ids[first:]
    assert completion[-1] == end_ids(tokenizer)[0]
    rows = completion_rows([prompt] * 2, [completion, completion[:2]], [[1.0] * len(completion), [0, 0]], 24, 5)
    length = len(ids) - 1
    np.testing.assert_array_equal(rows["input_ids"][0], ids[:-1] + [5] * (24 - length))
    np.testing.assert_array_equal(
        rows["target_ids"][0], np.where(np.array(mask[1:] + [0] * (24 - length)), (ids[1:] + [0] * 24)[:24], -1)
    )
    np.testing.assert_array_equal(rows["loss_mask"][0, :length], mask[1:])
    assert rows["loss_mask"][0].sum() == len(completion) and rows["loss_mask"][1].sum() == 0
    assert rows["segment_ids"][0].sum() == length and rows["positions"][0, length - 1] == length - 1
    found = spread([range(len(completion)), [7, 8]], rows)
    np.testing.assert_array_equal(found[0, first - 1 : length], range(len(completion)))
    assert found[1].sum() == 15


def rollout(masked: bool) -> Rollout:
    rows = completion_rows([[1, 2]] * 4, [[3, 4]] * 4, [[0.0 if masked else 1.0] * 2] * 4, 6, 0)
    rows["advantages"][:] = np.array([[1.0], [2], [3], [4]])
    return Rollout(3, rows, {"reward": np.array([0.1, 0.2, 0.3, 0.7])}, {"reward": 1 / 3, "time/rollout_s": 0.5})


def test_a_part_without_a_token_left_is_trained_with_advantage_0():
    passes = Passes(4, 4)
    whole, empty = passes.take(rollout(False), 0), passes.take(rollout(True), 0)
    assert whole["advantages"].max() == 4 and whole["loss_mask"].sum() == 8
    assert empty["advantages"].max() == 0 and empty["loss_mask"].sum() == 8


def test_a_rollout_is_read_back_exactly_and_damage_is_named(tmp_path: Path):
    made, path = rollout(False), tmp_path / "rollout.safetensors"
    path.write_bytes(made.to_bytes())
    again = Rollout.load(path)
    assert (again.number, again.metrics) == (made.number, made.metrics)
    for before, after in ((made.rows, again.rows), (made.rewards, again.rewards)):
        assert before.keys() == after.keys()
        for name, array in before.items():
            np.testing.assert_array_equal(array, after[name])
            assert array.dtype == after[name].dtype
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StorageError, match="cannot be read"):
        Rollout.load(path)


RUN: dict[str, Any] = {name: ((6,), np.dtype(dtype)) for name, dtype in FIELDS.items()}
EXPERTS: dict[str, Any] = {EXPERT_IDS: ((6, 2, 1), np.dtype(np.int16))}


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("input_ids", lambda rows: rows.pop("input_ids"), "missing"),
        ("advantages", lambda rows: rows.update(advantages=rows["advantages"][:2]), r"float32 \(2, 6\)"),
        ("loss_mask", lambda rows: rows.update(loss_mask=rows["loss_mask"].astype(np.int32)), "int32"),
        ("input_ids", lambda rows: rows["input_ids"].fill(300), "from 300 to 300"),
        ("target_ids", lambda rows: rows["target_ids"].fill(-2), "from -2 to -2"),
        (EXPERT_IDS, lambda rows: rows.update({EXPERT_IDS: np.full((4, 6, 2, 1), 4, np.int16)}), "from 4 to 4"),
    ],
)
def test_a_rollout_of_another_run_is_refused_by_name(name: str, change: Any, problem: str, tmp_path: Path) -> None:
    """Whoever can write a checkpoint can write its checksums, too."""
    model, made = Llama(vocab_size=300, block_size=6, experts=4, experts_active=1), rollout(False)
    check_rollout(made, tmp_path, 4, RUN | EXPERTS, model)
    change(made.rows)
    with pytest.raises(StorageError, match=f"{tmp_path}: '{name}'.*{problem}"):
        check_rollout(made, tmp_path, 4, RUN | EXPERTS, model)


@pytest.mark.parametrize("about", ["[1]", "5", "[" * 100_000, '{"reward": []}', '{"reward": 1' + "0" * 400 + "}"])
def test_metrics_of_a_rollout_that_are_no_numbers_are_refused(about: str, tmp_path: Path) -> None:
    path = tmp_path / "rollout.safetensors"
    path.write_bytes(to_bytes({"rows/input_ids": np.zeros((1, 1), np.int32)}, {"number": "0", "metrics": about}))
    with pytest.raises(StorageError, match=f"the rollout {path}"):
        Rollout.load(path)


def test_where_a_prompt_is_found():
    assert prompt_of({"prompt": "a", "x": 1}, "") == ("a", {"prompt": "a", "x": 1})
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    prompt, columns = prompt_of(row, "")
    assert prompt == row["messages"][:1] and columns["answer"] == "a"
    assert prompt_of({**row, "answer": "b"}, "")[1]["answer"] == "b"
    assert prompt_of({"question": "1+1?", "answer": "#### 2"}, "")[0] == "1+1?"
    for bad in ({}, {"prompt": " "}, {"prompt": 3}, {"messages": []}):
        with pytest.raises(InputError, match=r"data\.jsonl row 7"):
            prompt_of(bad, "data.jsonl row 7")


def test_rows_keep_every_column_from_any_kind_of_file(tmp_path: Path):
    rows = [{"prompt": f"p{n}", "answer": n, "meta": {"n": [n]}} for n in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert list(read_rows(str(tmp_path / name))) == rows
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    with pytest.raises(InputError, match=r"bad\.jsonl line 2"):
        list(read_rows(str(tmp_path / "bad.jsonl")))
    with pytest.raises(InputError, match="row 1: the column 'completions'"):
        PromptRows([{"prompt": "a", "completions": []}], "cats", tiny_tokenizer(), 32, longest=20)


def test_held_out_rows_do_not_depend_on_their_order_or_are_the_datasets_own(tmp_path: Path):
    rows = [{"prompt": f"p{n}"} for n in range(200)]
    parts = []
    for order in (rows, rows[::-1]):
        path = tmp_path / f"{len(parts)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in order))
        train, held = read_split(Sampling(str(path)), 0.2)
        assert len(train) + len(held) == 200 and 20 < len(held) < 60
        parts.append({row["prompt"] for row in held})
    assert parts[0] == parts[1]
    datasets.register("own-part", held_out=lambda: [{"prompt": "held"}])(lambda: [{"prompt": "trained"}])
    assert read_split(Sampling("own-part"), 0.5) == ([{"prompt": "trained"}], [{"prompt": "held"}])


def test_rows_are_named_by_their_place_in_the_file_whatever_is_held_out(tmp_path: Path):
    path = tmp_path / "cats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"cat {n}"}) + "\n" for n in range(1, 101)))
    parts = numbered_split(Sampling(str(path)), 0.2)
    assert sorted([*parts[0], *parts[1]]) == list(range(1, 101)) and len(parts[1]) > 5
    for part in parts:
        assert all(row["prompt"] == f"cat {number}" for number, row in part.items())
        made = PromptRows(list(part.values()), "cats", tiny_tokenizer(), 32, longest=20, numbers=list(part))
        assert made.places == list(part)
    rows = [{"prompt": "cat"}, {"prompt": " "}]
    with pytest.raises(InputError, match="cats row 40: a prompt is"):
        PromptRows(rows, "cats", tiny_tokenizer(), 32, longest=20, numbers=[39, 40])


def plan(seed: int = 0) -> PromptPlan:
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": f"cat {n}", "answer": n, **({"rare": 1} if n == 3 else {})} for n in range(10)]
    rows.append({"prompt": "a cat " * 40, "answer": 0})
    made = PromptRows(rows, "cats", tokenizer, 32, longest=20)
    assert made.stats == {"prompts": 10, "too_long": 1}
    return PromptPlan([(Sampling("cats"), made)], [(Sampling("cats"), made)], Passes(8, 4, 2, 2, seed), 4)


def test_prompts_are_a_function_of_the_rollout_and_the_seed():
    one, same, other = plan(), plan(), plan(1)
    drawn = [[place for _, place in one.prompts(number)] for number in range(5)]
    assert drawn == [[place for _, place in same.prompts(number)] for number in range(5)]
    assert drawn != [[place for _, place in other.prompts(number)] for number in range(5)]
    assert sorted(place for number in drawn for place in number) == sorted([*range(10)] * 2)  # two epochs
    assert one.batch(4)["prompt"].tolist() == drawn[1]  # four steps per rollout
    assert one.batch(7, slice(1, 3))["prompt"].tolist() == drawn[1][1:3]
    assert one.epoch(4) == 0.4 and len(one.held_out) == 4
    assert one.columns == ["answer", "prompt"]  # not one that a single row has
    assert one.partial_columns == {"rare": "9 of 10 rows lack it, first cats row 1"}
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_saved_rollout_fits_whether_experts_are_replayed() -> None:
    made, fields = rollout(False), {EXPERT_IDS: EXPERTS[EXPERT_IDS]}
    fit_routes(made.rows, fields)
    assert made.rows[EXPERT_IDS].shape == (4, 6, 2, 1) and (made.rows[EXPERT_IDS] == -1).all()
    made.rows[EXPERT_IDS][:] = 2
    fit_routes(made.rows, fields)
    assert (made.rows[EXPERT_IDS] == 2).all(), "recorded ones stay"
    fit_routes(made.rows, {})
    assert EXPERT_IDS not in made.rows, "scoring would replay them, and training would not"


STORED = {"prompt": "hi", "completions": [[1, 2], [3, 4]], "rewards": [0, 1], "logprobs": [[-1, -1], [-1, -1]]}


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": ["good", "bad"]},
        {"rewards": ["1", "2"]},
        {"rewards": [[1], [2]]},
        {"completions": [None, [1, 2]]},
        {"completions": [[1.5, 2], [3, 4]]},
        {"completions": [["a", "b"], [3, 4]]},
        {"logprobs": [1, 2]},
        {"logprobs": 3},
        {"logprobs": [["a", -1], [-1, -1]]},
        {"logprobs": [[float("nan"), -1], [-1, -1]]},
        {"masks": [[None, 1], [1, 1]]},
        {"masks": [[5, 1], [-1, 1]]},
        {"prompt": "half \ud800"},
    ],
)
def test_a_stored_group_that_cannot_be_trained_on_is_named_with_its_row(changes: dict[str, Any]) -> None:
    settings: Any = SimpleNamespace(group_size=2, chat=True, block_size=32, max_prompt_length=None)
    policy, tokenizer = GrpoSettings(offline="logprobs", max_completion_length=8), tiny_tokenizer()
    rows, rewards = group_of(STORED, "row 7", settings, policy, tokenizer)
    assert rows["loss_mask"].sum() == 4 and rewards.tolist() == [0, 1]
    column = "content" if "prompt" in changes else next(iter(changes))
    with pytest.raises(InputError, match=f"^row 7: '{column}'"):
        group_of(STORED | changes, "row 7", settings, policy, tokenizer)


def test_prompts_that_are_all_too_long_are_an_error():
    with pytest.raises(InputError, match=r"grpo\.max_prompt_length"):
        PromptRows([{"prompt": "a cat " * 40}], "cats", tiny_tokenizer(), 32, longest=20)
