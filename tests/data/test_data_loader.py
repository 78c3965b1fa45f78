"""batch(step): pure, the same for any split over processes, every row once an epoch; the prefetcher in front
of it."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data import ArrayStore, DataPlan, DatasetStyle, Prefetcher, Sampling, make_rows
from bessemer.data.plan import batches
from bessemer.errors import InputError

BLOCK = 4


def rows_with(count: int, base: int = 0):
    """`count` PMD rows whose inputs name the row."""
    tokens = np.arange(count * BLOCK + 1) + base
    store = ArrayStore.of([tokens], None, {"vocab_size": 1 << 20, "pad_id": 0})
    return make_rows(store, DatasetStyle.PMD, BLOCK)


def names(batch, base=0):
    return ((batch["input_ids"][:, 0] - base) // BLOCK).tolist()


def mixed(seed=0, batch_size=8, **options) -> DataPlan:
    a, b = rows_with(30), rows_with(11, 10_000)
    stages = [[(Sampling("a", 0.7), a), (Sampling("b", 0.3), b)], [(Sampling("b", 1.0), b)]]
    return DataPlan(stages, batch_size, seed, boundaries=[12], steps=20, **options)


def same(x, y):
    return set(x) == set(y) and all(np.array_equal(x[name], y[name]) for name in x)


def test_rates_of_any_sum_make_the_batches_and_validation_of_their_shares():
    a, b = rows_with(30), rows_with(30, 10_000)

    def plan(*rates):
        mixture = [(Sampling("a", rates[0]), a), (Sampling("b", rates[1]), b)]
        return DataPlan([mixture], 8, 0, validation=mixture, validation_count=8)

    two, half = plan(3, 1), plan(0.75, 0.25)
    assert two.fingerprint == half.fingerprint and two.shares.rates(0).tolist() == [0.75, 0.25]
    assert same(two.batch(5), half.batch(5)) and same(two.validation_batch(0, 8), half.validation_batch(0, 8))
    assert (two.validation_batch(0, 8)["input_ids"][:, 0] < 10_000).sum() == 6


def test_every_row_once_an_epoch_and_epochs_differ():
    plan = DataPlan([[(Sampling("a"), rows_with(35))]], 7, seed=3)
    epochs = [[row for step in range(5) for row in names(plan.batch(5 * e + step))] for e in range(8)]
    assert all(sorted(epoch) == list(range(35)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert epochs[0] != list(range(35))


@pytest.mark.parametrize("batch_size", [8, 100])
def test_an_epoch_may_end_inside_a_batch(batch_size):
    plan = DataPlan([[(Sampling("a"), rows_with(35))]], batch_size, seed=3)
    drawn = np.concatenate([names(plan.batch(step)) for step in range(35)])
    assert np.bincount(drawn).tolist() == [batch_size] * 35
    assert plan.epoch(35) == batch_size and plan.rows == 35


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 19), st.integers(0, 5), st.sampled_from(["none", "cosine"]))
@settings(max_examples=40)
def test_the_same_batch_for_any_number_of_processes(processes, step, seed, fade):
    whole = mixed(seed, crossfade=fade, crossfade_share=0.8).batch(step)
    other = mixed(seed, crossfade=fade, crossfade_share=0.8)
    other.batch(17)  # another process, which asked for another step first
    share = 8 // processes
    parts = [other.batch(step, slice(i * share, (i + 1) * share)) for i in reversed(range(processes))]
    joined = {name: np.concatenate([part[name] for part in reversed(parts)]) for name in whole}
    assert same(whole, joined)


def test_rates_order_and_seed():
    plan = mixed(batch_size=10)
    from_b = [(plan.batch(step)["input_ids"][:, 0] >= 10_000).tolist() for step in range(20)]
    assert [sum(flags) for flags in from_b] == [3] * 12 + [10] * 8
    assert len({tuple(flags) for flags in from_b[:12]}) > 6  # the order is dealt anew each step
    assert not same(plan.batch(0), mixed(seed=1, batch_size=10).batch(0))
    assert plan.shares.rates(0).tolist() == [0.7, 0.3] and plan.shares.rates(12).tolist() == [0.0, 1.0]
    assert plan.shares.before(12).tolist() == [84, 36]
    assert set(plan.stats) == {"a/PMD", "b/PMD"}


def test_fingerprint():
    prints = [mixed(), mixed(seed=1), mixed(batch_size=4), mixed(crossfade="linear")]
    assert len({plan.fingerprint for plan in prints}) == 4
    assert mixed().fingerprint == mixed().fingerprint
    a = rows_with(30)
    here, there = (DataPlan([[(Sampling(name), a)]], 4, 0) for name in ("here", "there"))
    assert here.fingerprint == there.fingerprint


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_validation_is_the_same_set_every_time(processes):
    a, b = rows_with(30), rows_with(11, 10_000)
    mixture = [(Sampling("a", 0.5), a), (Sampling("b", 0.5), b)]
    train = [[(Sampling("a"), a)]]
    plan = DataPlan(train, 8, seed=0, validation=mixture, validation_count=21)
    other = DataPlan(train, 4, seed=9, validation=mixture, validation_count=21)
    assert len(plan.validation) == 21 and plan.validation.batches(8) == 3
    for number in range(3):
        share = 8 // processes
        slices = [slice(i * share, (i + 1) * share) for i in range(processes)]
        parts = [other.validation_batch(number, 8, part) for part in slices]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert same(plan.validation_batch(number, 8), joined)
    seen = np.concatenate([plan.validation_batch(i, 8)["input_ids"][:, 0] for i in range(3)])[:21]
    assert len(set(seen.tolist())) == 21 and (seen < 10_000).sum() == 11
    last = plan.validation_batch(2, 8)
    assert (last["target_ids"][5:] == -1).all() and (last["segment_ids"][5:] == 0).all()
    assert (last["loss_mask"][5:] == 0).all() and last["loss_mask"][:5].all()


def test_a_small_validation_source_gives_all_it_has_once():
    b = rows_with(11)
    plan = DataPlan([[(Sampling("b"), b)]], 8, 0, validation=[(Sampling("b"), b)], validation_count=100)
    assert len(plan.validation) == 11
    none = DataPlan([[(Sampling("b"), b)]], 8, 0)
    assert none.validation is None
    with pytest.raises(InputError, match="no validation data"):
        none.validation_batch(0, 8)


def test_plans_that_cannot_be():
    a = rows_with(5)
    stage = [(Sampling("a"), a)]
    for arguments, match in [
        (([], 8, 0), "empty"),
        (([[(Sampling("a", -0.5), a)]], 8, 0), "rates are above 0"),
        (([stage], 0, 0), "batch_size is 0"),
        (([stage, stage], 8, 0), "need 1 boundaries"),
    ]:
        with pytest.raises(InputError, match=match):
            DataPlan(*arguments)
    with pytest.raises(InputError, match="must increase"):
        DataPlan([stage, stage], 8, 0, boundaries=[0])
    with pytest.raises(InputError, match=r"crossfade is 'wavy'"):
        DataPlan([stage], 8, 0, crossfade="wavy")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetched_batches_are_the_same(depth):
    with Prefetcher(lambda step: step * step, 5, depth) as source:
        assert [source.get(step) for step in range(5, 30)] == [step * step for step in range(5, 30)]
        assert [source.get(step) for step in (3, 4, 5, 90, 7)] == [9, 16, 25, 8100, 49]  # after a rollback
    with pytest.raises(RuntimeError, match="closed"):
        source.get(8)


def test_prefetching_is_bounded_and_waiting_is_counted(monkeypatch):
    """By a clock that moves only while the first batch is made, and its caller waits for it."""
    made, asked, now = [], threading.Event(), [0.0]

    def monotonic():
        asked.set()
        return now[0]

    def make(step):
        if step == 0:
            assert asked.wait(60)
            now[0] = 100.0
        made.append(step)
        return step

    monkeypatch.setattr(batches, "time", SimpleNamespace(monotonic=monotonic))
    source = Prefetcher(make, 0, 2)
    assert source.get(0) == 0 and source.waited == 100.0
    while len(source._ready) < 2:
        time.sleep(0.01)
    time.sleep(0.1)  # in which it makes no further one
    assert made == [0, 1, 2]
    assert source.get(1) == 1 and source.waited == 100.0
    source.close()
    source.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch" and t.is_alive()]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_while_prefetching_is_raised_at_its_step(depth):
    failing = [True]

    def make(step):
        if step == 2 and failing[0]:
            raise InputError("broken row")
        return step

    with Prefetcher(make, 0, depth) as source:
        assert source.get(0) == 0 and source.get(1) == 1
        with pytest.raises(InputError, match="broken row"):
            source.get(2)
        failing[0] = False
        assert source.get(2) == 2 and source.get(3) == 3
