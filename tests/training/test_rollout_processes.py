"""Rollouts by two real processes over one mesh: the run of one process with two devices, also from the middle of a
rollout on; and what happens when the processes do not have the same prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.faults.harness import metrics, train
from tests.processes import finish, start
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_processes import assert_same_run

PLUGIN = """
import os
from bessemer.registry import datasets, rewards

ME = os.environ.get("BESSEMER_PROCESS_ID", "0")

@rewards.register("of_process_0")
def of_process_0(prompts, completions, **columns):
    assert ME == "0"
    return [sum(map(ord, text)) % 7 / 7 for text in completions]

@rewards.register("flat_for_odd_prompts")
def flat_for_odd_prompts(prompts, completions, **columns):
    assert ME == "0"
    return [0.0 if int(p.split()[-1]) % 2 else sum(map(ord, c)) % 97 / 97 for p, c in zip(prompts, completions)]

@datasets.register("one_each")
def one_each():
    return [{"prompt": f"cats of process {ME}, {n}"} for n in range(40)]
"""


class Pair(NamedTuple):
    """A finished run of two processes, and its settings."""

    settings: dict[str, Any]
    run: Path


@pytest.fixture(scope="module")
def pair(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Six steps, four a rollout, with a checkpoint in the middle of each; a reward that only process 0 can give."""
    root = tmp_path_factory.mktemp("pair")
    tiny_tokenizer().save(root / "tokenizer")
    rows = [json.dumps({"prompt": f"cats and dogs {n}"}) for n in range(40)]
    (root / "cats.jsonl").write_text("\n".join(rows) + "\n")
    (root / "plugin.py").write_text(PLUGIN)
    settings = {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "plugins": f"[{root / 'plugin.py'}]",
        "topology.data": 2,
        "training.dataset": root / "cats.jsonl",
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 6,
        "training.validation_steps": 8,
        "training.max_grad_norm": 0,
        "data.tokenizer": root / "tokenizer",
        "data.val_fraction": 0.2,
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 32,
        "architecture.precision": "float32",
        "grpo.num_iterations": 2,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "grpo.sync_interval": 3,
        "grpo.rewards": "[of_process_0, length_penalty]",
        "optimization.name": "sgd",
        "optimization.lr": 0.1,
        "logging.report_interval": 1,
        "logging.validation_interval": 4,
        "logging.checkpoint_interval": 2,
        "logging.preview_interval": 0,
        "logging.progress": "none",
        "logging.plots": False,
    }
    run = root / "runs" / "two"
    codes, outputs = finish(start(home, 2, *train(settings, run)))
    assert codes == [0, 0], outputs
    return Pair(settings, run)


@pytest.mark.slow
def test_two_processes_are_one_run(pair: Pair, home: Path) -> None:
    """The same completions and rewards, and to rounding the same losses, as one process with two devices."""
    two, one = pair.run, pair.run.with_name("one")
    codes, outputs = finish(start(home, 1, *train(pair.settings, one), JAX_NUM_CPU_DEVICES="2"))
    assert codes == [0], outputs
    for step in (2, 6):  # in the first rollout and in the second
        a, b = (load_file(run / f"checkpoints/step_{step:08}/rollout.safetensors") for run in (one, two))
        assert a.keys() == b.keys() and np.ptp(a["rewards/reward"]) > 0
        for name in a:
            most = 1e-5 if name == "rows/old_logprobs" else 0
            np.testing.assert_allclose(b[name], a[name], 0, most, err_msg=name)
    left, right = metrics(one), metrics(two)
    assert [row["step"] for row in left] == [0, 1, 2, 3, 4, 4, 5, 6, 6]
    assert any(abs(row.get("loss", 0)) > 1e-3 for row in left)
    for a, b in zip(left, right, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_episodes_of_two_processes_are_those_of_one(pair: Pair, home: Path) -> None:
    """Process 0 alone runs the environment, and both append what it said."""
    settings = pair.settings | {
        "grpo.environment": "{name: guess, options: {low: 1, high: 9}}",
        "grpo.max_turns": 2,
        "architecture.block_size": 64,
        "training.steps": 2,
        "training.validation": "false",
    }
    found = []
    for name, processes, devices in (("played-one", 1, "2"), ("played-two", 2, "1")):
        run = pair.run.with_name(name)
        codes, outputs = finish(start(home, processes, *train(settings, run), JAX_NUM_CPU_DEVICES=devices))
        assert codes == [0] * processes, outputs
        found.append(load_file(run / "checkpoints/step_00000002/rollout.safetensors"))
    one, two = found
    assert one.keys() == two.keys() and (one["rows/loss_mask"] > 0).any()
    for name in one:
        most = 1e-5 if name == "rows/old_logprobs" else 0
        np.testing.assert_allclose(two[name], one[name], 0, most, err_msg=name)


@pytest.mark.long
def test_two_processes_replace_the_same_flat_groups_as_one(pair: Pair, home: Path) -> None:
    settings = pair.settings | {
        "grpo.rewards": "[flat_for_odd_prompts]",
        "grpo.resample": 2,
        "training.steps": 2,
        "training.validation": "false",
    }
    found = []
    for name, processes, devices in (("resampled-one", 1, "2"), ("resampled-two", 2, "1")):
        run = pair.run.with_name(name)
        codes, outputs = finish(start(home, processes, *train(settings, run), JAX_NUM_CPU_DEVICES=devices))
        assert codes == [0] * processes, outputs
        found.append((load_file(run / "checkpoints/step_00000002/rollout.safetensors"), metrics(run)))
    (one, left), (two, right) = found
    assert one.keys() == two.keys()
    for name in one:
        most = 1e-5 if name == "rows/old_logprobs" else 0
        np.testing.assert_allclose(two[name], one[name], 0, most, err_msg=name)
    for a, b in zip(left, right, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6) and b["resample/discarded"] > 0


@pytest.mark.slow
def test_two_processes_sample_ahead_as_one_and_go_on_from_a_rollout_sampled_ahead(pair: Pair, home: Path) -> None:
    settings = pair.settings | {"grpo.staleness": 1, "grpo.num_iterations": 1, "training.validation": "false"}
    for name, processes, devices in (("ahead-one", 1, "2"), ("ahead-two", 2, "1")):
        run = pair.run.with_name(name)
        codes, outputs = finish(start(home, processes, *train(settings, run), JAX_NUM_CPU_DEVICES=devices))
        assert codes == [0] * processes, outputs
    one, two = (pair.run.with_name(name) for name in ("ahead-one", "ahead-two"))
    a, b = (load_file(run / "checkpoints/step_00000004/rollout-ahead.safetensors") for run in (one, two))
    assert a.keys() == b.keys() and "rewards/of_process_0" in a
    for name in a:
        np.testing.assert_allclose(b[name], a[name], 0, 1e-5 if name.startswith("drawn/") else 0, err_msg=name)
    for left, right in zip(metrics(one), metrics(two), strict=True):
        assert right == pytest.approx(left, rel=1e-4, abs=1e-6)
        assert left.get("staleness", 0) == (2 if left["step"] > 2 else 0)
    again = two.with_name("ahead-again")
    shutil.copytree(two, again)
    for step in (4, 6):
        shutil.rmtree(again / f"checkpoints/step_{step:08}")
    (again / "status.json").unlink()
    codes, outputs = finish(start(home, 2, "resume", str(again)))
    assert codes == [0, 0], outputs
    assert_same_run(again, two)


@pytest.mark.long
def test_two_processes_go_on_in_the_middle_of_a_rollout(pair: Pair, home: Path) -> None:
    again = pair.run.with_name("again")
    shutil.copytree(pair.run, again)
    for step in (4, 6):
        shutil.rmtree(again / f"checkpoints/step_{step:08}")
    (again / "status.json").unlink()  # which says that it is done
    codes, outputs = finish(start(home, 2, "resume", str(again)))
    assert codes == [0, 0], outputs
    assert_same_run(again, pair.run)


@pytest.mark.long
def test_processes_with_other_prompts_say_so(pair: Pair, home: Path) -> None:
    settings = {**pair.settings, "training.dataset": "one_each"}
    codes, outputs = finish(start(home, 2, *train(settings, pair.run.with_name("apart"))))
    assert codes == [4, 4], outputs
    assert all("do not agree on the prompts: process 1 has" in output for output in outputs), outputs
