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
from bessemer.kernels.attention import attention, document_lengths, too_many_documents
from bessemer.models.llama import Llama


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_lengths_are_the_runs_of_equal_ids(rows: list[list[int]]) -> None:
    width = max(map(sum, rows))
    ids = np.zeros((len(rows), width), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, 1 + len(lengths)), lengths)
    found, count = document_lengths(jnp.asarray(ids), 6)
    for row, lengths, number in zip(np.asarray(found), rows, np.asarray(count), strict=True):
        padded = [*lengths, width - sum(lengths)] if sum(lengths) < width else lengths
        assert number == len(padded)
        assert row.tolist() == [*padded, *[0] * (6 - len(padded))]
    assert not too_many_documents(jnp.asarray(ids), 6)


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


def test_packed_rows_know_their_most_pieces(tmp_path: Path) -> None:
    texts = [{"text": "word " * (1 + i % 7)} for i in range(60)]
    tokenizer = Tokenizer.train((row["text"] for row in texts), 300)
    prepare(texts, tmp_path / "store", tokenizer)
    rows = make_rows(TokenStore(tmp_path / "store", "train"), DatasetStyle.PACKED, 32)
    segments = rows.get(np.arange(len(rows)))["segment_ids"]
    assert rows.most_pieces == segments.max() > 1


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
    for found, exact in zip(grads(jnp.bfloat16, "cudnn", 8), want, strict=True):
        difference = jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        assert difference < 6e-3
