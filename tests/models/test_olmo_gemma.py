"""olmo and gemma, dense and with experts, on a mesh, scanned and recomputed: the same loss and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.test_llama import QUICK, SIZES, assert_same, batch_of

from bessemer.errors import InputError
from bessemer.interop.config import type_of
from bessemer.models.gemma import Gemma
from bessemer.models.llama import Llama
from bessemer.models.moe import BIAS, ROUTER
from bessemer.models.olmo import Olmo
from bessemer.topology import TopologySettings, make_topology, shardings, unbox

SHARED: dict[str, Any] = {
    **SIZES,
    "depth": 4,
    "block_size": 16,
    "sliding_window": 5,
    "sliding_layers": "SL",
    "rope_local_base": 100.0,
    "document_mask": True,
}
CAPPED: dict[str, Any] = {"query_scalar": 11.0, "attention_cap": 2.0, "softcap": 5.0}
EXPERTS: dict[str, Any] = {"experts": 4, "experts_active": 2, "experts_shared": 1, "expert_width": 24}
FAMILIES: dict[str, Llama] = {"olmo": Olmo(**SHARED), "gemma": Gemma(**SHARED, **CAPPED)}
MIXTURES: dict[str, Llama] = {"olmo": Olmo(**SHARED, **EXPERTS), "gemma": Gemma(**SHARED, **CAPPED, **EXPERTS)}


def step_of(model: Llama) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return jax.value_and_grad(loss)


def random_params(model: Llama) -> tuple[Any, Any]:
    """Return boxed shapes, and weights around 0, or around 1 for vectors."""
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    random = np.random.default_rng(1)
    return boxed, jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) * 0.2 + (len(leaf.shape) < 2), unbox(boxed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mesh_scan_and_remat_change_nothing(family: str, kind: str) -> None:
    model = FAMILIES[family] if kind == "dense" else MIXTURES[family]
    model.check()
    boxed, params = random_params(model)
    expected = jax.device_get(jax.jit(step_of(model), compiler_options=QUICK)(params, batch_of()))
    third = {"tensor": 2} if kind == "dense" else {"expert": 2}
    topology = make_topology(TopologySettings(data=2, fsdp=2, **third))
    places = shardings(boxed, topology.mesh)
    again = model.clone(scan_layers=True, remat=["mlp_hidden", "q"])
    with topology.scope():
        batch = jax.device_put(batch_of(), topology.batch_sharding())
        step = jax.jit(step_of(again), out_shardings=(None, places), compiler_options=QUICK)
        assert_same(step(jax.device_put(params, places), batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_copies_of_a_dense_layer_are_that_layer(family: str) -> None:
    """Norms, activation and residual of the family are around its experts as around its dense layer, whose gradient is
    the sum of theirs; which copy is chosen does not matter, so routers have none."""
    dense, model = FAMILIES[family].clone(mlp_width=24), MIXTURES[family].clone(experts_shared=0)
    _, params = random_params(dense)
    copies = {}
    for name, block in params.items():
        copies[name] = block
        if name.startswith("blocks_"):
            stacks = {f"expert_{part}": np.stack([block[part]] * 4) for part in ("gate", "up", "down")}
            kept = {part: leaf for part, leaf in block.items() if part not in ("gate", "up", "down")}
            router = np.random.default_rng(int(name[-1])).standard_normal((32, 4)).astype(np.float32)
            copies[name] = {**kept, **stacks, ROUTER: router, BIAS: np.zeros(4, np.float32)}
    wanted, gradients = jax.jit(step_of(dense), compiler_options=QUICK)(params, batch_of())
    got, found = jax.jit(step_of(model), compiler_options=QUICK)(copies, batch_of())
    routers = [found[f"blocks_{layer}"].pop(ROUTER) for layer in range(model.depth)]
    joined = {
        name: {
            part.removeprefix("expert_"): leaf.sum(axis=0) if part.startswith("expert_") else leaf
            for part, leaf in block.items()
            if part != BIAS
        }
        if name.startswith("blocks_")
        else block
        for name, block in found.items()
    }
    assert_same((got, joined), (wanted, gradients))
    assert max(np.abs(leaf).max() for leaf in routers) < 1e-5 * np.abs(gradients["blocks_0"]["down"]).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_norms_change_no_scale(family: str) -> None:
    """Weights of 1 in olmo, of 0 in gemma, where a norm multiplies by 1 + w."""
    model = FAMILIES[family]
    params = unbox(jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))[
        "params"
    ]
    for name in model.norm_sizes():
        np.testing.assert_array_equal(params["blocks_0"][name], 1.0 - model.norm_offset)
        assert model.group_of(("blocks_0", name)) == "rho"
    assert model.count_parameters()["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_an_export_has_no_place_for_their_experts() -> None:
    for kind, model in (("olmo3", MIXTURES["olmo"]), ("gemma", MIXTURES["gemma"])):
        with pytest.raises(InputError, match=rf"{kind}.* model\.experts=4"):
            type_of(model)


def test_contradictions_are_named() -> None:
    with pytest.raises(InputError, match=r"architecture\.query_scalar is -1"):
        Gemma(**SHARED, query_scalar=-1.0).check()
    with pytest.raises(InputError, match=r"architecture\.attention_cap is -1"):
        Gemma(**SHARED, attention_cap=-1.0).check()
