"""Stages of consecutive layers: what they hold, what they send, and deeper models than the suite of all meshes has."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from tests.mesh.harness import (
    LAST_RESORT,
    QUICKLY,
    SHARED,
    batch_of,
    build,
    collectives,
    compile_step,
    difference,
    mesh_of,
)

from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.models.pipeline import bubble, check_branches, micro_batches, stage_bounds
from bessemer.models.transformer import Transformer

DEEP: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    # stages of 2, 2, 1 and 1 layers; the middle layer's output goes through two of them
    "gpt, as shipped, 6 layers on 4 stages": ("gpt", {"data": 2, "pipeline": 4}, {"depth": 6, "window": "SSSL"}),
    "gpt, equal stages, scanned": ("gpt", {"pipeline": 2}, {"depth": 4, "scan_layers": True}),
    "gpt, recomputed": ("gpt", {"pipeline": 2}, {"depth": 4, "window": "L", "remat": ["block"]}),
    "gpt, square matrices": ("gpt", {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"depth": 3}),
    "gpt, shifted keys of split rows": (
        "gpt",
        {"pipeline": 2, "context": 2},
        {"depth": 4, "window": "L", "key_offset": True},
    ),
    "llama, layers without positions": ("llama", {"pipeline": 2}, {"depth": 3, "rotary_layers": "RRN"}),
    "llama, split sequences": ("llama", {"pipeline": 2, "context": 4}, {"sliding_layers": "S"}),
}
LONG = ("gpt, equal stages, scanned", "gpt, recomputed", "gpt, square matrices", "llama, layers without positions")
SHIPPED = {"backout": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in DEEP])
def test_stages_are_one_device(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    family, mesh, settings = DEEP[name]
    settings = settings | (SHIPPED if family == "gpt" else {})
    topology = mesh_of(mesh)
    with topology.scope():
        tiny = build(family, topology=topology, **settings)
        tiny.model.check()
    step, arguments = compile_step(tiny, topology)
    assert LAST_RESORT not in capfd.readouterr().err
    check_branches(step.as_text())
    alone = build(family, **settings)
    start = (alone.params, alone.tx.init(alone.params), batch_of(), np.int32(0))
    wanted = jax.device_get(jax.jit(alone.step, compiler_options=QUICKLY)(*start))
    got = jax.device_get(step(*arguments))
    for part, largest, mean in (("loss", 1e-6, 1e-6), ("gradients", 1e-4, 2e-7)):  # measured: 1.7e-7, 2.6e-5, 3e-8
        off = difference(got[part], wanted[part])
        print(part, off)
        assert off.largest < largest and off.mean < mean, (part, off)


def test_dense_connections_are_refused_in_stages() -> None:
    model = GPT(**SHARED, dense_connections=True)
    with mesh_of({"pipeline": 2}).scope(), pytest.raises(InputError, match=r"topology\.pipeline=2"):
        model.check()


def test_layers_are_dealt_out_in_order() -> None:
    assert stage_bounds(6, 4) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert stage_bounds(12, 3) == [(0, 4), (4, 8), (8, 12)]


def test_the_bubble_is_that_of_the_schedule() -> None:
    """Counted tick by tick: stage s works on micro-batch t − s."""
    for stages, rows in ((2, 1), (4, 8), (3, 5)):
        count = micro_batches(stages, rows)
        ticks = count + stages - 1
        busy = sum(0 <= tick - stages + 1 < count for tick in range(ticks))
        assert bubble(stages, rows) == pytest.approx(1 - busy / ticks)
    assert bubble(1, 8) == 0


@pytest.fixture(scope="module")
def forward() -> Any:
    """(model, parameters where they belong, the topology): four layers on two stages, dropout and a document mask."""
    topology = mesh_of({"data": 2, "pipeline": 2})
    with topology.scope():
        tiny = build("gpt", topology=topology, depth=4, dropout=0.2)
    return tiny, jax.device_put(tiny.params, tiny.places), topology


@pytest.mark.slow
def test_rows_draw_their_own_dropout(forward: Any) -> None:
    """The same keys reach the same rows, whatever micro-batch they are in."""
    tiny, params, topology = forward

    def loss(params: Any, batch: Any) -> jax.Array:
        made = tiny.model.apply(
            {"params": params}, batch, deterministic=False, method="loss", rngs={"dropout": jax.random.key(5)}
        )
        return made[0]

    alone = jax.jit(loss, compiler_options=QUICKLY)(tiny.params, batch_of())
    with topology.scope():
        batch = jax.device_put(batch_of(), topology.batch_sharding())
        together = jax.jit(loss, compiler_options=QUICKLY)(params, batch)
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_few_rows_go_through_all_layers_everywhere(forward: Any) -> None:
    """One prompt is not divisible into micro-batches: its logits are those of one device."""
    tiny, params, topology = forward
    ids = batch_of()["input_ids"][:1]
    alone = tiny.model.apply({"params": tiny.params}, ids)
    with topology.scope():
        step = jax.jit(lambda params, ids: tiny.model.apply({"params": params}, ids), compiler_options=QUICKLY)
        program = step.lower(params, ids).compile()
    assert not collectives(program)["collective-permute"]
    np.testing.assert_allclose(program(params, ids), alone, atol=2e-5)


def test_a_stage_holds_its_own_layers_alone() -> None:
    """Per device, at rest and while it computes: twice the layers on twice the stages take no more memory."""

    def held(stages: int) -> tuple[int, int]:
        topology = mesh_of({"pipeline": stages})
        with topology.scope():
            tiny = build("llama", topology=topology, depth=stages, mlp_width=2048)
        step, _ = compile_step(tiny, topology)
        memory = step.memory_analysis()
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes

    (two_rest, two), (four_rest, four) = held(2), held(4)
    print(two_rest, two, four_rest, four)
    assert four_rest < 1.1 * two_rest
    assert four < 1.1 * two


def test_a_split_sequence_takes_stages_that_are_alike() -> None:
    """Exchanges among the pieces of a sequence that only some devices take part in would never end."""
    topology = mesh_of({"pipeline": 2, "context": 4})
    with topology.scope():
        tiny = build("gpt", topology=topology)
        with pytest.raises(InputError, match=r"topology.pipeline=2.*topology.context=4.*model.window=L"):
            jax.eval_shape(tiny.step, tiny.params, tiny.tx.init(tiny.params), batch_of(), np.int32(0))


def test_a_program_that_would_hang_is_refused() -> None:
    """Exchanges between neighbors in a branch, at any depth; elsewhere they are how sequences go on."""
    text = """\
%inner (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} KIND(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%first (p: f32[4]) -> f32[4] {
  ROOT %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%inner
}

%second (p: f32[4]) -> f32[4] {
  ROOT %g = f32[4]{0} negate(%p)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %on = f32[4]{0} collective-permute(%p), channel_id=2, source_target_pairs={{0,1}}
  ROOT %c = f32[4]{0} conditional(%i, %p, %p), branch_computations={%first, %second}
}
"""
    check_branches(text.replace("KIND", "copy"))
    with pytest.raises(InputError, match=r"topology.pipeline.*hang.*topology.data"):
        check_branches(text.replace("KIND", "collective-permute"))


def test_a_family_without_stages_is_refused() -> None:
    class Other(GPT):
        has_stages = False

    model = Other(**{**SHARED, "window": "L"})
    assert not Transformer.has_stages
    with (
        mesh_of({"pipeline": 2}).scope(),
        pytest.raises(InputError, match=r"topology.pipeline=2.*Other.*topology.fsdp"),
    ):
        model.check()
