"""metrics.jsonl: rows survive kills and resumes; nothing non-finite is silent."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import InputError, StorageError
from bessemer.report.metrics import MetricsFile


def test_rows_come_back_and_non_finite_values_are_named(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.rows() == [] and metrics.truncate_after(3) == 0
    metrics.append({"step": 1, "loss": np.float32(2.5), "name": "a", "ok": True, "none": None})
    metrics.append({"step": np.int64(2), "loss": float("nan"), "grad_norm": float("inf")})
    first, second = metrics.rows()
    assert first == {"step": 1, "loss": 2.5, "name": "a", "ok": True, "none": None}
    assert second == {"step": 2, "loss": None, "grad_norm": None, "non_finite": ["loss", "grad_norm"]}


def test_device_values_are_refused(tmp_path):
    with pytest.raises(InputError, match="'loss'"):
        MetricsFile(tmp_path / "metrics.jsonl").append({"loss": jnp.ones(())})


def test_resume_removes_rows_beyond_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (8, 16, 16, 24, 32):
        metrics.append({"step": step, "loss": 1 / 3})
    before = path.read_bytes().splitlines()
    assert metrics.truncate_after(16) == 2
    assert path.read_bytes().splitlines() == before[:3]
    metrics.append({"step": 24})
    assert [row["step"] for row in metrics.rows()] == [8, 16, 16, 24]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@given(cut=st.integers(min_value=0, max_value=60))
def test_a_kill_in_the_middle_of_a_row_loses_at_most_that_row(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(text[:cut])
    kept = [row for row, end in zip(rows, (len(text) // 2, len(text)), strict=True) if cut >= end - 1]
    assert MetricsFile(path).rows() == kept
    metrics = MetricsFile(path)
    metrics.append({"step": 3})
    assert metrics.rows() == [*kept, {"step": 3}]
    torn = cut not in (0, len(text) // 2 - 1, len(text) // 2) and cut < len(text) - 1
    assert bool(metrics.notes) == torn


def test_damage_in_the_middle_is_an_error_with_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(StorageError, match="line 2"):
        MetricsFile(path).rows()


def test_a_vanished_directory_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="vanished"):
        MetricsFile(tmp_path / "gone" / "metrics.jsonl").append({"step": 1})
