"""A JobSet manifest (jobset.x-k8s.io/v1alpha2): an indexed job with one pod a node, all restarted together.

pod 0's name      NAME-workers-0-0.NAME, from JobSet's own service: the coordinator, before any pod runs
exit 1, 2, 3      the job fails by its pod failure policy, and the set with it: another start would end the same
any other end     (75, 4, 134, a lost node) the set starts all pods again; after `restarts` failures a pod ends with 1.
                  maxRestarts is no limit, as it also counts starts after a stop with a checkpoint (75)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.errors import InputError
from bessemer.launch.job import COUNT_STARTS, ENDED_IN_ORDER, HOPELESS, STOPPED, Job, shell

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
    """What the manifest says besides the job itself."""

    image: str
    claim: str = "bessemer"  # a ReadWriteMany volume claim, mounted at `mount`
    mount: str = "/bessemer"
    resource: str = "nvidia.com/gpu"
    namespace: str | None = None
    cpus: str | None = None
    memory: str | None = None
    selectors: Sequence[str] = ()  # key=value of nodes
    environment: Mapping[str, str] = field(default_factory=dict)


def manifest(job: Job, pods: Pods, file: str) -> str:
    """The manifest as YAML."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Several lines are written as several lines."""

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
            "replicatedJobs": [
                {"name": WORKERS, "replicas": 1, "template": {"spec": indexed_job(job, pods)}}
            ],
        },
    }


def indexed_job(job: Job, pods: Pods) -> dict[str, Any]:
    """The Job: as many pods as nodes; the first that fails ends it."""
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
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # /dev/shm, which collectives between GPUs need
    ]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,  # to finish the step and save
        **({"nodeSelector": selector} if selector else {}),
        "containers": [container(job, pods)],
        "volumes": volumes,
    }


def container(job: Job, pods: Pods) -> dict[str, Any]:
    limits = {pods.resource: job.gpus or None, "cpu": pods.cpus, "memory": pods.memory}
    asked = {name: str(value) for name, value in limits.items() if value is not None}
    start = START.format(
        run=shell([job.run]),
        name=object_name(job.name),
        resume=shell(job.resume()),
        train=shell(job.train()),
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
        "volumeMounts": [
            {"name": "shared", "mountPath": pods.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def environment(job: Job, pods: Pods, port: int) -> list[dict[str, Any]]:
    name = object_name(job.name)
    plain = {"BESSEMER_HOME": f"{pods.mount.rstrip('/')}/home", "PYTHONUNBUFFERED": "1", **pods.environment}
    listed: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in plain.items()]
    listed.append({"name": "RESTART_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": ATTEMPT}}})
    if job.nodes == 1:
        return listed
    return [
        *listed,
        {"name": "BESSEMER_COORDINATOR", "value": f"{name}-{WORKERS}-0-0.{name}:{port}"},
        {"name": "BESSEMER_PROCESSES", "value": str(job.nodes)},
        {"name": "BESSEMER_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
    ]


def object_name(name: str) -> str:
    """A run's name as Kubernetes allows it: with what JobSet adds, a pod's host name has 63 characters."""
    found = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not found or not found[0].isalpha():
        found = f"run-{found}".strip("-")
    return found
