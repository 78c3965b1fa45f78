"""grpo.staleness=1: completions are sampled one rollout ahead, so that rewards are computed while the device works.

Before the first step of rollout k, with θ_k the parameters of that moment, everything happens in this order:

    1  sample the completions of rollout k + 1 from θ_k       meanwhile a thread computes the rewards of rollout k
    2  wait for the rewards of rollout k, and begin those of rollout k + 1 in the thread
    3  score rollout k with θ_k, and take its optimizer steps  meanwhile the thread computes on

So every program and every message between processes is sent by the loop's own thread, in an order that depends on
nothing but the step; the thread only calls the rewards, one rollout at a time, and only on process 0. Rollout 0 is
sampled from θ_0 right before step 1. Sampling is over before the next step is dispatched, so no copy of the weights is
needed, and a checkpoint holds completions, their log-probabilities under θ_k, and rewards: it waits for the latter.

Rollout k was drawn by μ, the sampler with θ_{k−1}; π_old is a training pass with θ_k. The importance weights
π_old / μ correct for the difference, which is that of the weights now, besides rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.rows.rows import Fields
from bessemer.errors import InputError, StorageError
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.rl.prompts import Chosen
from bessemer.rl.rollout import TOKEN_FIELDS, GRPOTrainerConfig, Rollout, check_rollout
from bessemer.rl.sampler import Laps, Sampler, told
from bessemer.storage.files import ROLLOUT_AHEAD
from bessemer.topology import process_index

FILE = ROLLOUT_AHEAD.name
PLACES = ("source", "prompt")


def check_staleness(settings: GRPOTrainerConfig, policy: SampledSettings) -> None:
    """Raise InputError if grpo.staleness cannot be used as configured."""
    if settings.staleness == 0:
        return
    if not isinstance(policy, GrpoSettings):
        why, remedy = "overlaps rewards with training, and a teacher gives none", "leave it out"
    elif policy.offline != "no":
        why, remedy = f"is about sampling, and grpo.offline={policy.offline} trains on stored completions", "leave it"
    elif policy.exact:
        why = "samples from older weights than those trained, and grpo.exact promises that they are the same"
        remedy = "use one of them"
    elif settings.resample:
        why = "draws a rollout before the rewards of the one before are known, and grpo.resample samples again by them"
        remedy = "use one of them"
    elif settings.environment is not None:
        why = "overlaps grpo.rewards with training; an environment answers while completions are sampled"
        remedy = "grpo.environment_overlap hides its work behind decoding"
    else:
        return
    raise InputError(f"grpo.staleness=1 {why}: {remedy}.")


def check_ahead(rollout: Rollout, path: Path, count: int, group_size: int, fields: Fields, model: Any) -> None:
    """Raise StorageError unless a rollout that was read has rows, rewards, log-probabilities and prompts for `count`
    rows of this run."""
    unscored = {name: field for name, field in fields.items() if name in rollout.rows or name in TOKEN_FIELDS}
    check_rollout(rollout, path, count, unscored, model)
    block = rollout.rows["target_ids"].shape
    wanted = {name: (rollout.drawn.get(name), block, "f") for name in ("model", "policy")}
    wanted |= {name: (rollout.drawn.get(name), (count // group_size,), "i") for name in PLACES}
    wanted |= {name: (rollout.rewards.get(name), (count,), "fi") for name in {"reward", *rollout.rewards}}
    for name, (array, shape, kind) in wanted.items():
        if array is None or array.shape != shape or array.dtype.kind not in kind or not np.isfinite(array).all():
            found = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise StorageError(f"the rollout {path}: '{name}' is {found}; this run has finite numbers {shape}.")
    if rollout.step is None:
        raise StorageError(f"the rollout {path} does not say which step sampled it.")


class Background:
    """A call in a daemon thread, which no error of the run waits for."""

    def __init__(self, call: Callable[[], Any]):
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._call, self.seconds = call, 0.0
        threading.Thread(target=self._run, name="bessemer-rewards", daemon=True).start()

    def _run(self) -> None:
        begun, found, raised = time.monotonic(), None, None
        try:
            found = self._call()
        except BaseException as error:  # noqa: BLE001 -- raised by `result`
            raised = error
        self.seconds = time.monotonic() - begun
        self._outcome.put((found, raised))

    def result(self) -> Any:
        """Wait for the call and return what it returned, or raise what it raised. May be asked for once."""
        found, raised = self._outcome.get()
        if raised is not None:
            raise raised
        return found


@dataclasses.dataclass
class Sampled:
    """A rollout that is neither rewarded nor scored. After a restart its rewards are known and the rest is gone."""

    rollout: Rollout
    chosen: Chosen = dataclasses.field(default_factory=list)
    samples: list[Any] = dataclasses.field(default_factory=list)
    call: Background | None = None  # of the rewards, on process 0


class AheadOfTraining:
    """Makes the rollouts of a run with grpo.staleness=1. `next`: the rollout sampled ahead.

    sampler: returns the run's, which is created after a checkpoint is read.
    """

    def __init__(self, sampler: Callable[[], Sampler]):
        self._sampler = sampler
        self.next: Sampled | None = None

    @property
    def sampler(self) -> Sampler:
        return self._sampler()

    def rollout(self, number: int, step: int, another: bool, clock: Laps) -> Rollout:
        """Return rollout `number`, to be trained on from `step` on. another: whether a rollout follows it. clock: runs.

        The seconds in its metrics are those that passed here: of sampling (mostly of the next rollout), of waiting for
        rewards, of scoring. time/reward_overlap_s is how long its rewards took beside other work.
        """
        now, self.next = self.next, None
        if now is None or now.rollout.number != number:  # the first one, or after a rollback
            now = self.sample(number, step)
            self.begin(now)
        follows = self.sample(number + 1, step) if another else None
        clock.end("time/rollout_s")
        took = self.settle(now)
        self.sampler.measure(number, self.chosen(now.rollout), now.rollout.rewards["reward"])
        clock.end("time/reward_s")
        if follows is not None:
            self.begin(follows)
        self.next = follows
        made = self.sampler.scored(now.rollout, now.samples, clock)
        waited = made.metrics["time/reward_s"]
        assert now.rollout.step is not None
        made.metrics |= {"staleness": float(step - now.rollout.step), "time/reward_overlap_s": max(0.0, took - waited)}
        return made

    def sample(self, number: int, step: int) -> Sampled:
        """Draw the completions of rollout `number` from the live parameters, which are those of `step`."""
        sampler = self.sampler
        counted, chosen = sampler.counted, sampler.plan.prompts(number)
        _, samples, rows = sampler.first_draw(number, chosen)
        made = dataclasses.replace(sampler.unscored(number, samples, rows, counted), step=step)
        made.drawn["source"] = np.array([source.number for source, _ in chosen])
        made.drawn["prompt"] = np.array([place for _, place in chosen])
        return Sampled(made, chosen, samples)

    def chosen(self, rollout: Rollout) -> Chosen:
        """Return the prompts of a rollout sampled ahead."""
        sources = self.sampler.plan.sources
        pairs = list(zip(*(rollout.drawn[name].tolist() for name in PLACES), strict=True))
        for source, place in pairs:
            if not (0 <= source < len(sources) and 0 <= place < len(sources[source])):
                raise StorageError(f"the rollout sampled ahead names prompt {place} of source {source}: there is none.")
        return [(sources[source], place) for source, place in pairs]

    def begin(self, one: Sampled) -> None:
        """Begin to compute the rewards, in a thread of process 0."""
        if process_index() == 0:
            size = self.sampler.settings.group_size
            one.call = Background(lambda: self.sampler.rewards_text(one.chosen, one.samples, size))

    def settle(self, one: Sampled | None = None) -> float:
        """Wait for the rewards of a rollout (default: the one sampled ahead) and return the seconds they took, 0 if
        they were known. Every process calls it."""
        one = self.next if one is None else one
        if one is None or one.rollout.rewards:
            return 0.0
        call, one.call = one.call, None
        total, each = told(lambda: "" if call is None else call.result())
        lengths = [sample.length for sample in one.samples]
        one.rollout.rewards = self.sampler.penalized(total, each, lengths)
        return 0.0 if call is None else call.seconds

    # --- checkpoints ---

    def files(self) -> dict[str, bytes]:
        """Return what a checkpoint holds: the rollout sampled ahead, with its rewards."""
        self.settle()
        return {} if self.next is None else {FILE: self.next.rollout.to_bytes()}

    def load(self, folder: Path) -> None:
        """Continue with what a checkpoint holds."""
        self.drop()
        path = folder / FILE
        self.next = Sampled(Rollout.load(path)) if path.is_file() else None

    def drop(self) -> None:
        """Forget the rollout sampled ahead, as a rollback does, once its rewards have returned or failed: rewards are
        user code, and one call at a time is made."""
        one, self.next = self.next, None
        if one is not None and one.call is not None:
            with contextlib.suppress(Exception):
                one.call.result()

    @property
    def waiting(self) -> str:
        """Which rollout was sampled ahead, for comparing processes."""
        return "none" if self.next is None else f"rollout {self.next.rollout.number}"
