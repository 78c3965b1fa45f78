"""The run directory: where everything of a run lies, and its status file."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.config.bounded import read_json
from bessemer.errors import InputError, nearest
from bessemer.storage.files import atomic_write, storage
from bessemer.storage.remote import refuse_remote

GIVEN = "given from Python"
"""The row of derived.json that names the parts which the caller brought, such as dataset_train."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_STEP = re.compile(r"step_(\d{8,})")
_status_writes = threading.Lock()  # the loop and the heartbeat thread both read, change and write the status


def check_run_name(name: str) -> str:
    """Return `name` when it can be a directory name anywhere: [A-Za-z0-9._-], at most 80, not `.` or `..`."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"'{name}' cannot be a run name: use 1 to 80 letters, digits, dots, dashes and underscores."
        )
    return name


def default_run_name(prefix: str = "run") -> str:
    """`prefix`-YYYYmmdd-HHMMSS."""
    return check_run_name(f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}")


def step_name(step: int) -> str:
    """Directory of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step of a final directory name; None for anything else (a `.tmp`, a stray file)."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run (a contract: scripts depend on them) and its status.json."""

    path: Path

    def __post_init__(self) -> None:
        refuse_remote(
            self.path,
            "a run directory is locked, renamed and appended to, so it must be on a disk",
            "keep --runs local and set logging.mirror=s3://…, which copies checkpoints there; "
            "`bessemer resume URL/NAME` goes on from the copy anywhere",
        )
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def word(self) -> str:
        """The path as a shell takes it, for the commands that are printed."""
        return shlex.quote(str(self.path))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def derived(self) -> Path:
        return self.path / "derived.json"

    def given_parts(self) -> set[str]:
        """Names of the parts that the caller brought from Python when the run was started."""
        if not self.derived.is_file():
            return set()
        try:
            return set(read_json(self.derived).get(GIVEN, {}).get("value", []))
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"{self.derived} is damaged ({error}). Delete it; it is written again on resume."
            ) from error

    @property
    def branches(self) -> Path:
        """Steps after which the run went on with other settings (`resume --change`)."""
        return self.path / "branches.json"

    @property
    def stages(self) -> Path:
        return self.path / "stages.json"

    def step_of_stage(self, name: str) -> int:
        """The last step of the stage of that name (stage-1, …), whose checkpoint is kept."""
        try:
            listed = read_json(self.stages) if self.stages.is_file() else []
            ends = {str(stage["name"]): int(stage["end"]) for stage in listed}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.stages} cannot be read ({error}). Give --step as a number.") from error
        if name not in ends:
            known = f"it has {', '.join(ends)}" if ends else "it has one stage only; give a number"
            raise InputError(f"{self.path} has no stage '{name}': {known}.")
        return ends[name]

    @property
    def facts(self) -> Path:
        return self.path / "facts.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def origin(self) -> Path:
        return self.path / "origin.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def weights(self) -> Path:
        """Histograms of parameters, where callbacks=[weight_distribution] is on."""
        return self.path / "weights.jsonl"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        return self.path / "reference"

    @property
    def report(self) -> Path:
        return self.path / "report.md"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def exists(self) -> bool:
        """Whether a run was ever created here: an empty directory is not one."""
        return self.config.is_file() or self.status.is_file() or self.checkpoints.is_dir()

    def create(self, exist_ok: bool = False) -> RunDirectory:
        """Make the directory. A run already there is an error, or it would silently go on as this one."""
        check_run_name(self.name)
        if self.exists() and not exist_ok:
            raise InputError(
                f"the run '{self.name}' already exists at {self.path}. Continue it with "
                f"`bessemer resume {self.name}`, or choose another --name."
            )
        with storage("cannot create the run directory"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.eval.mkdir(exist_ok=True)
        return self

    def write_status(self, **fields: Any) -> dict[str, Any]:
        """Merge `fields` (state, step, exit_code, message) into status.json, with a new heartbeat."""
        with _status_writes:
            status = {**self.read_status(), **fields}
            status.update(pid=os.getpid(), host=socket.gethostname(), heartbeat=time.time())
            atomic_write(self.status, json.dumps(status, indent=1) + "\n")
            return status

    def heartbeat(self) -> None:
        """Say that the process is alive, whatever it is doing."""
        self.write_status()

    def read_status(self) -> dict[str, Any]:
        """The status, or {} before the first one."""
        try:
            found = read_json(self.status)
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise InputError(
                f"{self.status} is not valid JSON ({error}). Delete it; it is rebuilt."
            ) from error
        return found if isinstance(found, dict) else {}


def find_run(
    name_or_path: str | Path, runs_root: str | Path = "runs", *, trust: bool = False
) -> RunDirectory:
    """The run at a path, or of a name under `runs_root`; otherwise an error that says what is there.

    A run that holds links out of its directory, or pipes and devices, is refused (job/trust.py) unless it is trusted.
    """
    from bessemer.job.trust import check_links  # which knows run directories

    text = str(name_or_path)
    root = Path(runs_root)
    candidates = [Path(text)] if os.sep in text else [root / text, Path(text)]
    for candidate in candidates:
        run = RunDirectory(candidate)
        if candidate.is_dir() and (run.exists() or run.model.is_dir()):
            if not trust:
                check_links(run.path, run=run)
            return run
    if (folder := next((path for path in candidates if (path / "config.json").is_file()), None)) is not None:
        raise InputError(
            f"{folder} holds a model's weights and is not a run. Of a Hugging Face folder `bessemer import {folder} "
            f"{root / folder.name}` makes one; to train from it, begin a new run with init={folder}"
        )
    names = list_runs(root)
    close = nearest(Path(text).name, names)
    hint = f" Did you mean '{close}'?" if close else ""
    known = f" Runs there: {', '.join(names[:10])}{' …' if len(names) > 10 else ''}." if names else ""
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise InputError(f"no run '{text}' (looked at {tried}).{hint}{known} `--runs DIR` says where runs are.")


def list_runs(runs_root: str | Path = "runs") -> list[str]:
    """Names of the runs under a directory, sorted."""
    root = Path(runs_root)
    if not root.is_dir():
        return []
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and RunDirectory(entry).exists())
