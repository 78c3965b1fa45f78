"""`architecture.max_documents`: lengths of documents for cuDNN's variable-length attention, and what guards them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import Tokenizer, TokenStore, prepare
from bessemer.data.rows.build import make_rows
from bessemer.data.rows.rows import DatasetStyle
from bessemer.generate.load import build_model
from bessemer.kernels.attention import attention, document_operands, document_table, too_many_documents
from bessemer.models.llama import Llama
from bessemer.training.setup.model import document_counts


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_the_table_lists_the_runs_of_equal_ids_of_all_rows(rows: list[list[int]]) -> None:
    width = max(map(sum, rows))
    ids = np.zeros((len(rows), width), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, 1 + len(lengths)), lengths)
    padded = [[*lengths, width - sum(lengths)] if sum(lengths) < width else lengths for lengths in rows]
    flat = [length for row in padded for length in row]
    slots = len(flat) + 3
    places, lengths = (np.asarray(x).tolist() for x in document_table(jnp.asarray(ids), slots))
    assert lengths == [*flat, 0, 0, 0]
    assert places == [*np.cumsum([0, *flat[:-1]]).tolist(), *[ids.size] * 3]
    assert not too_many_documents(jnp.asarray(ids), len(flat))
    assert too_many_documents(jnp.asarray(ids), len(flat) - 1)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_no_batch_of_rows_holds_more_documents_than_its_slots(data: st.DataObject) -> None:
    """Rows of two sources in any order, and twice where an epoch ends within the batch."""
    counts = [np.array(data.draw(st.lists(st.integers(1, 20), min_size=64, max_size=90))) for _ in range(2)]
    most = max(int(c.max()) for c in counts)
    model = Llama(depth=1, head_dim=16, width=32, vocab_size=64, max_documents=most)
    model = model.clone(document_counts=document_counts(counts))
    rows = data.draw(st.integers(1, 80))
    twice = np.repeat(np.concatenate(counts), 2)
    chosen = data.draw(st.permutations(range(len(twice))))[:rows]
    assert twice[chosen].sum() <= model.document_slots(rows) <= rows * most
    assert np.sort(twice)[::-1][:rows].sum() == model.document_slots(rows) or rows > 64


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=4))
def test_cudnn_is_given_what_jax_gives_it_for_documents_counted_per_row(rows: list[list[int]]) -> None:
    """Its public function takes lengths and offsets of each row, and lists them for cuDNN; ours is that list."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    width, most = max(map(sum, rows)), 6
    rows = [[*row, width - sum(row)] if sum(row) < width else row for row in rows]
    ids = jnp.asarray(np.stack([np.repeat(np.arange(len(row)), row) for row in rows]))
    lengths = np.full((len(rows), most), -1, np.int32)
    offsets = np.full((len(rows), most + 1), -1, np.int32)
    for number, row in enumerate(rows):
        lengths[number, : len(row)] = row
        offsets[number, : len(row)] = np.cumsum([0, *row[:-1]])
    q = jnp.zeros((len(rows), width, 4, 8))
    wanted = _fix_seqlen_offsets(*(jnp.asarray(x) for x in (lengths, lengths, offsets, offsets)), q, q)
    count = sum(map(len, rows))
    found = document_operands(ids, (4, 8), (2, 8), count + 1)
    for ours, theirs in zip((found[0], found[0], found[1], 2 * found[2]), wanted, strict=True):
        assert np.asarray(ours).ravel()[:count].tolist() == np.asarray(theirs).ravel()[:count].tolist()
    assert not np.any(np.asarray(found[0]).ravel()[count:])
    assert set(np.asarray(found[1]).ravel()[count:].tolist()) == {ids.size * 32}


def test_a_row_with_more_documents_than_promised_is_not_finite() -> None:
    model = Llama(depth=1, head_dim=16, width=32, vocab_size=64, block_size=16, document_mask=True, max_documents=2)
    ids = jnp.arange(16)[None] % 64
    params = model.init(jax.random.key(0), ids)
    two, three = (
        jnp.asarray(np.repeat(np.arange(1, 1 + n), [16 // n] * (n - 1) + [16 - 16 // n * (n - 1)]))[None]
        for n in (2, 3)
    )
    unlimited = model.clone(max_documents=0)
    same = model.apply(params, ids, None, two)
    assert jnp.array_equal(same, unlimited.apply(params, ids, None, two))
    assert jnp.isnan(model.apply(params, ids, None, three)).all()


def test_a_saved_limit_is_not_that_of_other_data() -> None:
    shape = {"family": "llama", "depth": 1, "head_dim": 16, "width": 32, "vocab_size": 64}
    model, _ = build_model({"model": shape, "architecture": {"document_mask": True, "max_documents": 8}}, "here")
    assert model.document_mask and model.max_documents == 0


def test_packed_rows_know_their_pieces(tmp_path: Path) -> None:
    texts = [{"text": "word " * (1 + i % 7)} for i in range(60)]
    tokenizer = Tokenizer.train((row["text"] for row in texts), 300)
    prepare(texts, tmp_path / "store", tokenizer)
    rows = make_rows(TokenStore(tmp_path / "store", "train"), DatasetStyle.PACKED, 32)
    segments = rows.get(np.arange(len(rows)))["segment_ids"]
    assert rows.pieces.tolist() == segments.max(axis=1).tolist() and max(rows.pieces) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["equal", "grouped"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_variable_length_attention_is_that_of_float32(heads: tuple[int, int], head_dim: int) -> None:
    rng = np.random.default_rng(0)
    length, lengths = 512, ([200, 1, 311], [512], [3, 5, 7, 100, 397])
    ids = jnp.asarray(np.stack([np.repeat(np.arange(1, 1 + len(row)), row) for row in lengths]).astype(np.int32))
    q, k, v, g = (
        jnp.asarray(rng.normal(size=(3, length, n, head_dim)), jnp.bfloat16)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )

    def grads(dtype: jnp.dtype, name: str, most: int) -> tuple[jax.Array, ...]:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(q, k, v, segment_ids=ids, implementation=name, max_documents=most)

        out, back = jax.vjp(call, *(x.astype(dtype) for x in (q, k, v)))
        return out, *back(g.astype(dtype))

    want = grads(jnp.float32, "xla", 0)
    for slots in (9, 24):  # all in use; most of them empty
        for found, exact in zip(grads(jnp.bfloat16, "cudnn", slots), want, strict=True):
            difference = jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
            assert difference < 6e-3
