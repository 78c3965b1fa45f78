"""`bessemer launch local`: one process per GPU. `launch slurm` and `launch k8s`: the job file of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bessemer.cli.options import FORWARD, RUNS, WORDS, refuse_flags, say, several
from bessemer.cli.train import parted, split_words
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
    """Start a run on all GPUs of this machine, or write the job file that starts and restarts it on a cluster.

    `local` starts one process per GPU now. `slurm` and `k8s` check the recipe, so that a mistake does not cost hours in
    a queue, and write a file; they submit nothing.

    \b
    Examples:
      bessemer launch local pretrain training.dataset=data/web --name web
      bessemer launch slurm pretrain training.dataset=data/web --nodes 4 --gpus-per-node 8 --time 24h
      sbatch pretrain.sbatch
      bessemer launch k8s pretrain training.dataset=/bessemer/web --nodes 4 --gpus-per-node 8 --image lab/bessemer:1
      kubectl apply -f pretrain.yaml
    """


@command.command("local", context_settings=FORWARD)
@WORDS
@click.option("--processes", type=int, metavar="N", help="Default: the number of visible NVIDIA GPUs.")
@click.option("--name", help="Name of the run; default: recipe and time.")
@RUNS
@click.option("--resume", metavar="RUN", help="Continue this run, with this number of processes.")
@click.option("--restarts", type=int, default=3, show_default=True, metavar="N", help="Restarts after failures.")
def local(
    words: tuple[str, ...], processes: int | None, name: str | None, root: str, resume: str | None, restarts: int
) -> int:
    """Train on this machine with one process per GPU; on a CPU, --processes N with one device each.

    Each process sees one GPU of CUDA_VISIBLE_DEVICES (default: all). RECIPE, settings, --name and --runs are those of
    `bessemer train`. Process 0 prints here; the others write to RUN/logs/process-K.log.

    If a process is lost (killed, crashed, exit 1, 4 or 134), the others are stopped and all resume from the last
    checkpoint, at most --restarts times, counted in RUN/starts. Bad input (2) and failed training (3) end it. Ctrl-C or
    SIGTERM stops all with a checkpoint, exit 75; a second one leaves at once.

    \b
    Examples:
      bessemer launch local pretrain training.dataset=data/web --name web      # all GPUs
      CUDA_VISIBLE_DEVICES=0,1 bessemer launch local sft init=runs/web training.dataset=chats.jsonl
      bessemer launch local quickstart --processes 2 --name two                # no GPU: two CPU processes
      bessemer launch local --resume runs/two --processes 2
    """
    from bessemer.launch.local import local_group

    if resume is None:
        recipe, overrides = split_words(words)
    else:
        refuse_flags(words)
        (given, overrides), recipe = parted(words), None
        if given or name is not None:
            wrong = f"the recipe '{given[0]}'" if given else "--name"
            raise InputError(f"--resume {resume} continues a run under its own name and recipe; leave out {wrong}.")
    group = local_group(
        recipe, overrides, processes=processes, name=name, root=root, resume=resume, restarts=restarts, say=say
    )
    return group.launch()


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
    from bessemer.launch.job_files import Batch, script

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
    from bessemer.config.recipes import is_shipped_recipe
    from bessemer.launch.job_files import Pods, manifest

    names = ("image", "claim", "resource", "namespace", "cpus", "memory", "selectors")
    pods = Pods(mount=mount, **{name: options.pop(name) for name in names})
    recipe = split_words(words)[0]
    if not is_shipped_recipe(recipe) and not recipe.startswith(f"{mount.rstrip('/')}/"):
        raise InputError(
            f"the pods do not have the file '{recipe}': put it on the volume and pass it as {mount}/…, or pass a "
            "shipped recipe with settings."
        )
    job = _job(words, {**options, "runs": f"{mount.rstrip('/')}/runs", "elsewhere": mount})
    write(out or f"{job.name}.yaml", lambda file: manifest(job, pods, file), "kubectl apply -f")


def _job(words: tuple[str, ...], options: dict[str, Any]) -> Any:
    from bessemer.launch.job_files import describe_job, unseen

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
