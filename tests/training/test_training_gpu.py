"""What only a GPU can show: a deterministic run is the same bits in fresh processes; no transfer inside the loop."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.gpu

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Large enough that atomic adds collide: frequent tokens, half a million targets in twenty steps."""
    path = tmp_path_factory.mktemp("gpu") / "words.jsonl"
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(2000)]
    texts = (" ".join(vocabulary[int(len(vocabulary) * rng.random() ** 4)] for _ in range(600)) for _ in range(1500))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        f"training.dataset={path}",
        "training.batch_size=32",
        "training.per_device_batch_size=16",
        "training.steps=20",
        "data.tokenizer=train:2048",
        "data.val_fraction=0.02",
        "training.validation_steps=16",
        "model.depth=4",
        "architecture.block_size=1024",
        "logging.report_interval=1",
        "logging.validation_interval=10",
        "logging.checkpoint_interval=10",
        "logging.progress=none",
        "topology.deterministic=true",
    ]


def rows(path: Path) -> list[dict[str, object]]:
    lines = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/"))} for row in lines]


def test_deterministic_runs_are_the_same_bits_in_fresh_processes_and_on_resume(
    settings: list[str], tmp_path: Path, cli: Cli
) -> None:
    """One run of 20 steps; another, compiled anew, of which the second half is done again from step 10."""
    for name in ("whole", "again"):
        home = tmp_path / f"home-{name}"  # no compiled program is shared
        done = cli(
            "train", "pretrain", *settings, "--runs", str(tmp_path), "--name", name, env={"BESSEMER_HOME": str(home)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads((tmp_path / "again" / "status.json").read_text())
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000020")
    (tmp_path / "again" / "status.json").write_text(json.dumps({**status, "state": "stopped", "step": 10}))
    first = load_file(tmp_path / "again" / "model" / "model.safetensors")
    resumed = cli("resume", str(tmp_path / "again"), env={"BESSEMER_HOME": str(tmp_path / "home-again")})
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    whole, again = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "again"))
    for name, array in whole.items():
        np.testing.assert_array_equal(array, first[name], err_msg=f"fresh process: {name}")
        np.testing.assert_array_equal(array, again[name], err_msg=f"resumed: {name}")
    assert rows(tmp_path / "whole") == rows(tmp_path / "again")
    assert len(rows(tmp_path / "whole")) >= 20
