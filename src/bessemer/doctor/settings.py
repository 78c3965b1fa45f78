"""config.yaml: it can be read, this version knows its settings, and nobody has edited it since the checkpoint."""

from __future__ import annotations

from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config
from bessemer.config.layers import flat_values, saved_tree
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.job.trust import named_code, names_own_code, refused_requests
from bessemer.training.branches import edited_settings, read_branches, recorded_changes
from bessemer.training.schema import saved_config


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
