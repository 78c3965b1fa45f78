"""From a recipe to a running trainer, and back from a run directory: what `bessemer train` and `bm.train` share."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer.config import Config, configuration, configure, dotted, load_saved, resolve
from bessemer.config.layers import nest
from bessemer.errors import InputError
from bessemer.generate.load import parse_config
from bessemer.job import ExecutionSpec, RunDirectory, RunLock, check_run_name, default_run_name, find_run
from bessemer.registry import jobs
from bessemer.selectors import SELECTORS
from bessemer.topology import AXES, TopologySettings, make_topology, share, start_distributed
from bessemer.training.schema import schema_of
from bessemer.training.trainer import GIVEN, BaseTrainer

RESUMABLE = ("logging/", "topology/", "eval/", "training/per_device_batch_size", "training/time_limit")
"""Settings that cannot change the run, so `resume` accepts them."""

Overrides = Sequence[str] | Mapping[str, Any]


def build_trainer(
    recipe: str | Path | Mapping[str, Any] | None,
    overrides: Overrides = (),
    *,
    name: str | None = None,
    root: str | Path = "runs",
    distributed: bool = False,
    **parts: Any,
) -> BaseTrainer:
    """Resolve, check and build a new run. Everything that can be wrong is found before anything is written."""
    if name is not None:
        check_run_name(name)
    config = resolve(schema_of, recipe, overrides)
    topology_settings = _topology_settings(config, distributed)
    name = share("run name", lambda: new_name(recipe, name, root))
    with configuration(config):
        spec = ExecutionSpec.local(root, name, make_topology(topology_settings))
        return jobs.get(config["job"])(spec, **parts)


def new_name(recipe: Any, name: str | None, root: str | Path) -> str:
    """The run's name, given or made of recipe and time, and not taken. Process 0 decides for all."""
    label = Path(recipe).stem if isinstance(recipe, str | Path) else "run"
    directory = RunDirectory(
        Path(root) / (name or default_run_name(re.sub(r"[^A-Za-z0-9._-]", "-", label)[:60]))
    )
    if directory.exists():
        raise InputError(
            f"a run named '{directory.name}' already exists at {directory.path}. Continue it with "
            f"`bessemer resume {directory.path}`, or choose another --name."
        )
    return directory.name


def _topology_settings(config: Config, distributed: bool) -> TopologySettings:
    with configuration(config):
        settings = configure(TopologySettings)
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
    distributed: bool = False,
    **parts: Any,
) -> BaseTrainer:
    """A trainer that continues `run` from its newest valid checkpoint (or `step`), or from the start if none."""
    directory = find_run(run, root)
    if not directory.config.is_file():
        raise InputError(
            f"{directory.path} holds no config.yaml: the run ended before it was written, so there is nothing to "
            "continue, and nothing is lost. Delete the directory and start the run again."
        )
    RunLock.check_free(directory)  # before its checkpoints are read: the owner may be deleting old ones
    check_trust(directory, trust)
    config = overridden(directory.config, overrides)
    settings = _topology_settings(config, distributed)
    with configuration(config):
        spec = ExecutionSpec(directory.name, root=directory.path.parent, topology=make_topology(settings))
        trainer = jobs.get(config["job"])(spec, **parts)
    trainer.continues = True
    check_given(directory, trainer)
    if not trainer.load(None if step is None else str(step)):
        if step is not None:
            raise InputError(f"{directory.path} has no checkpoint at step {step}.")
        trainer.say("no checkpoint was committed yet: the run starts again from step 0, as the same run")
    return trainer


def check_given(directory: RunDirectory, trainer: BaseTrainer) -> None:
    """Parts that were given from Python are not in the configuration: without them it would be another run."""
    derived = json.loads(directory.derived.read_text(encoding="utf-8")) if directory.derived.is_file() else {}
    missing = set(derived.get(GIVEN, {}).get("value", [])) - set(
        trainer.derived.get(GIVEN, {}).get("value", [])
    )
    missing.discard("model_state")  # the checkpoint holds the weights
    if "callbacks" in missing:
        missing.discard("callbacks")
        trainer.say("note: this run was started with callbacks given from Python; it continues without them")
    if missing:
        raise InputError(
            f"{directory.path} was started from Python with its own {', '.join(sorted(missing))}; give the same again: "
            f"bm.resume('{directory.name}', {', '.join(f'{name}=…' for name in sorted(missing))})."
        )


def overridden(path: Path, overrides: Overrides) -> Config:
    """The saved configuration with the overrides a resume may make; another setting would make it another run."""
    saved = load_saved(path, schema_of)
    config = load_saved(path, schema_of, overrides)
    changed = [key for key, value in config.values.items() if saved.get(key) != value]
    for key in changed:
        if not key.startswith(RESUMABLE):
            raise InputError(
                f"{dotted(key)} cannot be changed on resume: the result would be another run. "
                "Only logging.*, topology.*, eval.*, training.per_device_batch_size and training.time_limit can. "
                f"To train on with {dotted(key)}={config[key]}, start a new run with init=RUN."
            )
    chosen = saved.provenance["training/per_device_batch_size"].startswith("chosen")
    meshes = [f"topology/{axis}" for axis in ("platform", *AXES)]
    if chosen and any(key in meshes for key in changed):
        config.set("training/per_device_batch_size", -1, "the mesh changed")
    return config


def check_trust(directory: RunDirectory, trust: bool) -> None:
    """A config may name code of the user's; code that came with a run from elsewhere is not imported unasked."""
    tree = parse_config(directory.config.read_text(encoding="utf-8"), str(directory.path))
    named = named_code(nest(tree, str(directory.config)))
    if not named or trust or _started_here(directory):
        return
    raise InputError(
        f"{directory.path} names code of its own ({', '.join(named)}) and was not started on this machine by this "
        "user. Look at that code; if you trust it, add --trust."
    )


def named_code(tree: Mapping[str, Any]) -> list[str]:
    """Plugins, and every `module:attribute` where a part or a dataset can be named."""
    words = [
        word
        for selector in SELECTORS
        for word in _texts(functools.reduce(_below, selector.split("/"), tree))
        if ":" in word
    ]
    datasets = [
        word
        for word in _texts(_below(_below(tree, "training"), "dataset"))
        if ":" in word and not Path(word).exists()
    ]
    return [*_texts(tree.get("plugins")), *words, *datasets]


def _below(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, Mapping) else None


def _texts(value: Any) -> list[str]:
    """Every text in a nested value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _started_here(directory: RunDirectory) -> bool:
    with contextlib.suppress(OSError):
        return (
            directory.read_status().get("host") == socket.gethostname()
            and directory.path.stat().st_uid == os.getuid()
        )
    return False


def is_finished(run: str | Path, root: str | Path = "runs") -> bool:
    """Ended, report and all: the state is "done" while the report is written, the exit code comes after it."""
    status = find_run(run, root).read_status()
    return status.get("state") == "done" and status.get("exit_code") == 0
