"""What it takes to make a run again: the command, the versions, and hashes that say whether it is the same."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.config.bounded import read_json
from bessemer.job.directory import RunDirectory, step_name, step_of_name
from bessemer.report.summary import Summary
from bessemer.report.words import MISSING, show, show_or_missing


def reproduction(summary: Summary) -> list[tuple[str, str]]:
    """(what, value) rows; what was never recorded says so."""
    meta, saved = newest_meta(summary.run)
    versions = summary.facts.get("versions")
    named = versions if isinstance(versions, Mapping) else meta.get("versions")
    return [
        ("command", command_of(summary)),
        ("seed", show(summary.config.get("seed", MISSING))),
        ("versions", show_or_missing(named if isinstance(named, Mapping) else None)),
        ("devices", show_or_missing(summary.facts.get("devices"))),
        ("determinism", show_or_missing(summary.facts.get("determinism"))),
        ("config.yaml, sha256", file_hash(summary.run.config)),
        ("tokenizer", str(meta.get("tokenizer_hash") or MISSING)),
        ("data", str(meta.get("data_fingerprint") or MISSING)),
        ("newest checkpoint", saved or MISSING),
        ("its COMMIT, sha256", file_hash(summary.run.checkpoints / saved / "COMMIT") if saved else MISSING),
    ]


def command_of(summary: Summary) -> str:
    """A command that gives these settings, from what each setting says of its origin."""
    if not summary.config:
        return MISSING
    recipe = summary.recipe
    given = [
        f"{key}={show(summary.config.get(key))}"
        for key, origin in summary.provenance.items()
        if str(origin).startswith("command line")
    ]
    return shlex.join(["bessemer", "train", *([] if recipe is None else [recipe]), *given])


def newest_meta(run: RunDirectory) -> tuple[dict[str, Any], str]:
    """(meta.json, directory name) of the newest checkpoint; ({}, "") when there is none."""
    found = run.checkpoints.iterdir() if run.checkpoints.is_dir() else []
    steps = sorted((step for path in found if (step := step_of_name(path.name)) is not None), reverse=True)
    for step in steps:
        try:
            meta = read_json(run.checkpoints / step_name(step) / "meta.json")
        except (OSError, ValueError):
            continue
        return (meta if isinstance(meta, dict) else {}), step_name(step)
    return {}, ""


def file_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return MISSING
