"""Optimizer state and Muon's stacks on a mesh of eight virtual devices."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bessemer.optim import build_optimizer, mesh_spread, state_shardings

P = PartitionSpec


def defaults(cls: type) -> Any:
    return cls()


def build_mesh(data: int, fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
    names = ("data", "fsdp", "tensor")
    return jax.make_mesh((data, fsdp, tensor), names, axis_types=(AxisType.Auto,) * 3)


def abstract_params(blocks: int) -> dict[str, Any]:
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params: dict[str, Any] = {f"block_{i}": {"q": leaf(16, 16), "up": leaf(16, 64)} for i in range(blocks)}
    return params | {"embedding": leaf(24, 16), "gain": leaf(8)}


def shardings_of(params: Any, mesh: jax.sharding.Mesh) -> Any:
    spec = {2: P("fsdp", "tensor"), 1: P()}
    return jax.tree.map(lambda p: NamedSharding(mesh, spec[p.ndim]), params)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_state_lies_where_its_parameters_do(name: str) -> None:
    mesh = build_mesh(2, 4)
    params = abstract_params(1)
    where = shardings_of(params, mesh)
    replicated = NamedSharding(mesh, P())
    tx = build_optimizer(name, defaults, 10).tx
    shardings = state_shardings(tx, params, where, replicated)
    abstract = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
    pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True)
    by_shape = {leaf.shape: sharding.spec for leaf, sharding in pairs}
    if name != "adafactor":
        assert by_shape[(16, 16)] == P("fsdp", "tensor") and by_shape[(24, 16)] == P("fsdp", "tensor")
    if name == "muon":  # its second moment has one value an output unit; the reduced axis is not split
        assert by_shape[(1, 64)] == P(None, "tensor")
    assert by_shape.get((), P()) == P()
    lowered = jax.jit(tx.init, out_shardings=shardings).lower(jax.tree.map(_placed, params, where))
    assert lowered.out_info is not None


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def run_muon(mesh: jax.sharding.Mesh, spread: bool, blocks: int) -> tuple[Any, Counter[str]]:
    """Two muon updates on `mesh`: the updates, and the collectives of the compiled update."""
    params_like = abstract_params(blocks)
    where, replicated = shardings_of(params_like, mesh), NamedSharding(mesh, P())
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params_like)
    params = jax.device_put(params, where)
    tx = build_optimizer("muon", defaults, 10, spread=mesh_spread(mesh) if spread else None).tx
    shardings = state_shardings(tx, params_like, where, replicated)
    state = jax.jit(tx.init, out_shardings=shardings)(params)

    def update(grads: Any, state: Any, params: Any, step: jax.Array) -> Any:
        return tx.update(grads, state, params, step=step)

    compiled = (
        jax.jit(update, in_shardings=(where, shardings, where, replicated), out_shardings=(where, shardings))
        .lower(params, state, params, jnp.int32(0))
        .compile()
    )
    kinds = r" = [^\n]*? (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
    step = jax.device_put(jnp.int32(0), replicated)
    updates, state = compiled(params, state, params, step)
    updates, state = compiled(updates, state, params, step)
    return jax.device_get(updates), Counter(re.findall(kinds, compiled.as_text()))


@pytest.mark.slow
def test_spread_polar_step_is_the_same_with_few_collectives() -> None:
    alone, _ = run_muon(build_mesh(1, 1), False, blocks=5)
    over_data, collectives = run_muon(build_mesh(8, 1), True, blocks=5)  # 5 matrices a shape on 8 devices: padded
    assert collectives == {"all-gather": 2}  # one a shape
    over_both, collectives = run_muon(build_mesh(2, 4), True, blocks=5)
    # a shape: to its devices and back over fsdp, once over data; one all-reduce for the norms
    assert collectives == {"all-to-all": 4, "all-gather": 2, "all-reduce": 1}
    over_all, collectives = run_muon(build_mesh(2, 2, 2), True, blocks=5)
    assert collectives == {"all-to-all": 8, "all-gather": 2, "all-reduce": 2}
    for spread in (over_data, over_both, over_all):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), alone, spread)


def test_one_device_needs_no_spread() -> None:
    assert mesh_spread(build_mesh(1, 1)) is None
    spread = mesh_spread(build_mesh(2, 4))
    assert spread is not None and spread.over(5).multiple == 8


@pytest.mark.parametrize(
    ("matrices", "sizes", "axes"),
    [
        (5, {"data": 2, "fsdp": 4}, ("data", "fsdp")),  # eight devices, three of padding
        (26, {"data": 64, "fsdp": 8}, ("data",)),  # over both, 486 of padding would be gathered with the rest
        (26, {"data": 512, "fsdp": 8}, ("fsdp",)),
        (26, {"fsdp": 512}, ("fsdp",)),  # padding that all-to-alls carry: as little as a matrix
        (1, {"data": 8, "fsdp": 8}, ()),  # nothing to share out: gathered, and made by everyone
        (12, {"data": 2, "fsdp": 2, "tensor": 2, "context": 2}, ("data", "context", "fsdp", "tensor")),
    ],
)
def test_a_stack_is_split_over_as_many_devices_as_pay(
    matrices: int, sizes: dict[str, int], axes: tuple[str, ...]
) -> None:
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    spread = mesh_spread(mesh)  # type: ignore[arg-type]
    assert spread is not None and spread.chosen(matrices) == axes
    assert spread.cost(matrices, axes) < 30  # whatever the number of devices
