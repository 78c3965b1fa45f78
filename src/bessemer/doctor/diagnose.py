"""All checks in order, and the verdict: what `bessemer resume` would do, or why it cannot."""

from __future__ import annotations

import os
import shutil
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.manifest import Progress
from bessemer.console import duration, size
from bessemer.doctor.files import examine_checkpoints, examine_leftovers, examine_metrics, examine_weights
from bessemer.doctor.findings import Diagnosis, Level
from bessemer.doctor.inputs import examine_config, examine_material, mesh_fits, rehearse
from bessemer.errors import InputError, StorageError
from bessemer.job import RunDirectory, RunLock
from bessemer.job.lock import STALE_SECONDS
from bessemer.report.phases import FOLDER, has_phases, phases_of
from bessemer.report.summary import Summary, summarise

CONDITIONS = ("code", "data", "disk", "machine")
"""Areas whose remedies belong to the verdict: without them resume refuses, or fails later."""


def diagnose(run: RunDirectory, progress: Progress | None = None) -> Diagnosis:
    """Look at everything and change nothing. `progress` is told the bytes verified, from several threads."""
    if not run.exists():
        raise InputError(f"{run.path} holds a model but no run: there is nothing to resume.")
    summary, owner = summarise(run), RunLock.owner(run)
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
            stands = owner is None and found.state != "done" and not found.errors()
            if mesh_fits(config, found) and ready and stands:
                rehearse(run, config, checkpoints, found)
    finally:
        checkpoints.close()
    conclude(found, summary, owner)
    return found


def examine_status(summary: Summary, found: Diagnosis, owner: dict[str, Any] | None) -> None:
    """status.json and the lock: is somebody at work, and if not, how did it end?"""
    try:
        status = summary.run.read_status()
    except InputError as error:
        found.add("status", "error", str(error))
        return
    if owner is not None:
        text = f"the run is in use by pid {owner.get('pid')} on host {owner.get('host')}."
        found.add("status", "note", text)
        if (summary.age or 0.0) > STALE_SECONDS:
            text = f"its last sign of life is {duration(summary.age)} old, though it holds the lock."
            found.add("status", "warning", text)
    elif found.state == "crashed":
        text = f"the run crashed after step {summary.step}: its status says running, but no process holds its lock."
        found.add("status", "note", text, "Resume takes the lock over.")
    else:
        message = f" ({status['message']})" if status.get("message") else ""
        level: Level = "ok" if found.state in ("done", "stopped") else "note"
        found.add("status", level, f"{found.state} at step {summary.step}{message}.")


def examine_disk(run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Room for one more checkpoint, and the right to write it."""
    if not os.access(run.path, os.W_OK):
        remedy = "Resume needs to: change its rights, or copy it to where you may write."
        found.add("disk", "error", f"{run.path} cannot be written.", remedy)
        return
    free = shutil.disk_usage(run.path).free
    needed = 0 if found.step is None else checkpoints.size(found.step)
    if free < needed:
        text = f"{size(free)} are free, less than a checkpoint needs ({size(needed)})."
        found.add("disk", "warning", text, "Free space, or the next save fails.")
    else:
        found.add("disk", "ok", f"{size(free)} are free; a checkpoint needs {size(needed)}.")


def conclude(found: Diagnosis, summary: Summary, owner: dict[str, Any] | None) -> None:
    errors = found.errors()
    unusable = bool(found.checkpoints) and found.step is None
    if owner is not None:
        found.verdict = "the run is at work now; there is nothing to resume."
    elif found.state == "done" and not unusable:
        found.verdict = f"the run is finished at step {summary.step}; there is nothing to resume."
    elif errors:
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this run: {errors[0].line}"
    else:
        found.resumable = True
        found.verdict = _promise(found, summary.step)


def _promise(found: Diagnosis, reached: int | None) -> str:
    """What resume will do, and what the user must do for it."""
    conditions = [f.remedy for f in found.findings if f.area in CONDITIONS and f.remedy]
    but = f" But: {' '.join(conditions)}" if conditions else ""
    if found.step is None:
        return f"resume will start again from step 0, as the same run: no checkpoint was committed.{but}"
    lost = (reached or 0) - found.step
    again = f" {lost} step{'s' if lost > 1 else ''} after it will be taken again." if lost > 0 else ""
    return f"resume will continue at step {found.step} from checkpoint {found.checkpoint}.{again}{but}"


# A job of phases: every phase is a run of its own, and the job can go on if they all can.


def examine(run: RunDirectory, progress: Progress | None = None) -> Diagnosis:
    """The diagnosis of a run, or of all runs of a job of phases."""
    if not has_phases(run):
        return diagnose(run, progress)
    summary, owner = summarise(run), RunLock.owner(run)
    found = Diagnosis(str(run.path), summary.state)
    examine_status(summary, found, owner)
    for name in phases_of(run):
        phase = diagnose(RunDirectory(run.path / FOLDER / name), progress)
        found.add("phase", "error" if phase.exit_code else "ok", f"{name}: {phase.verdict}")
    if owner is not None:
        found.verdict = "the job is at work now; there is nothing to resume."
    elif found.errors():
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this job: {found.errors()[0].line}"
    elif found.state == "done":
        found.verdict = "the job is finished; there is nothing to resume."
    else:
        found.resumable = True
        found.verdict = "resume will go on with the phases that are not done."
    return found
