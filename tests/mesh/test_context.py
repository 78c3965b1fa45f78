"""Attention of a sequence that is split over devices: masks right at every edge, and only what is seen travels."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from tests.mesh.harness import collectives, mesh_of
from tests.models.test_models_attention import causal, draw, reference

from bessemer.kernels.attention import attention, layout_of

LENGTH = 64  # pieces of 16


def arrays(kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return draw(2, LENGTH, 4, 8), draw(2, LENGTH, kv_heads, 8, seed=1), draw(2, LENGTH, kv_heads, 8, seed=2)


def segments_of() -> np.ndarray:
    """Documents that end within a piece, at its edge, and after several pieces."""
    ends = [[5, 16, 50], [31, 32, 33]]
    return np.stack([np.searchsorted(row, np.arange(LENGTH), side="right") for row in ends]).astype(np.int32)


@pytest.mark.parametrize(("kv_heads", "way"), [(4, "heads"), (2, "keys")])
@pytest.mark.parametrize("documents", [False, True])
def test_every_window_and_document_ends_where_it_should(kv_heads: int, way: str, documents: bool) -> None:
    q, k, v = arrays(kv_heads)
    segments = segments_of() if documents else None
    with mesh_of({"context": 4}).scope():
        assert layout_of(q.shape, k.shape).way == way
        for window in (None, 1, 2, 16, 17, 18, 40, 63):
            got = jax.jit(lambda *x, w=window: attention(*x, window=w, segment_ids=segments))(q, k, v)
            want = reference(q, k, v, causal(LENGTH, window, segments))
            np.testing.assert_allclose(got, want, atol=2e-6, err_msg=str(window))


# of the values and gradients of one attention: heads trade places, keys are gathered and their gradients scattered
MOVES = {
    ("heads", None): {"all-to-all": 8},
    ("keys", None): {"all-gather": 1, "reduce-scatter": 1},
    ("keys", 16): {"collective-permute": 2},
    ("keys", 18): {"collective-permute": 4},
}


@pytest.mark.parametrize(("way", "window"), list(MOVES))
def test_what_travels(way: str, window: int | None) -> None:
    q, k, v = arrays(4 if way == "heads" else 2)
    topology = mesh_of({"context": 4})
    with topology.scope():
        q, k, v = (jax.device_put(x, topology.batch_sharding()) for x in (q, k, v))

        def both(g, *x):
            out, back = jax.vjp(partial(attention, window=window), *x)
            return out, back(g)

        program = jax.jit(both).lower(q, q, k, v).compile()
    assert collectives(program) == MOVES[way, window]


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_key_heads_that_the_mesh_cannot_split(kv_heads: int) -> None:
    """Queries split over tensor, keys not: each device takes the key heads of its queries."""
    q, k, v = (draw(2, LENGTH, 6, 8), draw(2, LENGTH, kv_heads, 8, seed=1), draw(2, LENGTH, kv_heads, 8, seed=2))
    with mesh_of({"tensor": 2, "context": 2}).scope():
        got = jax.jit(attention)(q, k, v)
    np.testing.assert_allclose(got, reference(q, k, v, causal(LENGTH)), atol=2e-6)


def test_a_sequence_that_the_mesh_does_not_divide_stays_whole() -> None:
    q, k, v = (x[:, :63] for x in arrays(2))
    with mesh_of({"context": 4}).scope():
        got = jax.jit(attention)(q, k, v)
    np.testing.assert_allclose(got, reference(q, k, v, causal(63)), atol=2e-6)
