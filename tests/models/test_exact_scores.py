"""Scores of rows read one at a time: the values of whole batches, with bits that depend on the row alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.losses.cross_entropy import Projection
from bessemer.losses.exact_scores import exact_scores, value_of
from bessemer.losses.token_scores import policy_scores

ROWS, LENGTH, WIDTH, VOCAB, PADDED = 5, 23, 16, 50, 64


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Targets at the end of each row, of several lengths; the fourth row has none."""
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    targets[np.arange(LENGTH) < np.array([3, 9, 0, LENGTH, 14])[:, None]] = -1
    return {"input_ids": draw.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32), "target_ids": targets}


def apply(chunks: Any, params: Any, rows: Any, deterministic: bool, method: str) -> Projection:
    hidden = jnp.cumsum(params["table"][rows["input_ids"]], axis=1)
    if chunks is None:
        return Projection(hidden @ params["head"], None, VOCAB)
    return Projection(hidden, params["head"], VOCAB, 5.0, chunks)


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    table, head = draw.standard_normal((VOCAB, WIDTH)), draw.standard_normal((WIDTH, PADDED))
    return {"table": table.astype(np.float32) / 4, "head": head.astype(np.float32)}


@pytest.mark.parametrize(("chunks", "temperature"), [(1, 1.0), (3, 0.7), (None, 1.3)])
def test_values_are_those_of_the_whole_batch(params: Any, chunks: Any, temperature: float) -> None:
    model, batch = partial(apply, chunks), batch_of()
    if chunks is None:  # logits of a model of one's own have no padding
        params = {**params, "head": params["head"][:, :VOCAB]}
    logprobs, entropy, plain = jax.jit(partial(exact_scores, model, temperature=temperature))(params, batch)
    for scale, found in ((temperature, logprobs), (1.0, plain)):
        wanted, spread = policy_scores(model(params, batch, True, "projection"), batch["target_ids"], scale)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        if scale == temperature:
            np.testing.assert_allclose(entropy, spread, atol=1e-5)
    assert (np.asarray(logprobs)[batch["target_ids"] < 0] == 0).all()


def test_bits_depend_on_the_row_and_what_comes_before(params: Any) -> None:
    scores, batch = jax.jit(partial(exact_scores, partial(apply, 3), temperature=0.7)), batch_of()
    whole, order = np.asarray(scores(params, batch)[0]), [4, 2, 0]
    np.testing.assert_array_equal(scores(params, {k: v[order] for k, v in batch.items()})[0], whole[order])
    later = batch["input_ids"].copy()
    later[:, 18:] = 7
    changed = np.asarray(scores(params, {**batch, "input_ids": later})[0])
    np.testing.assert_array_equal(changed[:, :18], whole[:, :18])
    assert (changed[:, 19:] != whole[:, 19:]).any()


def test_the_gradient_is_that_of_the_batch(params: Any) -> None:
    model, batch = partial(apply, 1), batch_of()

    def loss(params: Any, exact: bool) -> jax.Array:
        found = policy_scores(model(params, batch, True, "projection"), batch["target_ids"], 0.7)[0]
        if exact:
            found = value_of(exact_scores(model, params, batch, 0.7)[0], found)
        return jnp.sum(jnp.square(found))

    (one, ours), (two, theirs) = (jax.jit(jax.value_and_grad(partial(loss, exact=e)))(params) for e in (True, False))
    assert one == pytest.approx(float(two), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), ours, theirs)
