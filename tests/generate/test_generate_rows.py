"""The programs under the engine: rings of windows, lookup layers, half precision, rows copied between caches."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.generate import Engine, Request
from bessemer.generate.rows import (
    BETWEEN_LOOKS,
    Slots,
    _decode,
    _empty_rows,
    forward,
    in_use,
    put_rows,
    stop_table,
    take_rows,
)
from bessemer.generate.sampling import Way
from bessemer.models.allocation import Allocation
from bessemer.models.gpt import GPT
from bessemer.models.lora import Adapted
from tiny_run import random_params, tiny_model, tiny_params


@pytest.mark.slow
def test_rows_that_outgrow_a_window_equal_the_full_forward():
    """Short rows in half of the capacity, rows that outgrow it and the window while decoding, a prompt longer than the
    window; grouped queries and a lookup layer."""
    block, vocab = 256, 60
    model = GPT(
        depth=2,
        width=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocab_size=vocab,
        block_size=block,
        window="SL",
        precision="float32",
        lookup_after_layers=[0],
        lookup_rows=128,
        lookup_d_up=32,
        allocation=Allocation.of(np.where(np.arange(vocab) < 4, 18, 1)),
    )
    assert model.shape.windows == (128, None)
    params = random_params(model, 3, scale=0.2)
    engine = Engine(model, params, slots=4, steps=8)
    assert [engine._slots.reach(length) for length in (1, 128, 129, 256)] == [128, 128, 256, 256]
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(0, vocab, length).tolist(), 40, logprobs=True, n=4) for length in (100, 145)]
    results = [engine.generate([request])[0] for request in requests]
    assert engine.compilations == 4  # two lengths of prompts, two of rows
    call = jax.jit(lambda ids: jax.nn.log_softmax(model.apply({"params": params}, ids)))
    padded = np.zeros((2, block), np.int32)
    for row, (request, result) in enumerate(zip(requests, results, strict=True)):
        assert len({sample.ids for sample in result.samples}) == 1  # greedy
        ids = [*request.prompt_ids, *result.samples[0].ids]
        padded[row, : len(ids)] = ids
    full = np.asarray(call(padded))
    for row, (request, result) in enumerate(zip(requests, results, strict=True)):
        scores = full[row, len(request.prompt_ids) - 1 :][:40]
        for sample in result.samples:
            assert scores.argmax(axis=-1).tolist() == list(sample.ids)
            np.testing.assert_allclose(sample.logprobs, scores[np.arange(40), sample.ids], atol=1e-4)


def test_parameters_cast_before_a_loop_give_the_same_bits_as_cast_in_it():
    model = GPT(depth=2, width=32, head_dim=16, vocab_size=60, block_size=16, precision="bf16")
    params = random_params(model, 4)
    cast = in_use(model, params)
    assert cast["blocks_0"]["q"].dtype == cast["head"].dtype == jnp.bfloat16
    assert cast["embedding"].dtype == cast["blocks_1"]["value_gate"].dtype == jnp.float32
    ids, lengths = jnp.arange(8).reshape(2, 4), jnp.array([4, 3])
    step = jax.jit(lambda params: forward(model, params, ids, model.init_cache(2, 16), lengths)[0])
    np.testing.assert_array_equal(step(params), step(cast))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_cast_before_a_loop_give_the_same_bits_as_cast_in_it(dora: bool):
    """Also where the factor α/r is no power of two: B is scaled before it is rounded. DoRA's norms need float32."""
    model = GPT(depth=1, width=32, head_dim=16, vocab_size=60, block_size=16, precision="bf16")
    params, rng = random_params(model, 4), np.random.default_rng(1)

    def adapted(w):
        a, b, m = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((32, 3), (3, w.shape[1]), (w.shape[1],)))
        return Adapted(w.astype(jnp.bfloat16), a, b, 16 / 3, m if dora else None)

    params["blocks_0"] |= {name: adapted(params["blocks_0"][name]) for name in ("q", "up")}
    slots = Slots(model, 2, 16, 4, 0)
    cast = slots.cast(params)
    node = cast["blocks_0"]["q"]
    assert node.w.dtype == jnp.bfloat16 and node.a.dtype == node.b.dtype == (jnp.float32 if dora else jnp.bfloat16)
    assert slots.cast(cast) is cast, "nothing is left to cast"
    ids, lengths = jnp.arange(8).reshape(2, 4), jnp.array([4, 3])
    step = jax.jit(lambda params: forward(model, params, ids, model.init_cache(2, 16), lengths)[0])
    np.testing.assert_array_equal(step(params), step(cast))


def test_a_step_writes_the_cache_in_place_and_asks_nobody():
    """The program of a block, as it is compiled where every branch would wait for the host (a GPU)."""
    model, params = tiny_model(), tiny_params(1)
    rows = jax.eval_shape(functools.partial(_empty_rows, model, 4, 32), params)
    program = jax.jit(
        functools.partial(_decode, model, 0, 2 * BETWEEN_LOOKS, reach=32, way=Way.GREEDY), donate_argnums=1
    )
    mask, bound = jax.ShapeDtypeStruct((4,), bool), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = program.lower(params, rows, mask, None, bound).compile()
    text, (shape,) = compiled.as_text(), {leaf.shape for leaf in rows.cache.keys}
    assert f'"known_trip_count":{{"n":"{BETWEEN_LOOKS}"}}' in text, "steps between two looks are not counted out"
    assert not re.search(r" (conditional|custom-call|outfeed|send)\(", text)
    assert not re.search(rf"f32\[{','.join(map(str, shape))}\]\S* copy\(", text), "the cache is copied"
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(rows.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= kept


def test_rows_are_copied_into_the_beginning_of_longer_ones():
    tree = {"a": jnp.zeros((4, 3)), "b": jnp.arange(4)}
    part = {"a": jnp.ones((3, 2)), "b": jnp.array([7, 8, 9])}
    found = put_rows(tree, part, jnp.array([2, 5, 0]))  # one beyond the end is dropped
    assert found["b"].tolist() == [9, 1, 7, 3]
    assert found["a"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert take_rows(found, jnp.array([2, 0, 9]))["b"].tolist() == [7, 9, 3]


def test_stop_tables_are_as_wide_as_they_must_be():
    assert stop_table([]).shape == (0, 16) and stop_table([(), (3,)]).shape == (2, 16)
    table = stop_table([(5, 3, 5), range(17)])
    assert table.shape == (2, 32) and table[0, :3].tolist() == [3, 5, -1]
