"""Where a run's first weights lie: a checkpoint, files (RUN/model, an export of ours), or a Hugging Face folder.

`init` names one, and so does `distill.teacher`. Everything is refused by names and shapes before an array is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.manifest import COMMIT
from bessemer.checkpoint.tree import select
from bessemer.checkpoint.weights import Arrays, WeightFile, check_fits, place
from bessemer.config.layers import saved_tree
from bessemer.errors import InputError
from bessemer.generate.load import WEIGHTS, check_whole, flat, located, read_whole
from bessemer.interop.folder import CONFIG, Folder, is_folder, read_object
from bessemer.interop.hub import fetched, is_hub
from bessemer.job import RunDirectory, find_run
from bessemer.job.jobs import step_of
from bessemer.job.trust import check_folder
from bessemer.models.split import split_of
from bessemer.report.phases import FOLDER, has_phases, phases_of
from bessemer.topology import Topology, unbox

INIT = "init"


def find_start(named: str, root: str | Path, setting: str = INIT) -> tuple[Path, list[str]]:
    """The directory of the weights that are named, and lines to show.

    A run gives its newest valid checkpoint, or RUN/model when it has none (an imported one); a checkpoint directory
    and a folder with config.json, Hugging Face's or ours, are themselves.
    """
    if is_hub(named):
        return fetched(named), []
    path = Path(named)
    if (path / CONFIG).is_file():
        check_folder(path)
        return path.absolute(), _unverified(path, setting)
    is_step = re.fullmatch(r"step_\d+", path.name) is not None
    run = find_run(path.parent.parent if is_step else named, root)
    if has_phases(run) and (phases := phases_of(run)):
        run = RunDirectory(run.path / FOLDER / phases[-1])
    checkpoints = Checkpoints(run.checkpoints)
    try:
        if is_step:
            if problems := checkpoints.verify(step_of(path.name)):
                raise InputError(f"{setting}={named} cannot be used: {'; '.join(problems)}.")
            return path.absolute(), []
        step, messages = checkpoints.newest_valid()
        if step is None and (run.model / WEIGHTS).is_file():
            return run.model.absolute(), _unverified(run.model, setting)
        if step is None:
            raise InputError(f"{setting}={named}: the run has no checkpoint to take weights from.")
        return checkpoints.path(step), [f"{setting}: {message}" for message in messages]
    finally:
        checkpoints.close()


def _unverified(folder: Path, setting: str) -> list[str]:
    """A line for weights in our format that carry no checksums."""
    if is_folder(folder) or not (folder / WEIGHTS).is_file():
        return []
    return [f"{setting}: {note}" for note in WeightFile(folder / WEIGHTS).notes]


def tree_in(start: Path) -> dict[str, Any]:
    """The configuration of what `find_start` found."""
    if is_folder(start):
        return Folder(start).tree
    if not (start / CONFIG).is_file():
        return saved_tree(start / "config.yaml")
    tree = read_object(start / CONFIG)
    if "model" not in tree or not (start / WEIGHTS).is_file():
        raise InputError(
            f"{start / CONFIG} has neither a 'model_type', as Hugging Face's have, nor a 'model' with {WEIGHTS} beside "
            "it, as our exports have: these are no weights to start from."
        )
    return tree


def files_in(start: Path) -> Arrays | None:
    """The weights of a start that is no checkpoint."""
    if is_folder(start):
        return Folder(start)
    return WeightFile(start / WEIGHTS) if (start / WEIGHTS).is_file() else None


def weights_digest(start: Path) -> str:
    """Return the SHA-256 that names the weights: of a checkpoint's manifest, which lists its files' own, or of the
    files with their configuration."""
    if (start / COMMIT).is_file():
        return hashlib.sha256((start / COMMIT).read_bytes()).hexdigest()
    files = {file.path for file in Folder(start).files.values()} if is_folder(start) else {start / WEIGHTS}
    digest = hashlib.sha256()
    for path in [start / CONFIG, *sorted(files)]:
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def check_weights(start: Path, checkpoints: Checkpoints, model: Any, boxed: Any) -> None:
    """Raise the error that names what does not fit the model's parameters `boxed`; no array is read."""
    if (files := files_in(start)) is not None:
        check_fits(files, unbox(taken_over(model, boxed, files.signature())), str(start))
        return
    manager, step = checkpoints.at(start.parent), step_of(start.name)
    boxed = taken_over(model, boxed, _names(manager, step))
    check_whole(manager, step, tree_in(start), boxed, getattr(model, "group_of", None))


def read_weights(
    start: Path, checkpoints: Checkpoints, model: Any, boxed: Any, topology: Topology
) -> dict[str, Any]:
    """The parameters that are there, where `topology` rests them; adapters merged."""
    files, manager = files_in(start), checkpoints.at(start.parent)
    saved = _names(manager, step_of(start.name)) if files is None else files.signature()
    boxed = taken_over(model, boxed, saved)
    if files is not None:
        return place(files, located(boxed, topology), str(start))
    split = split_of(flat(tree_in(start)), boxed, getattr(model, "group_of", None))
    return read_whole(manager, step_of(start.name), split, boxed, partial(located, topology=topology))


def taken_over(model: Any, params: Any, saved: Iterable[str]) -> Any:
    """The parameters to take from weights with the arrays `saved`: all but those that the model declares as new
    (`new_parameters`) and that are not there."""
    there = {name.split("/")[0] for name in saved}
    new = set(getattr(model, "new_parameters", ())) - there
    return {name: part for name, part in params.items() if name not in new}


def _names(manager: Checkpoints, step: int) -> Iterable[str]:
    return select(manager.leaves(step), "params")
