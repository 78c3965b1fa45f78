"""What lies outside the run directory and resume needs: the tokenizer and the prepared data."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, configuration, configure
from bessemer.config.recipes import flat_values, saved_tree
from bessemer.data import DataSettings, Sampling, Tokenizer, find_source
from bessemer.data.rows.store import TokenStore, is_store
from bessemer.data.stores.catalog import store_directory, store_place
from bessemer.data.stores.tokenizers import tokenizer_place
from bessemer.data.tokenize.tokenizer import FILE
from bessemer.doctor.files import saved_meta
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory
from bessemer.job.trust import named_code, names_own_code, refused_requests
from bessemer.topology import TopologySettings
from bessemer.training import launch
from bessemer.training.persistence.checkpoints import (
    edited_settings,
    machine_differences,
    meta,
    read_branches,
    recorded_changes,
)
from bessemer.training.setup.schema import saved_config

NOT_NEEDED = {
    "model_state",
    "callbacks",
}  # the checkpoint holds the weights; a run goes on without its callbacks


def examine_material(run: RunDirectory, config: Config, found: Diagnosis) -> bool:
    """Whether all is there, so that the run can be rebuilt without preparing anything."""
    try:
        given = run.given_parts() - NOT_NEEDED
    except InputError as error:
        found.add("data", "error", str(error))
        return False
    if given:
        parts = ", ".join(f"{name}=…" for name in sorted(given))
        text = f"the run was started from Python with its own {', '.join(sorted(given))}, which cannot be checked here."
        found.add("data", "note", text, f"Give the same again: bm.resume('{run.name}', {parts}).")
        return False
    with configuration(config):
        settings = configure(DataSettings)
    samplings = [sampling for mixture in config["training/dataset"] or [] for sampling in mixture]
    if not samplings:
        found.add("data", "note", "the run names none: an imported model was not trained here.")
        return False
    sources = {(sampling.name, sampling.suffix): sampling for sampling in samplings}
    gone = [sampling for sampling in sources.values() if not _is_there(sampling, found)]
    if gone:
        return False
    try:
        tokenizer = _tokenizer(settings, samplings, found)
        if tokenizer is None:
            return False
        there = [_store(sampling, tokenizer, settings, found) for sampling in sources.values()]
        return all(there)
    except BessemerError as error:
        found.add("data", "error", str(error))
        return False


def _is_there(sampling: Sampling, found: Diagnosis) -> bool:
    """Whether a dataset can be found, be it a store or its source; one that is gone is named."""
    try:
        if store_directory(sampling) is None:
            find_source(sampling.name)
    except BessemerError as error:
        text = f"training.dataset names {sampling.name}{sampling.suffix}, which is gone: {error}"
        found.add(
            "data",
            "error",
            text,
            "Put it back where it was; a copy elsewhere below this directory is found too.",
        )
        return False
    return True


def _tokenizer(settings: DataSettings, samplings: list[Sampling], found: Diagnosis) -> Tokenizer | None:
    place = tokenizer_place(settings, samplings)
    if settings.tokenizer.startswith("train:") and not (place / FILE).is_file():
        found.add(
            "data",
            "warning",
            f"the tokenizer {settings.tokenizer} is not at {place}: it was deleted, or the text it was trained on "
            "has changed.",
            "Resume trains it again, and refuses unless it comes out the same. The checkpoint holds the original.",
        )
        return None
    tokenizer = Tokenizer.load(place)
    found.add("data", "ok", f"tokenizer {tokenizer.hash[:12]} at {place}.")
    return tokenizer


def _store(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings, found: Diagnosis) -> bool:
    place = store_directory(sampling)
    if place is None:
        place = store_place(sampling, find_source(sampling.name), tokenizer, settings=settings)
    if not is_store(place):
        found.add(
            "data",
            "warning",
            f"the prepared data of {sampling.name} is not at {place}: it was deleted, or its files have changed.",
            "Resume prepares it again, and refuses unless it comes out the same.",
        )
        return False
    parts = [TokenStore(place, split) for split in TokenStore(place).splits]
    for part in parts:
        part.verify()
    found.add("data", "ok", f"prepared data of {sampling.name} at {place}, every byte verified.")
    if not all(part.has_checksums for part in parts):
        found.add(
            "data",
            "note",
            f"{place} was prepared before stores had checksums, so damage during a run would go unnoticed.",
            "Prepare it again to have every chunk verified before it is used.",
        )
    return True


# config.yaml: it can be read, this version knows its settings, and nobody has edited it since the checkpoint.


def examine_config(run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis) -> Config | None:
    """The checked configuration; None when it is not usable, or names code, which is never imported here."""
    copy = None if found.checkpoint is None else run.checkpoints / found.checkpoint / "config.yaml"
    remedy = "" if copy is None else f"The checkpoint holds a copy: cp {copy} {run.config}"
    if not run.config.is_file():
        found.add("config", "error", f"{run.config} is missing.", remedy)
        return None
    try:
        tree = saved_tree(run.config)
        named = named_code(tree)
        if named:
            _examine_code(run, tree, named, found)
            _compare(run, tree, checkpoints, found)
            return None
        if refused := refused_requests(run, tree):
            text = f"the run was not started here, and config.yaml {'; '.join(map(str, refused[:5]))}: not checked."
            found.add("trust", "warning", text, "Resume asks for --trust: look at each of these first.")
            _compare(run, tree, checkpoints, found)
            return None
        config = saved_config(run.config)
    except InputError as error:
        found.add("config", "error", str(error), remedy)
        return None
    found.add("config", "ok", "config.yaml is valid for this version.")
    _compare(run, tree, checkpoints, found)
    return config


def _examine_code(run: RunDirectory, tree: dict[str, Any], named: list[str], found: Diagnosis) -> None:
    words = ", ".join(named)
    text = (
        f"config.yaml names code ({words}), which is not imported here, so settings and data are not checked."
    )
    found.add("code", "note", text)
    try:
        trusted = names_own_code(run, tree)
    except InputError as error:
        found.add("code", "warning", str(error))
        return
    if not trusted:
        text = "the run does not bear the mark of one that this user started with that code."
        found.add("code", "warning", text, "Resume asks for --trust: look at the code first.")


def _compare(run: RunDirectory, tree: dict[str, Any], checkpoints: Checkpoints, found: Diagnosis) -> None:
    """A setting edited by hand makes it another run, which nothing else would notice."""
    if found.step is None:
        return
    path = checkpoints.path(found.step) / "config.yaml"
    try:
        saved = flat_values(saved_tree(path))
    except InputError as error:
        found.add("config", "warning", str(error))
        return
    branches = [branch for branch in read_branches(run) if branch.step == found.step]
    for branch in branches:
        found.add("config", "note", f"the run branches off at step {branch.step}: {branch.describe()}.")
    recorded = recorded_changes(branches, found.step)
    edited = [
        f"{name} is {values['to']!r}, was {values['from']!r}"
        for name, values in sorted(edited_settings(saved, flat_values(tree)).items())
        if name not in recorded
    ]
    if edited:
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        found.add(
            "config",
            "error",
            f"config.yaml is not what {found.checkpoint} was saved with: {'; '.join(edited[:3])}{more}.",
            f"Resuming would be another run; put the original back: cp {path} {run.config}",
        )


# Resume without resuming: the run is rebuilt as resume does it, up to the point where arrays would be read.


def mesh_fits(config: Config, found: Diagnosis) -> bool:
    with configuration(config):
        settings = configure(TopologySettings)
    try:
        launch.make_topology(settings)
    except InputError as error:
        found.add(
            "machine", "warning", str(error), "Give resume other topology.* settings; the run allows it."
        )
        return False
    return True


def rehearse(run: RunDirectory, config: Config, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Data, tokenizer, model and optimizer against the checkpoint that resume would take."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what a trainer says while it is built
            trainer = launch.rebuild(run, config)
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
        return
    try:
        if found.step is None:
            found.add("rehearsal", "ok", "the run can be built again.")
            return
        saved = saved_meta(checkpoints, found.step)
        current = json.loads(json.dumps(meta(trainer, found.step), default=str))
        for note in machine_differences(saved, current):
            found.add(
                "machine", "note", f"{note}: bit-for-bit is not promised, only the same run to rounding."
            )
        if not any(finding.area == "machine" for finding in found.findings):
            found.add("machine", "ok", "versions, mesh and cores are as they were.")
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.admit(found.step)
        checkpoints.check_fits(found.step, trainer.abstract_state())
        found.add("rehearsal", "ok", f"data, tokenizer, model and optimizer fit {found.checkpoint}.")
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
    finally:
        trainer.finish()
