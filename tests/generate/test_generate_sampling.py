"""Choosing a token: filters keep exactly the tokens they name, and draws follow the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.generate.sampling import Filters, SamplingOptions, Way, _way, choose, keep, penalise, row_keys

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


def chi_square(drawn, expected):
    """Σ (observed − expected)² / expected over the tokens that can be drawn; others must never be."""
    counts = np.bincount(drawn, minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * len(drawn)
    return float(np.sum((counts[possible] - wanted) ** 2 / wanted)), int(possible.sum()) - 1


def test_draws_of_a_mixed_batch_pass_a_chi_square_test_row_by_row():
    """Every setting in one batch, each judged against its own distribution computed in float64."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=24) * 1.5
    each = 20_000
    options = [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.7, top_k=5),
        SamplingOptions(temperature=1.3, top_p=0.6),
        SamplingOptions(temperature=1.0, min_p=0.3),
        SamplingOptions(temperature=1.0, repetition_penalty=1.8),
        SamplingOptions(),
    ]
    seen = np.zeros(24, bool)
    seen[[1, 4, 9]] = True
    rows = [sampling for sampling in options for _ in range(each)]
    filters = Filters.rows(options, 24)
    filters = jax.tree.map(lambda value: np.repeat(value, each), filters)
    keys = row_keys(SamplingOptions(seed=2).streams(len(rows)), 0)
    table = jnp.repeat(jnp.asarray(logits, jnp.float32)[None], len(rows), axis=0)
    drawn = np.asarray(choose(table, keys, filters, jnp.broadcast_to(seen, table.shape))).reshape(len(options), each)
    for sampling, tokens in zip(options[:-1], drawn[:-1], strict=True):
        statistic, freedom = chi_square(tokens, distribution(logits, seen, sampling))
        assert statistic < freedom + 5 * np.sqrt(2 * freedom), sampling  # five standard deviations
    assert (drawn[-1] == logits.argmax()).all()  # greedy among neighbors that draw


def distribution(logits, seen, sampling):
    """The filters by their definitions, in float64."""
    scores = np.where(
        seen, np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty), logits
    )
    p = np.exp(scores / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    allowed = np.ones(len(p), bool)
    if sampling.top_k:
        allowed[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        allowed[order[1 + np.searchsorted(np.cumsum(p[order]), sampling.top_p) :]] = False
    allowed &= p >= sampling.min_p * p.max()
    return np.where(allowed, p, 0) / p[allowed].sum()


def test_penalties_are_the_formulas_in_numpy():
    draw = np.random.default_rng(5)
    logits = draw.normal(size=(4, 60)).astype(np.float32)
    made = draw.integers(0, 4, size=(4, 60)) * (draw.random((4, 60)) < 0.5)
    seen = (made > 0) | (draw.random((4, 60)) < 0.2)
    options = [
        SamplingOptions(),
        SamplingOptions(presence_penalty=1.5),
        SamplingOptions(frequency_penalty=-0.7),
        SamplingOptions(repetition_penalty=1.4, presence_penalty=-0.3, frequency_penalty=2.0),
    ]
    found = penalise(jnp.asarray(logits), jnp.asarray(seen), jnp.asarray(made, jnp.int16), Filters.rows(options, 60))
    for row, sampling in enumerate(options):
        expected = logits[row].astype(np.float64)
        ratio = sampling.repetition_penalty
        expected = np.where(seen[row], np.where(expected > 0, expected / ratio, expected * ratio), expected)
        expected = expected - sampling.presence_penalty * (made[row] > 0) - sampling.frequency_penalty * made[row]
        np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[0], logits[0])  # exactly: a row without penalties has its own logits


def test_a_row_is_not_changed_by_the_filters_of_its_neighbors():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5000)) * 4, jnp.float32)
    alone = SamplingOptions(temperature=1.0)
    mixed = Filters.rows([alone, SamplingOptions(temperature=1.0, top_p=0.1), alone], 5000)
    np.testing.assert_array_equal(np.asarray(keep(logits, mixed))[[0, 2]], np.asarray(logits)[[0, 2]])
    keys = row_keys(SamplingOptions(seed=3).streams(3), 7)
    together = choose(logits, keys, mixed)
    single = choose(logits, keys, Filters.of(alone, 5000))
    assert together.tolist()[::2] == single.tolist()[::2]


@pytest.mark.slow
def test_a_program_for_one_way_of_choosing_chooses_the_same():
    """A GPU has a program for what a batch needs, a CPU one that finds out."""
    options = [
        SamplingOptions(top_k=5, top_p=0.5),  # greedy all the same
        SamplingOptions(temperature=1.2),
        SamplingOptions(temperature=0.8, min_p=0.1),
        SamplingOptions(repetition_penalty=1.5),
        SamplingOptions(presence_penalty=3.0),
        SamplingOptions(frequency_penalty=2.0),
    ]
    assert [_way(one) for one in options] == [Way.GREEDY, Way.DRAWN, *[Way.FILTERED] * 4]
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(6, 50)), jnp.float32)
    keys = row_keys(SamplingOptions(seed=6).streams(6), 2)
    seen = logits > 1
    made = seen.astype(jnp.int16) * 2
    for count, way in ((1, Way.GREEDY), (2, Way.DRAWN), (6, Way.FILTERED)):
        arguments = (logits[:count], keys[:count], Filters.rows(options[:count], 50), seen[:count])
        assert choose(*arguments, way, made[:count]).tolist() == choose(*arguments, made=made[:count]).tolist()
    plain = choose(logits, keys, Filters.rows([SamplingOptions()] * 6, 50)).tolist()
    assert all(choose(*arguments, made=made).tolist()[row] != plain[row] for row in (4, 5)), "they were penalized"


def test_the_smallest_temperature_is_greedy_not_nan():
    keys = row_keys(SamplingOptions(seed=1).streams(1), 0)
    filters = Filters.of(SamplingOptions(temperature=1e-38), 4)
    assert choose(LOGITS * 30 + 50, keys, filters).tolist() == [1]


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
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
    ],
)
def test_impossible_options_are_input_errors(bad):
    with pytest.raises(InputError):
        SamplingOptions(**bad)
