"""The rows of each token: properties for any sample, and the numbers of a plain LZW written from its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import InputError
from bessemer.models.lookup import allocation_to_bounds, compute_lzw_allocation

VOCAB = 6
SEQUENCES = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=6)


def by_definition(sequences, vocab_size: int, rows: int, k_max: int) -> list[int]:
    """Codewords as tuples of tokens, allocation one row at a time."""
    seen: dict[tuple[int, ...], int] = {}  # insertion order is first seen
    frequency = [0] * vocab_size
    for sequence in sequences:
        phrase: tuple[int, ...] = ()
        for token in sequence:
            frequency[token] += 1
            longer = (*phrase, token)
            if len(longer) == 1 or longer in seen:
                phrase = longer
                continue
            if len(phrase) > 1:
                seen[phrase] += 1
            seen[longer] = 1
            phrase = (token,)
        if len(phrase) > 1:
            seen[phrase] += 1
    k = [1] * vocab_size
    first = {word: number for number, word in enumerate(seen)}
    for word in sorted(seen, key=lambda w: (-seen[w], len(w), first[w])):
        if sum(k) < rows and k[word[-1]] < k_max:
            k[word[-1]] += 1
    order = sorted(range(vocab_size), key=lambda t: (-frequency[t], t))
    while sum(k) < rows:
        for token in order:
            if sum(k) < rows and k[token] < k_max:
                k[token] += 1
    return k


@settings(max_examples=200)
@given(SEQUENCES, st.integers(1, 9), st.floats(0, 1))
def test_allocation_is_its_definition(sequences, k_max, share):
    rows = VOCAB + round(share * VOCAB * (k_max - 1))
    k = compute_lzw_allocation(sequences, VOCAB, rows, k_max)
    assert k.sum() == rows and k.min() >= 1 and k.max() <= k_max and k.shape == (VOCAB,)
    assert k.tolist() == by_definition(sequences, VOCAB, rows, k_max)
    again = compute_lzw_allocation([np.array(s, np.uint16) for s in sequences], VOCAB, rows, k_max)
    assert np.array_equal(k, again)
    bounds = allocation_to_bounds(k)
    assert bounds[0] == 0 and bounds[-1] == rows and np.array_equal(np.diff(bounds), k)


def test_a_worked_example():
    """0 1 0 1 0 1 2 is read 0, 1, 01, 01, 2: codewords 01 (read twice: 3), 10 (1), 010 (1), 012 (1)."""
    sample = [[0, 1, 0, 1, 0, 1, 2]]
    assert compute_lzw_allocation(sample, 3, 4, 8).tolist() == [1, 2, 1]  # 01: the most frequent
    assert compute_lzw_allocation(sample, 3, 5, 8).tolist() == [2, 2, 1]  # 10: the shorter of the rest
    assert compute_lzw_allocation(sample, 3, 6, 8).tolist() == [3, 2, 1]  # 010: seen before 012
    assert compute_lzw_allocation(sample, 3, 7, 8).tolist() == [3, 2, 2]
    # no codeword is left: round the tokens, 0 and 1 (three times each) before 2
    assert compute_lzw_allocation(sample, 3, 9, 8).tolist() == [4, 3, 2]
    assert compute_lzw_allocation(sample, 3, 6, 2).tolist() == [2, 2, 2]  # nobody above k_max


def test_frequent_endings_own_more_rows():
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 201)
    sample = rng.choice(200, (20, 500), p=weights / weights.sum())
    k = compute_lzw_allocation(sample, 200, 1024, 64)
    assert k[:10].mean() > 4 * k[100:].mean() and k.max() == 64


@pytest.mark.parametrize(("rows", "k_max"), [(5, 4), (25, 4), (7, 1)])
def test_rows_that_cannot_be_shared_out(rows, k_max):
    with pytest.raises(InputError, match=r"architecture\.lookup\.rows"):
        compute_lzw_allocation([[0, 1]], VOCAB, rows, k_max)
