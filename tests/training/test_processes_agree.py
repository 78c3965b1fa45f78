"""Several processes decide alike: what one of them meets, all of them meet at the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import words
from tests.processes import finish, start


@pytest.mark.long
def test_two_processes_roll_back_together(tiny: dict[str, object], home: Path, tmp_path: Path) -> None:
    """The loss is replicated, so both decide the same at the same step; to rounding it is the run of one process."""
    settings = {
        **tiny,
        "optimization.name": "adamw",
        "training.steps": 14,
        "training.validation": False,
        "logging.checkpoint_interval": 4,
        "plugins": f"[{Path(__file__).parent / 'poison.py'}]",
        "job": "poisoned",
        "objective": "poisonable",
        "training.poison": "{'6': 50.0}",
        "guard.spike_sigma": 6.0,
        "guard.spike_window": 4,
        "guard.spike_action": "rollback",
    }
    arguments = ["train", "quickstart", *words(settings), "--runs", str(tmp_path), "--name"]
    for name, count in (("one", 1), ("two", 2)):
        codes, outputs = finish(start(home, count, *arguments, name))
        assert codes == [0] * count, outputs
    one, two = ([json.loads(row) for row in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two"))
    assert [row["step"] for row in two] == list(range(1, 15)) and two[-1]["rollbacks"] == 1
    for a, b in zip(one, two, strict=True):
        assert a["target_tokens"] == b["target_tokens"] and a["epoch"] == b["epoch"], "the same token stream"
        assert abs(a["loss"] - b["loss"]) < 1e-2 * a["loss"]
