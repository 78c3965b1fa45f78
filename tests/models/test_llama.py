"""The llama family under meshes, scans and rematerialisation: the same loss and gradients; and settings it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.models.llama import Llama, Rope
from bessemer.plan.kept import on_host
from bessemer.topology import TopologySettings, make_topology, shardings, unbox

SIZES: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 100}
EVERYTHING: dict[str, Any] = {
    **SIZES,
    "block_size": 16,
    "attention_bias": "all",
    "mlp_bias": True,
    "head_norm": True,
    "tied_head": True,
    "sliding_window": 5,
    "sliding_layers": "SL",
    "document_mask": True,
    "loss_chunks": 2,
}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def batch_of(rows: int = 8, length: int = 16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.integers(0, 100, (rows, length + 1)).astype(np.int32)
    targets = np.where(random.uniform(size=(rows, length)) < 0.3, -1, ids[:, 1:]).astype(np.int32)
    segments = np.sort(random.integers(1, 3, (rows, length)), axis=1).astype(np.int32)
    return {"input_ids": ids[:, :-1], "target_ids": targets, "segment_ids": segments}


def step_of(**settings: Any) -> Any:
    model = Llama(**{**EVERYTHING, **settings})
    model.check()

    def loss(params: Any, batch: Any) -> Any:
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return model, jax.value_and_grad(loss)


@pytest.fixture(scope="module")
def single() -> Any:
    """(boxed shapes, parameters, loss and gradients on one device)."""
    model, step = step_of()
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) * 0.2 + (len(leaf.shape) < 2), unbox(boxed)
    )
    return boxed, params, jax.device_get(jax.jit(step, compiler_options=QUICK)(params, batch_of()))


def assert_same(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-6)
    leaves = jax.tree_util.tree_leaves_with_path(got[1])
    for (path, a), b in zip(leaves, jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_mesh_equals_one_device(single: Any) -> None:
    boxed, params, expected = single
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    places = shardings(boxed, topology.mesh)
    batch = jax.device_put(batch_of(), topology.batch_sharding())
    with topology.scope():
        step = jax.jit(step_of()[1], out_shardings=(None, places), compiler_options=QUICK)
        assert_same(step(jax.device_put(params, places), batch), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"scan_layers": True, "sliding_layers": "S", "remat": ["block"]},
        {"scan_layers": True, "sliding_layers": "S", "remat": ["offload"]},
        {"remat": ["offload"]},
        {"remat": ["mlp_hidden", "q"]},
    ],
)
def test_scan_and_remat_change_nothing(settings: dict[str, Any], single: Any) -> None:
    _, params, expected = single
    if "sliding_layers" in settings:  # a scan needs layers that repeat
        plain = step_of(sliding_layers="S")[1]
        expected = jax.device_get(jax.jit(plain, compiler_options=QUICK)(params, batch_of()))
    step = jax.jit(step_of(**settings)[1], compiler_options=QUICK)
    assert_same(step(params, batch_of()), expected)


@pytest.mark.parametrize("scan", [False, True])
def test_offload_keeps_the_inputs_of_blocks_in_host_memory_and_nothing_else_of_them(scan: bool, single: Any) -> None:
    """Between the passes: one input per block on the host, (B, T, D), and on the device nothing that `block` keeps."""
    kept = {}
    for remat in ("block", "offload"):
        model, _ = step_of(remat=[remat], scan_layers=scan, sliding_layers="S")

        def residuals(params: Any, model: Any = model) -> Any:
            loss = jax.vjp(lambda p: model.apply({"params": p}, batch_of(), method="loss")[0], params)[1]
            return jax.tree.leaves(loss)

        avals = jax.make_jaxpr(residuals)(single[1]).out_avals
        stream = [aval for aval in avals if aval.shape[-3:] == (8, 16, 32)]
        places = Counter()
        for aval in stream:
            places[on_host(aval)] += aval.shape[0] if aval.ndim == 4 else 1
        kept[remat] = places
    assert kept["offload"][True] == 2 and kept["block"][True] == 0  # two blocks
    assert kept["block"][False] - kept["offload"][False] == 2


def test_offload_on_a_mesh_equals_one_device(single: Any) -> None:
    boxed, params, expected = single
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    places = shardings(boxed, topology.mesh)
    batch = jax.device_put(batch_of(), topology.batch_sharding())
    with topology.scope():
        step = jax.jit(step_of(remat=["offload"])[1], out_shardings=(None, places), compiler_options=QUICK)
        assert_same(step(jax.device_put(params, places), batch), expected)


def test_a_layer_without_positions_sees_the_same_tokens_in_any_order() -> None:
    """The last position of a row whose earlier tokens are shuffled; with rotary it differs."""
    ids = np.arange(8)[None].repeat(2, axis=0)
    ids[1, :7] = ids[1, 6::-1]
    last = []
    for pattern in ("N", "R"):
        model = Llama(**SIZES, block_size=8, rotary_layers=pattern).clone(depth=1)
        params = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), ids)
        last.append(np.asarray(jax.jit(model.apply, compiler_options=QUICK)(params, ids)[:, -1]))
    np.testing.assert_allclose(last[0][0], last[0][1], atol=1e-6)
    assert np.abs(last[1][0] - last[1][1]).max() > 1e-5


@pytest.mark.slow
def test_layers_with_and_without_positions_are_scanned_in_groups(single: Any) -> None:
    _, params, _ = single
    four = {**params, "blocks_2": params["blocks_0"], "blocks_3": params["blocks_1"]}
    settings = {"depth": 4, "rotary_layers": "RN"}
    plain = jax.device_get(jax.jit(step_of(**settings)[1], compiler_options=QUICK)(four, batch_of()))
    scanned = jax.jit(step_of(**settings, scan_layers=True)[1], compiler_options=QUICK)
    assert_same(scanned(four, batch_of()), plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "yarn"}, r"architecture\.rope\.original_length"),
        ({"rope_type": "dynamic", "rope_original_length": 8}, r"architecture\.block_size=8"),
        ({"sliding_layers": "SX"}, r"model\.sliding_layers is 'SX'"),
        ({"rotary_layers": "RX"}, r"model\.rotary_layers is 'RX'"),
        ({"precision": "fp8"}, "gpt family"),
        ({"kv_heads": 3}, r"model\.kv_heads 3"),
        ({"remat": ["everything"]}, r"architecture\.remat"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Llama(**{**EVERYTHING, **settings}).check()


def test_rotary_scalings_leave_fast_pairs_and_slow_down_the_others() -> None:
    """Within the pretrained context a fast pair turns as before; the slowest by `factor` less."""
    plain = Rope(10_000.0).frequencies(64)
    for rope in (Rope(10_000.0, "llama3", 8.0, 2048), Rope(10_000.0, "yarn", 8.0, 2048)):
        scaled = rope.frequencies(64)
        np.testing.assert_allclose(scaled[0], plain[0])
        np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
        assert np.all(np.diff(scaled) < 0)
    np.testing.assert_allclose(Rope(10_000.0, "linear", 8.0).frequencies(64), plain / 8)
    assert Rope(10_000.0, "yarn", 8.0, 2048).attention_scale == pytest.approx(0.1 * np.log(8) + 1)
