"""grpo.sync_interval and grpo.sync_moments: the reference becomes the policy, with adapters too, and a run stopped
around a reset is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.tiny_run import tiny_tokenizer
from tests.training.test_training_resume import StopAt, assert_same, one_device, rows

from bessemer.errors import Stopped
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback


def vowels(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [sum(letter in "aeiou " for letter in text) / 4 for text in completions]


class Watch(Callback):
    """Keeps a copy of the reference and the largest moment after every step."""

    def __init__(self) -> None:
        self.references: list[list[np.ndarray]] = []
        self.moments: list[float] = []
        self.params: list[list[np.ndarray]] = []

    def on_batch_end(self, loop: Any) -> None:
        state = loop.run_state.state
        self.references.append([np.array(leaf) for leaf in jax.tree.leaves(state.reference)])
        self.params.append([np.array(leaf) for leaf in jax.tree.leaves(state.params)])
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 0]
        self.moments.append(max(float(np.abs(leaf).max()) for leaf in moments))


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    tiny_tokenizer().save(tmp_path / "tokenizer")
    lines = [json.dumps({"prompt": f"cats and dogs {n}"}) for n in range(40)]
    (tmp_path / "cats.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": str(tmp_path / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 8,
        "training.steps": 6,
        "training.validation": False,
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "model.window": "L",
        "architecture.block_size": 32,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "grpo.kl_coef": 0.1,
        "grpo.sync_interval": 3,
        "grpo.sync_moments": True,
        "grpo.rewards": ["tests.training.test_reference_reset:vowels"],
        "optimization.name": "adamw",
        "optimization.lr": 0.03,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": 1,
        "logging.keep_last": 20,
        "logging.progress": "none",
        "logging.preview_interval": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapters", [{}, pytest.param({"lora.rank": 2}, marks=pytest.mark.long)], ids=["all", "adapters"]
)
def test_a_reset_takes_the_policy_and_fresh_moments_and_resumes(
    adapters: dict[str, Any], settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, seen = settings | adapters, Watch()
    whole = launch.build_trainer(None, given, name="whole", root=tmp_path, callbacks=[seen])
    whole.run()
    assert "taken anew from the policy after step 3; the optimizer's moments are reset" in capsys.readouterr().out
    for step, reference in enumerate(seen.references, 1):
        reset = step == 3
        assert (seen.moments[step - 1] == 0) == reset
        same = [np.array_equal(a, b) for a, b in zip(reference, seen.params[2 if step >= 3 else 0], strict=True)]
        assert all(same) == (step >= 3)
    found = [row for row in rows(whole.run_directory.path) if "loss" in row]
    assert found[0]["kl"] == 0 and found[2]["kl"] > 0 and found[3]["kl"] == pytest.approx(0, abs=1e-9)
    assert found[5]["kl"] > 0
    for step in (3, 4):  # the checkpoint of the reset, and one after it
        with pytest.raises(Stopped):
            launch.build_trainer(None, given, name=f"part{step}", root=tmp_path, callbacks=[StopAt(step)]).run()
        again = launch.reopen(tmp_path / f"part{step}")
        again.run()
        assert_same(again, whole)


def test_moments_that_are_never_reset_are_said(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.build_trainer(None, settings | {"grpo.kl_coef": 0}, name="run", root=tmp_path)
    assert "note: grpo.sync_moments has no effect" in capsys.readouterr().out
