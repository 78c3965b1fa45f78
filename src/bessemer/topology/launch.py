"""Which launcher started this process. JAX reads the details itself; here we decide whether to ask it."""

from __future__ import annotations

import glob
import os
import re


def cluster() -> str | None:
    """SLURM, Open MPI, Kubernetes or TPU pod when this is one of several processes; None when alone.

    A batch script's shell or a notebook pod is inside a cluster too, but alone: those are not asked to wait
    for peers.
    """
    env = os.environ
    if _count("SLURM_NTASKS") > 1 and "SLURM_PROCID" in env and "SLURM_STEP_NODELIST" in env:
        return "SLURM"
    if _count("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if _tpu_host() and (
        "," in env.get("TPU_WORKER_HOSTNAMES", "") or "," in env.get("TPU_PROCESS_ADDRESSES", "")
    ):
        return "TPU pod"
    if _tpu_host() and _count("MEGASCALE_NUM_SLICES") > 1:
        return "TPU pod"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "Kubernetes"
    if _tpu_host() and "TPU_SKIP_MDS_QUERY" not in env and "TPU_WORKER_HOSTNAMES" not in env:
        return "TPU pod"  # a cloud TPU VM keeps its peers in the metadata server, which JAX asks
    return None


def slurm_local_devices() -> list[int] | None:
    """GPUs of this SLURM task where JAX's rule (local task number) is wrong; None where it is right.

    One task a node gets every GPU of the node, not only the first; tasks that each see just one GPU use
    number 0.
    """
    if "SLURM_PROCID" not in os.environ:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len(visible.split(",")) if visible else _count("SLURM_GPUS_ON_NODE")
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if gpus == 0 or tasks is None:
        return None
    if int(tasks.group()) == 1:
        return list(range(gpus))
    return [0] if gpus == 1 else None


def _tpu_host() -> bool:
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def _count(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0
