"""olmo and gemma under a mesh, with scanned and recomputed layers: the same loss and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.test_llama import QUICK, SIZES, assert_same, batch_of

from bessemer.errors import InputError
from bessemer.models.gemma import Gemma
from bessemer.models.llama import Llama
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
FAMILIES: dict[str, Llama] = {
    "olmo": Olmo(**SHARED),
    "gemma": Gemma(**SHARED, query_scalar=11.0, attention_cap=2.0, softcap=5.0),
}


def step_of(model: Llama) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return jax.value_and_grad(loss)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_mesh_scan_and_remat_change_nothing(family: str) -> None:
    model = FAMILIES[family]
    model.check()
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) * 0.2 + (len(leaf.shape) < 2), unbox(boxed)
    )
    expected = jax.device_get(jax.jit(step_of(model), compiler_options=QUICK)(params, batch_of()))
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    places = shardings(boxed, topology.mesh)
    again = model.clone(scan_layers=True, remat=["mlp_hidden", "q"])
    with topology.scope():
        batch = jax.device_put(batch_of(), topology.batch_sharding())
        step = jax.jit(step_of(again), out_shardings=(None, places), compiler_options=QUICK)
        assert_same(step(jax.device_put(params, places), batch), expected)


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


def test_contradictions_are_named() -> None:
    with pytest.raises(InputError, match=r"architecture\.query_scalar is -1"):
        Gemma(**SHARED, query_scalar=-1.0).check()
    with pytest.raises(InputError, match=r"architecture\.attention_cap is -1"):
        Gemma(**SHARED, attention_cap=-1.0).check()
