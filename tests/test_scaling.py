"""The depth dial: its check values, the horizon's order, floors, and errors."""

from __future__ import annotations

import math

import pytest

from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.scaling import Reference, Sizes, Target, derive_batch, dial, horizon, stage_starts


def scaling_parameters(depth: int, vocabulary: int = 32768) -> int:
    """Of the GPT family: 12·width² a layer and the head."""
    width = -(-depth * 64 // 128) * 128
    return depth * 12 * width**2 + vocabulary * width


REFERENCE = Reference(scaling_parameters(12), scaling_parameters(8))


def turn(depth: int, target: Target | None = None, **keywords: object):
    sizes = Sizes(scaling_parameters(depth), flops_per_token=1e9, epoch_tokens=10**9)
    return dial(target or Target(), depth=depth, sizes=sizes, reference=REFERENCE, block_size=2048, **keywords)  # type: ignore[arg-type]


def test_check_values() -> None:
    assert scaling_parameters(12) == 110_100_480
    assert scaling_parameters(20) == 435_159_040 and scaling_parameters(24) == 729_808_896
    twelve, twenty = turn(12), turn(20)
    assert twelve.batch_tokens == 2**19 and twenty.batch_tokens == 2**20
    assert twelve.steps == int(10.5 * 110_100_480) // 2**19 == 2205
    assert twelve.lr_multiplier == 1.0 and twenty.lr_multiplier == math.sqrt(2)
    assert twelve.weight_decay == pytest.approx(0.2, rel=1e-3)
    expected = 0.2 * math.sqrt(2) * (10.5 * 110_100_480) / (twenty.steps * 2**20)
    assert twenty.weight_decay == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("depth", "width", "scaling", "total", "batch", "steps"),
    [
        (12, 768, 110_100_480, 286_261_730, 2**19, 2205),
        (20, 1280, 435_159_040, 896_533_746, 2**20, 4357),
        (24, 1536, 729_808_896, 1_384_122_122, 2**20, 7308),
    ],
)
def test_check_values_of_the_model_itself(
    depth: int, width: int, scaling: int, total: int, batch: int, steps: int
) -> None:
    """The sizes the dial is fed with are those of the GPT family at vocabulary 32,768 and 2048 tokens of context."""
    model = GPT(depth=depth, vocab_size=32_768, block_size=2048)
    counts = model.count_parameters()
    assert (model.shape.width, counts["scaling"], counts["total"]) == (width, scaling, total)
    assert counts["scaling"] == scaling_parameters(depth)
    derived = turn(depth)
    assert (derived.batch_tokens, derived.steps) == (batch, steps)
    assert derived.tokens == batch * steps <= 10.5 * scaling < derived.tokens + batch


def test_every_row_has_a_reason() -> None:
    rows = {row.name: row for row in turn(20).rows}
    assert rows["training/steps"].value == turn(20).steps
    assert "10.5" in rows["training/steps"].reason and "435,159,040" in rows["training/steps"].reason
    assert rows["tokens : scaling parameters"].value == pytest.approx(10.5, rel=1e-3)
    assert all(row.reason for row in rows.values())


def test_below_depth_8_the_share_is_floored() -> None:
    eight, four = turn(8), turn(4)
    floor = scaling_parameters(8) / scaling_parameters(12)
    assert eight.batch_tokens == four.batch_tokens == derive_batch(floor, 2048) == 2**18
    assert four.weight_decay == pytest.approx(0.2 * math.sqrt(0.5) / floor)
    assert "floored at depth 8" in {row.name: row.reason for row in four.rows}["optimization/weight_decay"]
    assert eight.weight_decay == pytest.approx(0.2 * math.sqrt(0.5) / (eight.tokens / REFERENCE.tokens))


def test_above_depth_8_nothing_is_floored() -> None:
    """A short run of a deep model keeps its own share; the floor is for shallow models only."""
    nine = turn(9, Target(tokens=REFERENCE.tokens // 100))
    assert nine.weight_decay == pytest.approx(0.2 * nine.lr_multiplier / (nine.tokens / REFERENCE.tokens), rel=1e-12)
    seven = turn(7, Target(tokens=REFERENCE.tokens // 100))
    assert seven.weight_decay == pytest.approx(
        0.2 * seven.lr_multiplier * scaling_parameters(12) / scaling_parameters(8)
    )


def test_first_given_wins() -> None:
    sizes = Sizes(10**6, flops_per_token=100.0, epoch_tokens=5000)
    everything = Target(steps=7, flops=1e7, tokens=2000, epochs=0.1, ratio=0.01)
    order = [("steps", 7), ("flops", 100), ("tokens", 2), ("epochs", 0), ("ratio", 10)]
    given = {name: getattr(everything, name) for name, _ in order}
    for name, steps in order:
        target = Target(**given)
        assert target.given == name
        if steps:
            assert horizon(target, 1000, sizes).value == steps
        else:
            with pytest.raises(InputError, match=r"0 steps .*raise training\.epochs"):
                horizon(target, 1000, sizes)
        given[name] = None
    with pytest.raises(InputError, match="no horizon"):
        horizon(Target(), 1000, sizes)


def test_exact_arithmetic() -> None:
    assert horizon(Target(epochs=0.1), 1, Sizes(epoch_tokens=30)).value == 3
    assert horizon(Target(tokens=10**18 + 1), 10**9 + 7).value == (10**18 + 1) // (10**9 + 7)
    assert horizon(Target(flops=1e21), 2**19, Sizes(flops_per_token=3 * 10**9)).value == round(
        10**21 / (3 * 10**9 * 2**19)
    )
    assert horizon(Target(tokens=[1500, 2500]), 1000).value == 4
    assert stage_starts([1500, 2500], 1000) == [0, 1]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match=r"0 steps \(training\.tokens.*lower training\.batch_size"):
        horizon(Target(tokens=10), 1000)
    with pytest.raises(InputError, match="scaling parameters"):
        horizon(Target(ratio=10.5), 1000)
    with pytest.raises(InputError, match="dataset of known length"):
        horizon(Target(epochs=1), 1000)
    with pytest.raises(InputError, match="stage 2 has 10 tokens"):
        stage_starts([2000, 10], 1000)
    with pytest.raises(InputError, match=r"multiple of architecture\.block_size"):
        turn(12, batch_tokens=5000)
    with pytest.raises(InputError, match="a step of 0 tokens"):
        horizon(Target(steps=3), 0)


def test_given_tokens_and_batches() -> None:
    short = turn(12, Target(tokens=REFERENCE.tokens // 16))
    assert short.batch_tokens == 2 ** round(math.log2(2**19 * 16**-0.383))
    given = turn(12, Target(steps=10), batch_tokens=2**17)
    assert given.lr_multiplier == 0.5 and given.steps == 10 and given.tokens == 10 * 2**17
    assert derive_batch(1.0, 3000) % 3000 == 0 and derive_batch(1e-9, 4096) == 4096
