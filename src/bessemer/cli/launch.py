"""`bessemer launch slurm` and `bessemer launch k8s`: the job file of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bessemer.cli.options import FORWARD, WORDS, say, several
from bessemer.cli.train import split_words
from bessemer.errors import InputError

COMMON = several(
    WORDS,
    click.option("--nodes", type=int, default=1, show_default=True, help="Machines; one process each."),
    click.option("--gpus-per-node", "gpus", type=int, default=0, metavar="N", help="Devices per machine."),
    click.option("--time", metavar="D", help="Time limit of one start, as 24h; the run stops itself shortly before."),
    click.option("--name", help="Name of the run and of the job; default: the recipe's."),
    click.option("--port", type=int, metavar="P", help="Port of process 0; default: chosen by the cluster's rule."),
    click.option("--restarts", type=int, default=20, show_default=True, metavar="N", help="Restarts after failures."),
    click.option("-o", "--out", metavar="FILE", help="File to write; - for stdout. Default: by name."),
)


@click.group("launch")
def command() -> None:
    """Write a job file that starts a recipe on a cluster and restarts it whenever it was stopped or lost.

    The recipe is checked now, not after hours in a queue. Nothing is submitted.

    \b
    Examples:
      bessemer launch slurm pretrain training.dataset=data/web --nodes 4 --gpus-per-node 8 --time 24h
      sbatch pretrain.sbatch
      bessemer launch k8s pretrain training.dataset=/bessemer/web --nodes 4 --gpus-per-node 8 --image lab/bessemer:1
      kubectl apply -f pretrain.yaml
    """


@command.command("slurm", context_settings=FORWARD)
@COMMON
@click.option("--runs", default="runs", show_default=True, help="Directory that holds the runs, shared by all nodes.")
@click.option("--partition", help="As in sbatch.")
@click.option("--account", help="As in sbatch.")
@click.option("--cpus-per-task", "cpus", type=int, metavar="N", help="As in sbatch.")
@click.option("--mem", "memory", metavar="SIZE", help="As in sbatch.")
@click.option("--setup", multiple=True, metavar="LINE", help="Shell line before the program; repeatable.")
def slurm(words: tuple[str, ...], out: str | None, **options: Any) -> None:
    """Write an sbatch script.

    The first start is `bessemer train`, each later one `bessemer resume`. Exit code 75 (stopped with a checkpoint: time
    limit, preemption) always requeues the job; a lost process or node (4, 134, 137) does so at most --restarts times,
    counted in RUN/starts; anything else ends the job.

    \b
    Examples:
      bessemer launch slurm quickstart --nodes 2 --time 1h
      bessemer launch slurm pretrain training.dataset=data/web topology.data=4 topology.fsdp=8 \\
          --nodes 4 --gpus-per-node 8 --time 24h --partition gpu --setup 'source ~/venv/bin/activate'
    """
    from bessemer.launch import Batch, script

    batch = Batch(**{name: options.pop(name) for name in ("partition", "account", "cpus", "memory", "setup")})
    job = _job(words, options)
    write(out or f"{job.name}.sbatch", lambda file: script(job, batch, file), "sbatch")


@command.command("k8s", context_settings=FORWARD)
@COMMON
@click.option("--image", required=True, help="Container image that has bessemer.")
@click.option("--claim", default="bessemer", show_default=True, help="ReadWriteMany volume claim for runs and data.")
@click.option("--mount", default="/bessemer", show_default=True, help="Where the claim is mounted.")
@click.option(
    "--resource", default="nvidia.com/gpu", show_default=True, help="Device resource, such as google.com/tpu."
)
@click.option("--node-selector", "selectors", multiple=True, metavar="KEY=VALUE", help="Nodes to use; repeatable.")
@click.option("--namespace", help="As in kubectl.")
@click.option("--cpu", "cpus", metavar="N", help="Limit per container.")
@click.option("--memory", metavar="SIZE", help="Limit per container.")
def k8s(words: tuple[str, ...], out: str | None, mount: str, **options: Any) -> None:
    """Write a JobSet manifest. JobSet (jobset.sigs.k8s.io) must be installed in the cluster.

    Runs go to MOUNT/runs and prepared data to MOUNT/home. A RECIPE file must be below MOUNT, and is then not checked
    here. A pod that exits with 1, 2 or 3 (a bug, bad input, failed training) ends the job; after any other exit all
    pods restart and the run resumes. Failures are counted in RUN/starts, and after --restarts of them the job ends; a
    stop with a checkpoint (75) is not a failure.

    \b
    Examples:
      bessemer launch k8s quickstart --nodes 2 --image lab/bessemer:1
      bessemer launch k8s pretrain training.dataset=/bessemer/web --image lab/bessemer:1 \\
          --nodes 4 --gpus-per-node 4 --resource google.com/tpu \\
          --node-selector cloud.google.com/gke-tpu-accelerator=tpu-v5-lite-podslice \\
          --node-selector cloud.google.com/gke-tpu-topology=4x4
    """
    from bessemer.config.recipes import recipe_names
    from bessemer.launch import Pods, manifest

    names = ("image", "claim", "resource", "namespace", "cpus", "memory", "selectors")
    pods = Pods(mount=mount, **{name: options.pop(name) for name in names})
    recipe = split_words(words)[0]
    if recipe not in recipe_names() and not recipe.startswith(f"{mount.rstrip('/')}/"):
        raise InputError(
            f"the pods do not have the file '{recipe}': put it on the volume and pass it as {mount}/…, or pass a "
            "shipped recipe with settings."
        )
    job = _job(words, {**options, "runs": f"{mount.rstrip('/')}/runs", "elsewhere": mount})
    write(out or f"{job.name}.yaml", lambda file: manifest(job, pods, file), "kubectl apply -f")


def _job(words: tuple[str, ...], options: dict[str, Any]) -> Any:
    from bessemer.launch import describe_job, unseen

    recipe, overrides = split_words(words)
    job = describe_job(recipe, overrides, **options)
    for line in unseen(job, options.get("elsewhere")):
        say(f"warning: {line}")
    return job


def write(out: str, make: Callable[[str], str], submit: str) -> None:
    from bessemer.storage.files import atomic_write

    if out == "-":
        click.echo(make("FILE"), nl=False)
        return
    atomic_write(Path(out), make(out))
    click.echo(f"wrote {out}; submit it with: {submit} {out}")
