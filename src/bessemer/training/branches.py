"""Branch points: steps after which a run went on with other settings or data (`bessemer resume --change`).

    RUN/branches.json    [{"step": 100, "time": "2026-11-16T16:20:00Z",
                           "changes": {"training.steps": {"from": 100, "to": 200}},
                           "data": {"from": FINGERPRINT, "to": FINGERPRINT}}]        data: only where it changed

Every checkpoint after a branch point holds the list in its meta.json, so a checkpoint says under which settings each
part of its run was made. A branch whose first checkpoint is not committed yet is in the file alone; there it explains
why config.yaml differs from the checkpoint of that step.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.config import Config, dotted
from bessemer.config.bounded import read_json
from bessemer.config.values import plain
from bessemer.errors import InputError
from bessemer.job import RunDirectory, atomic_write
from bessemer.training.horizon import HORIZONS, REPORTS
from bessemer.training.pinning import PATHS

RESUMABLE = ("logging/", "topology/", "eval/", "training/per_device_batch_size", "training/time_limit")
"""Settings that cannot change the run, so `resume` accepts them."""

SELECTORS = ("job", "objective", "model/family", "optimization/name")
"""Of the settings below, those that decide which other settings there are."""

FIXED = (
    *SELECTORS,
    "init",
    "phases",
    "model/",
    "lora/",
    "distill/",
    "architecture/block_size",
    "training/batch_size",
    "training/batch_tokens",
    "training/freeze",
    "data/tokenizer",
    "grpo/group_size",
    "grpo/num_iterations",
    "grpo/mini_batches",
)
"""Settings that the saved state, its token count or its rollout depend on: no branch can change them."""

UNCHECKED = (*RESUMABLE, *PATHS, "architecture/attention", "provenance")
"""Settings in which config.yaml may differ from a checkpoint's copy: files that moved (what is trained on is compared
by its fingerprint), and the attention kernel, which topology.deterministic chooses."""

Changes = dict[str, dict[str, Any]]
"""Setting → {"from": value, "to": value}."""


@dataclass(frozen=True)
class Branch:
    """The run goes on from `step` with `changes`. `data`: fingerprints, where the training data is not the same."""

    step: int
    changes: Changes = field(default_factory=dict)
    data: dict[str, str] | None = None
    time: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def describe(self) -> str:
        """training.steps 100 → 200; other training data."""
        words = [f"{name} {change['from']} → {change['to']}" for name, change in self.changes.items()]
        if self.data is not None:
            words.append("other training data")
        return "; ".join(words)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def changes_between(before: Config, after: Config) -> Changes:
    """The settings that differ."""
    return {
        dotted(key): {"from": plain(before.get(key)), "to": plain(value)}
        for key, value in after.values.items()
        if before.get(key) != value
    }


def edited_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Changes:
    """The settings of a checkpoint (`saved`, by section/name) that have another value now, though nobody may change
    them without a branch point."""
    return {
        dotted(key): {"from": value, "to": current.get(key)}
        for key, value in saved.items()
        if not key.startswith(UNCHECKED) and current.get(key) != value
    }


def recorded_changes(branches: Iterable[Branch], step: int) -> set[str]:
    """Names of the settings that change at the branch points of `step`."""
    return {name for branch in branches if branch.step == step for name in branch.changes}


def check_changeable(keys: Iterable[str]) -> None:
    """Raise InputError for a setting that not even a branch can change."""
    for key in keys:
        if key.startswith(FIXED):
            raise InputError(
                f"{dotted(key)} cannot be changed on resume, not even with --change: the saved state depends on it. "
                "Start a new run with init=RUN."
            )


def replace_horizon(config: Config, changed: Sequence[str]) -> None:
    """Drop the horizon that the run had, where another kind of horizon is given now: a run has one."""
    given = [key for key in changed if key in HORIZONS and config[key] is not None]
    if not given:
        return
    if "training/tokens" not in given and len(config["training/tokens"] or ()) > 1:
        raise InputError(
            f"{dotted(given[0])} cannot be changed in a run with several stages; give training.tokens=[…] with one "
            "number per stage."
        )
    for key in HORIZONS:
        if key not in given and config[key] is not None:
            config.set(key, None, f"replaced by {dotted(given[0])} (--change)")
    if config.provenance.get(REPORTS, "").startswith("chosen"):
        config.set(REPORTS, None, "the horizon changed")  # derived again


def read_branches(directory: RunDirectory) -> list[Branch]:
    """The branch points of a run, oldest first."""
    path = directory.branches
    try:
        return [Branch(**entry) for entry in read_json(path)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}). Restore it from a copy; if there is none, delete it: every checkpoint "
            "made after a branch point holds the list too."
        ) from error


def write_branches(directory: RunDirectory, branches: Sequence[Branch]) -> None:
    if branches or directory.branches.is_file():
        text = json.dumps([branch.as_json() for branch in branches], indent=1, ensure_ascii=False)
        atomic_write(directory.branches, text + "\n", sync=True)


def known_branches(meta: Mapping[str, Any]) -> list[Branch]:
    """The branch points in the past of a checkpoint."""
    return [Branch(**entry) for entry in meta.get("branches") or ()]


def branches_at(
    directory: RunDirectory, step: int, known: Sequence[Branch], change: Changes | None
) -> tuple[list[Branch], Changes]:
    """Return (branches that begin at the checkpoint of `step` and are not in it yet, new changes to record).

    `change` is what `--change` asks for; None: nothing. A checkpoint from before a later branch point does not go with
    the settings of config.yaml, so continuing from it is a change too.
    """
    recorded = [branch for branch in read_branches(directory) if branch not in known]
    pending = [branch for branch in recorded if branch.step == step]
    later = [branch for branch in recorded if branch.step > step]
    if later and change is None:
        raise InputError(
            f"the checkpoint of step {step} is from before the branch point at step {later[0].step} "
            f"({later[0].describe()}). To continue from it with the settings as they are now, add --change."
        )
    undone: Changes = {}
    for branch in later:
        for name, values in branch.changes.items():
            undone.setdefault(name, dict(values))["to"] = values["to"]
    for name, values in (change or {}).items():
        undone.setdefault(name, dict(values))["to"] = values["to"]
    return pending, {name: values for name, values in undone.items() if values["from"] != values["to"]}
