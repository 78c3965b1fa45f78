"""Under which name, where and on what a job runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.job.directory import RunDirectory, check_run_name, default_run_name
from bessemer.job.files import storage

if TYPE_CHECKING:
    from bessemer.topology import Topology


@dataclass(frozen=True)
class ExecutionSpec:
    """`project` and `group` are labels for reports and trackers; the run lives in root/name."""

    name: str
    project: str | None = None
    group: str | None = None
    root: Path = Path("runs")
    topology: Topology | None = None

    def __post_init__(self) -> None:
        check_run_name(self.name)
        object.__setattr__(self, "root", Path(self.root))

    @classmethod
    def local(
        cls,
        root: str | Path,
        name: str | None = None,
        topology: Topology | None = None,
        *,
        project: str | None = None,
        group: str | None = None,
    ) -> ExecutionSpec:
        """On this machine: makes a missing root, detects the topology, names the run run-YYYYmmdd-HHMMSS."""
        from bessemer.topology import make_topology

        with storage("cannot create the directory for runs"):
            Path(root).mkdir(parents=True, exist_ok=True)
        return cls(name or default_run_name(), project, group, Path(root), topology or make_topology())

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.root / self.name)
