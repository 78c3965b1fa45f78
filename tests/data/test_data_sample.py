"""The sample of training tokens is a pure function of data and seed."""

from __future__ import annotations

import numpy as np

from bessemer.data import ArrayStore, DatasetStyle, Sampling, make_rows
from bessemer.data.plan.batches import sample_tokens

INFO = {"vocab_size": 1000, "pad_id": 0, "bos_id": 1, "tokenizer": "x", "dtype": "uint16", "mask": False}


def rows(first: int, documents: int = 40, style: DatasetStyle = DatasetStyle.PMD):
    """Documents of 30 tokens from `first` to `first` + 99."""
    rng = np.random.default_rng(first)
    store = ArrayStore.of([rng.integers(first, first + 100, 30) for _ in range(documents)], None, INFO)
    return make_rows(store, style, 64)


def test_sample_is_fixed_and_of_the_asked_size():
    mixture = [(Sampling("a", 0.75), rows(100)), (Sampling("b", 0.25), rows(500))]
    one, two = (sample_tokens(mixture, 400, seed=3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    tokens = np.concatenate(one)
    assert len(tokens) == 400 and np.count_nonzero(tokens >= 500) == 100
    other = np.concatenate(sample_tokens(mixture, 400, seed=4))
    assert not np.array_equal(tokens, other)


def test_a_small_source_gives_all_it_has_and_no_padding():
    for style in (DatasetStyle.PMD, DatasetStyle.PACKED):
        found = rows(100, documents=5, style=style)
        tokens = np.concatenate(sample_tokens([(Sampling("a"), found)], 10_000, seed=0))
        # a row's last token is only a target: in PMD the next row begins with it, the very last has no next row
        assert 140 <= len(tokens) <= 150 and tokens.min() >= 100


def test_nothing_asked_nothing_read():
    assert sample_tokens([(Sampling("a"), rows(100))], 0, seed=0) == []
