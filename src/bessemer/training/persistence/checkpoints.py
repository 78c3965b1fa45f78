"""Save and restore a run, check that a checkpoint belongs to it, roll it back, and record its branch points.

A branch point is a step after which a run went on with other settings or data (`bessemer resume --change`):

    RUN/branches.json    [{"step": 100, "time": "2026-11-16T16:20:00Z",
                           "changes": {"training.steps": {"from": 100, "to": 200}},
                           "data": {"from": FINGERPRINT, "to": FINGERPRINT}}]        data: only where it changed

Every checkpoint after a branch point holds the list in its meta.json. A branch whose first checkpoint is not committed
yet is in the file alone; there it explains why config.yaml differs from the checkpoint of that step.
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
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, dotted
from bessemer.config.aliases import current_name
from bessemer.config.bounded import parse_json, read_json
from bessemer.config.declare import slashed
from bessemer.config.recipes import flat_values, parse_saved
from bessemer.config.recipes import saved_tree as tree_of
from bessemer.config.values import plain
from bessemer.errors import InputError, StorageError
from bessemer.generate.base import BaseRecord
from bessemer.generate.load import check_finite, located
from bessemer.job import CheckpointManager, RunDirectory, Snapshot
from bessemer.models.lookup import allocation_of
from bessemer.storage.files import ALLOCATION, atomic_write
from bessemer.storage.weights import place
from bessemer.training.feed import fetch
from bessemer.training.persistence import frozen, reference
from bessemer.training.persistence.mirror import Mirror
from bessemer.training.settings import RunContext
from bessemer.training.setup.compiled import Functions, RunPlan
from bessemer.training.setup.horizon import HORIZONS, REPORTS
from bessemer.training.setup.initial_weights import adapter_arrays, read_weights
from bessemer.training.setup.model import ModelParts
from bessemer.training.setup.schema import PATHS
from bessemer.training.stages import Stage
from bessemer.training.state import LoopState, RunState, TrainState, added_fields

RESUMABLE = ("logging/", "topology/", "eval/", "training/per_device_batch_size", "training/time_limit")
"""Settings that cannot change the run, so `resume` accepts them."""

SELECTORS = ("job", "objective", "model/family", "optimization/name")
"""Those of the settings below that decide which other settings exist."""

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
    "training/param_dtype",
    "optimization/state_dtype",
    "data/tokenizer",
    "grpo/group_size",
    "grpo/num_iterations",
    "grpo/mini_batches",
)
"""Settings that the saved state, its token count or its rollout depend on: no branch can change them."""

SWITCHES = ("training/ema", "training/tied_head", "grpo/entropy_target")
"""Settings that add arrays to the saved state: a branch can change their value, not switch them on or off."""

UNCHECKED = (*RESUMABLE, *PATHS, "architecture/attention", "provenance")
"""Settings in which config.yaml may differ from a checkpoint's copy: files that moved (what is trained on is compared
by its fingerprint), and the attention kernel, which topology.deterministic chooses."""

Changes = dict[str, dict[str, Any]]
"""Setting → {"from": value, "to": value}."""


@dataclass(frozen=True)
class Branch:
    """The run continues from `step` with `changes`. `data`: fingerprints, if the training data changed."""

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


@dataclass(frozen=True)
class Lineage:
    """How this start of a run follows from the ones before.

    continues: it is not the first. change: what `resume --change` asks for; None: nothing may change.
    data_change: describes training data that is not the checkpoint's; empty: it is the same.
    """

    continues: bool = False
    change: Changes | None = None
    branches: tuple[Branch, ...] = ()
    data_change: str = ""


def changes_between(before: Config, after: Config) -> Changes:
    """Return the settings that differ."""
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
    """Return the names of settings that change at the branch points of `step`."""
    names = (name for branch in branches if branch.step == step for name in branch.changes)
    return {dotted(current_name(slashed(name))) for name in names}


def check_changeable(keys: Iterable[str]) -> None:
    """Raise InputError for a setting that not even a branch can change."""
    for key in keys:
        if key.startswith(FIXED):
            raise InputError(
                f"{dotted(key)} cannot be changed on resume, not even with --change: the saved state depends on it. "
                "Start a new run with init=RUN."
            )


def check_switches(before: Config, after: Config) -> None:
    """Raise InputError for a setting that adds arrays to the state on one side only."""
    for key in SWITCHES:
        if bool(after.get(key)) != bool(before.get(key)):
            raise InputError(
                f"{dotted(key)} cannot be switched {'on' if after.get(key) else 'off'} by a resume, not even with "
                "--change: it is part of the saved state. Start a new run with init=RUN."
            )


def replace_horizon(config: Config, changed: Sequence[str]) -> None:
    """Drop the run's previous horizon if `changed` sets another kind: a run has one."""
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
    """Return the branch points of a run, oldest first."""
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
# Return to the last regular checkpoint before a poisoned step, and continue with the batch after the poisoned one.
# The target must be reproducible: only checkpoints at multiples of logging.checkpoint_interval and at branch points
# count, not those that a stop or a callback asked for. Nothing is recorded: a run killed before its next checkpoint
# meets the same spike again and decides the same.


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


# --- saving and restoring ----------------------------------------------------------------------------------
VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SAVED = ("step", "data_step", "params", "opt_state", "ema", "guard", "tied")
META_KEYS = ("tokenizer_hash", "data_fingerprint", "versions", "topology")
"""Keys of meta.json that `check_same_run` compares."""


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
    """Exempt the checkpoints between stages from retention."""
    for stage in planned[:-1]:
        manager.protect(stage.end, stage.name)


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def saved_tree(state: Any) -> dict[str, Any]:
    """Return the arrays of a state (what is static is rebuilt from the configuration)."""
    names = (*SAVED, *added_fields(type(state)))
    return {name: getattr(state, name) for name in names if getattr(state, name) is not None}


def meta(plan: RunPlan, run: RunState, functions: Functions, branches: Sequence[Branch], step: int) -> dict[str, Any]:
    """meta.json of a checkpoint of `step`: which run this is, and what its bits depend on."""
    context, tokenizer, abstract = plan.context, plan.model.tokenizer, functions.abstract_state
    if abstract.reference is None:
        compared = reference.logps_identity(context.directory)
    else:
        compared = reference.weights_identity(context, plan.stages, step)
    return {
        "step": step,
        "tokens": step * plan.tokens_per_step,
        "epoch": plan.data.plan.epoch(step + run.data_offset),
        "iteration": step * functions.accumulate_steps,
        "timestamp": time.time(),
        "versions": versions(),
        "config_hash": hashlib.sha256(context.config.to_yaml().encode()).hexdigest(),
        "tokenizer_hash": tokenizer.hash if tokenizer else None,
        "data_fingerprint": plan.data.plan.fingerprint,
        "topology": context.topology.describe(),
        "reference": compared,
        "frozen": None if abstract.frozen is None else frozen.frozen_identity(context),
        "branches": [branch.as_json() for branch in branches],
        "val_loss": run.loop_state.best_val_loss if run.loop_state.best_step == step else None,
    }


def asset_files(parts: ModelParts) -> dict[str, str]:
    """Return the tokenizer and the rows of lookup layers, by file name."""
    files = {} if parts.tokenizer is None else dict(parts.tokenizer.files)
    if (allocation := allocation_of(parts.model)) is not None:
        files[ALLOCATION.name] = allocation.to_json()
    return files


def snapshot(plan: RunPlan, run: RunState, about: dict[str, Any]) -> Snapshot:
    """Return everything that a checkpoint of the current step holds; `about`: its meta.json."""
    files = {"loop.json": run.loop_state.to_json(), "config.yaml": plan.context.config.to_yaml()}
    return Snapshot(run.step, saved_tree(run.state), files | asset_files(plan.model), about)


def protect_best(context: RunContext, run: RunState, manager: Checkpoints) -> None:
    """Exempt the best validated checkpoint, and the target of a rollback, from retention; called before a save."""
    if run.loop_state.best_step == run.step:
        run.loop_state.best_checkpoint = run.step
    manager.protect(run.loop_state.best_checkpoint)
    protect_target(context, manager, run.step)


def restore_state(plan: RunPlan, run: RunState, abstract: TrainState, tree: Any, step: int) -> None:
    """Set the train state to a restored `tree`, with the reference and frozen weights that belong to `step`."""
    held = reference.restore(plan.context, abstract.reference, plan.stages, step)
    kept, run.base = frozen.restore_frozen(plan.context, abstract.frozen)
    run.state = abstract.replace(**tree, reference=held, frozen=kept)


def continue_from(run: RunState, loop: str, step: int, branches: Sequence[Branch], manager: Checkpoints) -> None:
    """Set the host's state to that of `step`; `loop`: the checkpoint's loop.json. run.state is restored already."""
    run.loop_state = LoopState.from_json(loop)
    manager.protect(run.loop_state.best_checkpoint)
    for branch in branches:
        manager.protect(branch.step, f"branch-{branch.step}")
        if branch.step == step:
            run.loop_state.branch_off(other_data=branch.data is not None)
    run.step = step
    run.data_offset = int(fetch(run.state.data_step)) - step


def check_same_run(
    plan: RunPlan, lineage: Lineage, current: Mapping[str, Any], files: CheckpointManager, own: Checkpoints
) -> Lineage:
    """Return how a start from the checkpoint of current["step"] in `files` continues the run. Raise InputError for
    other data or another tokenizer; another machine is one line, as only rounding changes.

    current: what meta.json would hold now. own: the run's own checkpoints.
    """
    context, step = plan.context, current["step"]
    directory, say = context.directory, context.notes.say
    saved = parse_json(files.read(step, "meta.json"))
    changes = [
        f"{what} ({str(saved[name])[:12]} then, {str(current[name])[:12]} now)"
        for name, what in (("tokenizer_hash", "tokenizer"), ("data_fingerprint", "training data"))
        if saved[name] != current[name]
    ]
    copy = own.path(step) / "config.yaml"
    edited = edited_since(context.config, copy) if lineage.continues and files is own and copy.is_file() else {}
    if lineage.change is not None:  # given now: a change from what was trained with
        given = {
            name: {**values, "from": edited[name]["from"]} if name in edited else values
            for name, values in lineage.change.items()
        }
        lineage = dataclasses.replace(lineage, change=given)
    lineage = branch_off(plan, lineage, step, saved)
    refuse_edits(directory, copy, step, edited, recorded_changes(lineage.branches, step))
    other_data = any(branch.step == step and branch.data is not None for branch in lineage.branches)
    explained = other_data and saved["tokenizer_hash"] == current["tokenizer_hash"]
    if changes and not explained and not context.settings.allow_data_change:
        raise InputError(
            f"the checkpoint at step {saved['step']} of {directory.path} was made with another "
            f"{' and another '.join(changes)}, so continuing would not be the same run. Restore the data (a tokenizer "
            "train:N is trained on it) or the tokenizer, or start a new run from these weights with "
            f"init={directory.path}, or continue with the new data with --change, which records a branch "
            "point in the run (with another tokenizer, too: training.allow_data_change=true)."
        )
    for name, use in (("reference", "trained against"), ("frozen", "trained with")):
        if saved.get(name) != current[name]:
            raise StorageError(
                f"the {name} weights of {directory.path} are not those that checkpoint {step} was {use}: "
                "the folder reference/ was changed or deleted. Put it back from a copy."
            )
    if changes:
        lineage = dataclasses.replace(lineage, data_change=f"from step {step} on other data: {'; '.join(changes)}")
        say(f"note: {lineage.data_change}; not the same run any more")
    if differences := machine_differences(saved, current):
        say(
            "note: bits can differ from the uninterrupted run, which is the same to rounding: " + "; ".join(differences)
        )
    return lineage


def edited_since(config: Config, copy: Path) -> Changes:
    """Return the settings that are not those of `copy`, the checkpoint's config.yaml."""
    saved = flat_values(tree_of(copy))
    current = flat_values(parse_saved(config.to_yaml(), "this run"))
    return edited_settings({key: value for key, value in saved.items() if key in config}, current)


def refuse_edits(directory: RunDirectory, copy: Path, step: int, edited: Changes, recorded: set[str]) -> None:
    """Raise InputError for settings of config.yaml that changed although no branch point records it."""
    unexplained = {name: values for name, values in edited.items() if name not in recorded}
    if not unexplained:
        return
    first, values = next(iter(unexplained.items()))
    shown = "; ".join(f"{name} is {v['to']} and was {v['from']}" for name, v in list(unexplained.items())[:5])
    more = f" and {len(unexplained) - 5} more" if len(unexplained) > 5 else ""
    raise InputError(
        f"{directory.config} is not what the checkpoint of step {step} was made with: {shown}{more}. It was edited or "
        "damaged since, and continuing with it would be another run. Put the original back: "
        f"cp {copy} {directory.config}. To train on with the new value, "
        f"give it on the command line: bessemer resume {directory.word} {first}={values['to']} --change"
    )


def branch_off(plan: RunPlan, lineage: Lineage, step: int, saved: Mapping[str, Any]) -> Lineage:
    """Return the lineage with the branch points of a run that continues from `step`: those of the checkpoint, whose
    meta.json is `saved`, those that began there before a first checkpoint was committed, and the one that `--change`
    begins now."""
    known = [Branch(**entry) for entry in saved.get("branches") or ()]
    pending, changes = branches_at(plan.context.directory, step, known, lineage.change)
    branches = [*known, *pending]
    past = saved.get("data_fingerprint")
    data = {"from": past, "to": plan.data.plan.fingerprint} if past else None
    if data is not None and (data["from"] == data["to"] or any(branch.data == data for branch in pending)):
        data = None
    if lineage.change is not None and (changes or data):
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        branches.append(Branch(step, changes, data, now))
        if step >= plan.data.steps:
            raise InputError(
                f"the checkpoint is of step {step} and the run would end at step {plan.data.steps}: give a longer "
                f"horizon (training.steps={2 * step}), or an earlier checkpoint with --step."
            )
        check_past_stages(plan, step)
        plan.context.notes.say(f"branch     from step {step} on: {branches[-1].describe()} (--change)")
    return dataclasses.replace(lineage, branches=tuple(branches))


def check_past_stages(plan: RunPlan, step: int) -> None:
    """Raise InputError if stages that are over would end at other steps."""
    try:
        before = read_json(plan.context.directory.stages)
        ends = [stage["end"] for stage in before if stage["end"] <= step]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if ends != [stage.end for stage in plan.stages if stage.end <= step]:
        raise InputError(
            f"the stages that ended up to step {step} would end elsewhere: leave their numbers in training.tokens as "
            "they are."
        )


def machine_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return what bits depend on (versions, mesh, cores) and has changed since meta.json was written."""
    words = [
        f"{name} {saved[part].get(name)} then, {value} now"
        for part in ("versions", "topology")
        for name, value in current[part].items()
        if saved[part].get(name) != value
    ]
    return list(dict.fromkeys(words))  # jax is in both parts


class InitialParams(NamedTuple):
    """The starting weights on their devices; base: what names them where they stay outside the run."""

    params: Any
    base: BaseRecord | None
    lines: list[str]  # to show


def initial_params(context: RunContext, parts: ModelParts, manager: Checkpoints) -> InitialParams:
    """Read the weights of the pinned `init`."""
    assert context.settings.init is not None
    path, record, lines = Path(context.settings.init), None, []
    base, why_copied = frozen.find_base(context, parts.split)
    if base is not None:
        taken, record = frozen.read_start(context, parts, base)
        stays = "is copied into the run (lora.keep_base)" if context.lora.keep_base else "stays where it is"
        lines.append(f"base       {record.path} {stays}; sha256 {record.sha256[:16]}…")
    else:
        frozen.check_quantized(parts.split, why_copied)
        taken = read_weights(path, manager, parts.model, parts.boxed, context.topology, parts.split)
        if why_copied:
            lines.append(f"base       {path} is copied into the run: {why_copied}")
    new = [name for name in parts.boxed if name not in taken]
    lines.append(f"weights    from {path}{'; new: ' + ', '.join(new) if new else ''}")
    return InitialParams(taken, record, lines)


def initial_adapters(context: RunContext, parts: ModelParts) -> Any:
    """Return the adapters of `lora.adapters` on their devices; {} where they are drawn here."""
    arrays = adapter_arrays(context.config, parts.model)
    if arrays is None:
        return {}
    where = str(arrays.folder.path)
    held, trained = arrays.signature(), flatten_dict(located(parts.split.shapes(parts.boxed)[0], context.topology))
    # what else is trained whole, such as a value head, is new
    wanted = {path: leaf for path, leaf in trained.items() if path not in parts.split.trained or "/".join(path) in held}
    adapters = place(arrays, unflatten_dict(wanted), where)
    check_finite(adapters, where, "Copy or download them again.")
    context.notes.say(f"adapters   continued from {where}")
    return adapters
