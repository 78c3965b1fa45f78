"""Saving and restoring a run: state tree, loop state, configuration, tokenizer, the fingerprint of the data."""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.checkpoint import Checkpoints
from bessemer.config.bounded import parse_json, read_json
from bessemer.config.layers import flat_values, parse_saved
from bessemer.config.layers import saved_tree as tree_of
from bessemer.errors import InputError, StorageError
from bessemer.job import CheckpointManager, Snapshot
from bessemer.models.allocation import FILE as ALLOCATION
from bessemer.training import frozen, reference, stages
from bessemer.training.branches import (
    Branch,
    Changes,
    branches_at,
    edited_settings,
    known_branches,
    now,
    recorded_changes,
)
from bessemer.training.fetch import fetch
from bessemer.training.rollback import protect_target
from bessemer.training.starts import read_weights
from bessemer.training.state import LoopState, added_fields

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SAVED = ("step", "data_step", "params", "opt_state", "ema", "guard")
META_KEYS = ("tokenizer_hash", "data_fingerprint", "versions", "topology")
"""What `check_same_run` asks of meta.json."""


def open_checkpoints(trainer: BaseTrainer) -> Checkpoints:
    manager = Checkpoints(
        trainer.run_directory.checkpoints,
        keep_last=trainer.logging.keep_last,
        keep_every=trainer.logging.keep_every,
        process_zero=trainer.is_process_zero,
        on_commit=None if trainer.mirror is None else trainer.mirror.push,
    )
    protect_stages(trainer, manager)
    return manager


def protect_stages(trainer: BaseTrainer, manager: Checkpoints) -> None:
    """Keep the checkpoint at the end of every stage from retention."""
    for stage in stages.followed(trainer):
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
        "reference": reference.identity(trainer, step),
        "frozen": frozen.identity(trainer),
        "branches": [branch.as_json() for branch in trainer.branches],
        "val_loss": trainer.loop_state.best_val_loss if trainer.loop_state.best_step == step else None,
    }


def snapshot(trainer: BaseTrainer) -> Snapshot:
    """Everything a checkpoint holds, as of the current step."""
    files = {"loop.json": trainer.loop_state.to_json(), "config.yaml": trainer.config.to_yaml()}
    if trainer.tokenizer is not None:
        files |= trainer.tokenizer.files
    if (allocation := getattr(trainer.model, "allocation", None)) is not None:
        files[ALLOCATION] = allocation.to_json()
    return Snapshot(trainer.step, saved_tree(trainer.state), files, meta(trainer, trainer.step))


def protect_best(trainer: BaseTrainer) -> None:
    """Before a save: exempt the best validated checkpoint, and the one a rollback would go back to, from retention."""
    loop = trainer.loop_state
    if loop.best_step == trainer.step:
        loop.best_checkpoint = trainer.step
    trainer.checkpoint_manager.protect(loop.best_checkpoint)
    protect_target(trainer)


def accept(trainer: BaseTrainer, tree: Any, step: int, files: CheckpointManager) -> None:
    """Go on from a restored tree; `files` holds what was saved beside it."""
    stages.select(trainer, step)
    against = reference.restore(trainer, step)
    kept = frozen.restore(trainer)
    trainer.state = trainer.functions.abstract_state.replace(**tree, reference=against, frozen=kept)
    trainer.loop_state = LoopState.from_json(files.read(step, "loop.json"))
    manager = trainer.checkpoint_manager
    manager.protect(trainer.loop_state.best_checkpoint)
    for branch in trainer.branches:
        manager.protect(branch.step, f"branch-{branch.step}")
        if branch.step == step:
            trainer.loop_state.branch_off(other_data=branch.data is not None)
    trainer.step = step
    protect_target(trainer)
    trainer.data_offset = int(fetch(trainer.state.data_step)) - step


def check_same_run(trainer: BaseTrainer, step: int, files: CheckpointManager) -> None:
    """Other data or another tokenizer is an error; another machine is one line, as only rounding changes."""
    saved = parse_json(files.read(step, "meta.json"))
    stages.select(trainer, step)
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
