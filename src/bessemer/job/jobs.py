"""Jobs: they run once, save themselves and can be restored from a checkpoint. Trainers and evaluators are jobs.

`checkpoint` imports this package, so a job only states what a checkpoint manager must do; the subclass provides one.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeGuard, TypeVar

from bessemer.config.recipes import saved_tree
from bessemer.errors import InputError, StorageError
from bessemer.job.directory import RunDirectory, check_run_name, default_run_name
from bessemer.job.trust import check_trust
from bessemer.registry import jobs
from bessemer.storage.files import storage

if TYPE_CHECKING:
    from bessemer.topology import Topology


C = TypeVar("C")


class CheckpointManager(Protocol):
    """The part of `bessemer.checkpoint.Checkpoints` that a job uses."""

    def save(
        self,
        step: int,
        state: Any,
        *,
        files: Mapping[str, str | bytes] = ...,
        meta: Mapping[str, Any] = ...,
        wait: bool = False,
    ) -> None: ...

    def restore(self, step: int, abstract: Any) -> Any: ...

    def committed(self) -> list[int]: ...

    def latest(self) -> int | None: ...

    def verify(self, step: int) -> list[str]: ...

    def newest_valid(self) -> tuple[int | None, list[str]]: ...

    def read(self, step: int, name: str) -> str: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def path(self, step: int) -> Path: ...

    def at(self, path: Path) -> CheckpointManager:
        """Return the same kind of manager over another directory."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint: a tree of arrays, files beside it, and metadata."""

    step: int
    tree: Any
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


class BasicJob(ABC):
    """Something to run under a spec; calling it runs it unless it is done."""

    def __init__(self, spec: ExecutionSpec):
        self.spec = spec

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to run."""

    @abstractmethod
    def run(self) -> Any:
        """Run to the end; return the result, if there is one."""

    def __call__(self) -> Any:
        return None if self.done else self.run()


class CheckpointedJob(BasicJob):
    """Knows its run directory and the checkpoints in it."""

    @property
    def run_directory(self) -> RunDirectory:
        """The directory root/name of the spec."""
        return self.spec.run_directory

    @property
    @abstractmethod
    def checkpoint_manager(self) -> CheckpointManager:
        """The checkpoints in the run directory."""


class RestoreableJob(CheckpointedJob, Generic[C]):
    """A job whose whole state is in checkpoints. `C` is the type of its configuration.

    A subclass provides `snapshot`, `abstract_state` and `accept`; saving, finding and restoring are here.
    """

    job_key: ClassVar[str] = "job"

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return what a checkpoint of the current step holds."""

    @abstractmethod
    def abstract_state(self) -> Any:
        """Return the shapes, dtypes and shardings of `snapshot().tree`."""

    @abstractmethod
    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None:
        """Continue from `tree`; `files.read(step, name)` gives what was saved beside it."""

    def admit(self, step: int, files: CheckpointManager | None = None) -> None:
        """Raise an error for a checkpoint that is not of this job, before its arrays are read; a subclass overrides it.

        `files` is where the checkpoint is; by default the job's own.
        """

    def note(self, message: str) -> None:
        """Called with a message for every damaged checkpoint that was skipped; a subclass logs it."""
        import warnings

        warnings.warn(message, stacklevel=3)

    def save(self, suffix: str | int | Path | None = None) -> None:
        """Save the current state among the job's checkpoints; return once its arrays are copied. If `suffix` is a step,
        it must be the current one.

        If it is a path (a `Path`, or a string with a slash), save to PATH/step_NNNNNNNN and wait for the commit.
        """
        snapshot = self.snapshot()
        folder, name = split_path(suffix) if is_path(suffix) else (None, suffix)
        if name is not None and step_of(name) != snapshot.step:
            raise InputError(f"cannot save step {snapshot.step} under the name '{suffix}'.")
        if folder is None:
            self.checkpoint_manager.save(snapshot.step, snapshot.tree, files=snapshot.files, meta=snapshot.meta)
            return
        with storage(f"cannot create '{folder}'"):
            folder.mkdir(parents=True, exist_ok=True)
        manager = self.checkpoint_manager.at(folder)
        try:
            manager.save(snapshot.step, snapshot.tree, files=snapshot.files, meta=snapshot.meta, wait=True)
        finally:
            manager.close()

    def load(self, suffix: str | int | Path | None = None, *, manager: CheckpointManager | None = None) -> bool:
        """Restore the state of step `suffix`, or of the newest valid checkpoint; return False if there is none.

        A path names one checkpoint, a run, or a folder that `save` wrote to; raise InputError if it has no checkpoint.
        `manager` reads another run's checkpoints; by default the job's own.
        """
        if is_path(suffix):
            folder, name = split_path(suffix)
            inside = folder / "checkpoints"
            place = inside if name is None and inside.is_dir() else folder
            if not self.load(name, manager=self.checkpoint_manager.at(place)):
                raise InputError(f"'{suffix}' has no committed checkpoint to load.")
            return True
        manager = manager or self.checkpoint_manager
        if suffix is None:
            step, messages = manager.newest_valid()
            for message in messages:
                self.note(message)
            if step is None:
                return False
        else:
            step = step_of(suffix)
            if step not in manager.committed():
                return False
            if problems := manager.verify(step):
                raise StorageError(f"checkpoint {step} is damaged: {'; '.join(problems)}. Choose another --step.")
        self.admit(step, manager)
        self.accept(manager.restore(step, self.abstract_state()), step, manager)
        return True

    def checkpoints(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return self.checkpoint_manager.committed()

    def latest(self) -> int | None:
        """Return the newest committed step, or None."""
        return self.checkpoint_manager.latest()

    @classmethod
    def from_config(cls, saved: Mapping[str, Any], spec: ExecutionSpec) -> Self:
        """Build the job from its saved configuration tree; a subclass with settings overrides this."""
        return cls(spec)

    @staticmethod
    def from_checkpoint(
        path: str | Path, spec: ExecutionSpec | None = None, *, trust: bool = False
    ) -> RestoreableJob[Any]:
        """Return the job saved at `path` (a run, or one of its checkpoints), with its state.

        Its class is the one the saved configuration names under `job`. `spec` defaults to the run it lies in. Code that
        a configuration names is imported only for runs started here, or with `trust`.
        """
        place = Path(path).absolute()
        is_step = _STEP.fullmatch(place.name) is not None
        run = RunDirectory(place.parent.parent if is_step else place)
        saved = _trusted_config(run, place / "config.yaml" if is_step else run.config, trust)
        for other in {run.path: run, **({spec.run_directory.path: spec.run_directory} if spec else {})}.values():
            if other.config.is_file():  # a trainer reads its settings there
                check_trust(other, trust)
        name = saved.get(RestoreableJob.job_key)
        if not isinstance(name, str):
            raise InputError(f"{place}: its config.yaml has no 'job', so the class to rebuild is unknown.")
        found = jobs.get(name)
        if not (isinstance(found, type) and issubclass(found, RestoreableJob)):
            raise InputError(f"{place}: the job '{name}' cannot be restored from a checkpoint.")
        job = found.from_config(saved, spec or ExecutionSpec.local(run.path.parent, run.name))
        manager = job.checkpoint_manager.at(run.checkpoints)
        if not job.load(place.name if is_step else None, manager=manager):
            raise InputError(f"{place} has no committed checkpoint to restore from.")
        return job


_STEP = re.compile(r"step_(\d+)")


def step_of(suffix: str | int | Path) -> int:
    """512, "512" and "step_00000512" all mean step 512."""
    if isinstance(suffix, int):
        return suffix
    match = re.fullmatch(r"(?:step_)?(\d+)", str(suffix))
    if match is None:
        raise InputError(
            f"'{suffix}' is not a checkpoint: write a step number, step_NNNNNNNN, or a path such as ./{suffix}."
        )
    return int(match.group(1))


def is_path(suffix: str | int | Path | None) -> TypeGuard[str | Path]:
    """Return whether a suffix of `save` or `load` is a path: a `Path`, or a text with a separator."""
    return isinstance(suffix, Path) or (isinstance(suffix, str) and os.sep in suffix)


def split_path(path: str | Path) -> tuple[Path, str | None]:
    """(the folder that holds checkpoints, the name of one in it, if the path names one)."""
    place = Path(path).expanduser()
    return (place.parent, place.name) if _STEP.fullmatch(place.name) else (place, None)


def _trusted_config(run: RunDirectory, path: Path, trust: bool) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist: this is not a run or a checkpoint of one.")
    check_trust(run, trust, path)
    return saved_tree(path)


@dataclass(frozen=True)
class ExecutionSpec:
    """Where and on what a job runs: in root/name. `project` and `group` are labels for reports and trackers."""

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
        """Return a spec for this machine. Creates a missing root, detects the topology, names the run by the time."""
        from bessemer.topology import make_topology

        with storage("cannot create the directory for runs"):
            Path(root).mkdir(parents=True, exist_ok=True)
        return cls(name or default_run_name(), project, group, Path(root), topology or make_topology())

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.root / self.name)
