"""Lookup layers over two real processes: the rows are shared out alike in each, and train as on two devices of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.conftest import words
from tests.processes import finish, start

from bessemer.models.allocation import Allocation

LOOKUP: dict[str, object] = {
    "architecture.lookup.after_layers": "[0]",
    "architecture.lookup.rows": 448,
    "architecture.lookup.k_max": 12,
    "training.per_device_batch_size": 2,
    "training.steps": 4,
    "logging.checkpoint_interval": 2,
}


def rows(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "mem/"))} for line in lines]


@pytest.mark.parametrize("fsdp", [pytest.param(2, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)])
def test_two_processes_train_as_two_devices(fsdp: int, tiny: dict[str, object], home: Path, tmp_path: Path) -> None:
    """Bit for bit, as sums of two do not depend on their order. fsdp 2 rests half of every table with each process."""
    settings = words({**tiny, **LOOKUP, "topology.fsdp": fsdp})
    for name, count, devices in (("one", 1, "2"), ("two", 2, "1")):
        arguments = ("train", "quickstart", *settings, "--runs", str(tmp_path), "--name", name)
        codes, outputs = finish(start(home, count, *arguments, JAX_NUM_CPU_DEVICES=devices))
        assert codes == [0] * count, outputs
    one, two = tmp_path / "one", tmp_path / "two"
    for step in ("step_00000002", "step_00000004"):
        places = (run / "checkpoints" / step for run in (one, two))
        first, second = map(Allocation.read, places)
        assert first == second and first.rows == 448 and 1 < first.longest <= 12
    assert rows(one) == rows(two) and len(rows(one)) > 4
    left, right = (load_file(run / "model" / "model.safetensors") for run in (one, two))
    assert left.keys() == right.keys() and "lookups_0/lookup_values" in left
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
