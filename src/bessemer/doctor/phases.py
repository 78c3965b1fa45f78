"""A job of phases: every phase is a run of its own, and the job can go on if they all can."""

from __future__ import annotations

from bessemer.checkpoint.manifest import Progress
from bessemer.doctor.diagnose import diagnose, examine_status
from bessemer.doctor.findings import Diagnosis
from bessemer.errors import StorageError
from bessemer.job import RunDirectory, RunLock
from bessemer.report.phases import FOLDER, has_phases, phases_of
from bessemer.report.summary import summarise


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
