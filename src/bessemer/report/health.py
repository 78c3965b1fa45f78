"""Whether a run is going well, in one sentence: for the top of its report and of its page in the dash."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bessemer.console import counted

Points = Sequence[tuple[float, float]]
"""(step, value) of one metric, oldest first."""

RESULTS = (
    ("val_reward", "held-out reward", True),
    ("val_pref_acc", "held-out accuracy", True),
    ("val_bpb", "bits per byte", False),
    ("val_loss", "validation loss", False),
)
"""(metric, its name in a sentence, whether higher is better): the first that a run has is judged."""

LOST = 0.1  # share of the whole improvement that may be lost again
WORSE = 0.02  # share by which a loss may be above its lowest value
WAITING = 20.0  # percent of the time

NOTHING_TO_LEARN = (
    "In every group all answers had the same reward, so there was nothing to learn: compare answers of the model with "
    "what grpo.rewards expects."
)


def nothing_to_learn(flat_groups: Sequence[float]) -> bool:
    """Return whether no group of a run ever had two rewards. flat_groups: the metric of that name."""
    return bool(flat_groups) and min(flat_groups) >= 1


@dataclass(frozen=True)
class Health:
    """`good` is False if something should be looked at; `words` are sentences."""

    good: bool
    words: str


def judge_health(points: Callable[[str], Points]) -> Health | None:
    """Judge a run by its metrics; None if it has reported nothing yet. `points` returns those of one metric."""
    trend = _trend(points)
    troubles = _troubles(points)
    if trend is None:
        return Health(False, " ".join(troubles)) if troubles else None
    good, words = trend
    return Health(good and not troubles, " ".join([words, *troubles]))


def _trend(points: Callable[[str], Points]) -> tuple[bool, str] | None:
    for metric, name, higher in RESULTS:
        found = points(metric)
        if len(found) > 1:
            return _held_out(name, found, higher)
    sampled = points("reward")
    if len(sampled) > 1:
        first, last = sampled[0][1], sampled[-1][1]
        words = (
            f"The reward of sampled answers was {first:.3g} at the start and is {last:.3g}; nothing is validated yet."
        )
        return last > first, words
    losses = points("loss_smooth")
    if len(losses) < 2:
        return None
    first, last = losses[0][1], losses[-1][1]
    if last > first:
        return False, f"The training loss has risen from {first:.4g} to {last:.4g}."
    return True, f"The training loss fell from {first:.4g} to {last:.4g}; nothing is validated yet."


def _held_out(name: str, found: Points, higher: bool) -> tuple[bool, str]:
    sign = -1.0 if higher else 1.0
    first, (step, last) = found[0][1], found[-1]
    at, best = min(found, key=lambda point: sign * point[1])
    gained, lost = sign * (first - best), sign * (last - best)
    extreme = "highest" if higher else "lowest"
    if gained <= 0:
        return False, f"No improvement yet: {name} was {first:.4g} at the start and is {last:.4g}."
    if lost > LOST * gained or (not higher and lost > WORSE * abs(best)):
        return False, f"Worse since step {at:.0f}: {name} is {last:.4g}, {extreme} {best:.4g}. The model may overfit."
    if lost > 0:
        return True, f"Level: {name} is {last:.4g}, {extreme} {best:.4g} at step {at:.0f}."
    return True, f"Improving: {name} went from {first:.4g} to {last:.4g}, its {extreme} value, at step {step:.0f}."


def _troubles(points: Callable[[str], Points]) -> list[str]:
    found = []
    if skipped := _newest(points("skipped_steps")):
        found.append(f"{counted(skipped, 'step')} skipped: the gradient was NaN or infinite.")
    if rollbacks := _newest(points("rollbacks")):
        found.append(f"Rolled back to a checkpoint {counted(rollbacks, 'time')}.")
    if nothing_to_learn([value for _, value in points("flat_groups")]):
        found.append(NOTHING_TO_LEARN)
    waits = [value for _, value in points("time/data_wait_pct")]
    if len(waits) > 1 and (typical := statistics.median(waits)) > WAITING:
        found.append(f"{typical:.0f}% of the time is spent waiting for data.")
    return found


def _newest(found: Points) -> int:
    return int(found[-1][1]) if found else 0
