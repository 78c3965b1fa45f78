"""Choosing a token: filters keep exactly the tokens they name, and draws follow the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.generate.sampling import Filters, SamplingOptions, choose, keep, row_keys

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))


def kept(**options):
    filters = Filters.of(SamplingOptions(temperature=1.0, **options), 4)
    return np.flatnonzero(np.isfinite(np.asarray(keep(LOGITS, filters))[0])).tolist()


def test_filters_keep_what_they_name():
    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.4) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.95) == [0, 1, 2, 3]
    assert kept(min_p=0.45) == [1, 2, 3]
    assert kept(top_k=3, top_p=0.5) == [1, 3]  # of the three, 0.4/0.9 does not reach a half
    assert kept(top_k=100) == [0, 1, 2, 3]


def test_equal_logits_go_to_the_lowest_id_as_in_greedy():
    logits = jnp.zeros((1, 6))
    filters = Filters.of(SamplingOptions(temperature=1.0, top_k=1), 6)
    key = jax.random.split(jax.random.key(0), 1)
    drawn, greedy = choose(logits, key, filters), choose(logits, key, Filters.of(SamplingOptions(), 6))
    assert drawn.tolist() == greedy.tolist() == [0]


def test_draws_follow_the_tempered_distribution():
    rows = 4000
    keys = row_keys(SamplingOptions(temperature=2.0, seed=1).streams(rows), 0)
    filters = Filters.of(SamplingOptions(temperature=2.0), 4)
    drawn = np.asarray(choose(jnp.repeat(LOGITS, rows, axis=0), keys, filters))
    expected = np.sqrt([0.1, 0.4, 0.2, 0.3]) / np.sum(np.sqrt([0.1, 0.4, 0.2, 0.3]))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / rows, expected, atol=0.03)


def test_keys_belong_to_rows():
    words = jax.random.key_data(row_keys(SamplingOptions(seed=4).streams(3), 5))
    assert len({tuple(row) for row in np.asarray(words).tolist()}) == 3
    own = jax.random.key_data(row_keys(SamplingOptions(seed=[4]).streams(1), 5))
    np.testing.assert_array_equal(words[0], own[0])
    with pytest.raises(InputError, match="2 seeds for 3 prompts"):
        SamplingOptions(seed=[1, 2]).streams(3)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"seed": -1},
    ],
)
def test_impossible_options_are_input_errors(bad):
    with pytest.raises(InputError):
        SamplingOptions(**bad)
