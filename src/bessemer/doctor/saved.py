"""The checkpoints of a run, newest first: every byte, and what stands beside the arrays."""

from __future__ import annotations

from typing import Any

from bessemer.checkpoint import Checkpoints, retention
from bessemer.checkpoint.manifest import Progress, unlisted_files
from bessemer.checkpoint.weights import WeightFile
from bessemer.config.bounded import parse_json
from bessemer.data.tokenizer import FILE, Tokenizer
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import InputError, StorageError
from bessemer.generate.load import frozen_store
from bessemer.job import RunDirectory
from bessemer.job.directory import step_name
from bessemer.report.table import size
from bessemer.training.restore import META_KEYS
from bessemer.training.state import LoopState


def examine_checkpoints(
    run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis, progress: Progress | None
) -> None:
    """Fill in the step that resume would take, and a finding for every checkpoint."""
    try:
        steps = retention.final_steps(run.checkpoints)
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
