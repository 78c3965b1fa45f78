"""The step: one denominator, whatever the split; a bad step changes nothing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bessemer.models.gpt import GPT
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.optim import build_optimizer
from bessemer.topology import unbox
from bessemer.training.setup.model import make_apply
from bessemer.training.state import StepRules, create_state
from bessemer.training.step import train_step, val_step

VOCAB, BLOCK, ROWS = 97, 16, 8
PLAIN, SMALL = optax.sgd(1.0), optax.adam(3e-6)


@functools.cache
def setup(ema: float = 0.0, limit: float = 1.0, precision: str = "auto", tx: Any = None, mtp: tuple[float, ...] = ()):
    model = GPT(depth=2, width=32, head_dim=16, vocab_size=VOCAB, block_size=BLOCK, precision=precision)
    optimizer = build_optimizer("adamw", lambda cls: cls(), 100, model.group_of)
    if tx is not None:
        optimizer = build_optimizer(tx, lambda cls: cls(), 100)
    params = unbox(model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    # the head starts at almost nothing; give every parameter a gradient worth comparing
    params = {**params, "head": params["head"] * 300}
    loss_fn = functools.partial(pretrain, settings=PretrainSettings(mtp=mtp))
    rules = StepRules(max_grad_norm=limit, ema_decay=ema, rates=optimizer.rates, steps=100 if mtp else 0)
    return create_state(make_apply(model), loss_fn, params, optimizer.tx, rules)


def rows(uneven: bool = True) -> dict[str, np.ndarray]:
    """Eight rows whose supervised tokens differ wildly in number: 16 in the first, one in the last."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, BLOCK + 1), dtype=np.int32)
    kept = np.arange(BLOCK)[None] < (np.linspace(BLOCK, 1, ROWS).astype(int)[:, None] if uneven else BLOCK)
    return {
        "input_ids": tokens[:, :-1],
        "target_ids": np.where(kept, tokens[:, 1:], -1).astype(np.int32),
        "positions": np.broadcast_to(np.arange(BLOCK, dtype=np.int32), (ROWS, BLOCK)).copy(),
        "segment_ids": np.ones((ROWS, BLOCK), np.int32),
        "loss_mask": kept.astype(np.float32),
    }


def split(batch: dict[str, np.ndarray], parts: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array).reshape(parts, ROWS // parts, *array.shape[1:]) for name, array in batch.items()}


@functools.cache
def step_of(parts: int):
    return jax.jit(functools.partial(train_step, accumulate_steps=parts))


@pytest.mark.slow
def test_further_tokens_have_the_one_denominator_and_fade_with_the_step() -> None:
    start, key = setup(mtp=(0.5, 0.25)), jax.random.key(1)
    _, loss, meta = step_of(1)(start, split(rows(), 1), key)
    _, in_parts, meta_parts = step_of(4)(start, split(rows(), 4), key)
    np.testing.assert_allclose(in_parts, loss, rtol=1e-6)
    np.testing.assert_allclose(meta_parts["grad_norm"], meta["grad_norm"], rtol=1e-5)
    _, plain, _ = step_of(1)(setup(), split(rows(), 1), key)
    extra = float(loss - plain)
    assert extra > 0.5 and float(meta["nll"]) == pytest.approx(float(plain), rel=1e-6)
    for step, share in ((60, 0.4), (100, 0.0)):
        _, later, _ = step_of(1)(start.replace(step=jnp.int32(step)), split(rows(), 1), key)
        assert float(later - plain) == pytest.approx(share * extra, abs=2e-6)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_with_uneven_masks_is_the_big_batch(parts: int) -> None:
    """Every element of every parameter. By plain gradient descent: Adam's first step divides a gradient by its own
    size, which shows the rounding of an almost zero one through its sign."""
    key, start, rng = jax.random.key(1), setup(tx=PLAIN), np.random.default_rng(1)
    start = start.replace(  # at the start some are zero, and behind them are no gradients
        params=jax.tree.map(lambda p: jnp.asarray(0.2 * rng.standard_normal(p.shape), jnp.float32), start.params)
    )
    whole, loss, meta = step_of(1)(start, split(rows(), 1), key)
    state, loss_parts, meta_parts = step_of(parts)(start, split(rows(), parts), key)
    np.testing.assert_allclose(loss_parts, loss, rtol=1e-6)
    np.testing.assert_allclose(meta_parts["grad_norm"], meta["grad_norm"], rtol=1e-5)
    assert float(meta_parts["target_tokens"]) == float(meta["target_tokens"]) == rows()["loss_mask"].sum()
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(start.params)]
    leaves = map(jax.tree.leaves, (state.params, whole.params, start.params))
    for name, a, b, before in zip(names, *leaves, strict=True):
        moved = np.abs(np.asarray(b) - np.asarray(before)).max()
        assert moved > 0 or "backout" in name, name  # at two layers it is a factor before a norm
        # a float32 weight is rounded to 6e-8 of its own size, whatever it moved by
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * moved + 1.2e-7 * np.abs(b).max(), name


@pytest.mark.parametrize("parts", [2, 8])
def test_gradients_agree_to_rounding(parts: int) -> None:
    """Plain gradients through the momentum of the optimizer: no division hides or makes a difference."""
    key = jax.random.key(1)
    moments = [step_of(n)(setup(), split(rows(), n), key)[0].opt_state for n in (1, parts)]
    for a, b in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-8, rtol=1e-4)


def test_loss_is_divided_by_supervised_tokens_only() -> None:
    state, batch = setup(), rows()
    _, loss, _ = step_of(1)(state, split(batch, 1), jax.random.key(1))
    logits = state.apply_fn(state.params, jnp.asarray(batch["input_ids"]))
    logp = np.asarray(jax.nn.log_softmax(logits), np.float64)
    taken = np.take_along_axis(logp, np.maximum(batch["target_ids"], 0)[..., None], -1)[..., 0]
    mask = batch["loss_mask"].astype(np.float64)
    np.testing.assert_allclose(float(loss), -(taken * mask).sum() / mask.sum(), rtol=1e-5)


def test_a_non_finite_step_is_skipped_and_counted() -> None:
    state = setup()
    batch = rows()
    batch["loss_mask"][0, 0] = np.nan
    after, _, meta = step_of(2)(state, split(batch, 2), jax.random.key(1))
    assert not bool(meta["finite"])
    assert int(after.step) == int(state.step) + 1
    for new, old in zip(
        *map(jax.tree.leaves, ((after.params, after.opt_state), (state.params, state.opt_state))), strict=True
    ):
        np.testing.assert_array_equal(new, old)


def test_small_steps_are_taken_in_bf16() -> None:
    """Adam's first step moves a weight by the rate, 3e-6 here: kept in bf16, almost all would stay where they are."""
    state, loss, _ = step_of(1)(setup(precision="bf16", tx=SMALL), split(rows(), 1), jax.random.key(0))
    assert loss.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    before, after = (params["head"][:, :VOCAB] for params in (setup().params, state.params))
    moved = before != after
    assert moved.mean() > 0.9
    half = (before.astype(jnp.bfloat16) != after.astype(jnp.bfloat16)) & moved
    assert half.sum() < 0.1 * moved.sum()


def test_clip_scales_the_gradient_and_reports_the_norm_before_it() -> None:
    batch = split(rows(), 1)
    _, _, free = step_of(1)(setup(limit=0.0), batch, jax.random.key(1))
    limited, _, clipped = step_of(1)(setup(limit=1e-3), batch, jax.random.key(1))
    np.testing.assert_allclose(free["grad_norm"], clipped["grad_norm"], rtol=1e-6)
    assert bool(clipped["clipped"]) and not bool(free["clipped"])
    assert float(free["grad_norm"]) > 1e-3
    assert int(limited.step) == 1


@pytest.mark.slow
def test_ema_follows_the_parameters() -> None:
    state = setup(ema=0.9)
    after, _, _ = step_of(1)(state, split(rows(), 1), jax.random.key(1))
    expected = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.ema, after.params)
    for a, b in zip(*map(jax.tree.leaves, (after.ema, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_validation_is_independent_of_the_split() -> None:
    batch = rows()
    batch["target_bytes"] = np.where(batch["target_ids"] > 10, 3, 0).astype(np.int32)
    results = [jax.jit(val_step)(setup(), split(batch, parts)) for parts in (1, 4)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert float(results[0][2]["bytes"]) == batch["target_bytes"].sum()
