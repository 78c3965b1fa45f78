"""Named artifacts: what a run writes besides its trained state, where, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from bessemer.storage.files import atomic_write, storage


class Lifetime(Enum):
    CHECKPOINT = "in each checkpoint, and deleted with it"
    RUN = "written once per run, before the first step that uses it"
    SHARED = "written once for all runs that agree on its key"


@dataclass(frozen=True)
class Artifact:
    """A file or folder; a `*` in its name stands for the key of its content."""

    name: str
    lifetime: Lifetime

    def path(self, root: Path, key: str = "") -> Path:
        """Return its path. root: the checkpoint, the run directory or the data root, by the lifetime."""
        folder = root / "reference" if self.lifetime is Lifetime.RUN else root
        return folder / self.name.replace("*", key)

    def all(self, root: Path) -> list[Path]:
        """Return those that are there, whatever their key, sorted."""
        return sorted(self.path(root).parent.glob(Path(self.name).name))

    def write(self, root: Path, text: str, key: str = "") -> None:
        """Write a small file atomically. Raise StorageError if the disk fails."""
        path = self.path(root, key)
        with storage(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)


ALLOCATION = Artifact("lookup.json", Lifetime.CHECKPOINT)
ROLLOUT = Artifact("rollout.safetensors", Lifetime.CHECKPOINT)
PASS_RATES = Artifact("pass-rates.safetensors", Lifetime.CHECKPOINT)
ROLLOUT_AHEAD = Artifact("rollout-ahead.safetensors", Lifetime.CHECKPOINT)
REFERENCE_WEIGHTS = Artifact("", Lifetime.RUN)  # step_N of each reference taken
REFERENCE_LOGPS = Artifact("logps-*.safetensors", Lifetime.RUN)
TEACHER_RECORD = Artifact("teacher.json", Lifetime.RUN)
TEACHER_TARGETS = Artifact("taught/*", Lifetime.SHARED)
