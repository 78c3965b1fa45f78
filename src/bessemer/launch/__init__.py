"""Job files for clusters: a recipe becomes an sbatch script or a JobSet manifest that starts it and starts it again."""

from bessemer.launch.job import Job, describe_job
from bessemer.launch.k8s import Pods, jobset, manifest
from bessemer.launch.slurm import Batch, script

__all__ = ["Batch", "Job", "Pods", "describe_job", "jobset", "manifest", "script"]
