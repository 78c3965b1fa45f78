"""What a report says of the machine: devices, how much of them was used, versions."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.config import Origin, OriginKind
from bessemer.config.bounded import read_json
from bessemer.console import counted, markdown_table
from bessemer.job.directory import RunDirectory, step_name, step_of_name
from bessemer.report.summary import MISSING, Summary, count, gib, is_number, percent, show, show_or_missing


def _device(summary: Summary, name: str) -> Any:
    """A fact about the devices; None where they were not recorded."""
    devices = summary.facts.get("devices")
    return devices.get(name) if isinstance(devices, Mapping) else None


def utilisation(summary: Summary) -> list[tuple[str, str]]:
    """MFU, or why there is none."""
    peak, full = summary.facts.get("mfu_peak"), summary.typical("time/mfu")
    kind = _device(summary, "device_kind")
    if peak is None and full is None and kind is not None:
        return [("MFU", f"unknown: the peak of a {kind} is not in the table of chips")]
    return [
        ("MFU (attention counted in full)", percent(full)),
        ("MFU (causal attention only)", percent(summary.typical("time/mfu_causal"))),
        ("MFU is a share of", peak or MISSING),
    ]


def peak_memory(summary: Summary) -> str:
    largest = summary.largest("mem/peak_gib")
    on_cpu = largest is None and _device(summary, "platform") == "cpu"
    return "not told by a CPU; `bessemer plan` says what the step takes" if on_cpu else gib(largest)


def machine(summary: Summary) -> list[str]:
    facts = summary.facts
    rows = [
        ("devices", _devices(facts.get("devices"))),
        ("determinism", show_or_missing(facts.get("determinism"))),
        ("first step after", _start_up(facts.get("start_up"))),
        ("host", show_or_missing(summary.status.get("host"))),
        ("report written", time.strftime("%Y-%m-%d %H:%M:%S")),
    ]
    versions = facts.get("versions")
    names = versions if isinstance(versions, Mapping) else {}
    rows += [(f"version of {name}", str(version)) for name, version in names.items()]
    if not names:
        rows.append(("versions", MISSING))
    return ["## Machine", "", *markdown_table(("", ""), rows)]


def _devices(facts: Any) -> str:
    """8 × NVIDIA H200, mesh data 8 × fsdp 1 × …, 1 process; then what else was recorded about them."""
    if not isinstance(facts, Mapping):
        return show_or_missing(facts)
    axes, kind = facts.get("axes"), facts.get("device_kind") or facts.get("platform")
    words = [f"{count(facts.get('devices'))} × {kind}"] if kind else []
    if isinstance(axes, Mapping):
        words.append(f"mesh {' × '.join(f'{axis} {size}' for axis, size in axes.items())}")
    if is_number(number := facts.get("processes")):
        words.append(counted(int(number), "process"))
    said = ("axes", "device_kind", "platform", "chip", "devices", "processes", "jax", "jaxlib")
    others = {key: value for key, value in facts.items() if key not in said}
    return ", ".join([*words, *(f"{key} {show(value)}" for key, value in others.items())]) or MISSING


def _start_up(facts: Any) -> str:
    """21.3 s: imports and devices 4.1, …; of the last start of the run."""
    parts = facts.get("parts") if isinstance(facts, Mapping) else None
    if not isinstance(parts, Mapping) or not is_number(facts.get("seconds")):
        return MISSING
    words = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    return f"{facts['seconds']:.1f} s: {words} ({facts.get('cache')})"


# What it takes to make a run again: the command, the versions, and hashes that say whether it is the same.


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
        if Origin.parse(str(origin)).kind is OriginKind.COMMAND_LINE
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
