"""Plans with stages: the bubble, what a device holds, and what it sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bessemer.errors import InputError
from bessemer.plan.absent_plan import Planned, document, estimated, make_sweep
from bessemer.plan.document import make_plan, render, render_absent
from bessemer.plan.estimate import Choice, estimate
from bessemer.plan.trainer import parse_target
from bessemer.topology import AXES

WORDS = ["model.depth=12", "architecture.scan_layers=true", "training.batch_size=64"]


@pytest.fixture(scope="module")
def staged() -> Planned:
    """Depth 12 on eight H200: four stages, twice, eight sequences per device."""
    words = ["topology.data=2", "topology.pipeline=4", "training.per_device_batch_size=8"]
    return estimated("pretrain", [*WORDS, *words], parse_target("h200:8"))


def other(planned: Planned, rows: int = 8, **axes: int) -> Any:
    """The estimate of the same model on another mesh."""
    sizes = dict.fromkeys(AXES, 1) | axes
    return estimate(planned.facts, Choice(sizes, rows, planned.estimate.choice.remat), planned.terms)


def test_the_plan_says_stages_micro_batches_and_bubble(staged: Planned) -> None:
    plan = document("pretrain", staged, None)
    assert plan["pipeline"] == {"stages": 4, "micro_batches": 32, "bubble": pytest.approx(3 / 35)}
    text = render_absent(plan)
    assert "pipeline   4 stages, 32 micro-batches per pass: a stage idles 8.6% of it" in text
    assert "data 2 × pipeline 4" in text
    assert plan["horizon"]["accumulate_steps"] == 1


def test_state_falls_with_the_stages(staged: Planned) -> None:
    whole, half, quarter = (other(staged, data=8 // n, pipeline=n).memory for n in (1, 2, 4))
    for part in ("parameters", "optimizer"):
        assert getattr(half, part) == pytest.approx(getattr(whole, part) / 2, rel=0.01)
        assert getattr(quarter, part) == pytest.approx(getattr(whole, part) / 4, rel=0.01)
    assert quarter.activations < whole.activations / 3, "of its layers a stage keeps inputs alone"


def test_the_bubble_takes_time(staged: Planned) -> None:
    def compute(rows: int) -> float:
        made = other(staged, rows, data=2, pipeline=4)
        return float(replace(staged, estimate=made).time()["roofline"]["compute"])

    assert compute(1) / compute(8) == pytest.approx((1 - 3 / 35) / (1 - 3 / 7))


def test_bytes_by_collective(staged: Planned) -> None:
    """Weights and gradients once per pass however many sequences it has; activations once per tick."""

    def sent(rows: int) -> dict[tuple[str, tuple[str, ...]], float]:
        made = other(staged, rows, data=2, pipeline=4)
        assert made.accumulate == 8 // rows
        return {(one.kind, one.axes): one.sent / made.accumulate for one in made.collectives}

    one, eight = sent(1), sent(8)
    weights, hops = ("all-to-all", ("pipeline",)), ("collective-permute", ("pipeline",))
    summed = ("all-reduce", ("data",))
    assert eight[weights] == pytest.approx(one[weights], rel=0.2)  # Muon's own, once per step, is in it
    assert eight[summed] == pytest.approx(one[summed])
    assert eight[hops] / one[hops] == pytest.approx((8 * 4 + 3) / (4 + 3))
    width, block = staged.facts.shape.width, staged.facts.block  # type: ignore[union-attr]
    # three tensors of gpt go on and one of the sequences that wait, there and back
    assert eight[hops] == pytest.approx(2 * 4 * 35 * block * width * staged.facts.compute_bytes)


def test_a_plan_for_the_devices_at_hand_says_it_too() -> None:
    words = ["topology.pipeline=2", "topology.data=4", "training.per_device_batch_size=2"]
    plan = make_plan("quickstart", words, compiles=False)
    assert plan["pipeline"] == {"stages": 2, "micro_batches": 4, "bubble": pytest.approx(1 / 5)}
    assert "pipeline   2 stages, 4 micro-batches per pass: a stage idles 20.0% of it" in render(plan)


def test_a_sweep_chooses_the_stages_itself() -> None:
    with pytest.raises(InputError, match=r"topology\.pipeline"):
        make_sweep("pretrain", [*WORDS, "topology.pipeline=2"], topology="h200:8", compiles=False)
