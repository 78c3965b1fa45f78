"""The one-pass kernels against plain JAX: values and gradients, on one device and on a mesh (interpreted here)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.absent_gpu import lowered_for_a_gpu

from bessemer.kernels import norms, ops
from bessemer.kernels.loss import softmax_gradient
from bessemer.losses import cross_entropy
from bessemer.models.gpt import GPT
from bessemer.topology import TopologySettings, init_sharded, make_topology, planned_for

B, T, D = 4, 8, 96  # 96 = 3 pieces of 32


def normal(index: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(7), index), shape)


def assert_same(one, other, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def both(function, cotangents, *args):
    """(values, gradients) of function(implementation, *args) for xla and pallas."""
    results = []
    for implementation in ("xla", "pallas"):
        values, pull = jax.vjp(lambda *a, i=implementation: function(i, *a), *args)
        results.append((values, pull(cotangents)))
    return results


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 24), (2, 1, 24), (1, 3, 24)])
def test_a_single_row_is_multiplied_as_one_of_several_on_a_gpu(shape, monkeypatch: pytest.MonkeyPatch):
    """The same product: one row alone would be rounded to bf16 before it is summed, and W read three times."""
    monkeypatch.setattr(ops, "WIDE", 24 * 40)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in (shape, (24, 40)))
    with planned_for("gpu"):
        found = jax.jit(lambda x, w: ops.linear(x, w, (None, None), jnp.bfloat16))(x, w)
        rows = jax.make_jaxpr(lambda x, w: ops.linear(x, w, (None, None), jnp.bfloat16))(x, w)
    assert found.shape == (*shape[:-1], 40)
    np.testing.assert_allclose(found.astype("f4"), x.astype("f4") @ w.astype("f4"), rtol=2e-2, atol=5e-2)
    assert (f"bf16[{ops.FEW_ROWS},40]" in str(rows)) == (x.size == 24)


def test_a_width_that_is_no_power_of_two_is_held_in_pieces():
    assert norms.suits(768) and norms.suits(1280) and norms.suits(D)
    assert not norms.suits(100)  # pieces of 4
    assert not norms.suits(31 * 32)  # 31 pieces


def test_mix_norm_and_its_gradients():
    x, x0, g1, g2, g3 = (normal(i, B, T, D) for i in range(5))
    xla, pallas = both(lambda i, *a: norms.mix_norm(*a, i), (g1, g2, g3), x, x0, jnp.float32(1.1), jnp.float32(0.2))
    assert_same(xla, pallas)


def test_add_norm_and_its_gradients():
    x, z, g1, g2 = (normal(i, B, T, D) for i in range(4))
    assert_same(*both(lambda i, *a: norms.add_norm(*a, i), (g1, g2), x, z))


@pytest.mark.parametrize("table_rows", [1, B])
def test_rotate_norm_and_its_gradient(table_rows: int):
    positions = jnp.broadcast_to(jnp.arange(T), (table_rows, T))
    rotary = ops.rotary_table(positions, T, 64, 1e4)

    def unpacked(implementation: str, packed: jax.Array) -> tuple[jax.Array, ...]:
        if implementation == "pallas":
            return norms.unpack_rotate_norm(packed, rotary, 4, 2, 1.2)
        q, k, v = (part.reshape(B, T, -1, 64) for part in jnp.split(packed, (256, 384), axis=-1))
        return ops.rotate_norm(q, *rotary, 1.2), ops.rotate_norm(k, *rotary, 1.2), v

    cotangents = (normal(1, B, T, 4, 64), normal(2, B, T, 2, 64), normal(3, B, T, 2, 64))
    assert_same(*both(unpacked, cotangents, normal(0, B, T, 512)))


@pytest.mark.parametrize("softcap", [15.0, 0.0])
@pytest.mark.parametrize(("columns", "vocab_size"), [(192, 150), (256, 256), (5000, 4999)])
def test_softmax_gradient_is_the_gradient_of_the_loss(softcap: float, columns: int, vocab_size: int):
    logits, weights = 6 * normal(0, 5, columns), jnp.abs(normal(1, 5))
    targets = jnp.asarray([0, 3, 149, 7, 149])

    def loss(logits):
        z = softcap * jnp.tanh(logits / softcap) if softcap else logits
        z = z[:, :vocab_size]
        nll = jax.nn.logsumexp(z, axis=-1) - jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
        return jnp.sum(weights * nll), nll

    (_, nll), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
    found = softmax_gradient(logits, targets, weights, vocab_size=vocab_size, softcap=softcap)
    assert_same((gradient, nll), found, 1e-5)


def test_softmax_gradient_of_several_targets_is_the_sum_of_their_gradients():
    logits, weights = 6 * normal(0, 5, 192), jnp.abs(normal(1, 5, 3))
    targets = jnp.asarray([[0, 3, 3], [3, 1, 0], [149, 0, 0], [7, 7, 7], [149, 1, 2]])
    options = {"vocab_size": 150, "softcap": 15.0}
    alone = [softmax_gradient(logits, targets[:, k], weights[:, k], **options) for k in range(3)]
    gradient, nll = softmax_gradient(logits, targets, weights, **options)
    assert_same((sum(part[0] for part in alone), jnp.stack([part[1] for part in alone], axis=1)), (gradient, nll), 1e-6)


MODEL = GPT(depth=2, width=64, heads=1, head_dim=64, vocab_size=130, block_size=T, window="L", attention="xla")


def batch_of(rows: int) -> dict[str, jax.Array]:
    ids = jax.random.randint(jax.random.key(1), (rows, T + 1), 0, 130)
    mask = (jax.random.uniform(jax.random.key(2), (rows, T)) > 0.3).astype(jnp.float32)
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:], "loss_mask": mask}


def loss_and_gradients(model: GPT, params, batch):
    def loss(p):
        return model.apply({"params": p}, batch, method="loss")[0]

    return jax.jit(jax.value_and_grad(loss))(params)


def gradient_of_odd_rows(implementation: str) -> jax.Array:
    """Of the loss of three rows, which four devices cannot share."""
    head, targets = normal(1, 64, 192), jax.random.randint(jax.random.key(3), (3, T), 0, 130)

    def loss(hidden: jax.Array) -> jax.Array:
        rest = (head, targets, jnp.ones((3, T)))
        return cross_entropy.cross_entropy(hidden, *rest, vocab_size=130, kernels=implementation)[0]

    return jax.grad(loss)(normal(0, 3, T, 64))


@pytest.mark.slow
def test_the_whole_model_gives_the_same_loss_and_gradients():
    batch = batch_of(B)
    params = jax.tree.map(
        lambda p: p + 0.02 * jax.random.normal(jax.random.key(p.size), p.shape),  # zeros would hide their gradients
        _unboxed(MODEL.init(jax.random.key(0), batch["input_ids"])["params"]),
    )
    xla = loss_and_gradients(dataclasses.replace(MODEL, kernels="xla"), params, batch)
    pallas = loss_and_gradients(dataclasses.replace(MODEL, kernels="pallas"), params, batch)
    assert_same(xla, pallas, 1e-4)


@pytest.mark.slow
def test_on_a_mesh_each_device_takes_its_own_rows(monkeypatch: pytest.MonkeyPatch):
    """Norms, rotary and the loss; the rows of a device are 1/8 of the batch's."""
    logits = []

    def gradient(part: jax.Array, *args, **options):
        logits.append(part.shape)
        return softmax_gradient(part, *args, **options)

    monkeypatch.setattr(cross_entropy, "softmax_gradient", gradient)
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=1, context=2))
    model = dataclasses.replace(MODEL, kernels="pallas")
    batch = batch_of(B)
    variables, _ = init_sharded(lambda key: model.init(key, batch["input_ids"]), jax.random.key(0), topology)
    alone = loss_and_gradients(dataclasses.replace(MODEL, kernels="xla"), jax.device_get(variables["params"]), batch)
    with topology.scope():
        spread = loss_and_gradients(model, variables["params"], batch)
        uneven = gradient_of_odd_rows("pallas")
    assert_same(alone, spread, 1e-4)
    assert logits == [(B * T // 8, MODEL.shape.padded_vocab)]  # and none of the rows that do not divide
    assert_same(gradient_of_odd_rows("xla"), uneven, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, 768, 1280])
def test_the_kernels_lower_for_a_gpu(width: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = GPT(
        depth=2, width=width, heads=width // 128, vocab_size=500, block_size=64, attention="xla", precision="bf16"
    )
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = _unboxed(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
    step = jax.grad(lambda p, b: model.apply({"params": p}, b, method="loss")[0])
    text = lowered_for_a_gpu(step, params, {"input_ids": ids, "target_ids": ids})
    assert text.count("xla.gpu.triton") >= 7  # mix, add, rotary: forward and backward; the loss


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 768])
def test_on_a_gpu_the_kernels_in_half_precision_are_the_model_in_float32(width: int):
    """Loss within .5%, the gradient of each matrix within 4% of its norm: what bf16 leaves of plain JAX, too."""
    assert half_against_whole(width, "pallas") < 0.04


def half_against_whole(width: int, implementation: str) -> float:
    """The largest error of a matrix's gradient, as a share of its norm; the losses are compared here. (A scalar's is a
    sum over all tokens that nearly cancels.)"""
    model = GPT(depth=2, width=width, head_dim=128, vocab_size=500, block_size=64, attention="xla")
    ids = jax.random.randint(jax.random.key(1), (4, 65), 0, 500)
    batch = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}
    params = jax.tree.map(
        lambda p: p + 0.02 * jax.random.normal(jax.random.key(p.size), p.shape),
        _unboxed(jax.jit(model.init)(jax.random.key(0), batch["input_ids"])["params"]),
    )
    whole, half = (
        loss_and_gradients(dataclasses.replace(model, precision=precision, kernels=kernels), params, batch)
        for precision, kernels in (("float32", "xla"), ("bf16", implementation))
    )
    np.testing.assert_allclose(half[0], whole[0], rtol=5e-3)
    pairs = zip(jax.tree.leaves(half[1]), jax.tree.leaves(whole[1]), strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs if min(a.shape, default=0) > 32)


def _unboxed(tree):
    from bessemer.topology import unbox

    return unbox(tree)
