"""A keyed bijection on [0, n) that is computed, not stored: how epochs are shuffled without any state.

Indices are written as (left, right) on a grid of a × b >= n cells, a = ceil(sqrt(n)). Each round adds a hash
of one coordinate to the other, modulo its size; every round can be undone, so the whole is a permutation of
the grid. An image that falls on the few cells beyond n is sent through again (cycle walking), which keeps it
a bijection on [0, n).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 6
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def key_of(*parts: object) -> int:
    """A 64-bit key of its parts, the same on every machine and in every process (unlike `hash`)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: np.ndarray | range | int, n: int, key: int) -> np.ndarray:
    """Image of each index in [0, n) under the permutation chosen by `key`; int64, same shape."""
    values: np.ndarray = np.asarray(index, np.uint64)
    if n <= 1:
        return np.zeros(values.shape, np.int64)
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = _mix(np.arange(ROUNDS, dtype=np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF))
    out = _grid(values.ravel(), np.uint64(rows), np.uint64(columns), keys)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _grid(out[outside], np.uint64(rows), np.uint64(columns), keys)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(values.shape)


def _grid(values: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = values // columns
    right: np.ndarray = values % columns
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _mix(left ^ key) % columns) % columns
        else:
            left = (left + _mix(right ^ key) % rows) % rows
    return left * columns + right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _S30)) * _M1
        x = (x ^ (x >> _S27)) * _M2
        return x ^ (x >> _S31)
