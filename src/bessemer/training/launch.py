"""From a recipe to a running trainer, and back from a run directory: what `bessemer train` and `bm.train` share.

The Python front door is at the end: `bm.train`, `bm.resume` and the `Run` they return.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.config import COMMAND_LINE, Config, configuration, dotted, load_saved, resolve, slashed
from bessemer.config.recipes import Layer, override_layer, raw_values
from bessemer.config.resolve import Overrides as Overrides
from bessemer.config.values import plain
from bessemer.data import DataSettings, Tokenizer
from bessemer.data.stores.catalog import tokenizer_place
from bessemer.data.tokenize.tokenizer import FILE as TOKENIZER
from bessemer.errors import InputError, to_install
from bessemer.evaluate import Evaluator
from bessemer.generate import LoadedModel, SamplingOptions, load_model, sample
from bessemer.generate.base import BaseRecord, given_place, read_record, write_record
from bessemer.generate.load import base_arrays
from bessemer.job import GIVEN, ExecutionSpec, RunDirectory, RunLock, check_run_name, find_run
from bessemer.job.directory import new_run
from bessemer.job.trust import adopt, check_trust, mark_origin
from bessemer.registry import jobs
from bessemer.report.metrics import MetricsFile
from bessemer.storage.files import atomic_write
from bessemer.storage.remote import is_remote
from bessemer.topology import AXES, TopologySettings, broadcast, make_topology, start_distributed
from bessemer.training.persistence.checkpoints import (
    RESUMABLE,
    SELECTORS,
    Changes,
    branch_off,
    changes_between,
    check_changeable,
    check_switches,
    replace_horizon,
)
from bessemer.training.persistence.mirror import fetched
from bessemer.training.setup.init_recipe import trained_first
from bessemer.training.setup.initial_weights import INIT, find_start, inherit_settings
from bessemer.training.setup.schema import DATASET, schema_of, styled, usual_style, with_found_paths, with_full_paths
from bessemer.training.trainer import BaseTrainer
from bessemer.user_code import refuse_while_importing

PERMISSION = "training/allow_data_change"
DATA = (PERMISSION, "training/dataset", "data/")
"""Settings that `resume` accepts with PERMISSION; the run is then a different one from that step on."""


def build_trainer(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Overrides = (),
    *,
    name: str | None = None,
    root: str | Path = "runs",
    distributed: bool = False,
    **parts: Any,
) -> BaseTrainer:
    """Return the trainer of a new run. Raise InputError for whatever is wrong with it, before anything is written."""
    refuse_while_importing()
    if name is not None:
        check_run_name(name)

    def resolved(between: tuple[Layer, ...] = ()) -> Config:
        return resolve(schema_of, recipe, overrides, between=between)

    config = resolved()
    check_trackers(config)
    topology_settings = _topology_settings(config, distributed)
    name = broadcast("run name", lambda: new_run(recipe, name, root).name)
    started = time.monotonic()
    config = trained_first(config, root, train_base)
    elsewhere = time.monotonic() - started
    with configuration(with_full_paths(inherit_settings(resolved, config, root))):
        spec = ExecutionSpec.local(root, name, make_topology(topology_settings))
        trainer = jobs.get(config["job"])(spec, **parts)
    trainer.startup.elsewhere = elsewhere
    return trainer


def train_base(recipe: str, directory: RunDirectory, passed: dict[str, Any], started: bool) -> None:
    """Train the run that `init=recipe:NAME` starts from, or continue it if it was `started` before."""
    root = directory.path.parent
    if started:
        resumable = {key: value for key, value in passed.items() if key.startswith(RESUMABLE)}
        reopen(directory.path, resumable, root=root).run()
    else:
        build_trainer(recipe, passed, name=directory.name, root=root).run()


def check_trackers(config: Config) -> None:
    """Raise InputError if a tracker's package is missing, before data is prepared and steps are compiled."""
    for name in ("wandb", "tensorboard"):
        if config.get(f"logging/{name}") and importlib.util.find_spec(name) is None:
            raise InputError(
                f"logging.{name}=true, but {name} is not installed. Install it with: {to_install('track')}"
            )


def _topology_settings(config: Config, distributed: bool) -> TopologySettings:
    settings = config.make(TopologySettings)
    if distributed:
        start_distributed(settings)
    return settings


def reopen(
    run: str | Path,
    overrides: Overrides = (),
    *,
    root: str | Path = "runs",
    step: int | None = None,
    trust: bool = False,
    change: bool = False,
    base: str | None = None,
    distributed: bool = False,
    **parts: Any,
) -> BaseTrainer:
    """Return a trainer that continues `run` from its newest valid checkpoint (or `step`), or from the start if none.

    change: accept overrides that change the result, and record a branch point.
    base: the weights that the run started from, in place of its own `init`.
    """
    directory = find_run(fetched(run, root), root, trust=trust)
    if trust:
        adopt(directory)
    if not directory.config.is_file():
        raise InputError(explain_missing_config(directory))
    RunLock.check_free(directory)  # before its checkpoints are read: the owner may be deleting old ones
    given = [*override_keys(overrides), *([INIT] if base is not None else [])]
    mirror = str(run).rstrip("/").rpartition("/")[0] if is_remote(run) else None
    check_trust(directory, trust, given=given, mirror=mirror)
    config, changes = overridden(directory.config, overrides, change=change)
    if change:  # values that config.yaml has already count too: it may have been edited since the checkpoint
        for key in override_keys(overrides):
            if key in config and not key.startswith(RESUMABLE):
                same = {"from": plain(config[key]), "to": plain(config[key])}
                changes.setdefault(dotted(key), same)
    if base is not None:
        config.set(INIT, str(base_weights(directory, base, root)), "given with --base")
    check_trackers(config)
    if change:
        changes |= pin_tokenizer(directory, config, step)
    trainer = rebuild(directory, config, distributed=distributed, **parts)
    if changes and not isinstance(trainer, BaseTrainer):
        raise InputError(
            f"{', '.join(changes)}: job={config['job']} has no checkpoints to branch off from. Resume one of its runs "
            f"with --change ({directory.path}/phases/NAME)."
        )
    check_python_parts(directory, trainer.derived.get(GIVEN, {}).get("value", []), trainer.say)
    if isinstance(trainer, BaseTrainer):
        asked = changes if change or config.get(PERMISSION) else None
        trainer.lineage = replace(trainer.lineage, change=asked)
    if not trainer.load(None if step is None else str(step)):
        if step is not None:
            raise InputError(f"{directory.path} has no checkpoint at step {step}.")
        trainer.lineage = branch_off(trainer.plan, trainer.lineage, 0, {})
        trainer.say("no checkpoint was committed yet: the run starts again from step 0, as the same run")
    elif isinstance(trainer, BaseTrainer):
        trainer.say(f"resume     from the checkpoint of step {trainer.step:,} of {trainer.steps:,}")
    return trainer


def base_weights(directory: RunDirectory, base: str, root: str | Path) -> Path:
    """Return the weights that --base names; for adapters, those of the checkpoint that was their base."""
    record = read_record(directory)
    return find_start(base, root, "--base")[0] if record is None else given_place(base, record, root)


def point_to_base(run: str | Path, base: str, *, root: str | Path = "runs") -> list[str]:
    """Verify every tensor of the moved base of a finished run's adapters, and record its new place. Return lines to
    show."""
    directory = find_run(run, root)
    if (record := read_record(directory)) is None:
        return []
    check_trust(directory, given=[INIT])
    arrays = base_arrays(directory, record, base_weights(directory, base, root))
    for name in arrays.names:
        arrays.read(name)
    config = overridden(directory.config)[0]
    config.set(INIT, str(arrays.where), "given with --base")
    atomic_write(directory.config, config.to_yaml(), sync=True)
    mark_origin(directory, config.tree())
    write_record(directory, BaseRecord.of(arrays.where, record.tensors, directory))
    return [f"base       {arrays.where} is verified, and recorded"]


def pin_tokenizer(directory: RunDirectory, config: Config, step: int | None) -> Changes:
    """Set data.tokenizer to the run's own tokenizer if it is derived from the data, and the changed data would give
    another one. Return the change."""
    key, manager = "data/tokenizer", Checkpoints(directory.checkpoints)
    named = config.get(key)
    if named is None or not (named == "auto" or named.startswith("train:")):
        return {}
    step = manager.newest_valid()[0] if step is None else step
    if step is None or not (manager.path(step) / TOKENIZER).is_file():
        return {}
    own = Tokenizer.load(manager.path(step))
    with contextlib.suppress(InputError):
        samplings = [sampling for mixture in config["training/dataset"] for sampling in mixture]
        if Tokenizer.load(tokenizer_place(config.make(DataSettings), samplings)).hash == own.hash:
            return {}
    kept = own.save(directory.path / "tokenizer").parent
    config.set(key, str(kept), "the run's own, kept when its data changed")
    return {dotted(key): {"from": named, "to": str(kept)}}


def rebuild(directory: RunDirectory, config: Config, *, distributed: bool = False, **parts: Any) -> BaseTrainer:
    """Return the trainer of an existing run, before any checkpoint is read."""
    settings = _topology_settings(config, distributed)
    with configuration(config):
        spec = ExecutionSpec(directory.name, root=directory.path.parent, topology=make_topology(settings))
        trainer = jobs.get(config["job"])(spec, **parts)
    trainer.continues = True
    return trainer


def check_python_parts(directory: RunDirectory, given: Sequence[str], say: Callable[[str], None]) -> None:
    """Raise InputError if the run was started from Python with parts that are not `given` again, since the result would
    differ without them."""
    missing = directory.given_parts() - set(given)
    missing.discard("model_state")  # the checkpoint holds the weights
    if "callbacks" in missing:
        missing.discard("callbacks")
        say("note: this run was started with callbacks given from Python; it continues without them")
    if missing:
        raise InputError(
            f"{directory.path} was started from Python with its own {', '.join(sorted(missing))}; give the same again: "
            f"bm.resume('{directory.name}', {', '.join(f'{name}=…' for name in sorted(missing))})."
        )


def changes_finished(
    run: str | Path, overrides: Overrides, *, root: str | Path = "runs", trust: bool = False, change: bool = False
) -> bool:
    """Return whether the overrides give a finished run something to do. Raise InputError for those it cannot accept."""
    if not overrides:
        return False
    directory = find_run(run, root, trust=trust)
    check_trust(directory, trust, given=override_keys(overrides))
    return bool(overridden(directory.config, overrides, change=change)[1]) and change


def override_keys(overrides: Overrides) -> list[str]:
    """Return the settings (a/b) that overrides replace."""
    words = overrides if isinstance(overrides, Mapping) else (word.partition("=")[0] for word in overrides)
    return [slashed(str(word).strip()) for word in words]


def overridden(path: Path, overrides: Overrides = (), *, change: bool = False) -> tuple[Config, Changes]:
    """Return the saved configuration with the overrides of a resume, and those overrides that change the result, which
    need `change`."""
    saved = with_full_paths(load_saved(path, schema_of))
    given = raw_values([override_layer(overrides, COMMAND_LINE)])
    check_changeable(key for key in SELECTORS if key in given and given[key] != saved.get(key))
    config = with_full_paths(load_saved(path, schema_of, overrides))
    if DATASET in config:  # a dataset without a style gets the objective's, as it did when the run was started
        saved, config = (
            one.replace({DATASET: styled(one[DATASET], usual_style(one["objective"]))}) for one in (saved, config)
        )
    changed = [key for key, value in config.values.items() if saved.get(key) != value]
    other = {key: why for key in changed if (why := reason_unchangeable(config, key)) is not None}
    if change:
        check_changeable(other)
        check_switches(saved, config)
        replace_horizon(config, list(other))
    elif other:
        key, why = next(iter(other.items()))
        raise InputError(
            f"{dotted(key)} cannot be changed on resume: {why}. To train on with {dotted(key)}={plain(config[key])}, "
            "add --change, which records a branch point in the run, or start a new run with init=RUN."
        )
    changes = {
        name: values
        for name, values in changes_between(saved, config).items()
        if slashed(name) in other or not slashed(name).startswith(RESUMABLE)
    }
    # The micro-batch was chosen for the old mesh, so choose it again, unless the override sets it.
    batch = config.provenance.get("training/per_device_batch_size")
    meshes = [f"topology/{axis}" for axis in ("platform", *AXES)]
    if batch is not None and batch.is_derived and any(key in meshes for key in changed):
        config.set("training/per_device_batch_size", -1, "the mesh changed")
    return with_found_paths(config, changed), changes


def reason_unchangeable(config: Config, key: str) -> str | None:
    """Return why a resume cannot change the setting; None if it can, also because data may change."""
    if key == "logging/checkpoint_interval" and config.get("guard/spike_action") == "rollback":
        return (
            "with guard.spike_action=rollback it decides to which step a rollback goes back, so the result would be "
            "another run"
        )
    if key == "logging/validation_interval" and "early_stopping" in config["callbacks"]:
        return "with callbacks=[early_stopping] it decides when the run ends, so the result would be another run"
    if key.startswith((*RESUMABLE, *DATA) if config.get(PERMISSION) else RESUMABLE):
        return None
    return (
        "the result would be another run. Only logging.*, topology.*, eval.*, training.per_device_batch_size and "
        "training.time_limit can be, and the data with training.allow_data_change=true"
    )


def explain_missing_config(directory: RunDirectory) -> str:
    saved = sorted(directory.checkpoints.glob("step_*/config.yaml"))
    if saved:
        return (
            f"{directory.path} has lost its config.yaml; the newest checkpoint holds a copy. Continue after: "
            f"cp {saved[-1]} {directory.config}"
        )
    return (
        f"{directory.path} holds no config.yaml: the run ended before it was written, so there is nothing to "
        "continue, and nothing is lost. Delete the directory and start the run again."
    )


def is_finished(run: str | Path, root: str | Path = "runs", *, trust: bool = False) -> bool:
    """Return whether the run has ended and its report is written; the exit code is recorded after both."""
    status = find_run(run, root, trust=trust).read_status()
    return status.get("state") == "done" and status.get("exit_code") == 0


# --- the Python front door ---


PARTS = ("model", "model_state", "dataset_train", "dataset_eval", "data_collator", "tokenizer", "callbacks")


class Run:
    """A run on disk, by its path or its name under `runs`: what it measured, and the model it made."""

    def __init__(self, run: RunDirectory | str | Path, *, runs: str | Path = "runs"):
        self.directory = run if isinstance(run, RunDirectory) else find_run(run, runs)

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    @property
    def status(self) -> dict[str, Any]:
        """status.json: state, step, exit code, message."""
        return self.directory.read_status()

    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows of metrics.jsonl, in order."""
        return list(MetricsFile(self.directory.metrics).rows())

    def load(self, step: int | str | None = None, *, base: str | Path | None = None) -> LoadedModel:
        """Return the model of a checkpoint (default: the newest valid one): `.model`, `.params`, `.tokenizer`.

        base: where the base of a run with adapters lies, in place of where the run says.
        """
        return load_model(self.directory, step, base=base)

    def sample(self, prompt: str, *, max_tokens: int = 100, step: int | str | None = None, **options: Any) -> str:
        """Return the model's continuation of `prompt`. Options: temperature (0 = greedy), top_k, top_p, min_p, seed."""
        loaded = self.load(step)
        completions, notices = sample(loaded, [prompt], max_tokens=max_tokens, sampling=SamplingOptions(**options))
        for notice in [*loaded.notes, *notices]:
            print(notice, file=sys.stderr)
        return completions[0].text

    def evaluate(
        self, tasks: Sequence[str] = ("bpb",), *, step: int | str | None = None, **options: Any
    ) -> dict[str, dict[str, Any]]:
        """Return task → result of the named evaluations, also written to RUN/eval. Options: limit, batch_size."""
        return Evaluator.from_run(self.directory, step, tasks=tasks, **options).run()

    def __repr__(self) -> str:
        return f"Run('{self.path}', {self.status.get('state', 'unknown')} at step {self.status.get('step')})"


def take_parts(settings: dict[str, Any]) -> dict[str, Any]:
    """Take the parts out of the keywords; what is left are settings. `callbacks` as names is a setting."""
    given = settings.get("callbacks")
    names = [given] if isinstance(given, str) else list(given or ())
    by_name = all(isinstance(name, str) for name in names)
    return {key: settings.pop(key) for key in PARTS if key in settings and not (key == "callbacks" and by_name)}


def train(
    recipe: str | Path = "quickstart", *, name: str | None = None, runs: str | Path = "runs", **settings: Any
) -> Run:
    """Train and return the finished run. Settings are dotted keys: train("quickstart", **{"training.steps": 100}).

    Parts can be given directly: model, model_state, dataset_train, dataset_eval, data_collator, tokenizer, callbacks.
    """
    parts = take_parts(settings)
    trainer = build_trainer(recipe, settings, name=name, root=runs, **parts)
    trainer.run()
    return Run(trainer.run_directory)


def resume(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    step: int | None = None,
    trust: bool = False,
    change: bool = False,
    base: str | None = None,
    **settings: Any,
) -> Run:
    """Continue a stopped run to its end; a finished one is returned as it is. Parts as for `train`.

    change: settings may make it another run from here on, such as a longer one; that is recorded as a branch point.
    """
    refuse_while_importing()
    parts = take_parts(settings)
    if (
        step is not None
        or not is_finished(run, runs, trust=trust)
        or changes_finished(run, settings, root=runs, trust=trust, change=change)
    ):
        reopen(run, settings, root=runs, step=step, trust=trust, change=change, base=base, **parts).run()
    return Run(find_run(run, runs, trust=trust))
