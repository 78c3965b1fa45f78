"""qwen3-next and qwen3.5: packed rows, caches with states, and what cannot go back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.test_llama import QUICK, assert_same, batch_of

from bessemer.errors import InputError
from bessemer.generate.request import Held, PrefixCache
from bessemer.generate.speculate import Speculation
from bessemer.models.qwennext import QwenNext
from bessemer.topology import unbox

SIZES: dict[str, Any] = {
    "depth": 2,
    "width": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "vocab_size": 100,
    "block_size": 24,
    "document_mask": True,
    "delta_layers": "DF",
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_key_dim": 6,
    "delta_value_dim": 8,
}


def drawn(model: QwenNext) -> Any:
    """Weights large enough that every token depends on those before it."""
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) * 0.3, unbox(boxed))


@pytest.fixture(scope="module")
def tiny() -> tuple[QwenNext, Any, np.ndarray, np.ndarray]:
    """(model, parameters, ids, logits) of documents of 9 and 12 tokens: in one row, and each in a row of its own."""
    model = QwenNext(**SIZES)
    model.check()
    params = drawn(model)
    ids = np.random.default_rng(0).integers(0, 100, (3, 24))
    segments = np.repeat([[1, 2, 0]], [9, 12, 3], axis=1).repeat(3, axis=0)
    ids[1, :9], ids[2, :12] = ids[0, :9], ids[0, 9:21]
    segments[1], segments[2] = [1] * 9 + [2] * 15, [1] * 12 + [2] * 12
    run = jax.jit(lambda params, ids, segments: model.apply({"params": params}, ids, None, segments))
    return model, params, ids, np.asarray(run(params, ids, segments))


def test_documents_of_a_packed_row_are_rows_apart(tiny: Any) -> None:
    _, _, _, logits = tiny
    np.testing.assert_allclose(logits[0, :9], logits[1, :9], atol=2e-5)
    np.testing.assert_allclose(logits[0, 9:21], logits[2, :12], atol=2e-5)


def test_rows_of_different_lengths_are_decoded_as_each_alone(tiny: Any) -> None:
    """Prompts of 9 and 5 tokens in one prefill, 0 and 4 more, then steps without the row that has ended."""
    model, params, ids, logits = tiny
    decode = jax.jit(lambda *args: model.apply({"params": params}, *args, method="decode"), compiler_options=QUICK)
    rows, full = ids[1:], logits[1:]
    made, cache = decode(rows[:, :9], model.init_cache(2, 24), np.array([9, 5]))
    np.testing.assert_allclose(made[0], full[0, :9], atol=2e-5)
    np.testing.assert_allclose(made[1, :5], full[1, :5], atol=2e-5)
    kept = jax.tree.map(lambda leaf: np.asarray(leaf[0]), cache.states)
    made, cache = decode(np.stack([rows[0, :4], rows[1, 5:9]]), cache, np.array([0, 4]))
    np.testing.assert_allclose(made[1], full[1, 5:9], atol=2e-5)
    for place in range(9, 12):
        made, cache = decode(rows[:, place : place + 1], cache, np.array([0, 1]))
        np.testing.assert_allclose(made[1, 0], full[1, place], atol=2e-5)
    for before, after in zip(jax.tree.leaves(kept), jax.tree.leaves(cache.states), strict=True):
        np.testing.assert_array_equal(before, after[0])  # a row that has ended keeps its state for the next turn
    assert cache.lengths.tolist() == [9, 12] and cache.capacity == 24


def test_a_cache_is_continued_but_never_cut() -> None:
    """The prefix cache re-uses a row whose tokens all begin the prompt; one with further tokens is left alone."""
    model = QwenNext(**SIZES)
    prefixes = PrefixCache(model)
    prefixes.put(0, Held(np.array([5, 6, 7])))
    prefixes.put(1, Held(np.array([5, 6, 7, 8, 9])))
    found = prefixes.find([5, 6, 7, 8, 4, 3], 0, {})
    assert found is not None and (found.slot, found.length, found.whole) == (0, 3, True)
    assert prefixes.find([5, 6, 1, 2], 0, {}) is None
    with pytest.raises(InputError, match=r"generate\.speculate=ngram .* QwenNext has recurrent layers"):
        Speculation().check(model)


def test_counts_are_those_of_the_weights_and_flops_those_of_the_formula() -> None:
    made: dict[str, Any] = {"experts": 3, "experts_active": 2, "experts_shared": 1, "expert_width": 8, "depth": 3}
    for change in ({}, made, {**made, "delta_joint": True, "tied_head": True}):
        model = QwenNext(**{**SIZES, **change})
        ids = jnp.zeros((1, 4), jnp.int32)
        params = unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
        groups: dict[str, int] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            group = model.group_of(tuple(key.key for key in path))
            groups[group] = groups.get(group, 0) + leaf.size
        counts = model.count_parameters()
        assert {key: value for key, value in counts.items() if value and key in groups} == groups
        assert counts["total"] == sum(groups.values())
    plain = QwenNext(**SIZES)
    products = plain.shape.matmul_parameters()
    rule, convolution = (
        3 * 6 * 2 * 6 * 8,
        3 * 2 * 4 * (2 * 6 + 2 * 8),
    )  # per token: three products of a state, four taps
    assert plain.flops_per_token(24) == 6 * products + 12 * 32 * 24 + rule + convolution


def test_fresh_decays_and_norms() -> None:
    model = QwenNext(**SIZES)
    params = unbox(jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    block = params["params"]["blocks_0"]
    assert (np.exp(block["delta_decay"]) >= 1).all() and (np.exp(block["delta_decay"]) <= 16).all()
    steps = np.log1p(np.exp(np.asarray(block["delta_dt"], np.float64)))
    assert (steps > 0.9e-3).all() and (steps < 0.11).all()
    assert (block["delta_norm"] == 1).all() and (block["attention_norm"] == 0).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta_layers": "DX"}, r"model\.delta_layers is 'DX'"),
        ({"delta_layers": "D"}, r"none of the 2 layers has full attention"),
        ({"delta_key_heads": 4, "delta_value_heads": 6}, r"model\.delta_value_heads 6"),
        ({"rotary_share": 0.2}, r"architecture\.rotary_share 0\.2"),
        ({"sliding_window": 4}, r"model\.sliding_window is 4"),
        ({"attention_bias": "qkv"}, r"architecture\.attention_bias is qkv"),
        ({"precision": "fp8"}, "gpt family"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        QwenNext(**{**SIZES, **settings}).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"experts": 3, "experts_active": 2, "experts_shared": 1, "delta_joint": True},
    ],
)
def test_scan_and_remat_change_nothing(experts: dict[str, Any]) -> None:
    model = QwenNext(**{**SIZES, **experts, "depth": 4})
    params = drawn(model)

    def step_of(model: QwenNext) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            total, weight, _ = model.apply({"params": params}, batch, method="loss")
            return total / weight

        return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)

    expected = jax.device_get(step_of(model)(params, batch_of()))
    for changes in ({"scan_layers": True}, {"remat": ["block"]}, {"remat": ["q", "gate", "mlp_hidden"]}):
        assert_same(step_of(model.clone(**changes))(params, batch_of()), expected)
