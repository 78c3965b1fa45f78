"""Promises 2 and 3, by the command line: what only changes how a step is computed gives the same run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.invariance.classes import CLASSES, CONTROLS, LONG, Member
from tests.invariance.compare import difference, digests, meta
from tests.invariance.conftest import BLOCK, PAIRS, STEPS, Runs
from tests.tiny_run import tiny_tokenizer

from bessemer.data import DataPlan, Sampling, open_dataset
from bessemer.data.stores.catalog import DataSettings


def proof(name: str, label: str) -> Any:
    return pytest.mark.long if f"{name}: {label}" in LONG else pytest.mark.slow


def cases(many: bool) -> Iterator[Any]:
    """Members of one device, or those of many; the two halves of the suite."""
    for name, one in CLASSES.items():
        for label, member in one.members.items():
            if (member.devices * member.processes > 1) is many:
                marks = [pytest.mark.gpu] if one.gpu else [] if member.quick else [proof(name, label)]
                yield pytest.param(name, label, marks=marks, id=f"{name}: {label}")


def check(name: str, label: str, runs: Runs) -> None:
    """Train both and compare; `pytest -rP` shows the measured differences."""
    one, member = CLASSES[name], CLASSES[name].members[label]
    platform = "gpu" if one.gpu else "cpu"
    if one.gpu and shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA GPU here")
    baseline = runs.train(one.data, one.shared, one.baseline, platform)
    run = runs.train(one.data, one.shared, member, platform)
    assert run != baseline, "the member is its own baseline"
    assert meta(run)["topology"]["devices"] == member.devices * member.processes
    if one.same_rows:
        assert digests(run) == digests(baseline) and len(digests(run)) == STEPS
    found = difference(run, baseline, runs.start_arrays(one.shared))
    print(f"{name}: {label}: {found}")
    assert found.within(one.within), f"{found}; allowed: {one.within}"


@pytest.mark.parametrize(("name", "label"), list(cases(many=False)))
def test_member_is_the_baseline(name: str, label: str, runs: Runs) -> None:
    check(name, label, runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONTROLS))
def test_a_small_change_is_seen(name: str, runs: Runs) -> None:
    """The bounds are tight enough to tell runs apart: a thousandth of the rate is ten times over them."""
    of, settings = CONTROLS[name]
    one = CLASSES[of]
    baseline = runs.train(one.data, one.shared, one.baseline)
    run = runs.train(one.data, one.shared, Member(settings))
    found = difference(run, baseline, runs.start_arrays(one.shared))
    print(f"{name}: {found}")
    bound = one.within
    assert abs(found.length.value) > 10 * bound.length, found
    assert found.largest.value > 10 * bound.largest, found


def test_accumulation_changes_the_iterations_it_says(runs: Runs) -> None:
    """The members of the class really take their steps in parts."""
    one = CLASSES["accumulation"]
    run = runs.train(one.data, one.shared, one.members["S=4"])
    assert meta(run)["iteration"] == 4 * STEPS


def test_the_masks_are_uneven(runs: Runs) -> None:
    """Else a mean of means would pass: the trained tokens of micro-batches differ by more than half."""
    plan = plan_of(runs, "uneven", "PADDED", batch_size=8)
    for parts in (2, 4, 8):
        weights = [plan.batch(step)["loss_mask"].reshape(parts, -1).sum(1) for step in range(STEPS)]
        assert np.mean([w.max() / w.min() for w in weights]) > 1.5


def test_packing_makes_fewer_rows_of_the_same_documents(runs: Runs) -> None:
    """What the class of documents rests on: both batches are the whole data, in 12 rows or in 6."""
    alone = plan_of(runs, "documents", "PADDED", batch_size=12).batch(0)
    packed = plan_of(runs, "documents", "PACKED", batch_size=6).batch(0)
    assert alone["loss_mask"].sum() == packed["loss_mask"].sum() == sum(PAIRS)
    assert alone["segment_ids"].max() == 1 and (packed["segment_ids"].max(1) >= 2).all()
    assert math.isclose(sum(PAIRS) / (6 * BLOCK), (packed["segment_ids"] > 0).mean())


def plan_of(runs: Runs, data: str, style: str, batch_size: int) -> DataPlan:
    sampling = Sampling.from_string(f"{runs.data[data]}:{style}")
    settings = DataSettings(val_fraction=0.0)
    rows = open_dataset(sampling, tiny_tokenizer(), runs.home, "train", BLOCK, settings=settings)
    return DataPlan([[(sampling, rows)]], batch_size, seed=1337)
