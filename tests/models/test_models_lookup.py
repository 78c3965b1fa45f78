"""Lookup layers: both ways to compute them against numpy in float64, and as a part of a GPT."""

from __future__ import annotations

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError, StorageError
from bessemer.models.gpt import GPT
from bessemer.models.layers import run_layers
from bessemer.models.lookup import Allocation, LookupOptions, Tiles, choose_path, gathered, lookup_layer, tiled
from bessemer.models.shape import LookupShape, explain_flops
from bessemer.optim.muon import MuonSettings

VOCAB, WIDTH = 50, 32
TINY = {"depth": 2, "width": WIDTH, "head_dim": 8, "vocab_size": VOCAB, "block_size": 16}
LOOKUP = {"lookup_after_layers": [0, 1], "lookup_rows": 128, "lookup_k_max": 16, "lookup_d_up": 48}


def allocation(rows: int = 128, k_max: int = 16, seed: int = 0) -> Allocation:
    """Some tokens own many rows, most own one."""
    k = np.ones(VOCAB, np.int64)
    rng = np.random.default_rng(seed)
    while k.sum() < rows:
        token = int(rng.integers(0, 8) * 6)
        k[token] += k[token] < k_max
    return Allocation.of(k)


def shake(params, seed: int = 1):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    shaken = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, shaken)


@functools.cache
def make(**settings):
    """A model with lookup layers and parameters shaken off their zeros."""
    model = GPT(**{**TINY, **LOOKUP, "allocation": allocation(), **settings})
    model.check()
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    return model, shake(params)


def batch_of(rows: int = 2, length: int = 16, seed: int = 0):
    ids = np.random.default_rng(seed).integers(0, VOCAB, (rows, length + 1))
    return {"input_ids": jnp.asarray(ids[:, :-1]), "target_ids": jnp.asarray(ids[:, 1:])}


def loss_and_gradient(model, params, batch):
    def loss(params):
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def default_loss_and_gradient():
    return loss_and_gradient(*make(), batch_of())


def assert_close(a, b, atol=2e-6):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


# -- the attention over rows, by itself -----------------------------------------------------------------------------


def problem(tokens: int, seed: int = 0, rows: int = 128):
    rng = np.random.default_rng(seed)
    shared = allocation(rows, seed=seed)
    h = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    keys, values = rng.standard_normal((2, rows, WIDTH)).astype(np.float32)
    ids = rng.choice([0, 6, 12, 13, 30, 31, 49], tokens).astype(np.int32)  # most tokens are absent
    return shared, h, keys, values, ids


def by_numpy(shared, h, keys, values, ids):
    """The formula, a token at a time."""
    h, keys, values = (x.astype(np.float64) for x in (h, keys, values))
    out = np.zeros_like(h)
    for n, t in enumerate(ids):
        rows = slice(*shared.bounds[t : t + 2])
        logits = keys[rows] @ h[n] / np.sqrt(h.shape[1])
        weights = np.exp(logits - logits.max())
        out[n] = weights @ values[rows] / weights.sum()
    return out


def path_function(path: str, shared, tiles: Tiles):
    bounds = jnp.asarray(shared.bounds)
    if path == "gather":
        return lambda h, k, v, ids: gathered(h, k, v, ids, bounds, shared.longest)
    return lambda h, k, v, ids: tiled(h, k, v, ids, bounds, tiles)


def gradients(function, h, keys, values, ids):
    weight = jnp.asarray(np.random.default_rng(9).standard_normal(h.shape), jnp.float32)

    def loss(h, keys, values):
        return jnp.sum(weight * function(h, keys, values, jnp.asarray(ids)))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(h, keys, values)


@pytest.mark.parametrize(("tokens", "tiles"), [(1, Tiles()), (37, Tiles(8, 8, 4)), (200, Tiles(16, 5, 2))], ids=str)
def test_both_paths_are_the_formula_and_agree_in_gradients(tokens, tiles):
    shared, *arrays = problem(tokens)
    expected = by_numpy(shared, *arrays)
    found = {}
    for path in ("gather", "sorted"):
        function = path_function(path, shared, tiles)
        np.testing.assert_allclose(jax.jit(function)(*arrays), expected, atol=1e-5)
        found[path] = gradients(function, *arrays)
    for a, b in zip(found["gather"], found["sorted"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
    present = np.repeat(np.isin(np.arange(VOCAB), arrays[-1]), shared.k)
    for path in found:
        for table in found[path][1:]:
            assert not np.any(np.asarray(table)[~present])  # exactly 0 for rows of absent tokens
            assert np.all(np.any(np.asarray(found[path][2])[present], axis=1))


def test_gather_in_chunks_is_gather_at_once(monkeypatch):
    shared, *arrays = problem(37)
    whole = gradients(path_function("gather", shared, Tiles()), *arrays)
    monkeypatch.setattr("bessemer.models.lookup.GATHERED_ROWS", 4 * shared.longest)
    assert_close(gradients(path_function("gather", shared, Tiles()), *arrays), whole, atol=1e-6)


def test_memory_of_the_sorted_path_does_not_grow_with_k():
    """The largest temporary of forward and backward, for one token that owns 8 or 4,000 rows."""
    sizes = []
    for longest in (8, 4000):
        k = np.ones(VOCAB, np.int64)
        k[3] = longest
        k[4] = 4009 - longest
        shared = Allocation.of(k)
        arrays = (np.zeros((64, WIDTH), np.float32), *np.zeros((2, shared.rows, WIDTH), np.float32))
        ids = np.full(64, 3, np.int32)
        function = path_function("sorted", shared, Tiles())
        step = jax.jit(jax.value_and_grad(lambda *a, f=function, i=ids: f(*a, jnp.asarray(i)).sum(), argnums=(0, 1, 2)))
        sizes.append(step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1] and shared.rows == 4057


def test_path_is_chosen_by_size():
    assert choose_path("auto", 16, 512) == "gather" and choose_path("auto", 17, 512) == "sorted"  # on a CPU
    assert choose_path("gather", 1 << 20, 512) == "gather" and choose_path("sorted", 1, 1) == "sorted"


# -- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", ["gather", "sorted"])
def test_layer_is_the_formula(tied, path):
    shared, h, keys, values, ids = problem(24)
    rng = np.random.default_rng(2)
    params = {
        "lookup_keys": keys,
        "lookup_values": values,
        "up": 0.3 * rng.standard_normal((WIDTH, 48)).astype(np.float32),
        "mix": 0.3 * rng.standard_normal((48 + WIDTH, WIDTH)).astype(np.float32),
    }
    if tied:
        del params["lookup_values"]
        values = keys

    def norm(x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x = 3 * h.astype(np.float64)
    up = by_numpy(shared, norm(x), keys, values, ids) @ params["up"].astype(np.float64)
    expected = x + np.concatenate([norm(up), norm(x)], axis=-1) @ params["mix"].astype(np.float64)
    options = LookupOptions(jnp.float32, shared, path)
    got = jax.jit(functools.partial(lookup_layer, options))(
        params, jnp.asarray(3 * h).reshape(2, 12, WIDTH), jnp.asarray(ids).reshape(2, 12)
    )
    np.testing.assert_allclose(got.reshape(24, WIDTH), expected, atol=1e-4)


# -- in a model -----------------------------------------------------------------------------------------------------


def test_a_model_starts_as_the_same_model_without():
    model = GPT(**TINY, **LOOKUP, allocation=allocation())
    plain = GPT(**TINY)
    ids = jnp.zeros((1, 4), jnp.int32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), ids))["params"]
    bound = np.sqrt(3 / WIDTH)
    for name in ("lookup_keys", "lookup_values", "up"):
        values = np.asarray(params["lookups_1"][name])
        assert np.abs(values).max() <= bound and values.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
    assert not np.any(params["lookups_1"]["mix"]) and params["lookups_0"]["mix"].shape == (48 + WIDTH, WIDTH)
    without = {name: leaf for name, leaf in params.items() if not name.startswith("lookups")}
    losses = [
        jax.jit(lambda p, m=m: m.apply({"params": p}, batch_of(), method="loss")[0])(p)
        for m, p in ((model, params), (plain, without))
    ]
    assert float(losses[0]) == float(losses[1])


@pytest.mark.parametrize("settings", [{"lookup_path": "sorted"}, {"remat": ["q"], "lookup_path": "sorted"}], ids=str)
def test_same_numbers_however_computed(settings):
    model, params = make()
    variant = loss_and_gradient(model.clone(**settings), params, batch_of())
    assert_close(variant, default_loss_and_gradient(), atol=1e-5)


@pytest.mark.slow
def test_scanned_layers_equal_unrolled_ones():
    model, params = make(depth=4, lookup_after_layers=(0, 2), value_embeddings=False)
    scanned = model.clone(scan_layers=True, remat=["block"], lookup_path="sorted")
    one, two = (loss_and_gradient(m, params, batch_of()) for m in (model, scanned))
    assert_close(two, one, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_backout_takes_the_block_before_its_lookup(scan):
    params = [{"a": jnp.ones(()), "lookup": {"b": jnp.ones(())}} for _ in range(4)]

    def step(window, p, index, stream):
        return stream[0] + p["a"], *stream[1:]

    def after(p, x):
        return 10 * x * p["b"]

    x, middle, _ = run_layers(step, after, params, [None] * 4, jnp.ones(()), scan=scan, remat=["none"])
    assert (float(middle), float(x)) == (211.0, 21110.0)


def test_bf16_keeps_float32_gradients():
    model, params = make()
    half = model.clone(precision="bf16", lookup_path="sorted")
    loss, gradient = loss_and_gradient(half, params, batch_of())
    assert float(loss) == pytest.approx(float(default_loss_and_gradient()[0]), rel=2e-2)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))
    a, b = (np.asarray(g["lookups_1"]["mix"]) for g in (gradient, default_loss_and_gradient()[1]))
    assert np.abs(a - b).max() < 0.1 * np.abs(b).max()


def test_cached_decoding_equals_the_full_forward():
    model, params = make()
    ids = batch_of()["input_ids"]
    full = jax.jit(lambda p: model.clone(lookup_path="sorted").apply({"params": p}, ids))(params)
    decode = jax.jit(lambda x, cache: model.apply({"params": params}, x, cache, method="decode"))
    logits, cache = decode(ids[:, :5], model.init_cache(2, 16))
    np.testing.assert_allclose(logits, full[:, :5], atol=1e-5)
    for t in range(5, 9):
        logits, cache = decode(ids[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], full[:, t], atol=1e-5)


# -- counts and settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_counts_equal_the_tree(tied):
    model = GPT(**TINY, **LOOKUP, lookup_tied=tied)
    tree = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    counted = dict.fromkeys(model.count_parameters(), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        counted[GPT.group_of(tuple(part.key for part in path))] += leaf.size
        counted["total"] += leaf.size
    counted["scaling"] = counted["matrix"] + counted["head"]
    assert counted == model.count_parameters()
    plain = GPT(**TINY).count_parameters()
    assert counted["scaling"] - plain["scaling"] == 2 * (WIDTH * 48 + (48 + WIDTH) * WIDTH)
    tables = 2 * 128 * WIDTH * (1 if tied else 2)
    assert counted["value_embedding"] - plain["value_embedding"] == tables


def test_optimizer_groups():
    """Tables with the value embeddings, matrices by Muon, whatever the number of layers."""
    model = GPT(**TINY, **LOOKUP)
    tree = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    labels = {
        name: MuonSettings().label(("lookups_1", name), leaf, GPT.group_of) for name, leaf in tree["lookups_1"].items()
    }
    tables = dict.fromkeys(("lookup_keys", "lookup_values"), "value_embedding")
    assert labels == {**tables, "up": "matrix", "mix": "matrix"}


def test_flops_use_the_measured_mean():
    frequency = np.zeros(VOCAB)
    frequency[[0, 1]] = 3, 1
    k = np.ones(VOCAB, int)
    k[0] = 9
    model = GPT(**TINY, lookup_after_layers=[1], allocation=Allocation.of(k, frequency))
    plain = GPT(**TINY)
    assert model.allocation.mean_k == 7.0 and model.shape.lookup.rows == 58
    dense = WIDTH * 4 * WIDTH + 5 * WIDTH * WIDTH
    assert model.flops_per_token() - plain.flops_per_token() == 6 * dense + 12 * WIDTH * 7
    for one in (model, plain, model.clone(lookup_after_layers=(0, 1))):  # the formula that is printed, worked out
        terms = explain_flops(one.shape, 16).replace(",", "").split(" + ")
        factors = [re.findall(r"(?<!\S)[0-9.]+", term) for term in terms]
        assert sum(math.prod(map(float, numbers)) for numbers in factors) == one.flops_per_token()


def test_rows_are_derived_from_the_parameters():
    model = GPT(depth=12, vocab_size=32_768, block_size=2048, lookup_after_layers=[5])
    smallest = model.clone(lookup_rows=32_768).count_parameters()["total"]
    assert smallest == 286_261_730 + 2 * 32_768 * 768 + 768 * 3072 + (3072 + 768) * 768
    rows = -(-(smallest // 1000) // 64) * 64
    assert model.shape.lookup == LookupShape((5,), rows, 3072, False, rows / 32_768)
    assert model.lookup_sample == 5 * (rows - 32_768)
    tiny = GPT(**{**TINY, "vocab_size": 250}, lookup_after_layers=[0])
    assert tiny.shape.lookup.rows == 256  # the vocabulary, up to 64s


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lookup_after_layers": [2]}, "after_layers"),
        ({"lookup_after_layers": [1, 1]}, "after_layers"),
        ({"lookup_rows": 49}, "rows"),
        ({"lookup_rows": 50 * 16 + 1}, "k_max"),
        ({"lookup_path": "fast"}, "path"),
        ({"lookup_rows": 192, "allocation": allocation()}, "128 lookup rows"),
    ],
)
def test_contradictions_are_input_errors(settings, named):
    with pytest.raises(InputError, match=named):
        GPT(**{**TINY, **LOOKUP, **settings}).check()


def test_without_an_allocation_there_are_parameters_but_no_forward():
    model, ids = GPT(**TINY, **LOOKUP), jnp.zeros((1, 4), jnp.int32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids))["params"]
    with pytest.raises(InputError, match="allocation"):
        jax.eval_shape(lambda p: model.apply({"params": p}, ids), params)


def test_an_allocation_is_a_value():
    one, two = allocation(), allocation()
    assert one == two and hash(one) == hash(two) and one != allocation(seed=3)
    text = Allocation.of(one.k, tokenizer="abc").to_json()
    back = Allocation.from_json(text, "here")
    assert back.tokenizer == "abc" and np.array_equal(back.k, one.k) and back.mean_k == one.mean_k
    with pytest.raises(StorageError, match="damaged"):
        Allocation.from_json(text.replace("[", "[1, ", 1), "here")
    with pytest.raises(InputError, match="another tokenizer"):
        back.check(GPT(**TINY, **LOOKUP), "def", "here")
    assert hash(GPT(**TINY, allocation=one)) == hash(GPT(**TINY, allocation=two))
