"""Mixtures: rates hold at every step, and any step is found without the ones before."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import DatasetStyle, Sampling, check_mixture, permute, shares_of
from bessemer.data.plan.mixture import Shares, fade_at
from bessemer.errors import InputError


def decimals(weights):
    """Rates that sum to 1, as a user writes them (k thousandths), or as floats of any kind."""
    total = sum(weights)
    return [w / total for w in weights]


RATES = st.lists(st.integers(1, 1000), min_size=1, max_size=7).map(decimals)


def check_counts(shares, steps, batch):
    """Never fewer than before, always a whole batch, within one row of the ideal."""
    ideal = np.zeros(shares.sources)
    last = shares.before(0)
    assert (last == 0).all()
    for step in range(1, steps + 1):
        ideal += shares.rates(step - 1) * batch
        counts = shares.before(step)
        assert counts.sum() == step * batch
        assert (counts >= last).all()
        assert np.abs(counts - ideal).max() < 1 + 1e-6, step
        last = counts


@given(RATES, st.integers(1, 40))
@settings(max_examples=100)
def test_constant_rates_hold_at_every_step(rates, batch):
    check_counts(Shares([rates], [], batch), 60, batch)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=5), st.integers(1, 16), st.integers(0, 10**9))
@settings(max_examples=100)
def test_any_step_is_found_at_once(weights, batch, far):
    rates = decimals(weights)
    shares = Shares([rates], [], batch)
    exact = [Fraction(str(rate)) for rate in rates]
    if shares.period > 10_000:
        return
    counts = shares.before(far)
    for count, rate in zip(counts, exact, strict=True):
        assert abs(count - rate / sum(exact) * far * batch) < 1
    # the same as walking there, after whole periods
    assert (shares.before(7) + shares.before(shares.period) == shares.before(shares.period + 7)).all()


STAGES = st.integers(2, 4).flatmap(
    lambda k: st.lists(
        st.lists(st.integers(0, 9), min_size=k, max_size=k).filter(any).map(decimals), min_size=2, max_size=3
    )
)


@given(STAGES, st.integers(1, 12), st.sampled_from(["none", "linear", "cosine", "sigmoid"]), st.floats(0, 1), st.data())
@settings(max_examples=100)
def test_stages_and_fades_hold_at_every_step(stages, batch, fade, share, data):
    gaps = data.draw(st.lists(st.integers(1, 25), min_size=len(stages), max_size=len(stages)))
    ends = np.cumsum(gaps).tolist()
    shares = Shares(stages, ends[:-1], batch, fade, share, ends[-1])
    check_counts(shares, ends[-1] + 5, batch)
    fresh = Shares(stages, ends[:-1], batch, fade, share, ends[-1])
    for step in reversed(range(ends[-1] + 5)):  # in any order
        assert (fresh.before(step) == shares.before(step)).all()


def test_a_fade_is_centred_on_the_boundary_and_as_wide_as_asked():
    shares = Shares([[1, 0], [0, 1]], [100], 10, "linear", 0.5, 140)
    later = [shares.rates(step)[1] for step in range(140)]
    assert later[:90] == [0] * 90 and later[110:] == [1] * 30  # half of the shorter stage, 40 steps
    assert np.allclose(later[90:110], (np.arange(20) + 0.5) / 20)
    assert shares.before(140).tolist() == [1000, 400]
    for shape in ("linear", "cosine", "sigmoid"):
        values = [fade_at(shape, u / 50) for u in range(51)]
        assert values == sorted(values)
        assert [values[0], values[25], values[50]] == pytest.approx([0, 0.5, 1])


def test_a_source_in_two_stages_goes_on_where_it_was():
    shares = Shares([[1, 0], [0.25, 0.75]], [10], 8)
    assert shares.before(10).tolist() == [80, 0] and shares.before(12).tolist() == [84, 12]


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_permutation_is_a_bijection(n, key):
    assert np.sort(permute(np.arange(n), n, key)).tolist() == list(range(n))


def test_permutation_mixes_and_depends_on_the_key():
    n = 10_007
    images = [permute(np.arange(n), n, key) for key in range(4)]
    for a in range(4):
        assert abs(np.corrcoef(np.arange(n), images[a])[0, 1]) < 0.05
        assert np.mean(np.abs(np.diff(images[a])) == 1) < 0.01
        for b in range(a):
            assert np.mean(images[a] == images[b]) < 0.01
    huge = permute(np.array([0, 1, 10**12 - 1]), 10**12, 5)
    assert len(set(huge.tolist())) == 3 and huge.max() < 10**12
    orders = {tuple(permute(np.arange(4), 4, key).tolist()) for key in range(2000)}
    assert len(orders) == math.factorial(4)


def test_sampling_from_a_string():
    assert Sampling.from_string("my.txt") == Sampling("my.txt", 1.0, None, "")
    assert Sampling.from_string("my.txt").row_style is DatasetStyle.PMD
    assert Sampling.from_string("my.txt:PMD").style is DatasetStyle.PMD
    assert Sampling.from_string("dir/my.txt:packed").style is DatasetStyle.PACKED
    assert Sampling.from_string("module:dataset") == Sampling("module:dataset")
    with pytest.raises(InputError, match="Did you mean 'PACKED'"):
        Sampling.from_string("my.txt:PACKD")


def test_rates_are_weights():
    """`rate: 2` beside a source without a rate is two thirds, as docs/configuration.md writes it."""
    assert shares_of([Sampling("a", 2), Sampling("b")]) == [2 / 3, 1 / 3]
    written = [Sampling("a", 0.7), Sampling("b", 0.3)]
    assert shares_of(written) == [0.7, 0.3]  # to the bit: they are part of a plan's fingerprint
    shares = Shares([[2.0, 1.0]], [], 9)
    assert shares.before(1).tolist() == [6, 3] and shares.rates(0).tolist() == [2 / 3, 1 / 3]


def test_mixture_errors():
    with pytest.raises(InputError, match="above 0"):
        check_mixture([Sampling("a", 0.0), Sampling("b", 1.0)])
    with pytest.raises(InputError, match="appears twice"):
        check_mixture([Sampling("a", 0.5), Sampling("a", 0.5)])
    with pytest.raises(InputError, match="empty"):
        check_mixture([])
    check_mixture([Sampling(str(i), 0.1) for i in range(10)])
