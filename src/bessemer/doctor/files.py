"""The checkpoints of a run, newest first: every byte, and what stands beside the arrays."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

from bessemer.checkpoint import Checkpoints, store
from bessemer.checkpoint.manifest import Progress, unlisted_files
from bessemer.config.bounded import parse_json
from bessemer.console import size
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import InputError, StorageError
from bessemer.generate.load import frozen_store
from bessemer.job import RunDirectory, RunLock
from bessemer.job.directory import step_name
from bessemer.report import MetricsFile
from bessemer.report.summary import disk_size, is_number
from bessemer.storage.files import TEMPORARY, discard
from bessemer.storage.weights import WeightFile
from bessemer.training.persistence.checkpoints import META_KEYS
from bessemer.training.state import LoopState


def examine_checkpoints(
    run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis, progress: Progress | None
) -> None:
    """Fill in the step that resume would take, and a finding for every checkpoint."""
    try:
        steps = store.final_steps(run.checkpoints)
    except StorageError as error:
        found.add("checkpoints", "error", str(error))
        return
    for step in reversed(steps):
        problems = checkpoints.verify(step, progress)
        if problems and not checkpoints.path(step).is_dir():
            continue  # retired by the run itself while we looked
        entry = {"step": step, "name": step_name(step), "sound": not problems, "problems": problems}
        entry["bytes"] = None if problems else checkpoints.size(step)
        found.checkpoints.append(entry)
        if problems:
            _damaged(found, step, problems, newest=found.step is None)
            continue
        text = f"{step_name(step)}: every byte is as it was saved ({size(entry['bytes'])})."
        found.add("checkpoints", "ok", text)
        if extra := unlisted_files(checkpoints.path(step)):
            shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            found.add(
                "checkpoints", "note", f"{step_name(step)} holds files that were not saved with it: {shown}."
            )
        if found.step is None:
            found.step, found.checkpoint = step, step_name(step)
            _beside(checkpoints, step, found)
            _frozen(run, saved_meta(checkpoints, step), found, progress)
    _conclude(run, found)


def examine_weights(run: RunDirectory, found: Diagnosis, progress: Progress | None) -> None:
    """Read every array of RUN/model, which is verified by that. Resume does not need them, so damage is a warning."""
    for path in sorted(run.model.glob("*.safetensors")):
        name = path.relative_to(run.path)
        try:
            file = WeightFile(path)
            for array, entry in file.entries.items():
                file.read(array)
                if progress is not None:
                    progress(entry.size)
        except StorageError as error:
            found.add("weights", "warning", str(error))
        else:
            known = "every byte is as it was saved" if file.checksums else "readable; it has no checksums"
            found.add("weights", "ok" if file.checksums else "note", f"{name}: {known}.")


def saved_meta(checkpoints: Checkpoints, step: int | None) -> dict[str, Any]:
    """meta.json of a sound checkpoint, or {}."""
    return {} if step is None else parse_json(checkpoints.read(step, "meta.json"))


def _damaged(found: Diagnosis, step: int, problems: list[str], newest: bool) -> None:
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    text = f"{step_name(step)} is damaged: {'; '.join(problems[:3])}{more}."
    found.add("checkpoints", "warning", text, "Resume passes it over." if newest else "")


def _conclude(run: RunDirectory, found: Diagnosis) -> None:
    if found.checkpoints and found.step is None:
        found.add(
            "checkpoints",
            "error",
            f"none of the {len(found.checkpoints)} checkpoints can be used.",
            f"Restore {run.checkpoints} from a copy, or start a new run.",
        )
    elif not found.checkpoints:
        found.add("checkpoints", "note", "no checkpoint was committed yet.")


def _frozen(run: RunDirectory, meta: dict[str, Any], found: Diagnosis, progress: Progress | None) -> None:
    """The parameters that a run does not train are written once, beside its checkpoints."""
    if meta.get("frozen") is None:
        return
    problems = frozen_store(run).verify(0, progress)
    if problems:
        text = f"the frozen weights in reference/frozen are damaged: {'; '.join(problems[:3])}."
        found.add("checkpoints", "error", text, "Put that folder back from a copy.")
    else:
        found.add("checkpoints", "ok", "the frozen weights in reference/frozen are as they were saved.")


def _beside(checkpoints: Checkpoints, step: int, found: Diagnosis) -> None:
    """Of the one that resume takes: this version understands loop.json and meta.json, the tokenizer is its own."""
    older = "Continue from an older one with --step, or use the version of Bessemer that wrote it."
    meta = saved_meta(checkpoints, step)
    if lacking := [key for key in META_KEYS if key not in meta]:
        text = f"{step_name(step)}: meta.json does not say {', '.join(lacking)}."
        found.add("checkpoints", "error", text, older)
    try:
        LoopState.from_json(checkpoints.read(step, "loop.json"))
    except (StorageError, ValueError, TypeError) as error:
        found.add("checkpoints", "error", f"{step_name(step)}: loop.json is not usable ({error}).", older)
    expected = meta.get("tokenizer_hash")
    path = checkpoints.path(step) / FILE
    try:
        actual = Tokenizer.load(path).hash if path.is_file() else None
    except InputError:
        actual = None
    if expected != actual:
        text = f"{step_name(step)}: its tokenizer.json is not the one that meta.json names."
        found.add("checkpoints", "error", text, older)


# metrics.jsonl: readable, every step once, none missing, and how far it is ahead of the checkpoint.


Row = dict[str, Any]


def examine_metrics(run: RunDirectory, found: Diagnosis, interval: int | None) -> None:
    """`interval` is the configured distance of rows, when it is known."""
    file = MetricsFile(run.metrics)
    try:
        rows = file.rows()
    except StorageError as error:
        found.add("metrics", "error", str(error))
        return
    for note in file.notes:
        found.add("metrics", "note", note)
    if not rows:
        found.add("metrics", "note", "metrics.jsonl has no rows yet.")
        return
    steps = [int(row["step"]) for row in rows if is_number(row.get("step"))]
    doubled = doubled_steps(rows)
    if doubled:
        found.add("metrics", "warning", f"metrics.jsonl has rows twice, of {_steps(doubled)}.")
    if any(later < earlier for earlier, later in itertools.pairwise(steps)):
        found.add("metrics", "warning", "the steps in metrics.jsonl do not ascend.")
    trained = sorted({int(row["step"]) for row in rows if "loss" in row and is_number(row.get("step"))})
    gaps = missing_spans(trained, interval, found.step)
    if gaps:
        spans = ", ".join(f"{first} and {last}" for first, last in gaps[:3])
        found.add(
            "metrics", "warning", f"rows are missing between the steps {spans}{' …' if gaps[3:] else ''}."
        )
    if not doubled and not gaps:
        found.add("metrics", "ok", f"{len(rows)} rows up to step {max(steps, default=0)}.")
    beyond = [step for step in steps if found.step is not None and step > found.step]
    if beyond:
        found.add(
            "metrics",
            "note",
            f"{len(beyond)} rows are beyond step {found.step}.",
            "Resume removes them and writes them again.",
        )


def doubled_steps(rows: list[Row]) -> list[int]:
    """Steps of which a number is given twice. A training row and a validation row of one step have none in common."""
    seen = collections.Counter(
        (int(row["step"]), name)
        for row in rows
        if is_number(row.get("step"))
        for name in ("loss", "val_loss")
        if name in row
    )
    return sorted({step for (step, _), count in seen.items() if count > 1})


def missing_spans(steps: list[int], interval: int | None, saved: int | None) -> list[tuple[int, int]]:
    """(a, b): neighbouring rows further apart than the interval and than is usual in the file.

    The interval may have been changed by a resume, so the usual distance counts too. The checkpoint at `saved`
    was taken after its rows were written.
    """
    apart = collections.Counter(later - earlier for earlier, later in itertools.pairwise(steps))
    usual = max(interval or 1, apart.most_common(1)[0][0] if apart else 1)
    marks = [0, *steps]
    spans = [(a, b) for a, b in itertools.pairwise(marks) if b - a > usual]
    if saved is not None and saved - marks[-1] > usual:
        spans.append((marks[-1], saved))
    return spans


def _steps(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
    return f"step {shown}" if len(steps) == 1 else f"the steps {shown}"


# Directories and files that belong to no checkpoint: how much they hold, and who removes them.


def stale_paths(run: RunDirectory) -> list[Path]:
    """Unfinished saves, half-finished deletions, and half-written files of killed processes."""
    files = [path for path in sorted(run.path.glob(".*.tmp")) if TEMPORARY.fullmatch(path.name)]
    return [*(run.checkpoints / name for name in store.leftovers(run.checkpoints)), *files]


def examine_leftovers(run: RunDirectory, found: Diagnosis, alive: bool) -> None:
    if not run.checkpoints.is_dir():
        return
    for path in stale_paths(run):
        held = size(disk_size(path))
        if alive:
            found.add("leftovers", "note", f"{path.name} ({held}) is being written by the run.")
        else:
            found.add(
                "leftovers",
                "note",
                f"{path.name} ({held}) was left by a process that was killed and is never read.",
                "Resume removes it; so does --fix.",
            )
    for name in store.set_aside_names(run.checkpoints):
        found.add(
            "leftovers",
            "note",
            f"{name} ({size(disk_size(run.checkpoints / name))}) belongs to another future of the run, which went on "
            "from an earlier step.",
            "It is deleted when the run has saved as far again; renaming it back restores it.",
        )


def remove_stale(run: RunDirectory) -> list[str]:
    """Delete `stale_paths`, and nothing else, while holding the run's lock; returns their names."""
    with RunLock(run, status=False):  # the run itself is not at work
        paths = stale_paths(run)
        for path in paths:
            discard(path)
        return [path.name for path in paths]
