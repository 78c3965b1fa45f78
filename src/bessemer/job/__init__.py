"""What a run is: its directory, its status, its lock, and the jobs that work in it."""

from bessemer.job.directory import GIVEN, RunDirectory, RunLock, check_run_name
from bessemer.job.jobs import (
    BasicJob,
    CheckpointedJob,
    CheckpointManager,
    ExecutionSpec,
    RestoreableJob,
    Snapshot,
    is_path,
)
from bessemer.job.runs import find_run

__all__ = [
    "GIVEN",
    "BasicJob",
    "CheckpointManager",
    "CheckpointedJob",
    "ExecutionSpec",
    "RestoreableJob",
    "RunDirectory",
    "RunLock",
    "Snapshot",
    "check_run_name",
    "find_run",
    "is_path",
]
