"""Float8 products against float64 references, and what an fp8 model does with them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from tests.tiny_run import random_params

from bessemer.errors import InputError
from bessemer.kernels import fp8
from bessemer.kernels.ops import rms_norm
from bessemer.models.allocation import Allocation
from bessemer.models.gpt import GPT
from bessemer.models.lookup import LookupOptions, look_up, lookup_layer
from bessemer.models.moe import EXPERT_IDS
from bessemer.topology import TopologySettings, has_float8, make_topology, shardings

AXES = (None, None)
TINY = {"depth": 2, "width": 128, "head_dim": 64, "vocab_size": 320, "block_size": 32}
ROWS = Allocation.of(np.where(np.arange(320) < 64, 2, 1))
LOOKUP = {"lookup_after_layers": (0,), "lookup_rows": 384, "lookup_d_up": 256, "allocation": ROWS}


def draw(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rounded(x: Any, kind: Any, axis: int | None = None, bound: float | None = None) -> np.ndarray:
    """x as float8 holds it, in float64, by numpy alone; mind that float8 casts of numpy do not saturate."""
    x = np.asarray(x, np.float64)
    limit = float(ml_dtypes.finfo(kind).max)
    top = np.abs(x).max(axis, keepdims=axis is not None) if bound is None else np.float64(bound)
    scale = np.exp2(np.ceil(np.log2(np.where(top == 0, limit, top) / limit)))
    return np.clip(x / scale, -limit, limit).astype(kind).astype(np.float64) * scale


def distance(a: Any, b: Any) -> float:
    """‖a − b‖ / ‖b‖."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def with_gradients(function: Any, inputs: tuple[jax.Array, ...], g: jax.Array) -> Any:
    """(function(*inputs), its gradients for the gradient g of the result), compiled once."""

    def run(inputs: tuple[jax.Array, ...], g: jax.Array) -> Any:
        y, back = jax.vjp(function, *inputs)
        return y, back(g)

    return jax.jit(run)(inputs, g)


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_product_and_gradients_match_a_float64_reference(scaling: str) -> None:
    """To 1e-5 with operands rounded by numpy; to the few per cent of e4m3 and e5m2 without rounding."""
    x, w, g = draw(0, 2, 24, 128), draw(1, 128, 256, scale=0.1), draw(2, 2, 24, 256, scale=1e-6)
    y, (dx, dw) = with_gradients(partial(fp8.linear, axes=AXES, dtype=jnp.float32, scaling=scaling), (x, w), g)
    by_row = scaling == fp8.ROWWISE
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    x8 = rounded(x, e4m3, -1 if by_row else None)
    g8 = rounded(g, e5m2, -1 if by_row else None)
    assert distance(y, x8 @ rounded(w, e4m3, 0 if by_row else None)) < 1e-5
    assert distance(dx, g8 @ rounded(w, e4m3, 1 if by_row else None).T) < 1e-5
    left, right = (x, g) if by_row else (x8, g8)  # rowwise keeps dW in the compute dtype
    assert distance(dw, np.einsum("btd,btf->df", *(np.asarray(a, np.float64) for a in (left, right)))) < 1e-5
    assert dw.dtype == jnp.float32
    wide = [np.asarray(a, np.float64) for a in (x, w, g)]
    assert 0.01 < distance(y, wide[0] @ wide[1]) < 0.05
    assert 0.02 < distance(dx, wide[2] @ wide[1].T) < 0.08
    assert distance(dw, np.einsum("btd,btf->df", wide[0], wide[2])) < (1e-5 if by_row else 0.08)


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_feed_forward_follows_the_exact_one(scaling: str) -> None:
    """Its gradient of u is scaled by a bound; a bound that were too low would saturate and be far off."""
    h, up, down = rms_norm(draw(0, 2, 24, 128)), draw(1, 128, 512, scale=0.1), draw(2, 512, 128, scale=0.05)
    g = draw(3, 2, 24, 128, scale=1e-6)
    run = partial(fp8.feed_forward, axes=(AXES, AXES), dtype=jnp.float32, scaling=scaling, name="mlp_hidden")
    y, gradients = with_gradients(run, (h, up, down), g)
    plain = with_gradients(lambda h, up, down: jnp.square(jax.nn.relu(h @ up)) @ down, (h, up, down), g)
    assert distance(y, plain[0]) < 0.08
    for got, wanted in zip(gradients, plain[1], strict=True):
        assert distance(got, wanted) < 0.12


def test_one_outlier_row_does_not_drown_the_others_in_rowwise() -> None:
    x, w = np.array(draw(0, 1, 16, 128)), draw(1, 128, 128)
    x[0, 0] *= 1e6
    errors = {}
    for scaling in fp8.SCALINGS:
        y = fp8.linear(jnp.asarray(x), w, AXES, jnp.float32, scaling)
        errors[scaling] = distance(y[0, 1:], x[0, 1:].astype(np.float64) @ np.asarray(w, np.float64))
    assert errors["rowwise"] < 0.05 < 0.5 < errors["tensorwise"]


def test_scales_are_powers_of_two_that_hold_the_bound() -> None:
    x = np.float32([1e-30, 0.3, 0.5, 0.50001, 1, 3, 4, 1e30])
    scale = np.asarray(fp8.power_of_two(jnp.asarray(x)))
    assert (
        np.all(scale == np.exp2(np.ceil(np.log2(x.astype(np.float64)))))
        and float(fp8.power_of_two(jnp.float32(0))) == 1
    )


def test_overflow_saturates_and_what_is_not_finite_stays_so() -> None:
    values, scale = fp8.quantize(jnp.float32([1, -900, 5000]), fp8.FORWARD, bound=448.0)
    assert values.astype(jnp.float32).tolist() == [1, -448, 448] and float(scale) == 1
    huge = fp8.quantize(jnp.float32([3e38, -1]), fp8.GRADIENT)
    assert np.isfinite(np.asarray(huge.values, np.float32) * np.asarray(huge.scale)).all()
    for bad in (np.nan, np.inf):
        values, scale = fp8.quantize(jnp.float32([bad, 1]), fp8.FORWARD)
        assert not np.isfinite(np.asarray(values, np.float32)[0] * float(scale))


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_zeros_give_zeros(scaling: str) -> None:
    """An output projection starts at 0, and so does its gradient's other factor."""
    h, up, down = jnp.zeros((1, 16, 128)), jnp.zeros((128, 512)), jnp.zeros((512, 128))
    run = partial(fp8.feed_forward, axes=(AXES, AXES), dtype=jnp.float32, scaling=scaling, name="mlp_hidden")
    y, gradients = with_gradients(run, (h, up, down), jnp.zeros_like(h))
    assert all(not np.any(np.asarray(a)) for a in (y, *gradients))
    single = partial(fp8.linear, axes=AXES, dtype=jnp.float32, scaling=scaling)
    y, gradients = with_gradients(single, (h, up), jnp.zeros((1, 16, 512)))
    assert all(not np.any(np.asarray(a)) for a in (y, *gradients))


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((128, 128), True), ((768, 3072), True), ((112, 768), False), ((768, 3080), False), ((128,), False)],
)
def test_the_size_rule(shape: tuple[int, ...], taken: bool) -> None:
    assert fp8.fits(shape) is taken


# -- the model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(GPT(**TINY), scale=0.1)


def fp8_model(**settings: Any) -> GPT:
    return GPT(**{**TINY, "precision": "fp8", "fp8_emulate": True, **settings})


def batch_of(rows: int = 4) -> dict[str, jax.Array]:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 320, (rows, 33)), jnp.int32)
    return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}


def mean_loss(model: GPT, training: bool, params: Any, batch: Any) -> jax.Array:
    loss, weight, _ = model.apply({"params": params}, batch, 0.0, 0.0, not training, method="loss")  # type: ignore
    return loss / weight


def test_float8_is_in_training_and_not_in_evaluation(params: Any) -> None:
    """Validation, log-probabilities and logits are those of the same weights without fp8, bit for bit."""
    plain, model, batch = GPT(**TINY), fp8_model(fp8_head=True), batch_of()

    def text(training: bool) -> str:
        return jax.jit(jax.grad(partial(mean_loss, model, training))).lower(params, batch).as_text()

    assert "f8E4M3FN" in text(True) and "f8E5M2" in text(True)
    assert "f8E" not in text(False)
    for method, argument in (("token_logprobs", batch), ("__call__", batch["input_ids"])):
        one, other = (jax.jit(partial(m.apply, method=method))({"params": params}, argument) for m in (plain, model))
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_a_lookup_layer_matches_a_float64_reference(scaling: str) -> None:
    """Operands of W_up and W_mix are rounded to float8, the rows that a token reads are not."""
    params = random_params(GPT(**TINY, **LOOKUP), scale=0.1)["lookups_0"]
    x, ids = draw(0, 2, 16, 128), jnp.asarray(np.random.default_rng(1).integers(0, 320, (2, 16)))
    options = LookupOptions(jnp.float32, ROWS, fp8=scaling)
    h, axis = np.asarray(rms_norm(x)), -1 if scaling == fp8.ROWWISE else None
    e = look_up(options, jnp.asarray(h), params["lookup_keys"], params["lookup_values"], ids)

    def weights(name: str) -> np.ndarray:
        return rounded(params[name], fp8.FORWARD, 0 if axis == -1 else None)

    up = rounded(e, fp8.FORWARD, axis) @ weights("up")
    up /= np.sqrt(np.mean(up**2, axis=-1, keepdims=True) + 1e-6)
    joined = np.concatenate([up, h], axis=-1)
    bound = None if axis == -1 else math.sqrt(256)
    wanted = rounded(joined, fp8.FORWARD, axis, bound) @ weights("mix")
    got = jax.jit(partial(lookup_layer, options))(params, x, ids) - x
    plain = lookup_layer(LookupOptions(jnp.float32, ROWS), params, x, ids) - x
    assert distance(got, wanted) < 2e-3  # a few values lie between two of float8, and float32 decides
    assert 0.01 < distance(got, plain) < 0.08


@pytest.mark.slow
def test_a_lookup_model_is_converted_in_training_alone() -> None:
    model, batch = fp8_model(**LOOKUP), batch_of()
    params = random_params(model, scale=0.1)
    exact, quantized = (
        jax.jit(jax.grad(partial(mean_loss, model, training)))(params, batch)["lookups_0"] for training in (False, True)
    )
    for name in ("up", "mix", "lookup_keys", "lookup_values"):
        assert 0.01 < distance(quantized[name], exact[name]) < 0.25, name  # as in a block
    plain = GPT(**{**TINY, **LOOKUP})
    one, other = (jax.jit(partial(mean_loss, m, False))(params, batch) for m in (plain, model))
    assert float(one) == float(other)


@pytest.mark.slow
def test_beside_experts_the_dense_matrices_alone_are_float8() -> None:
    """Attention and the shared expert are rounded, routers and stacks of experts are not: with the same choices, the
    gradient is off by what float8 does to a dense model."""
    experts = {"experts": 4, "experts_active": 2, "experts_shared": 1, "expert_width": 128}
    plain, model, batch = GPT(**TINY, **experts), fp8_model(**experts), batch_of()
    model.check()
    params = random_params(model, scale=0.1)
    order = np.random.default_rng(3).permuted(np.tile(np.arange(4), (4, 32, 2, 1)), axis=-1)
    batch[EXPERT_IDS] = jnp.asarray(order[..., :2], jnp.int16)
    exact, quantized = (
        jax.jit(jax.grad(partial(mean_loss, m, True)))(params, batch)["blocks_1"] for m in (plain, model)
    )
    for name in ("q", "out", "up", "expert_up", "expert_down", "router"):
        assert 0.005 < distance(quantized[name], exact[name]) < 0.25, name
    one, other = (jax.jit(partial(mean_loss, m, False))(params, batch) for m in (plain, model))
    assert float(one) == float(other)
    line = str(model.fp8_conversion())
    assert "converted 12 of 21 matrices" in line
    assert "2 × expert_up 4 × 128 × 128 (a stack of experts, multiplied by group in the compute dtype)" in line


def curve(model: GPT, params: Any, steps: int = 20) -> np.ndarray:
    """Losses of Adam on one batch."""
    tx, batch = optax.adam(3e-3), batch_of(2)

    def step(carry: Any, _: None) -> Any:
        weights, state = carry
        loss, gradient = jax.value_and_grad(partial(mean_loss, model, True))(weights, batch)
        updates, state = tx.update(gradient, state)
        return (optax.apply_updates(weights, updates), state), loss

    return np.asarray(jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, length=steps)[1])(params))


@pytest.mark.slow
def test_training_stays_close_to_float32() -> None:
    """Both ways of scaling, the head included: never off by more than 1% of the way that float32 falls."""
    small = {**TINY, "depth": 1}
    weights = random_params(GPT(**small), scale=0.1)
    exact = curve(GPT(**small), weights)
    assert exact[-1] < 0.1 * exact[0]
    for scaling in fp8.SCALINGS:
        quantized = curve(fp8_model(depth=1, fp8_scaling=scaling, fp8_head=True), weights)
        assert not np.array_equal(exact, quantized)
        assert np.max(np.abs(quantized - exact)) < 0.01 * (exact[0] - exact[-1])


@pytest.mark.slow
def test_scanned_and_rematerialized_layers_give_the_same_gradient(params: Any) -> None:
    gradients = [
        jax.jit(jax.grad(partial(mean_loss, model, True)))(params, batch_of())
        for model in (fp8_model(), fp8_model(window="L", scan_layers=True, remat=["mlp_hidden"]))
    ]
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lookup", [{}, LOOKUP], ids=["blocks", "lookup"])
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=str
)
def test_a_mesh_gives_the_gradient_of_one_device(sizes: dict[str, int], lookup: dict[str, Any]) -> None:
    """Scales are of the whole tensor wherever its parts lie. Sums in another order flip a few roundings: 2%."""
    topology = make_topology(TopologySettings(**sizes))
    model, batch = fp8_model(**lookup), batch_of()
    params = random_params(model, scale=0.1)
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    wanted = jax.jit(jax.grad(partial(mean_loss, model, True)))(params, batch)
    placed = jax.device_put(params, shardings(boxed, topology.mesh))
    with topology.scope():
        spread = jax.jit(lambda p, b: jax.grad(partial(mean_loss, model, True))(p, b))
        got = spread(placed, jax.device_put(batch, topology.batch_sharding()))
    got, wanted = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (got, wanted))
    assert distance(got, wanted) < 0.02


def test_what_is_converted_is_said_with_the_reasons() -> None:
    line = str(fp8_model().fp8_conversion())
    assert line.startswith("converted 12 of 15 matrices, skipped 3: ")
    assert "value_gate 12 × 2 (a side below 128)" in line and "architecture.fp8.head is false" in line
    assert len(fp8_model(fp8_head=True).fp8_conversion().converted) == 13
    lookup = fp8_model(**LOOKUP).fp8_conversion()
    assert str(lookup).startswith("converted 14 of 17 matrices, skipped 3: ")
    assert {"lookups_0/up", "lookups_0/mix"} < set(lookup.converted)
    thin = str(fp8_model(**{**LOOKUP, "lookup_d_up": 64}).fp8_conversion())
    assert "up 128 × 64 (a side below 128)" in thin and "mix 192 × 128 (a side below 128)" in thin
    narrow = fp8_model(width=136, head_dim=68).fp8_conversion()
    assert not narrow.converted and "up 136 × 544 (a side not divisible by 16)" in str(narrow)


def test_flops_and_parameters_are_those_of_bf16() -> None:
    plain, model = GPT(**TINY), fp8_model()
    assert model.flops_per_token() == plain.flops_per_token()
    assert model.count_parameters() == plain.count_parameters()


@pytest.mark.parametrize("settings", [{"fp8_scaling": "rowwise"}, {"fp8_head": True}, {"fp8_emulate": True}], ids=str)
def test_settings_of_fp8_without_it_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"architecture\.fp8 .* architecture\.precision=fp8"):
        GPT(**TINY, **settings).check()


def test_which_chips_have_float8() -> None:
    assert has_float8("NVIDIA H200") and has_float8("NVIDIA L40S")
    assert not has_float8("NVIDIA A100-SXM4-80GB") and not has_float8("TPU v5 lite") and not has_float8("cpu")

    class Ada:
        compute_capability = "8.9"
        device_kind = "a card that is not in the table"

    assert has_float8(Ada())


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_product_of_a_layer_runs_in_float8_units() -> None:
    """Three projections and a feed-forward layer, forward and backward: 15 calls of cuBLASLt's float8 product."""
    width = 256
    x = rms_norm(draw(0, 2, 256, width)).astype(jnp.bfloat16)
    weights = tuple(draw(i, width, width, scale=0.05) for i in range(3))
    up, down = draw(4, width, 4 * width, scale=0.05), draw(5, 4 * width, width, scale=0.05)

    def run(x: jax.Array, up: jax.Array, down: jax.Array, *weights: jax.Array) -> jax.Array:
        mixed = sum(fp8.linear(x, w, AXES, x.dtype, fp8.TENSORWISE, math.sqrt(width)) ** 2 for w in weights)
        ffn = fp8.feed_forward(x, up, down, (AXES, AXES), x.dtype, fp8.TENSORWISE, "mlp_hidden")
        return jnp.sum((mixed + ffn).astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.value_and_grad(run, argnums=tuple(range(6))))
    options = {**(make_topology().compiler_options or {}), **fp8.GPU_OPTIONS}
    compiled = gradient.lower(x, up, down, *weights).compile(compiler_options=options)
    assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == 15
    with jax.default_device(jax.devices("cpu")[0]):
        emulated = gradient(*(jax.device_put(a, jax.devices("cpu")[0]) for a in (x, up, down, *weights)))
    for got, wanted in zip(jax.tree.leaves(compiled(x, up, down, *weights)), jax.tree.leaves(emulated), strict=True):
        # A gradient off by a bit of bf16 (2⁻⁸) crosses a step of e5m2 (2⁻²) once in 64 times: √(1/64) · 2⁻² = .031;
        # the gradient of `up` is rounded so twice, once behind `down`: √2 · .031 = .044, and this is one draw of it.
        assert distance(got, wanted) < 0.06
