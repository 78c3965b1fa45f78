"""The length of rounds: one who reads along has the first token at once, others whole rounds, all the same tokens."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from bessemer.generate import Engine, Request, SamplingOptions
from bessemer.generate.engine import READING, Pace
from tiny_run import random_params, tiny_model

DRAWN = SamplingOptions(temperature=1.2, top_p=0.95, repetition_penalty=1.1)
PROMPT = np.random.default_rng(2).integers(0, 300, 103).tolist()


@pytest.fixture(scope="module")
def engine():
    """One slot, and rows that outgrow the short part of the cache between two whole rounds."""
    model = tiny_model().clone(block_size=256)
    return Engine(model, random_params(model, 3), slots=1, steps=16)


class Fixed(Pace):
    """Rounds of one length, as a clock could have them."""

    def __init__(self, most, steps):
        super().__init__(most, clocked=False)
        self.steps = steps

    def next(self, rows, unit):
        whole, end = super().next([FakeRow(row.length - len(row.made), row.made) for row in rows], unit)
        return min(whole, self.steps), end


@dataclass
class FakeRow:
    """What is asked of a Row."""

    prompt: int
    made: list = field(default_factory=list)
    stream: bool = False

    @property
    def length(self):
        return self.prompt + len(self.made)

    @property
    def handle(self):
        return SimpleNamespace(request=self)


def paced(pace, rows, unit=1, rounds=6):
    """The lengths of some rounds, and where a whole round would have ended in each."""
    found = []
    for _ in range(rounds):
        steps, end = pace.next(rows, unit)
        assert steps % unit == 0 and max(row.length for row in rows) + steps <= end
        for row in rows:
            row.made += [0] * steps
        found.append((steps, end))
    return found


@pytest.mark.slow
def test_a_reader_has_the_first_token_before_a_whole_round_is_over(engine):
    engine._pace = Pace(16, clocked=False)
    before = engine.rounds
    whole = list(engine.submit(Request(PROMPT, 40)))
    assert [len(event.ids) for event in whole] == [16, 16, 8] and engine.rounds == before + 3
    compiled = engine.compilations
    handle = engine.submit(Request(PROMPT, 40, stream=True))
    first = handle.next_event()
    assert len(first.ids) == 1 and engine.rounds == before + 4
    rest = list(handle)
    assert [len(event.ids) for event in rest] == [3, 12, 16, 8]
    assert sum((event.ids for event in (first, *rest)), ()) == sum((event.ids for event in whole), ())
    assert engine.compilations == compiled, "a round of another length is the same program"


@pytest.mark.parametrize("sampling", [SamplingOptions(), DRAWN], ids=["greedy", "drawn"])
def test_the_length_of_rounds_changes_no_bit(engine, sampling):
    request = Request(PROMPT, 40, sampling, seed=4, logprobs=True)
    engine._pace = Pace(16, clocked=False)
    expected = engine.generate([request])
    compiled = engine.compilations
    for steps in (1, 3, 7, 16):
        engine._pace = Fixed(16, steps)
        before = engine.rounds
        assert engine.generate([request]) == expected
        assert engine.rounds - before == {1: 40, 3: 6 + 6 + 3, 7: 3 + 3 + 2, 16: 3}[steps]
    engine._pace = Pace(16, clocked=True)  # whatever this machine's clock says
    assert engine.generate([replace(request, stream=True)]) == expected
    assert engine.compilations == compiled


def test_rounds_are_whole_where_nobody_reads():
    pace = Pace(16, clocked=True)
    pace.took(100.0, 1)
    assert paced(pace, [FakeRow(100), FakeRow(7)], rounds=3) == [(16, 116), (16, 132), (16, 148)]


def test_a_readers_rounds_grow_and_last_a_moment():
    row = FakeRow(10, stream=True)
    pace = Pace(16, clocked=True)
    assert [steps for steps, _ in paced(pace, [row])] == [1, 3, 12, 16, 16, 16]
    pace.took(READING, 5)  # a slow model: five steps in the time of a round
    assert [steps for steps, _ in paced(pace, [row], rounds=5)] == [5, 5, 5, 1, 5]  # each whole round ends one
    pace.took(10 * READING, 1)
    assert [steps for steps, _ in paced(pace, [row], rounds=2)] == [1, 1]
    late = FakeRow(200, stream=True)
    pace.took(1e-3, 10)
    assert [steps for steps, _ in paced(pace, [row, late], rounds=3)] == [1, 3, 12]


def test_several_processes_choose_by_counts_and_a_gpu_in_steps_of_eight():
    row, pace = FakeRow(10, stream=True), Pace(32, clocked=False)
    pace.took(10 * READING, 1)
    assert [steps for steps, _ in paced(pace, [row], unit=8, rounds=4)] == [8, 24, 32, 32]
    company = [row, FakeRow(13, [0] * 8), FakeRow(120, [0] * 24)]
    assert [steps for steps, _ in paced(pace, company, unit=8, rounds=3)] == [8, 32, 32]
