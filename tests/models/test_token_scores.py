"""Likelihood and argmax of targets: tiles of logits give what the whole logits give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.losses.cross_entropy import Projection, token_scores


@pytest.mark.parametrize("chunks", [1, 3])
def test_tiles_against_whole_logits_in_float64(chunks):
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 7, 8)).astype(np.float32)
    head = rng.standard_normal((8, 24)).astype(np.float32)  # 24 columns for 20 tokens: the rest is padding
    head[:, 5] = head[:, 3]  # two tokens that are always equally likely
    logits = 15 * np.tanh(hidden.astype(np.float64) @ head[:, :20] / 15)
    targets = logits.argmax(-1)
    targets[0, :4] = [5, 3, -1, 19]
    logprobs, greedy = jax.jit(lambda h, w, t: token_scores(Projection(h, w, 20, 15.0, chunks), t))(
        jnp.array(hidden), jnp.array(head), jnp.array(targets)
    )
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(expected, np.maximum(targets, 0)[..., None], -1)[..., 0]
    assert np.allclose(logprobs, np.where(targets < 0, 0, picked), atol=1e-5)
    assert greedy.tolist() == ((targets < 0) | (logits.argmax(-1) == targets)).tolist()
    assert not greedy[0, 0], "of equal tokens the first is the likeliest"
