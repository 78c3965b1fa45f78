"""What every job file says: which run, on how many machines, for how long, and when it is started again."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bessemer.config import Config, configuration, configure, parse_duration, resolve
from bessemer.data import Sampling, find_source
from bessemer.data.stores.catalog import store_directory
from bessemer.errors import InputError, Stopped
from bessemer.job import check_run_name
from bessemer.storage.remote import is_remote
from bessemer.topology import TopologySettings
from bessemer.training.setup.schema import schema_of

STOPPED = Stopped.exit_code
LOST = (4, 134, 137)
"""Exit codes after a process or a machine was lost: ours, an abort of JAX, and a kill. A full disk is 4 too, so these
are not tried for ever."""
HOPELESS = (1, 2, 3)
"""A bug, bad input, training that failed: another start would end the same."""

TIME_LIMIT = "training.time_limit"

COUNT_STARTS = """\
# $run/starts has a file for each start of this job that did not end in order: those are the failures.
# A start that was killed together with this shell leaves its file behind and is counted too.
mkdir -p "$run/starts"
if [ "$start" = 0 ]; then rm -f "$run/starts/$job".*; fi  # submitted anew, by hand
failures=$(find "$run/starts" -name "$job.*" ! -name "$job.$start" | wc -l)
touch "$run/starts/$job.$start"
"""
ENDED_IN_ORDER = 'rm -f "$run/starts/$job.$start"'
"""Shell of both job files. SLURM's and JobSet's own counters also count requeues after a stop with a checkpoint."""


@dataclass(frozen=True)
class Job:
    """One run on a cluster. `gpus` are devices of one node (0: CPUs); one process a node holds them all."""

    recipe: str
    overrides: tuple[str, ...]
    name: str
    runs: str = "runs"
    nodes: int = 1
    gpus: int = 0
    seconds: float | None = None  # that the cluster gives it
    port: int | None = None
    restarts: int = 20  # after failures; a stop with a checkpoint is always continued

    def __post_init__(self) -> None:
        check_run_name(self.name)
        for name, value, least in (("--nodes", self.nodes, 1), ("--restarts", self.restarts, 0)):
            if value < least:
                raise InputError(f"{name} is {value}; at least {least} is needed.")
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise InputError(f"--port is {self.port}; choose one between 1024 and 65535.")

    @property
    def run(self) -> str:
        return f"{self.runs.rstrip('/')}/{self.name}"

    @property
    def margin(self) -> int:
        """Seconds before the cluster's limit at which the run stops by itself: a tenth, 1 to 10 minutes."""
        assert self.seconds is not None
        return int(min(600, max(60, self.seconds / 10)))

    def train(self) -> list[str]:
        """The command of the first start."""
        words = ["bessemer", "train", self.recipe, *self.overrides]
        if self.seconds is not None and not any(word.startswith(f"{TIME_LIMIT}=") for word in self.overrides):
            words.append(f"{TIME_LIMIT}={int(self.seconds - self.margin)}")
        return [*words, "--name", self.name, "--runs", self.runs]

    def resume(self) -> list[str]:
        """The command of every later start; the settings are in the run."""
        return ["bessemer", "resume", self.run]


def describe_job(
    recipe: str,
    overrides: Sequence[str],
    *,
    name: str | None,
    runs: str,
    nodes: int,
    gpus: int,
    time: str | None,
    port: int | None,
    restarts: int,
    elsewhere: str | None = None,
) -> Job:
    """A job whose recipe was resolved here: a misspelt setting should not cost a place in the queue.

    elsewhere: a directory of the cluster; a recipe in it cannot be looked at, and is taken as it is.
    """
    seconds = None if time is None else parse_duration(time)
    if seconds is not None and seconds < 120:
        raise InputError(f"--time {time} is too short to stop in good order: give at least 2m.")
    label = re.sub(r"[^A-Za-z0-9._-]", "-", Path(recipe).stem)[:60]
    job = Job(recipe, tuple(overrides), name or label, runs, nodes, gpus, seconds, port, restarts)
    if elsewhere is None or not recipe.startswith(f"{elsewhere.rstrip('/')}/"):
        check_mesh(job)
    return job


def check_mesh(job: Job) -> None:
    """The recipe reads, and its mesh fits the devices that are asked for."""
    config = resolve(schema_of, job.recipe, list(job.overrides))
    if job.gpus == 0:
        return
    with configuration(config):
        sizes = configure(TopologySettings).sizes()
    fixed = math.prod(size for size in sizes.values() if size > 0)
    devices = job.nodes * job.gpus
    if devices % fixed or (fixed != devices and -1 not in sizes.values()):
        written = ", ".join(f"topology.{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"{job.nodes} node(s) with {job.gpus} devices are {devices}, which the mesh does not fit ({written}). "
            "Change --nodes or --gpus-per-node, or a size of the mesh."
        )


def unseen(job: Job, mount: str | None = None) -> list[str]:
    """Warnings about files that the recipe names and this machine does not have.

    `mount` is a directory of the cluster, which cannot be looked at; with it only files below it are seen there.
    """
    if mount is not None and job.recipe.startswith(f"{mount.rstrip('/')}/"):
        return []
    config = resolve(schema_of, job.recipe, list(job.overrides))
    named = [("training.dataset", one.name, _dataset_problem(one)) for one in _samplings(config)]
    for key in ("data.tokenizer", "init", "distill.teacher"):
        value = config.get(key)
        if isinstance(value, str) and value != "auto" and not value.startswith(("train:", "hf:", "recipe:")):
            places = (Path(value).expanduser(), Path(job.runs) / value)
            there = is_remote(value) or any(place.exists() for place in places)
            named.append((key, value, None if there else f"'{value}' does not exist."))
    lines = []
    for key, value, problem in named:
        is_path = "/" in value or problem is not None or Path(value).exists()
        if mount is None and problem is not None:
            lines.append(f"{key}={value} was not found here ({problem.rstrip('.')}); the nodes must have it.")
        elif mount is not None and is_path and not is_remote(value) and not _below(value, mount):
            lines.append(
                f"{key}={value} is not below {mount}, so the pods do not have it; copy it to the volume."
            )
    return lines


def _samplings(config: Config) -> list[Sampling]:
    return [sampling for mixture in config.get("training/dataset") or [] for sampling in mixture]


def _dataset_problem(sampling: Sampling) -> str | None:
    try:
        if not is_remote(sampling.name) and store_directory(sampling) is None:
            find_source(sampling.name)
    except InputError as error:
        return str(error)
    return None


def _below(path: str, mount: str) -> bool:
    return path.startswith(f"{mount.rstrip('/')}/")


def shell(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
