"""Plans of multi-token prediction: further tokens share the logits of the next one, so they add next to nothing."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import pytest

from bessemer.plan import trainer as planning
from bessemer.plan.absent_plan import estimated
from bessemer.plan.collectives import Collective, Layout, collectives_of
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


@pytest.mark.slow
def test_the_compiler_adds_next_to_nothing() -> None:
    """Neither a product of the head (6 · width · vocabulary FLOPs per token), nor a gradient of it."""
    programs = [compiled(mtp)[0] for mtp in (NONE, TWO)]
    costs = [program.cost_analysis() for program in programs]
    # the compiler counts the loop over the pieces of a loss once
    assert CHUNKS * (costs[1]["flops"] - costs[0]["flops"]) < 0.1 * 6 * WIDTH * VOCAB * TOKENS
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert abs(temporaries[1] - temporaries[0]) < 3 * 4 * VOCAB * TOKENS / CHUNKS  # of one tile of logits


def total(found: Any, axis: str) -> float:
    """Bytes that reach the sums over one axis: a CPU's compiler writes reduce-scatters as all-reduces."""
    return sum(one.payload for one in found if one.kind in ("all-reduce", "reduce-scatter") and one.axes == (axis,))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_devices_sum_nothing_more(axis: str) -> None:
    found: list[tuple[Collective, ...]] = []
    for mtp in (NONE, TWO):
        program, layout = compiled(mtp, **{axis: 2})
        found.append(tuple(collectives_of(program.as_text(), layout)))
    assert total(found[1], axis) == pytest.approx(total(found[0], axis), rel=0.01)


def test_a_plan_adds_no_flops_for_further_tokens() -> None:
    plain, more = (planned(mtp).facts.step.plan for mtp in (NONE, TWO))
    assert more.flops == plain.flops and more.model.flops_per_token == plain.model.flops_per_token


OTHERS = {
    "bigrams": [
        *("architecture.bigram_rows=4096", "architecture.key_offset=true"),
        *("architecture.dense_connections=true", "architecture.paired_heads=true"),
    ],
    "experts": ["model.experts=8"],
    "delta layers": ["model.family=qwennext", "model.delta_layers=DF"],
    "stages": ["topology.pipeline=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OTHERS))
def test_further_tokens_are_planned_with(name: str) -> None:
    """The same plan, whatever the layers are."""
    words = [*TINY, *OTHERS[name], "training.per_device_batch_size=1"]
    plain, more = (estimated("pretrain", [*words, mtp], parse_target("h200:8")).estimate for mtp in (NONE, TWO))
    assert more.flops == plain.flops and more.traffic == pytest.approx(plain.traffic, rel=0.01)
    assert more.collectives == plain.collectives
