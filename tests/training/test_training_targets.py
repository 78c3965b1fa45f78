"""What is counted and judged: batches and held-out rows without a target, scores that are NaN, tokens of pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bessemer as bm
from bessemer.errors import InputError
from bessemer.report.metrics import MetricsFile
from bessemer.topology import make_topology
from bessemer.training.state import LoopState


class Masked(bm.BaseTrainer):
    """Without a target in one slice, from one batch on."""

    hidden: tuple[str, int] = ("train", 0)

    def batch(self, slice: str = "train", *, step: int | None = None, rows: Any = None) -> Any:
        made = dict(super().batch(slice, step=step, rows=rows))
        part, first = self.hidden
        if slice == part and (step or 0) >= first:
            made["loss_mask"] = np.zeros_like(made["loss_mask"])
        return made


def build(tiny: dict[str, object], root: Path, part: str, first: int = 0) -> Masked:
    spec = bm.ExecutionSpec.local(root, name="a", topology=make_topology(devices=jax.devices()[:1]))
    trainer = Masked(spec, arguments={**tiny, "training.steps": 3})
    trainer.hidden = (part, first)
    return trainer


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("validation", "no held-out row has a target: every token is masked.*training.validation=false"),
        ("train", r"the first batch \(8 rows\) has no target: every token is masked"),
    ],
)
def test_rows_without_a_target_are_refused_before_anything_is_written(
    part: str, message: str, tiny: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        build(tiny, tmp_path, part).run()
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_later_batch_without_a_target_is_left_out_and_named(tiny: dict[str, object], tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path, "train", first=2)
    trainer.run()
    log = trainer.run_directory.log.read_text()
    assert "step 3: no token of the batch is a target (every one is masked), so there is no loss" in log
    assert "2 updates in 3 steps" in log
    last = [row for row in MetricsFile(trainer.run_directory.metrics).rows() if "skipped_steps" in row][-1]
    assert last["skipped_steps"] == 1


def test_a_score_that_is_nan_is_never_the_best() -> None:
    loop = LoopState()
    loop.take_validation(math.nan, 0)
    assert loop.best_step is None and loop.last_validation == 0 and loop.stale_validations == 1
    loop.take_validation(2.0, 4)
    assert (loop.best_val_loss, loop.best_step, loop.stale_validations) == (2.0, 4, 0)
    loop.take_validation(math.nan, 8)
    assert (loop.best_val_loss, loop.best_step, loop.stale_validations) == (2.0, 4, 1)
    loop.take_validation(1.0, 12)
    assert (loop.best_val_loss, loop.best_step) == (1.0, 12)
    old = LoopState(best_val_loss=math.nan, best_step=0)  # as earlier versions saved it
    old.take_validation(3.0, 4)
    assert (old.best_val_loss, old.best_step) == (3.0, 4)


def test_bits_per_byte_that_are_nan_are_never_the_lowest() -> None:
    loop = LoopState()
    for bits, lowest in ((math.nan, None), (2.0, 2.0), (math.nan, 2.0), (1.0, 1.0)):
        loop.take_bits(bits)
        assert loop.min_val_bpb == lowest
