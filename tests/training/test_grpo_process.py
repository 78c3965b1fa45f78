"""GRPO from the command line: killed between two steps of a rollout, and its own demonstration, shortened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.harness import HOLDING, assert_resumes, call, finish, hold, start, steps_saved, train, until
from tests.processes import TIMEOUT
from tests.tiny_run import tiny_tokenizer

pytestmark = pytest.mark.slow
WORLDS = Path(__file__).with_name("worlds.py")


PLACES = ["episode", "reward", "round", "ahead", "shaped-episode"]
PLACES += [pytest.param(place, marks=pytest.mark.long) for place in ("exact", "reset", "curriculum", "shaped")]
SHAPED = {  # ratios and clips of sequences, an adapted entropy, resets, measured pass rates, packed rows, a cut sampler
    "objective": "gspo",
    "grpo.kl_coef": 0.01,
    "grpo.entropy_target": 2.0,
    "grpo.sync_moments": "true",
    "grpo.curriculum": "pass_rate",
    "grpo.resample": 1,
    "grpo.pack": "true",
    "training.per_device_batch_size": 2,
    "grpo.temperature": 0.8,
    "grpo.top_p": 0.9,
    "grpo.importance": "sequence",
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """Four steps a rollout, a checkpoint after each step, a reward that any length has more or less of."""
    tiny_tokenizer().save(tmp_path / "tokenizer")
    rows = [json.dumps({"prompt": f"cats and dogs {n}"}) for n in range(40)]
    (tmp_path / "cats.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": tmp_path / "cats.jsonl",
        "data.tokenizer": tmp_path / "tokenizer",
        "training.batch_size": 8,
        "training.per_device_batch_size": 8,
        "training.steps": 10,
        "training.validation": "false",
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 32,
        "grpo.num_iterations": 2,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "grpo.sync_interval": 3,
        "grpo.rewards": "[{name: length_penalty, options: {scale: 6}}]",
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": 1,
        "logging.keep_last": 4,
        "logging.progress": "none",
    }


def test_killed_between_two_steps_of_a_rollout(settings: dict[str, object], tmp_path: Path, home: Path) -> None:
    whole, run = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    code, output = call(home, *train(settings, whole))
    assert code == 0, output
    process = hold(home, "step 3", tmp_path / "hold", *train(settings | HOLDING, run))
    assert until(process, lambda: steps_saved(run) >= 2)
    process.kill()
    finish(process)
    assert process.returncode == -9
    assert_resumes(run, whole, home)


@pytest.mark.parametrize("place", PLACES)
def test_killed_inside_an_episode_or_a_reward_call(
    place: str, settings: dict[str, object], tmp_path: Path, home: Path
) -> None:
    """SIGKILL while a worker process is in a step of the second rollout, or the run itself in a reward: of the rollout,
    also with grpo.exact, or of the round that replaces its flat groups; or a thread is in a reward of the third, which
    is sampled ahead, while the steps of the second are taken; or after a reset of the reference and the moments; or
    where measured pass rates decide what is drawn; or with all that shapes a longer run, in a round that replaces flat
    groups and in an episode."""
    rows = [json.dumps({"prompt": f"cats {n}", "number": n}) for n in range(40)]
    (tmp_path / "cats.jsonl").write_text("\n".join(rows) + "\n")
    given = settings | {"grpo.rewards": f"['{WORLDS}:held_reward']"}
    if place.endswith("episode"):
        given = settings | {"grpo.environment": f"{WORLDS}:Held", "architecture.block_size": 64}
    if place.startswith("shaped"):
        given |= SHAPED
    if place == "shaped":
        given |= {"grpo.overlong_penalty": 0.5, "grpo.overlong": "mask"}
    if place in ("round", "shaped"):
        given |= {"grpo.resample": 1, "grpo.rewards": f"['{WORLDS}:held_in_a_round']"}
    if place == "exact":
        given |= {"grpo.exact": "true", "grpo.temperature": 0.7}
    if place == "ahead":
        given |= {"grpo.staleness": 1, "logging.checkpoint_interval": 3, "grpo.rewards": f"['{WORLDS}:held_ahead']"}
    if place == "reset":
        given |= {"lora.rank": 2, "grpo.sync_moments": "true"}
    if place == "curriculum":
        given |= {"grpo.curriculum": "pass_rate", "grpo.pass_rate_high": 0.4, "training.steps": 14}
        lines = (tmp_path / "cats.jsonl").read_text().splitlines()
        (tmp_path / "cats.jsonl").write_text("\n".join(lines[:6]) + "\n")
    whole, run, folder = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed", tmp_path / "hold"
    code, output = call(home, *train(given, whole))
    assert code == 0, output
    folder.mkdir()
    process = start(home, *train(given, run), HOLD_CALL=str(folder))
    assert until(process, (folder / "here").exists, poll=0.01), finish(process)
    assert until(process, lambda: steps_saved(run) >= (1 if place == "ahead" else 3))
    held = int((folder / "pid").read_text())
    process.kill()
    finish(process)
    assert process.returncode == -9
    deadline = time.monotonic() + TIMEOUT
    while Path(f"/proc/{held}").exists():
        assert time.monotonic() < deadline, "a worker outlives its run"
        time.sleep(0.05)
    assert_resumes(run, whole, home)


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_the_demonstration_learns(cli: Callable[..., Any], tmp_path: Path) -> None:
    """`bessemer train grpo`, with fewer steps: the model before it is trained first, and exact match rises."""
    shorter = ["training.steps=64", "logging.validation_interval=-1", "training.validation_steps=128"]
    done = cli("train", "grpo", *shorter, "logging.progress=none", "--name", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()]
    before, after = (row["val_reward"] for row in rows if "val_reward" in row)
    assert before < 0.3 and after > 0.8
    assert max(row.get("clip_frac", 0) for row in rows) > 0 and all("kl" in row for row in rows if "loss" in row)
