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
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, dotted
from bessemer.config.bounded import parse_json, read_json
from bessemer.config.recipes import flat_values, parse_saved
from bessemer.config.recipes import saved_tree as tree_of
from bessemer.config.values import plain
from bessemer.errors import InputError, StorageError
from bessemer.job import CheckpointManager, RunDirectory, Snapshot, atomic_write
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.training import stages
from bessemer.training.context import RunContext
from bessemer.training.feed import fetch
from bessemer.training.persistence import frozen, reference
from bessemer.training.persistence.mirror import Mirror
from bessemer.training.setup.horizon import HORIZONS, REPORTS
from bessemer.training.setup.initial_weights import read_weights
from bessemer.training.setup.schema import PATHS
from bessemer.training.stages import Stage
from bessemer.training.state import LoopState, RunState, TrainState, added_fields

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


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
    if REPORTS in config and config.provenance[REPORTS].is_derived:
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


# --- rollback ----------------------------------------------------------------------------------------------
# Return to the last regular checkpoint before a poisoned step, and continue with the batch after the poisoned one:
#
#     restored step r, poisoned step s, offset o = data_step − step:    data position r + o  →  s + o
#
# The target must not depend on chance, or a run that was stopped on its way would become another one: only
# checkpoints at multiples of logging.checkpoint_interval and at branch points count, not those that a stop or a
# callback asked for; without one it is step 0. Nothing is recorded: a run killed before its next checkpoint meets
# the same spike again and decides the same.


def rollback_target(
    manager: Checkpoints, branches: Sequence[Branch], interval: int, poisoned: int, say: Callable[[str], None]
) -> int:
    """Return the newest regular checkpoint before step `poisoned` whose every byte verifies; 0: the initial state."""
    for step in reversed(manager.committed()):
        branched = any(branch.step == step for branch in branches)
        if step >= poisoned or (step != regular_step(interval, step) and not branched):
            continue
        if not (problems := manager.verify(step)):
            return step
        say(f"warning: checkpoint {step} is damaged and not used: {'; '.join(problems[:3])}")
    return 0


def regular_step(interval: int, step: int) -> int | None:
    """Return the newest step up to `step` at which a regular checkpoint is taken, or None."""
    return step - step % interval or None if interval > 0 else None


def protect_target(context: RunContext, manager: Checkpoints, step: int) -> None:
    """Exempt the checkpoint that a rollback would return to from retention."""
    if context.guard.rolls_back:
        manager.protect(regular_step(context.logging.checkpoint_interval, step), "rollback")


# Saving and restoring a run: state tree, loop state, configuration, tokenizer, the fingerprint of the data.


VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SAVED = ("step", "data_step", "params", "opt_state", "ema", "guard")
META_KEYS = ("tokenizer_hash", "data_fingerprint", "versions", "topology")
"""What `check_same_run` asks of meta.json."""


def open_checkpoints(context: RunContext, mirror: Mirror | None, planned: Sequence[Stage]) -> Checkpoints:
    manager = Checkpoints(
        context.directory.checkpoints,
        keep_last=context.logging.keep_last,
        keep_every=context.logging.keep_every,
        process_zero=context.topology.is_process_zero,
        on_commit=None if mirror is None else mirror.push,
    )
    protect_stages(manager, planned)
    return manager


def protect_stages(manager: Checkpoints, planned: Sequence[Stage]) -> None:
    """Exempt the checkpoint at the end of every stage from retention."""
    for stage in planned[:-1]:
        manager.protect(stage.end, stage.name)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def saved_tree(state: Any) -> dict[str, Any]:
    """The arrays of a state (what is static is rebuilt from the configuration)."""
    names = (*SAVED, *added_fields(type(state)))
    return {name: getattr(state, name) for name in names if getattr(state, name) is not None}


def meta(trainer: BaseTrainer, step: int) -> dict[str, Any]:
    """Facts that say which run this is, and on what its bits rest."""
    return {
        "step": step,
        "tokens": step * trainer.tokens_per_step,
        "epoch": trainer.data.plan.epoch(step + trainer.data_offset),
        "iteration": step * trainer.functions.accumulate_steps,
        "timestamp": time.time(),
        "versions": versions(),
        "config_hash": hashlib.sha256(trainer.config.to_yaml().encode()).hexdigest(),
        "tokenizer_hash": trainer.tokenizer.hash if trainer.tokenizer else None,
        "data_fingerprint": trainer.data.plan.fingerprint,
        "topology": trainer.topology.describe(),
        **untrained_identity(trainer.context, trainer.functions.abstract_state, trainer.stages, step),
        "branches": [branch.as_json() for branch in trainer.branches],
        "val_loss": trainer.loop_state.best_val_loss if trainer.loop_state.best_step == step else None,
    }


def untrained_identity(
    context: RunContext, abstract: TrainState, planned: Sequence[Stage], step: int
) -> dict[str, Any]:
    """Return which reference and frozen weights a state of `step` belongs with."""
    with_weights = abstract.reference is not None
    return {
        "reference": reference.weights_identity(context, planned, step)
        if with_weights
        else reference.logps_identity(context.directory),
        "frozen": None if abstract.frozen is None else frozen.frozen_identity(context),
    }


def snapshot(trainer: BaseTrainer) -> Snapshot:
    """Everything a checkpoint holds, as of the current step."""
    files = {"loop.json": trainer.loop_state.to_json(), "config.yaml": trainer.config.to_yaml()}
    if trainer.tokenizer is not None:
        files |= trainer.tokenizer.files
    if (allocation := getattr(trainer.model, "allocation", None)) is not None:
        files[ALLOCATION] = allocation.to_json()
    return Snapshot(trainer.step, saved_tree(trainer.state), files, meta(trainer, trainer.step))


def protect_best(context: RunContext, run: RunState, manager: Checkpoints) -> None:
    """Before a save: exempt the best validated checkpoint, and the target of a rollback, from retention."""
    if run.loop_state.best_step == run.step:
        run.loop_state.best_checkpoint = run.step
    manager.protect(run.loop_state.best_checkpoint)
    protect_target(context, manager, run.step)


def accept(trainer: BaseTrainer, tree: Any, step: int, files: CheckpointManager) -> None:
    """Go on from a restored tree; `files` holds what was saved beside it."""
    trainer.use_stage(stages.current(trainer.stages, step))
    abstract = trainer.functions.abstract_state
    against = reference.restore(trainer.context, abstract.reference, trainer.stages, step)
    trainer.state = abstract.replace(
        **tree, reference=against, frozen=frozen.restore_frozen(trainer.context, abstract.frozen)
    )
    trainer.run_state.loop_state = LoopState.from_json(files.read(step, "loop.json"))
    manager = trainer.checkpoint_manager
    manager.protect(trainer.loop_state.best_checkpoint)
    for branch in trainer.branches:
        manager.protect(branch.step, f"branch-{branch.step}")
        if branch.step == step:
            trainer.loop_state.branch_off(other_data=branch.data is not None)
    trainer.step = step
    protect_target(trainer.context, manager, step)
    trainer.run_state.data_offset = int(fetch(trainer.state.data_step)) - step


def check_same_run(trainer: BaseTrainer, step: int, files: CheckpointManager) -> None:
    """Other data or another tokenizer is an error; another machine is one line, as only rounding changes."""
    saved = parse_json(files.read(step, "meta.json"))
    trainer.use_stage(stages.current(trainer.stages, step))
    current = meta(trainer, step)
    changes = [
        f"{what} ({_short(saved[name])} then, {_short(current[name])} now)"
        for name, what in (("tokenizer_hash", "tokenizer"), ("data_fingerprint", "training data"))
        if saved[name] != current[name]
    ]
    edited = edited_since(trainer, step, files) if trainer.continues else {}
    for name, values in edited.items():
        if (
            trainer.change is not None and name in trainer.change
        ):  # given now: a change from what was trained with
            trainer.change[name]["from"] = values["from"]
    branch_off(trainer, step, saved)
    refuse_edits(trainer, step, edited)
    tokenizer_changed = saved["tokenizer_hash"] != current["tokenizer_hash"]
    explained = not tokenizer_changed and any(
        branch.step == step and branch.data is not None for branch in trainer.branches
    )
    if changes and not explained and not trainer.settings.allow_data_change:
        raise InputError(
            f"the checkpoint at step {saved['step']} of {trainer.run_directory.path} was made with another "
            f"{' and another '.join(changes)}, so continuing would not be the same run. Restore the data (a tokenizer "
            "train:N is trained on it) or the tokenizer, or start a new run from these weights with "
            f"init={trainer.run_directory.path}, or go on with the new data with --change, which records a branch "
            "point in the run (with another tokenizer, too: training.allow_data_change=true)."
        )
    for name, use in (("reference", "trained against"), ("frozen", "trained with")):
        if saved.get(name) != current[name]:
            raise StorageError(
                f"the {name} weights of {trainer.run_directory.path} are not those that checkpoint {step} was {use}: "
                "the folder reference/ was changed or deleted. Put it back from a copy."
            )
    if changes:
        trainer.data_change = f"from step {step} on other data: {'; '.join(changes)}"
        trainer.say(f"note: {trainer.data_change}; not the same run any more")
    differences = machine_differences(saved, current)
    if differences:
        trainer.say(
            "note: bits can differ from the uninterrupted run, which is the same to rounding: "
            + "; ".join(differences)
        )


def edited_since(trainer: BaseTrainer, step: int, files: CheckpointManager) -> Changes:
    """The settings that are not those which the run's checkpoint of `step` was made with."""
    copy = trainer.checkpoint_manager.path(step) / "config.yaml"
    if files is not trainer.checkpoint_manager or not copy.is_file():
        return {}
    saved = flat_values(tree_of(copy))
    current = flat_values(parse_saved(trainer.config.to_yaml(), "this run"))
    return edited_settings({key: value for key, value in saved.items() if key in trainer.config}, current)


def refuse_edits(trainer: BaseTrainer, step: int, edited: Changes) -> None:
    """Raise InputError for settings of config.yaml that changed although no branch point says so."""
    unexplained = {n: v for n, v in edited.items() if n not in recorded_changes(trainer.branches, step)}
    if not unexplained:
        return
    directory, (first, values) = trainer.run_directory, next(iter(unexplained.items()))
    shown = "; ".join(f"{name} is {v['to']} and was {v['from']}" for name, v in list(unexplained.items())[:5])
    more = f" and {len(unexplained) - 5} more" if len(unexplained) > 5 else ""
    copy = trainer.checkpoint_manager.path(step) / "config.yaml"
    raise InputError(
        f"{directory.config} is not what the checkpoint of step {step} was made with: {shown}{more}. It was edited or "
        "damaged since, and continuing with it would be another run. Put the original back: "
        f"cp {copy} {directory.config}. To train on with the new value, "
        f"give it on the command line: bessemer resume {directory.word} {first}={values['to']} --change"
    )


def branch_off(trainer: BaseTrainer, step: int, saved: Mapping[str, Any]) -> None:
    """Set the branch points of a run that continues from `step`: those of the checkpoint, whose meta.json is `saved`,
    those that began there before a first checkpoint was committed, and the one that `--change` begins now."""
    known = known_branches(saved)
    pending, changes = branches_at(trainer.run_directory, step, known, trainer.change)
    trainer.branches = [*known, *pending]
    past = saved.get("data_fingerprint")
    data = {"from": past, "to": trainer.data.plan.fingerprint} if past else None
    if data is not None and (data["from"] == data["to"] or any(branch.data == data for branch in pending)):
        data = None
    if trainer.change is None or not (changes or data):
        return
    trainer.branches.append(Branch(step, changes, data, now()))
    if step >= trainer.steps:
        raise InputError(
            f"the checkpoint is of step {step} and the run would end at step {trainer.steps}: give a longer horizon "
            f"(training.steps={2 * step}), or an earlier checkpoint with --step."
        )
    check_past_stages(trainer, step)
    trainer.say(f"branch     from step {step} on: {trainer.branches[-1].describe()} (--change)")


def check_past_stages(trainer: BaseTrainer, step: int) -> None:
    """Stages that are over stay as they were."""
    try:
        before = read_json(trainer.run_directory.stages)
        ends = [stage["end"] for stage in before if stage["end"] <= step]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if ends != [stage.end for stage in trainer.stages if stage.end <= step]:
        raise InputError(
            f"the stages that ended up to step {step} would end elsewhere: leave their numbers in training.tokens as "
            "they are."
        )


def machine_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What bits rest on (versions, mesh, cores) and is not as it was when meta.json was written."""
    words = [
        f"{name} {saved[part].get(name)} then, {value} now"
        for part in ("versions", "topology")
        for name, value in current[part].items()
        if saved[part].get(name) != value
    ]
    return list(dict.fromkeys(words))  # jax is in both parts


def _short(value: Any) -> str:
    return str(value)[:12]


def initial_params(trainer: BaseTrainer) -> Any:
    """The weights of the pinned `init`."""
    assert trainer.settings.init is not None
    path, boxed = Path(trainer.settings.init), trainer.model_parts.boxed
    taken = read_weights(path, trainer.checkpoint_manager, trainer.model, boxed, trainer.topology)
    new = [name for name in boxed if name not in taken]
    trainer.say(f"weights    from {path}{'; new: ' + ', '.join(new) if new else ''}")
    return taken
