"""Plans of mixtures of experts: what a device holds and sends with an expert axis, alone and with pipeline stages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.plan.absent_plan import Planned, document, estimated, has_compiler
from bessemer.plan.document import render_absent
from bessemer.plan.estimate import Choice, Estimate, estimate
from bessemer.plan.trainer import parse_target
from bessemer.topology import AXES

Cli = Callable[..., subprocess.CompletedProcess[str]]
EXPERTS, ACTIVE, LAYERS = 32, 4, 12
MIXTURE = [f"model.depth={LAYERS}", "model.window=L", f"model.experts={EXPERTS}", f"model.experts_active={ACTIVE}"]
SCANNED = "architecture.scan_layers=true"


@pytest.fixture(scope="module")
def planned() -> Planned:
    """Depth 12 on 64 H200: four stages, experts over four devices, four times; eight sequences per device."""
    mesh = ["topology.data=4", "topology.pipeline=4", "topology.expert=4"]
    sizes = ["training.batch_size=512", "training.per_device_batch_size=8"]
    return estimated("pretrain", [*MIXTURE, SCANNED, *mesh, *sizes], parse_target("h200:64"))


def other(planned: Planned, remat: str = "none", **axes: int) -> Estimate:
    """The estimate of the same model on another mesh."""
    choice = Choice(dict.fromkeys(AXES, 1) | axes, 8, (remat,))
    return estimate(planned.facts, choice, planned.terms)


def sent(made: Estimate) -> dict[tuple[str, tuple[str, ...]], float]:
    return {(one.kind, one.axes): one.sent for one in made.collectives}


def tokens_of(planned: Planned) -> float:
    """Bytes of one sequence's rows to experts."""
    facts = planned.facts
    assert facts.shape is not None
    return facts.block * ACTIVE * facts.shape.width * facts.compute_bytes


def test_a_plan_for_64_gpus_prints_bytes_of_every_collective(planned: Planned) -> None:
    plan = document("pretrain", planned, None)
    assert plan["pipeline"] == {"stages": 4, "micro_batches": 32, "bubble": pytest.approx(3 / 35)}
    found = {(row["kind"], tuple(row["axes"])): row for row in plan["collectives"]}
    assert set(found) >= {
        ("all-to-all", ("expert",)),  # tokens to their experts
        ("all-reduce", ("expert",)),  # gradients of what the devices of the axis hold together
        ("collective-permute", ("pipeline",)),  # activations to the next stage
        ("all-to-all", ("pipeline",)),  # layers to their stage
        ("all-reduce", ("data",)),
    }
    assert all(row["bytes_sent"] > 0 and row["count"] > 0 for row in found.values())
    text = render_absent(plan)
    assert "data 4 × pipeline 4 × fsdp 1 × expert 4" in text
    for kind, axes in found:
        assert any(kind in line and " × ".join(axes) in line for line in text.splitlines()), (kind, axes)


def test_bytes_are_those_of_the_precision_over_there(planned: Planned) -> None:
    """Two per number on a GPU, wherever the plan is made: on a CPU the model itself would compute in float32."""
    assert planned.facts.compute_bytes == 2


def test_tokens_travel_to_experts_and_back(planned: Planned) -> None:
    """Two exchanges per layer and two for the gradients; two more where the forward pass is computed again."""
    of_all = 8 * 512 // (8 * 64) * LAYERS * tokens_of(planned) * 7 / 8
    plain, again = (sent(other(planned, remat, data=8, expert=8)) for remat in ("none", "block"))
    assert plain["all-to-all", ("expert",)] == pytest.approx(4 * of_all)
    assert again["all-to-all", ("expert",)] == pytest.approx(6 * of_all)
    assert ("all-to-all", ("expert",)) not in sent(other(planned, data=64))


def test_in_stages_tokens_travel_at_every_tick(planned: Planned) -> None:
    """A stage computes its layers again on the way back, one sequence at a time, and sends in its idle ticks too.

    Compiled for eight CPU devices, a llama of 4 layers on two stages with two sequences in flight: 36 exchanges per
    pass, 6 × 2 layers × 3 ticks.
    """
    wanted = 6 * LAYERS / 4 * 35 * tokens_of(planned) * 3 / 4
    assert sent(planned.estimate)["all-to-all", ("expert",)] == pytest.approx(wanted)
    one = other(planned, data=4, pipeline=2, expert=8)
    assert sent(one)["all-to-all", ("expert",)] == pytest.approx(6 * LAYERS / 2 * 17 * tokens_of(planned) * 7 / 8)


def test_memory_falls_with_the_axis_and_buffers_with_the_stages(planned: Planned) -> None:
    whole, split, staged = (
        other(planned, **axes).memory
        for axes in ({"data": 64}, {"data": 8, "expert": 8}, {"data": 2, "pipeline": 4, "expert": 8})
    )
    shape = planned.facts.shape
    assert shape is not None and shape.experts is not None
    stacks = 4.0 * LAYERS * EXPERTS * 2 * shape.width * shape.experts.width
    assert stacks > 0.6 * whole.parameters
    assert whole.parameters - split.parameters == pytest.approx(stacks * 7 / 8)
    assert split.parameters / staged.parameters == pytest.approx(4, rel=0.01)
    assert staged.activations < split.activations / 4, "room for the worst case is for one sequence, not for eight"


@pytest.mark.slow
def test_float8_is_counted_for_dense_matrices_alone() -> None:
    words = ["model.depth=4", "model.experts=8", "model.experts_shared=1", "architecture.precision=fp8"]
    facts = estimated("pretrain", words, parse_target("h200:1")).facts
    shape = facts.shape
    assert shape is not None
    dense = 4 * (shape.width * (2 * shape.query_width + 2 * shape.kv_width) + 2 * shape.width * shape.dense_width)
    assert facts.float8_flops == 6 * dense > 0


@pytest.mark.long
@pytest.mark.skipif(not has_compiler("tpu"), reason="needs libtpu: pip install 'bessemer[tpu-plan]'")
def test_stages_with_experts_compile_for_tpus(cli: Cli, tmp_path: Path) -> None:
    mesh = ["topology.data=1", "topology.pipeline=2", "topology.fsdp=2", "topology.expert=2"]
    sizes = ["model.depth=4", "model.window=L", "model.experts=8", "model.experts_active=2", "optimization.name=adamw"]
    rows = ["training.batch_size=32", "training.per_device_batch_size=4"]
    words = ["pretrain", *sizes, SCANNED, *mesh, *rows]
    result = cli("plan", *words, "--topology", "v5p:2x2x2", "--quick", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    assert plan["method"] == "compiled" and plan["memory"]["fits"] is True
    found = {(row["kind"], tuple(row["axes"])) for row in plan["collectives"] if row["bytes_sent"] > 0}
    assert ("collective-permute", ("pipeline",)) in found
    assert any(kind.endswith("all-to-all") and axes == ("expert",) for kind, axes in found)
