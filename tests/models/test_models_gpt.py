"""GPT: shapes, counts, initial values, switches, and equalities between ways to compute the same thing."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from bessemer.errors import InputError
from bessemer.kernels.attention import attention
from bessemer.models.gpt import GPT
from bessemer.models.paired_heads import attend_paired, interleave, separate
from bessemer.models.previous_token import attend_with_offset, hash_pairs, shifted_channels
from bessemer.models.shape import layer_windows, scan_segments
from bessemer.registry import models

TINY = {"depth": 4, "aspect": 8, "head_dim": 8, "vocab_size": 50, "block_size": 16}


@functools.cache
def make(seed: int = 0, **settings):
    """A model and parameters shaken off their zeros, so that every device of architecture shows."""
    model = GPT(**{**TINY, **settings})
    model.check()
    ids = jnp.zeros((1, 4), jnp.int32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(seed), ids))["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    shaken = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, shaken)


def batch_of(rows: int = 2, length: int = 16, vocab: int = 50, seed: int = 0):
    ids = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1))
    return {"input_ids": jnp.asarray(ids[:, :-1]), "target_ids": jnp.asarray(ids[:, 1:])}


def forward(model, params, ids, rngs=None, **inputs):
    return jax.jit(lambda p, x: model.apply({"params": p}, x, rngs=rngs, **inputs))(params, ids)


@functools.cache
def default_loss_and_gradient():
    return loss_and_gradient(*make(), batch_of())


def loss_and_gradient(model, params, batch):
    def loss(params):
        total, weight, _ = model.apply({"params": params}, batch, method="loss")
        return total / weight

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_close(a, b, atol=2e-6):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("depth", "width", "scaling", "total"),
    [(12, 768, 110_100_480, 286_261_730), (20, 1280, 435_159_040, 896_533_746), (24, 1536, 729_808_896, None)],
)
def test_check_values_of_the_dial(depth, width, scaling, total):
    model = GPT(depth=depth, vocab_size=32_768, block_size=2048)
    counts = model.count_parameters()
    assert model.shape.width == width and counts["scaling"] == scaling
    assert total is None or counts["total"] == total


@pytest.mark.parametrize("off", [(), ("smear", "backout"), ("residual_mix",), ("value_embeddings", "qk_norm")])
def test_counts_equal_the_tree(off):
    model = GPT(**TINY, kv_heads=2, **dict.fromkeys(off, False))
    tree = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    counted = dict.fromkeys(model.count_parameters(), 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        counted[GPT.group_of(tuple(part.key for part in path))] += leaf.size
        counted["total"] += leaf.size
    counted["scaling"] = counted["matrix"] + counted["head"]
    assert counted == model.count_parameters()


def test_flops():
    model = GPT(depth=12, vocab_size=32_768, block_size=2048)
    matmul = 110_100_480 + 6 * 12 * 6 + 24
    assert model.flops_per_token(2048) == 6 * matmul + 12 * 768 * (9 * 1024 + 3 * 2048)
    short, long = (1024 * 1025 / 2 + 1024 * 1024) / 2048, 2049 / 2
    assert model.flops_per_token(2048, causal=True) == pytest.approx(6 * matmul + 12 * 768 * (9 * short + 3 * long))


def test_flops_do_not_depend_on_how_layers_are_compiled():
    """The count is the model's own; a compiler counts the body of a scan once."""
    wanted = GPT(depth=12, vocab_size=32_768, block_size=2048).flops_per_token(2048)
    for settings in ({"scan_layers": True}, {"remat": "block"}, {"loss_chunks": 8}, {"precision": "float32"}):
        model = GPT(depth=12, vocab_size=32_768, block_size=2048, **settings)
        assert model.flops_per_token(2048) == wanted, settings


def test_initial_values():
    model = GPT(depth=4, aspect=32, head_dim=16, vocab_size=1000, block_size=32)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    bound = np.sqrt(3 / 128)
    block = params["blocks_3"]
    for name, limit in (("q", bound), ("k", bound), ("v", bound), ("up", 0.4 * bound), ("value_table", bound)):
        values = np.asarray(block[name])
        assert values.min() >= -limit and values.max() <= limit
        assert values.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
    assert not np.any(block["out"]) and not np.any(block["down"])
    gates = np.concatenate([np.ravel(block["value_gate"]), np.ravel(params["smear_gate"])])
    assert gates.min() >= 0 and gates.max() <= 0.02
    assert np.std(params["embedding"]) == pytest.approx(0.8, rel=0.02)
    assert np.std(params["head"]) == pytest.approx(0.001, rel=0.02)
    np.testing.assert_allclose(params["rho"], [1.15, 1.15 - 0.1 / 3, 1.05 + 0.1 / 3, 1.05], rtol=1e-6)
    np.testing.assert_allclose(params["xi"], [0.2, 0.15, 0.1, 0.05], rtol=1e-5)
    assert params["smear_scale"] == 0 and params["backout_scale"] == pytest.approx(0.2)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert "value_table" not in params["blocks_2"]


def test_windows_and_segments():
    assert layer_windows("SSSL", 6, 2048, 0.5) == (1024, 1024, 1024, None, 1024, None)
    assert layer_windows("S", 3, 600, 0.25) == (256, 256, None)
    assert layer_windows("S", 2, 128, 0.5) == (None, None)  # rounded up to the whole block
    kinds = tuple((w, i % 2) for i, w in enumerate(layer_windows("SSSL", 12, 2048, 0.5)))
    assert scan_segments(kinds) == [(0, 4, 3)]
    assert scan_segments((1, 2, 3, 3, 3, 4)) == [(0, 1, 1), (1, 1, 1), (2, 1, 3), (5, 1, 1)]


@pytest.mark.slow
def test_logits_are_capped_and_padding_is_never_predicted():
    model, params = make()
    logits = forward(model, params, batch_of()["input_ids"])
    assert logits.shape == (2, 16, 50) and logits.dtype == jnp.float32
    assert float(jnp.abs(logits).max()) < 15
    loud = {**params, "head": params["head"].at[:, 50:].set(100.0)}
    np.testing.assert_array_equal(forward(model, loud, batch_of()["input_ids"]), logits)
    assert_close(loss_and_gradient(model, loud, batch_of())[0], loss_and_gradient(model, params, batch_of())[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"remat": "block"},
        {"remat": ["q", "mlp_hidden"]},
        {"scan_layers": True},
        {"scan_layers": True, "remat": ["block"]},
        {"loss_chunks": 4},
    ],
    ids=str,
)
def test_same_numbers_however_computed(settings):
    model, params = make()
    variant = loss_and_gradient(model.clone(**settings), params, batch_of())
    assert_close(variant, default_loss_and_gradient())


def test_remat_keeps_less():
    model, params = make(depth=2)

    def saved(**settings):
        variant = model.clone(**settings)

        def residuals(params):
            return jax.vjp(lambda p: variant.apply({"params": p}, batch_of(), method="loss")[0], params)[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(residuals, params)))

    assert saved(remat="block") < saved(remat=["mlp_hidden", "q", "k", "v"]) < saved()


@pytest.mark.slow
def test_scan_and_dropout_draw_the_same_masks():
    model, params = make(dropout=0.3)
    key = {"dropout": jax.random.key(7)}
    ids = batch_of()["input_ids"]

    def run(model, deterministic=False):
        return forward(model, params, ids, deterministic=deterministic, rngs=key)

    assert_close(run(model), run(model.clone(scan_layers=True)))
    assert float(jnp.abs(run(model) - run(model, True)).max()) > 1e-3


@pytest.mark.parametrize(
    ("smear", "bigram_rows", "key_offset"), [(True, 0, False), (False, 0, False), (True, 128, False), (False, 0, True)]
)
def test_documents_do_not_see_each_other(smear, bigram_rows, key_offset):
    model, params = make(document_mask=True, smear=smear, bigram_rows=bigram_rows, key_offset=key_offset)
    if bigram_rows:  # a fresh table adds nothing
        table = jax.random.normal(jax.random.key(2), params["bigram_table"].shape)
        params = {**params, "bigram_table": table}
    run = jax.jit(lambda ids, segments: model.apply({"params": params}, ids, segment_ids=segments))
    ids = batch_of()["input_ids"]
    segments = jnp.asarray([[1] * 6 + [2] * 10] * 2)
    changed = ids.at[:, :6].set((ids[:, :6] + 1) % 50)
    before, after = run(ids, segments), run(changed, segments)
    np.testing.assert_array_equal(before[:, 6:], after[:, 6:])
    assert np.any(np.asarray(before[:, :6]) != np.asarray(after[:, :6]))
    # Off, the second document does see the first.
    open_model = model.clone(document_mask=False)
    one, two = (forward(open_model, params, x, segment_ids=segments) for x in (ids, changed))
    assert np.any(np.asarray(one[:, 6:]) != np.asarray(two[:, 6:]))


@pytest.mark.parametrize("settings", [{}, {"key_offset": True}], ids=str)
def test_a_document_alone_equals_the_document_packed(settings):
    model, params = make(document_mask=True, **settings)
    ids = batch_of()["input_ids"]
    packed = forward(
        model,
        params,
        ids,
        positions=jnp.asarray([[*range(6), *range(10)]] * 2),
        segment_ids=jnp.asarray([[1] * 6 + [2] * 10] * 2),
    )
    np.testing.assert_allclose(packed[:, 6:], forward(model, params, ids[:, 6:]), atol=2e-5)


def test_a_fresh_bigram_table_changes_nothing_and_learns_from_its_pairs():
    model, params = make()
    ids = batch_of()["input_ids"]
    hashed = model.clone(bigram_rows=128)
    fresh = nn.unbox(hashed.init(jax.random.key(0), ids))["params"]
    assert not np.any(fresh["bigram_table"]) and hashed.group_of(("bigram_table",)) == "value_embedding"
    with_table = {**params, "bigram_table": fresh["bigram_table"]}
    assert_close(forward(model, params, ids), forward(hashed, with_table, ids))
    more = {name: hashed.count_parameters()[name] - n for name, n in model.count_parameters().items()}
    assert {name: n for name, n in more.items() if n} == dict.fromkeys(
        ("value_embedding", "total"), fresh["bigram_table"].size
    )
    assert hashed.flops_per_token() == model.flops_per_token()
    _, gradient = loss_and_gradient(hashed, with_table, batch_of())
    rows = np.flatnonzero(np.abs(gradient["bigram_table"]).sum(-1))
    pairs = np.asarray(hash_pairs(ids[:, :-1], ids[:, 1:], 128))
    assert set(rows) == set(pairs.ravel())


def test_shifted_keys_cost_nothing_and_find_what_follows_in_one_layer():
    """One head of which the slower pairs alone count: a query equal to the key of a token gets the next one's value."""
    model, _ = make()
    shifted = model.clone(key_offset=True)
    assert shifted.count_parameters() == model.count_parameters()
    assert shifted.flops_per_token() == model.flops_per_token()
    channels = np.asarray(shifted_channels(8))
    assert channels.tolist() == [False, False, True, True] * 2
    k = jnp.where(channels, jax.random.normal(jax.random.key(0), (1, 6, 1, 8)), 0.0)
    k *= 50 / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = jnp.eye(6)[None, :, None]
    q = jnp.broadcast_to(k[:, 2:3], k.shape)  # every query looks for the key of token 2
    found = attend_with_offset(functools.partial(attention, implementation="xla"), None, q, k, v)
    np.testing.assert_allclose(found[0, 3:, 0], np.eye(6)[[3, 3, 3]], atol=1e-6)


def test_fresh_dense_connections_change_nothing_and_every_layer_learns_its_mixture():
    model, params = make(depth=2)
    dense, shaken = make(depth=2, dense_connections=True)
    batch, added = batch_of(), ["connections_0", "connections_1"]
    fresh = nn.unbox(dense.init(jax.random.key(0), batch["input_ids"]))["params"]
    more = {name: dense.count_parameters()[name] - n for name, n in model.count_parameters().items()}
    read, write, bias = 2 * 16 * 3, 3 * (2 + 3), 2 + 3
    assert {name: n for name, n in more.items() if n} == {
        "gate": read,
        "rho": write + bias,
        "total": read + write + bias,
    }
    assert more["total"] == sum(leaf.size for name in added for leaf in jax.tree.leaves(fresh[name]))
    assert dense.flops_per_token() == model.flops_per_token() + 6 * (read + write)

    def gradient_of(model):
        return jax.jit(jax.grad(lambda p: model.apply({"params": p}, batch, method="loss")[0]))

    gradient = gradient_of(dense)
    start = {**params, **{name: fresh[name] for name in added}}
    wanted, found = gradient_of(model)(params), gradient(start)
    assert_close({name: found[name] for name in wanted}, wanted, atol=1e-4)
    for name in added:
        assert np.all(found[name]["connect_bias"]) and np.all(found[name]["connect_write"])
        assert not np.any(found[name]["connect_read"])
    found = gradient(shaken)
    assert all(np.all(leaf) for name in added for leaf in jax.tree.leaves(found[name]))
    assert_close(gradient_of(dense.clone(remat=("block",)))(shaken), found, atol=1e-4)


def test_paired_heads_are_one_head_with_twice_the_tokens():
    """One pair: a token's first head sees both heads before it and itself, the second one the first as well."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
    np.testing.assert_array_equal(separate(interleave(x)), x)
    np.testing.assert_array_equal(interleave(x)[:, 4], x[:, 2, 0::2])
    values = jnp.eye(10).reshape(1, 5, 2, 10)  # which place is seen
    zeros = jnp.zeros((1, 5, 2, 10))
    for window, seen in ((None, 10), (3, 5)):
        found = attend_paired(
            functools.partial(attention, implementation="xla"), window, None, zeros, zeros, values
        ).reshape(10, 10)
        places = np.arange(10)
        back = places[:, None] - places
        np.testing.assert_array_equal(found > 0, (back >= 0) & (back < seen))
    model, params = make(depth=2, kv_heads=2)
    paired = model.clone(paired_heads=True)
    assert paired.count_parameters() == model.count_parameters()
    assert paired.flops_per_token() == model.flops_per_token() + 12 * 16 * 2 * 16  # no window at this length
    ids = batch_of()["input_ids"]
    assert float(jnp.abs(forward(paired, params, ids) - forward(model, params, ids)).max()) > 1e-4


def test_pairs_of_tokens_spread_over_the_table_and_their_order_counts():
    first, second = (x.ravel() for x in np.meshgrid(np.arange(200), np.arange(200)))
    rows = np.asarray(hash_pairs(jnp.asarray(first), jnp.asarray(second), 4096))
    counts = np.bincount(rows, minlength=4096)
    assert rows.min() >= 0 and counts.std() < 1.2 * counts.mean() ** 0.5  # as at random
    assert np.mean(rows == np.asarray(hash_pairs(jnp.asarray(second), jnp.asarray(first), 4096))) < 0.01


@pytest.mark.parametrize(
    "switch", ["smear", "residual_mix", "value_embeddings", "backout", "qk_norm", "softcap", "rotary_base"]
)
def test_each_switch_changes_the_function(switch):
    values = {"softcap": 0.0, "rotary_base": 500.0}
    model, params = make()
    off = model.clone(**{switch: values.get(switch, False)})
    known = nn.unbox(jax.eval_shape(off.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))["params"]
    kept = {k: {n: v for n, v in x.items() if n in known[k]} if isinstance(x, dict) else x for k, x in params.items()}
    kept = {k: x for k, x in kept.items() if k in known}
    ids = batch_of()["input_ids"]
    with_device, without = forward(model, params, ids), forward(off, kept, ids)
    assert float(jnp.abs(with_device - without).max()) > 1e-4


def test_bf16_computes_in_bf16_and_keeps_float32_gradients():
    model, params = make()
    half = model.clone(precision="bf16")
    assert forward(half, params, batch_of()["input_ids"], method="hidden").dtype == jnp.bfloat16
    loss, gradient = loss_and_gradient(half, params, batch_of())
    assert loss.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))
    assert float(loss) == pytest.approx(float(default_loss_and_gradient()[0]), rel=2e-2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"width": 100}, "model.width"),
        ({"heads": 3}, "model.heads"),
        ({"kv_heads": 3}, "model.kv_heads"),
        ({"head_dim": 7}, "model.head_dim"),
        ({"vocab_size": -1}, "model.vocab_size"),
        ({"window": "SX"}, "model.window"),
        ({"window_short": 0.0}, "model.window_short"),
        ({"precision": "fp4"}, "architecture.precision"),
        ({"remat": ["logits"]}, "architecture.remat"),
        ({"dropout": 1.0}, "architecture.dropout"),
        ({"loss_chunks": 0}, "architecture.loss_chunks"),
        ({"bigram_rows": 100}, "architecture.bigram_rows"),
        ({"key_offset": True, "head_dim": 2}, "architecture.key_offset"),
        ({"paired_heads": True, "kv_heads": 1}, "architecture.paired_heads"),
        ({"dense_connections": True, "scan_layers": True}, "architecture.scan_layers"),
        ({"dense_connections": True, "remat": ["offload"]}, "architecture.remat"),
    ],
)
def test_contradictions_are_input_errors(settings, named):
    with pytest.raises(InputError, match=named):
        GPT(**{**TINY, **settings}).check()


def test_registered_and_hashable():
    assert models.get("gpt") is GPT
    assert hash(GPT(**TINY, remat=["q"])) == hash(GPT(**TINY, remat=("q",)))


def test_a_position_outside_the_table_is_not_a_wrong_angle():
    model, params = make()
    ids = batch_of()["input_ids"]
    logits = forward(model, params, ids, positions=jnp.arange(16)[None] + 8)
    assert np.all(np.isnan(logits[:, 8:]))


def test_two_layers_have_no_middle_to_back_out_of():
    """The scale would be walked across 1 by rounding, where the output vanishes: it has no gradient at all."""
    model, params = make(depth=2)
    _, gradient = loss_and_gradient(model, params, batch_of())
    assert float(gradient["backout_scale"]) == 0
    assert float(default_loss_and_gradient()[1]["backout_scale"]) != 0


def operations(jaxpr) -> int:
    return sum(1 + sum(map(operations, jaxprs_in_params(equation.params))) for equation in jaxpr.eqns)


def test_a_scanned_program_does_not_grow_with_the_depth():
    """So neither does the time to compile it; unrolled it does."""

    def size(depth: int, scan: bool) -> int:
        model = GPT(**{**TINY, "depth": depth}, scan_layers=scan, window="L")
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
        loss = lambda params: model.apply({"params": params}, batch_of(), method="loss")[0]  # noqa: E731
        return operations(jax.make_jaxpr(loss)(nn.unbox(params)).jaxpr)

    assert size(16, True) < 1.1 * size(8, True) and size(16, False) > 1.5 * size(8, False)


def test_layers_of_a_kind_are_traced_and_lowered_once():
    """What a program says grows with the kinds of layers, not with their number: Python is most of a warm start."""

    def lines(depth):
        model = GPT(**{**TINY, "depth": depth}, window="L", value_embeddings=False)
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
        return len(jax.jit(model.apply).lower(params, jnp.zeros((1, 16), jnp.int32)).as_text().splitlines())

    assert lines(8) - lines(4) < 4 * 20
