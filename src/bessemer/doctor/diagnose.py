"""All checks in order, and the verdict: what `bessemer resume` would do, or why it refuses."""

from __future__ import annotations

import os
import shutil
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.console import Advance, counted, duration, size
from bessemer.doctor.checks import (
    Diagnosis,
    Level,
    examine_checkpoints,
    examine_config,
    examine_leftovers,
    examine_material,
    examine_metrics,
    examine_weights,
    mesh_fits,
    rehearse,
)
from bessemer.errors import InputError, StorageError
from bessemer.job import RunDirectory, RunLock
from bessemer.job.directory import STALE_SECONDS
from bessemer.report.summary import Summary, has_phases, phases_of, summarize

CONDITIONS = ("code", "trust", "data", "disk", "machine")
"""Areas whose remedies are part of the verdict: without them resume refuses, or fails later."""


def diagnose(run: RunDirectory, progress: Advance | None = None) -> Diagnosis:
    """Check everything and change nothing. `progress` gets the bytes verified, from several threads."""
    if not run.exists():
        raise InputError(f"{run.path} holds a model but no run: there is nothing to resume.")
    summary, owner = summarize(run), RunLock.owner(run)
    found = Diagnosis(str(run.path), summary.state)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        examine_status(summary, found, owner)
        examine_checkpoints(run, checkpoints, found, progress)
        examine_weights(run, found, progress)
        examine_leftovers(run, found, alive=owner is not None)
        config = examine_config(run, checkpoints, found)
        examine_metrics(run, found, None if config is None else config.get("logging/report_interval"))
        examine_disk(run, checkpoints, found)
        if config is not None:
            ready = examine_material(run, config, found)
            resumable = owner is None and found.state != "done" and not found.errors()
            if mesh_fits(config, found) and ready and resumable:
                rehearse(run, config, checkpoints, found)
    finally:
        checkpoints.close()
    conclude(found, summary, owner)
    return found


def examine_status(summary: Summary, found: Diagnosis, owner: dict[str, Any] | None) -> None:
    """Check status.json and the lock: is the run in use, and if not, how did it end?"""
    try:
        status = summary.run.read_status()
    except InputError as error:
        found.add("status", "error", str(error))
        return
    if owner is not None:
        found.add("status", "note", f"the run is in use by pid {owner.get('pid')} on host {owner.get('host')}.")
        if (summary.age or 0.0) > STALE_SECONDS:
            text = f"its last heartbeat is {duration(summary.age)} old, though it holds the lock."
            found.add("status", "warning", text)
    elif found.state == "crashed":
        text = f"the run crashed after step {summary.step}: its status says running, but no process holds its lock."
        found.add("status", "note", text, "Resume takes the lock over.")
    else:
        message = f" ({status['message']})" if status.get("message") else ""
        level: Level = "ok" if found.state in ("done", "stopped") else "note"
        found.add("status", level, f"{found.state} at step {summary.step}{message}.")


def examine_disk(run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Check that there is room for one more checkpoint, and permission to write it."""
    if not os.access(run.path, os.W_OK):
        remedy = "Resume needs write access: change its permissions, or copy it to where you may write."
        found.add("disk", "error", f"{run.path} cannot be written.", remedy)
        return
    free = shutil.disk_usage(run.path).free
    needed = 0 if found.step is None else checkpoints.size(found.step)
    if free < needed:
        text = f"{size(free)} free, less than a checkpoint needs ({size(needed)})."
        found.add("disk", "warning", text, "Free space, or the next save fails.")
    else:
        found.add("disk", "ok", f"{size(free)} free; a checkpoint needs {size(needed)}.")


def conclude(found: Diagnosis, summary: Summary, owner: dict[str, Any] | None) -> None:
    """Set the verdict, the exit code and whether the run can be resumed."""
    errors = found.errors()
    unusable = bool(found.checkpoints) and found.step is None
    if owner is not None:
        found.verdict = "the run is in progress; there is nothing to resume."
    elif found.state == "done" and not unusable:
        found.verdict = f"the run is finished at step {summary.step}; there is nothing to resume."
    elif errors:
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this run: {errors[0].line}"
    else:
        found.resumable = True
        found.verdict = _promise(found, summary.step)


def _promise(found: Diagnosis, reached: int | None) -> str:
    """Return what resume will do, and what the user must do first."""
    conditions = [f.remedy for f in found.findings if f.area in CONDITIONS and f.remedy]
    but = f" But: {' '.join(conditions)}" if conditions else ""
    if found.step is None:
        return f"resume will start again from step 0, as the same run: no checkpoint was committed.{but}"
    lost = (reached or 0) - found.step
    again = f" {counted(lost, 'step')} after it will be repeated." if lost > 0 else ""
    return f"resume will continue at step {found.step} from checkpoint {found.checkpoint}.{again}{but}"


def examine(run: RunDirectory, progress: Advance | None = None) -> Diagnosis:
    """Return the diagnosis of a run, or of a job of phases: it can be resumed if each of its runs can."""
    if not has_phases(run):
        return diagnose(run, progress)
    summary, owner = summarize(run), RunLock.owner(run)
    found = Diagnosis(str(run.path), summary.state)
    examine_status(summary, found, owner)
    for phase in phases_of(run):
        diagnosis = diagnose(phase, progress)
        found.add("phase", "error" if diagnosis.exit_code else "ok", f"{phase.name}: {diagnosis.verdict}")
    if owner is not None:
        found.verdict = "the job is in progress; there is nothing to resume."
    elif found.errors():
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this job: {found.errors()[0].line}"
    elif found.state == "done":
        found.verdict = "the job is finished; there is nothing to resume."
    else:
        found.resumable = True
        found.verdict = "resume will continue with the phases that are not done."
    return found
