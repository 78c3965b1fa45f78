"""What a run takes from the one it starts from (`init`): the tokenizer, and what decides the shapes of its weights.

    defaults < recipe < inherited < command line

So `init=RUN` alone is enough, with any recipe. What the command line says against the weights is refused when the
model is built (`check_start`). The result is written to config.yaml in full, so nothing is inherited twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.weights import Arrays, WeightFile, check_fits
from bessemer.config import Config, dotted
from bessemer.config.layers import Layer, override_layer
from bessemer.config.values import plain
from bessemer.data import data_root
from bessemer.data.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError, StorageError
from bessemer.generate.load import WEIGHTS, abstract_params
from bessemer.interop.folder import Folder, is_folder, read_json
from bessemer.interop.hub import fetched, is_hub
from bessemer.job import atomic_write, find_run
from bessemer.job.files import storage
from bessemer.job.jobs import step_of
from bessemer.job.trust import saved_tree

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

ORIGIN = "inherited from "
SECTIONS = ("model", "architecture")
OWN = (
    "architecture/precision",
    "architecture/fp8/",
    "architecture/attention",
    "architecture/kernels",
    "architecture/remat",
    "architecture/scan_layers",
    "architecture/dropout",
    "architecture/document_mask",
    "architecture/loss_chunks",
    "architecture/lookup/path",
    "architecture/lookup/sample_tokens",
)
"""How the same weights are computed and trained: the new run's matter."""
BELOW_RECIPE = ("architecture/block_size",)
"""Inherited only where neither recipe nor command line says anything."""

Resolve = Callable[[tuple[Layer, ...]], Config]


def is_own(key: str) -> bool:
    return any(key == own or (own.endswith("/") and key.startswith(own)) for own in OWN)


def begun_from(resolve: Resolve, config: Config, root: str | Path) -> Config:
    """`config`, or the one that `resolve` gives with what is inherited from its `init`, pinned to a checkpoint."""
    init = config["init"]
    if init is None:
        return config
    if init.startswith("recipe:"):
        raise InputError(f"init={init} is trained first by `bessemer train` and bm.train; here name a run.")
    start, notes = find_start(init, root)
    values = inherited(start_tree(start), config)
    tokenizer = keep_tokenizer(start, config["data/root"])
    if tokenizer is not None:
        values["data/tokenizer"] = tokenizer
    found = resolve((override_layer(values, f"{ORIGIN}{start}"),))
    found.set("init", str(start), "as given" if Path(init) == start else f"the newest checkpoint of {init}")
    found.notes += notes
    return found


def is_begun(config: Config) -> bool:
    """Whether what there is to inherit has been."""
    return config["init"] is None or config.provenance["init"].startswith("chosen")


def find_start(init: str, root: str | Path) -> tuple[Path, list[str]]:
    """The checkpoint that `init` names, a run (its newest valid one) or a checkpoint directory, and lines to show.

    A run without checkpoints (an imported one) gives its folder model/; a Hugging Face folder is itself."""
    named = fetched(init) if is_hub(init) else Path(init)
    if is_folder(named):
        return named.absolute(), []
    is_step = re.fullmatch(r"step_\d+", named.name) is not None
    run = find_run(named.parent.parent if is_step else init, root)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        if is_step:
            if problems := checkpoints.verify(step_of(named.name)):
                raise InputError(f"init={init} cannot be used: {'; '.join(problems)}.")
            return named.absolute(), []
        step, messages = checkpoints.newest_valid()
        if step is None and (run.model / WEIGHTS).is_file():
            return run.model, []
        if step is None:
            raise InputError(f"init={init}: the run has no checkpoint to take weights from.")
        return checkpoints.path(step), [f"init: {message}" for message in messages]
    finally:
        checkpoints.close()


def inherited(tree: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The settings of a configuration `tree` that a run which starts from it takes over."""
    flat: dict[str, Any] = {}
    for section in SECTIONS:
        _flatten(tree.get(section) or {}, section, flat)
    return {
        key: value
        for key, value in flat.items()
        if not is_own(key) and not (key in BELOW_RECIPE and key in config and config.is_set(key))
    }


def start_tree(start: Path) -> dict[str, Any]:
    """The configuration of what `find_start` found."""
    if is_folder(start):
        return Folder(start).tree
    files = start / "config.json"
    return saved_tree(start / "config.yaml") if not files.is_file() else read_json(files)


def weights_in(start: Path) -> Arrays | None:
    """The weights of a start that is no checkpoint."""
    if is_folder(start):
        return Folder(start)
    return WeightFile(start / WEIGHTS) if (start / WEIGHTS).is_file() else None


def _flatten(tree: Mapping[str, Any], prefix: str, into: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _flatten(value, f"{prefix}/{name}", into)
        else:
            into[f"{prefix}/{name}"] = value


def keep_tokenizer(start: Path, root: str | None) -> str | None:
    """A copy of the starting run's tokenizer under the data root: the new run needs it when that checkpoint is gone."""
    if not (start / FILE).is_file():
        return None
    tokenizer = Tokenizer.load(start)
    folder = data_root(root) / "tokenizers" / f"kept-{tokenizer.hash[:16]}"
    if not (folder / FILE).is_file():
        with storage("cannot keep the tokenizer"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in reversed(tokenizer.files.items()):  # tokenizer.json last: with it, all is there
            atomic_write(folder / name, text)
    return str(folder.absolute())


def describe(config: Config) -> str | None:
    """What was inherited, in one line; None for a run that starts afresh."""
    keys = [key for key, origin in config.provenance.items() if origin.startswith(ORIGIN)]
    if not keys:
        return None
    shown = [
        f"{dotted(key)}={config[key]}"
        for key in keys
        if key != "data/tokenizer" and config[key] != config.schema[key].default
    ]
    parts = (["the tokenizer"] if "data/tokenizer" in keys else []) + shown
    return f"inherited {', '.join(parts)}"


def check_start(trainer: BaseTrainer) -> None:
    """Refuse weights of `init` that mean something else here, before anything is written.

    A continued run holds its own weights: the checkpoint it once started from may be gone.
    """
    if trainer.settings.init is None or not Path(trainer.settings.init).is_dir():
        return
    path = Path(trainer.settings.init)
    saved = Tokenizer.load(path).hash if (path / FILE).is_file() else None
    if trainer.tokenizer is not None and saved != trainer.tokenizer.hash:
        raise InputError(
            f"init={path}: those weights were trained with another tokenizer, so ids would mean other words. Leave "
            f"data.tokenizer out, and it is taken over; or use data.tokenizer={path / FILE}"
        )
    try:
        if (weights := weights_in(path)) is not None:
            check_fits(weights, abstract_params(trainer.model), str(path))
        else:
            manager = trainer.checkpoint_manager.at(path.parent)
            manager.check_fits(step_of(path.name), abstract_params(trainer.model), only="params")
    except StorageError as error:
        problem = str(error).partition(": ")[2].partition(". Use the configuration")[0]
        given = differences(path, trainer.config)
        remedy = f"Leave out {', '.join(given)}" if given else "Use the model they were trained with"
        raise InputError(f"init={path}: the weights do not fit this model: {problem}. {remedy}.") from error


def differences(start: Path, config: Config) -> list[str]:
    """Settings of the weights that are not as they were where the weights come from."""
    known = {key: plain(setting.default) for key, setting in config.schema.settings.items()}
    there = inherited(start_tree(start), config)
    return [
        f"{dotted(key)}={config[key]} (it was {there.get(key, known[key])})"
        for key in known
        if key.partition("/")[0] in SECTIONS
        and not is_own(key)
        and key not in BELOW_RECIPE
        and plain(config[key]) != there.get(key, known[key])
    ]
