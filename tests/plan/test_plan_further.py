"""Plans of multi-token prediction: every further token takes another pass through the head."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest

from bessemer.plan import trainer as planning
from bessemer.plan.absent_plan import estimated
from bessemer.plan.collectives import Collective, Layout, collectives_of
from bessemer.plan.estimate import Choice, Estimate, estimate
from bessemer.plan.trainer import parse_target, planned_trainer
from bessemer.topology import AXES, make_topology
from bessemer.training.feed import abstract_batch

WIDTH, VOCAB, BLOCK, ROWS, CHUNKS = 64, 1024, 64, 8, 4
TOKENS = BLOCK * ROWS
# in float32 and with the kernels of a CPU, so that the estimate is of the program that is compiled here
TINY = [
    *("model.depth=2", f"model.width={WIDTH}", "model.heads=2", "model.head_dim=32", f"model.vocab_size={VOCAB}"),
    *("architecture.precision=float32", "architecture.kernels=xla", "architecture.attention=xla"),
    *(f"architecture.block_size={BLOCK}", f"architecture.loss_chunks={CHUNKS}", "optimization.name=adamw"),
    *(f"training.batch_size={ROWS}", "training.steps=10"),
]
NONE, TWO = "training.mtp=[]", "training.mtp=[0.5,0.25]"


def compiled(mtp: str, **axes: int) -> tuple[Any, Layout]:
    """The program of a step on the devices here: rows in one pass, shared by the mesh."""
    sizes = dict.fromkeys(AXES, 1) | axes
    mesh = [f"topology.{axis}={size}" for axis, size in sizes.items()]
    rows = f"training.per_device_batch_size={ROWS // sizes['data'] // sizes['fsdp']}"
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[: math.prod(sizes.values())]
        patch.setattr(planning, "make_topology", lambda settings: make_topology(settings, devices=devices))
        trainer: Any = planned_trainer("pretrain", [*TINY, mtp, rows, *mesh], compiles=False)
    functions, topology = trainer.functions, trainer.topology
    with topology.scope():
        batch = abstract_batch(trainer.data.fields, functions.micro, 1, topology.batch_sharding(1))
        lowered = functions.train_step.lower(functions.abstract_state, batch, functions.key)
    return lowered.compile(), Layout(sizes, None)


@cache
def planned(mtp: str) -> Any:
    rows = f"training.per_device_batch_size={ROWS}"
    return estimated("pretrain", [*TINY, mtp, rows], parse_target("h200:1"))


def on_mesh(mtp: str, **axes: int) -> Estimate:
    plan, sizes = planned(mtp), dict.fromkeys(AXES, 1) | axes
    choice = Choice(sizes, ROWS // sizes["data"] // sizes["fsdp"], ("none",))
    facts = replace(plan.facts, target=parse_target("h200:8"))
    return estimate(facts, choice, plan.terms)


@pytest.mark.slow
def test_flops_memory_and_traffic_are_those_that_the_compiler_adds() -> None:
    """The compiler counts the loop over the pieces of a loss once, hence the factor."""
    plain, more = planned(NONE).estimate, planned(TWO).estimate
    programs = [compiled(mtp)[0] for mtp in (NONE, TWO)]
    costs = [program.cost_analysis() for program in programs]
    flops = CHUNKS * (costs[1]["flops"] - costs[0]["flops"])
    assert more.flops - plain.flops == 2 * 6 * WIDTH * VOCAB * TOKENS == pytest.approx(flops, rel=0.1)
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in programs]
    # a gradient of the head and one of the hidden states for each further token
    assert temporaries[1] - temporaries[0] == pytest.approx(2 * 4 * WIDTH * (VOCAB + TOKENS), rel=0.05)
    assert more.memory.peak - plain.memory.peak == pytest.approx(temporaries[1] - temporaries[0], rel=0.05)
    moved = CHUNKS * (costs[1]["bytes accessed"] - costs[0]["bytes accessed"])
    logits = 2 * 4 * TOKENS * VOCAB
    assert 5 * logits < more.traffic - plain.traffic < moved, "a CPU's compiler fuses less"


def total(found: Any, axis: str) -> float:
    """Bytes that reach the sums over one axis: a CPU's compiler writes reduce-scatters as all-reduces."""
    return sum(one.payload for one in found if one.kind in ("all-reduce", "reduce-scatter") and one.axes == (axis,))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_sums_over_devices_are_those_that_the_compiler_adds(axis: str) -> None:
    found: list[tuple[Collective, ...]] = []
    for mtp in (NONE, TWO):
        program, layout = compiled(mtp, **{axis: 2})
        found.append(tuple(collectives_of(program.as_text(), layout)))
    rest = 4 * WIDTH * VOCAB if axis != "tensor" else 4 * WIDTH * TOKENS  # of the head's gradient or the states'
    added = total(found[1], axis) - total(found[0], axis)
    assert added == pytest.approx(2 * rest, rel=0.1)
    estimates = [on_mesh(mtp, **{axis: 2}).collectives for mtp in (NONE, TWO)]
    assert total(estimates[1], axis) - total(estimates[0], axis) == pytest.approx(2 * rest)


def test_a_plan_names_the_head_for_further_tokens() -> None:
    plan = planned(TWO).facts.step.plan
    assert plan.model.further == 2 * WIDTH * VOCAB
    assert plan.flops == plan.model.flops_per_token * plan.tokens
    plain = planned(NONE).facts.step.plan
    assert plan.model.flops_per_token - plain.model.flops_per_token == 6 * plan.model.further


OTHERS = {
    "bigrams": ["architecture.bigram_rows=4096", "architecture.key_offset=true"],
    "experts": ["model.experts=8"],
    "delta layers": ["model.family=qwennext", "model.delta_layers=DF"],
    "stages": ["topology.pipeline=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OTHERS))
def test_further_tokens_are_planned_with(name: str) -> None:
    """Two times the products of the head, whatever the layers are."""
    words = [*TINY, *OTHERS[name], "training.per_device_batch_size=1"]
    plain, more = (estimated("pretrain", [*words, mtp], parse_target("h200:8")).estimate for mtp in (NONE, TWO))
    again = 4 / 3 if name == "stages" else 1
    assert more.flops - plain.flops == pytest.approx(2 * 6 * WIDTH * VOCAB * BLOCK * again)
    assert more.traffic > plain.traffic
    sent = [sum(one.sent for one in made.collectives) for made in (plain, more)]
    assert sent[1] > sent[0]
