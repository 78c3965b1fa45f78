"""Job files for clusters: an sbatch script or a JobSet manifest that starts a recipe and restarts it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.config import parse_duration, resolve
from bessemer.data import Sampling, find_source
from bessemer.data.sources.hub import is_hub_dataset, must_download
from bessemer.data.stores.catalog import store_directory
from bessemer.errors import InputError, Stopped
from bessemer.job import check_run_name
from bessemer.job.directory import recipe_label
from bessemer.storage.remote import is_remote
from bessemer.topology import TopologySettings
from bessemer.training.setup.schema import schema_of

STOPPED = Stopped.exit_code
LOST = (4, 134, 137)
"""Exit codes of a lost process or machine: ours, a JAX abort, a kill. A full disk is 4 too, so restarts are limited."""
HOPELESS = (1, 2, 3)
"""A bug, bad input, failed training: another start would end the same."""
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
    """One run on a cluster. One process per node holds its `gpus` devices (0: CPUs)."""

    recipe: str
    overrides: tuple[str, ...]
    name: str
    runs: str = "runs"
    nodes: int = 1
    gpus: int = 0
    seconds: float | None = None  # the cluster's time limit
    port: int | None = None
    restarts: int = 20  # after failures; a stop with a checkpoint is always continued

    def __post_init__(self) -> None:
        check_run_name(self.name)
        for name, value, least in (("--nodes", self.nodes, 1), ("--restarts", self.restarts, 0)):
            if value < least:
                raise InputError(f"{name} must be at least {least}; got {value}.")
        if self.port is not None and not 1024 <= self.port <= 65535:
            raise InputError(f"--port must be between 1024 and 65535; got {self.port}.")

    @property
    def run(self) -> str:
        return f"{self.runs.rstrip('/')}/{self.name}"

    @property
    def margin(self) -> int:
        """Seconds before the cluster's limit at which the run stops itself: a tenth of it, 1 to 10 minutes."""
        assert self.seconds is not None
        return int(min(600, max(60, self.seconds / 10)))

    def train(self) -> list[str]:
        """Return the command of the first start."""
        words = ["bessemer", "train", self.recipe, *self.overrides]
        if self.seconds is not None and not any(word.startswith(f"{TIME_LIMIT}=") for word in self.overrides):
            words.append(f"{TIME_LIMIT}={int(self.seconds - self.margin)}")
        return [*words, "--name", self.name, "--runs", self.runs]

    def resume(self) -> list[str]:
        """Return the command of every later start; the settings are in the run."""
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
    """Return the job, after resolving its recipe here: a misspelled setting should not cost a place in the queue.

    A recipe below `elsewhere`, a directory of the cluster, cannot be checked.
    """
    seconds = None if time is None else parse_duration(time)
    if seconds is not None and seconds < 120:
        raise InputError(f"--time {time} is too short for a clean stop: give at least 2m.")
    job = Job(recipe, tuple(overrides), name or recipe_label(recipe), runs, nodes, gpus, seconds, port, restarts)
    if elsewhere is None or not _is_below(recipe, elsewhere):
        check_mesh(job)
    return job


def check_mesh(job: Job) -> None:
    """Raise InputError if the recipe does not resolve or its mesh does not fit the requested devices."""
    config = resolve(schema_of, job.recipe, list(job.overrides))
    if job.gpus == 0:
        return
    sizes = config.make(TopologySettings).sizes()
    fixed = math.prod(size for size in sizes.values() if size > 0)
    devices = job.nodes * job.gpus
    if devices % fixed or (fixed != devices and -1 not in sizes.values()):
        written = ", ".join(f"topology.{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"the mesh ({written}) does not fit {job.nodes} node(s) with {job.gpus} devices each ({devices} in all). "
            "Change --nodes, --gpus-per-node or the mesh."
        )


def unseen(job: Job, mount: str | None = None) -> list[str]:
    """Return warnings about files that the recipe names and the job will not find.

    Without `mount`: files missing here. With `mount`, a directory of the cluster: files that are not below it.
    """
    if mount is not None and _is_below(job.recipe, mount):
        return []
    config = resolve(schema_of, job.recipe, list(job.overrides))
    samplings = [sampling for mixture in config.get("training/dataset") or [] for sampling in mixture]
    named = [("training.dataset", sampling.name, _dataset_problem(sampling)) for sampling in samplings]
    for key in ("data.tokenizer", "init", "distill.teacher"):
        value = config.get(key)
        if isinstance(value, str) and value != "auto" and not value.startswith(("train:", "hf:", "recipe:")):
            places = (Path(value).expanduser(), Path(job.runs) / value)
            there = is_remote(value) or any(place.exists() for place in places)
            named.append((key, value, None if there else f"'{value}' does not exist."))
    lines = []
    for key, value, problem in named:
        is_path = ("/" in value and not is_hub_dataset(value)) or problem is not None or Path(value).exists()
        if mount is None and problem is not None:
            lines.append(f"{key}={value} was not found here ({problem.rstrip('.')}); the nodes must have it.")
        elif mount is not None and is_path and not is_remote(value) and not _is_below(value, mount):
            lines.append(f"{key}={value} is not below {mount}, so the pods do not have it; copy it to the volume.")
    return lines


def _dataset_problem(sampling: Sampling) -> str | None:
    try:
        if is_remote(sampling.name) or must_download(sampling.name):
            return None
        if store_directory(sampling) is None:
            find_source(sampling.name)
    except InputError as error:
        return str(error)
    return None


def _is_below(path: str, mount: str) -> bool:
    return path.startswith(f"{mount.rstrip('/')}/")


# SLURM: one process per node. The program finds its peers through SLURM's own variables; the shell waits for the
# processes and requeues the job by their exit code. A signal to the shell itself means that SLURM ends the job
# (scancel, or a preemption after which SLURM restarts it), so then the script does not requeue.

SCRIPT = """\
#!/bin/bash
# {title}
# Written by `bessemer launch slurm`. Submit with: sbatch {file}
{directives}

# Shared by all nodes and kept between starts: prepared data and compiled programs.
export BESSEMER_HOME="${{BESSEMER_HOME:-$HOME/.cache/bessemer}}"
export PYTHONUNBUFFERED=1
{port}
{setup}
run={run}
if [ -f "$run/config.yaml" ]; then
  command=({resume})
else
  command=({train})
fi
job=slurm-$SLURM_JOB_ID
start=${{SLURM_RESTART_COUNT:-0}}
{count}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd' ')
echo "start $start of job $SLURM_JOB_ID on $nodes"

ended=no
trap 'ended=yes' TERM  # SLURM ends the job itself; the processes hear it too and save
srun --kill-on-bad-exit=0 "${{command[@]}}"
code=$?

again=no
case $code in
  0) {in_order} ;;
  {stopped}) {in_order}; again=yes ;;  # stopped with a checkpoint: signal or time limit
  {lost})  # a process or a node was lost
    if [ "$failures" -lt {restarts} ]; then
      again=yes
    else
      echo "$((failures + 1)) starts failed; not started again"
    fi
    ;;
esac
if [ "$again" = yes ] && [ "$ended" = no ]; then
  echo "exit code $code: to be started again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class Batch:
    """Options of sbatch itself."""

    partition: str | None = None
    account: str | None = None
    cpus: int | None = None
    memory: str | None = None
    setup: Sequence[str] = ()  # shell lines before the program: modules, a virtual environment


def script(job: Job, batch: Batch, file: str) -> str:
    """Return the sbatch script."""
    port = (
        f"export JAX_COORDINATOR_PORT={job.port}"
        if job.port
        else "# The port of process 0 follows from the job's number; JAX_COORDINATOR_PORT=N would choose one."
    )
    return SCRIPT.format(
        title=f"{job.name}: {job.recipe} on {job.nodes} node(s)" + (f" with {job.gpus} GPUs" if job.gpus else ""),
        file=file,
        directives="\n".join(f"#SBATCH {line}" for line in directives(job, batch)),
        port=port,
        setup="".join(f"{line}\n" for line in batch.setup),
        run=shlex.quote(job.run),
        resume='bessemer resume "$run"',
        train=shlex.join(job.train()),
        stopped=STOPPED,
        lost=" | ".join(map(str, LOST)),
        restarts=job.restarts,
        count=COUNT_STARTS,
        in_order=ENDED_IN_ORDER,
    )


def directives(job: Job, batch: Batch) -> list[str]:
    """Return the #SBATCH options. The signal is a fallback, should the run's own time limit not have stopped it."""
    limit = [] if job.seconds is None else [f"--time={slurm_time(job.seconds)}", f"--signal=TERM@{job.margin // 2}"]
    given = {
        "--gpus-per-node": job.gpus or None,
        "--cpus-per-task": batch.cpus,
        "--mem": batch.memory,
        "--partition": batch.partition,
        "--account": batch.account,
    }
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *(f"{option}={value}" for option, value in given.items() if value is not None),
        *limit,
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-%j.log",
    ]


def slurm_time(seconds: float) -> str:
    """90000 -> 1-01:00:00."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    return f"{days}-{hours:02d}:{minutes:02d}:{second:02d}"


# Kubernetes: a JobSet (jobset.x-k8s.io/v1alpha2) with one indexed job, one pod per node, all restarted together.
#
# pod 0's name      NAME-workers-0-0.NAME, from JobSet's own service: the coordinator, before any pod runs
# exit 1, 2, 3      the job fails by its pod failure policy, and the set with it: another start would end the same
# any other end     (75, 4, 134, a lost node) the set restarts all pods; after `restarts` failures a pod exits with 1.
#                   maxRestarts is no limit, as it also counts starts after a stop with a checkpoint (75)

WORKERS = "workers"
CONTAINER = "bessemer"
PORT = 12345
GRACE_SECONDS = 120
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
UNLIMITED = 2**31 - 1

START = """\
run={run}
job=jobset-{name}
start=${{RESTART_ATTEMPT:-0}}
{count}
if [ "$failures" -gt {restarts} ]; then
  echo "$failures starts failed; not started again"
  exit 1
fi
if [ -f "$run/config.yaml" ]; then
  command=({resume})
else
  command=({train})
fi
"${{command[@]}}" &
pid=$!
trap 'kill -TERM "$pid" 2> /dev/null' TERM INT
wait "$pid"
code=$?
while kill -0 "$pid" 2> /dev/null; do  # a signal ends `wait`, not the program
  wait "$pid"
  code=$?
done
case $code in
  0 | {stopped}) {in_order} ;;
esac
exit "$code"
"""


@dataclass(frozen=True)
class Pods:
    """Options of the pods."""

    image: str
    claim: str = "bessemer"  # a ReadWriteMany volume claim, mounted at `mount`
    mount: str = "/bessemer"
    resource: str = "nvidia.com/gpu"
    namespace: str | None = None
    cpus: str | None = None
    memory: str | None = None
    selectors: Sequence[str] = ()  # key=value of nodes


def manifest(job: Job, pods: Pods, file: str) -> str:
    """Return the manifest as YAML."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes multi-line strings as block literals."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    body = yaml.dump(jobset(job, pods), Dumper=Dumper, sort_keys=False, width=100)
    return (
        f"# {job.name}: {job.recipe} on {job.nodes} pod(s). Written by `bessemer launch k8s`.\n"
        f"# Needs JobSet in the cluster and a ReadWriteMany claim '{pods.claim}'.\n"
        f"# Submit with: kubectl apply -f {file}\n"
        f"{body}"
    )


def jobset(job: Job, pods: Pods) -> dict[str, Any]:
    name = object_name(job.name)
    metadata: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/name": "bessemer"}}
    if pods.namespace:
        metadata["namespace"] = pods.namespace
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": UNLIMITED,
                "rules": [
                    {
                        "name": "another_start_would_end_the_same",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": indexed_job(job, pods)}}],
        },
    }


def indexed_job(job: Job, pods: Pods) -> dict[str, Any]:
    """Return the Job: one pod per node; the first that fails ends it."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": sorted(HOPELESS)}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = int(job.seconds)
    return {**spec, "template": {"spec": pod(job, pods)}}


def pod(job: Job, pods: Pods) -> dict[str, Any]:
    selector = {}
    for word in pods.selectors:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise InputError(f"--node-selector '{word}': write key=value.")
        selector[key] = value
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,  # to finish the step and save
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container(job, pods)],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # /dev/shm, which collectives between GPUs need
        ],
    }


def container(job: Job, pods: Pods) -> dict[str, Any]:
    limits = {pods.resource: job.gpus or None, "cpu": pods.cpus, "memory": pods.memory}
    asked = {name: str(value) for name, value in limits.items() if value is not None}
    start = START.format(
        run=shlex.quote(job.run),
        name=object_name(job.name),
        resume=shlex.join(job.resume()),
        train=shlex.join(job.train()),
        count=COUNT_STARTS,
        restarts=job.restarts,
        stopped=STOPPED,
        in_order=ENDED_IN_ORDER,
    )
    port = job.port or PORT
    return {
        "name": CONTAINER,
        "image": pods.image,
        "command": ["bash", "-c", start],
        "env": environment(job, pods, port),
        "ports": [{"containerPort": port}],
        **({"resources": {"limits": asked}} if asked else {}),
        "volumeMounts": [{"name": "shared", "mountPath": pods.mount}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def environment(job: Job, pods: Pods, port: int) -> list[dict[str, Any]]:
    name = object_name(job.name)
    plain = {"BESSEMER_HOME": f"{pods.mount.rstrip('/')}/home", "PYTHONUNBUFFERED": "1"}
    listed: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in plain.items()]
    listed.append({"name": "RESTART_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}})
    if job.nodes > 1:
        listed += [
            {"name": "BESSEMER_COORDINATOR", "value": f"{name}-{WORKERS}-0-0.{name}:{port}"},
            {"name": "BESSEMER_PROCESSES", "value": str(job.nodes)},
            {"name": "BESSEMER_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        ]
    return listed


def object_name(name: str) -> str:
    """Return a run's name as Kubernetes allows it; with JobSet's suffixes a host name has at most 63 characters."""
    found = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not found or not found[0].isalpha():
        found = f"run-{found}".strip("-")
    return found
