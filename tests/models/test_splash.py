"""Splash attention, the TPU's kernel: equal to the XLA path where it is interpreted, and compiled for a real TPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.test_models_attention import draw
from tests.processes import TIMEOUT
from tests.quick import OLDER_LOOPS

from bessemer.errors import InputError
from bessemer.kernels.attention import ABSENT, KERNELS, Layout, choose_attention, splash_attention
from bessemer.plan.compiled import QUIET
from bessemer.topology import planned_for


@pytest.mark.parametrize(("keys", "window"), [pytest.param(256, None, marks=pytest.mark.slow), (384, 100)])
def test_equals_xla_with_gradients(keys: int, window: int | None) -> None:
    """More keys than queries is a piece of a split sequence; the first of them do not exist on the first device."""
    q, k, v = draw(1, 256, 4, 32), draw(1, keys, 2, 32, seed=1), draw(1, keys, 2, 32, seed=2)
    ids = np.searchsorted([40, 200, 300], np.arange(keys), side="right").astype(np.int32)[None]
    q_ids, k_ids = ids[:, keys - 256 :], np.where(np.arange(keys) < keys - 256 - 64, ABSENT, ids)

    def value(kernel, q, k, v):
        return jnp.sum(jnp.sin(kernel(q, k, v, q_ids, k_ids, window)))

    def interpreted(*args):
        return splash_attention(*args, interpret=True)

    got, want = (
        jax.value_and_grad(value, argnums=(1, 2, 3))(kernel, q, k, v) for kernel in (interpreted, KERNELS["xla"])
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_scores_are_capped_as_xla_caps_them() -> None:
    q, k, v = 4 * draw(1, 128, 2, 32), draw(1, 128, 1, 32, seed=1), draw(1, 128, 1, 32, seed=2)

    def value(kernel, cap, q, k, v):
        return jnp.sum(jnp.sin(kernel(q, k, v, None, None, None, softcap=cap)))

    kernels = (partial(splash_attention, interpret=True), KERNELS["xla"])
    got, want = (jax.value_and_grad(partial(value, kernel, 2.0), argnums=(0, 1, 2))(q, k, v) for kernel in kernels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    assert abs(value(KERNELS["xla"], 0.0, q, k, v) - want[0]) > 0.1
    with planned_for("gpu"):
        assert choose_attention("auto", jnp.bfloat16, 128, False, 2048, capped=True) == "xla"
        with pytest.raises(InputError, match="attention_cap"):
            choose_attention("cudnn", jnp.bfloat16, 128, False, 2048, capped=True)


def test_it_is_chosen_on_a_tpu_and_only_there() -> None:
    assert choose_attention("auto", jnp.bfloat16, 128, True, 2048) == "xla"
    with pytest.raises(InputError, match="kernel for TPUs"):
        choose_attention("splash", jnp.bfloat16, 128, True, 2048)
    with planned_for("tpu"):
        assert choose_attention("auto", jnp.bfloat16, 128, True, 2048) == "splash"
        assert choose_attention("auto", jnp.bfloat16, 128, True, 2047) == "xla"
        pieces = Layout(sequence=("context",), pieces=32, way="keys")
        assert choose_attention("auto", jnp.bfloat16, 128, True, 2048, pieces) == "xla"
    with planned_for("gpu"):
        whole = Layout(sequence=("context",), pieces=32, way="heads")
        assert choose_attention("auto", jnp.bfloat16, 128, False, 2048, whole) == "cudnn"
        assert choose_attention("auto", jnp.bfloat16, 128, False, 2048, pieces) == "xla"
        assert choose_attention("auto", jnp.bfloat16, 128, True, 2048) == "cudnn"
        assert choose_attention("auto", jnp.bfloat16, 128, True, 2047) == "xla"  # cuDNN's tables are of even length


COMPILE = """
import re, jax, jax.numpy as jnp
from jax.experimental import topologies
from bessemer.models.gpt import GPT
from bessemer.topology import TopologySettings, make_topology, planned_for, shardings, unbox

key = jax.random.key(0)
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
topology = make_topology(TopologySettings(data=1, fsdp=1, tensor=2, context=2), devices)
model = GPT(depth=1, width=256, head_dim=64, kv_heads=2, vocab_size=256, block_size=512, document_mask=True)
with topology.scope(), planned_for("tpu"):
    print(model.chosen_kernels()["attention"])
    boxed = jax.eval_shape(model.init, key, jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params = jax.tree.map(place, unbox(boxed), shardings(boxed, topology.mesh))
    rows = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=topology.batch_sharding())
    batch = dict.fromkeys(("input_ids", "target_ids", "segment_ids"), rows)
    loss = lambda p, b: model.apply({"params": p}, b, method="loss")[0]
    text = jax.jit(jax.grad(loss)).lower(params, batch).compile().as_text()
print("kernels", len(re.findall(r"custom_call_target=\\"tpu_custom_call\\"", text)))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (extra tpu-plan)")
def test_a_step_compiles_for_a_tpu_with_it() -> None:
    """Tensor 2 × context 2 of a v5e: forward, and both kernels of the gradient."""
    flags = os.environ.get("XLA_FLAGS", "").replace(OLDER_LOOPS, "")  # libtpu aborts for flags that it does not know
    variables = {**os.environ, **QUIET, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=variables, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "splash" in done.stdout and "kernels 3" in done.stdout
