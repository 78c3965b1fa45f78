"""An sbatch script: one process a node, started again by the script when it was stopped or lost a peer.

The program finds its peers through SLURM's own variables. The shell waits for the processes and looks at their exit
code. A signal that reaches the shell itself means that SLURM ends the job (scancel; or preemption, after which SLURM
starts it again), so then the script asks for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.launch.job import COUNT_STARTS, ENDED_IN_ORDER, LOST, STOPPED, Job, shell

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
    """What sbatch is told besides the job itself."""

    partition: str | None = None
    account: str | None = None
    cpus: int | None = None
    memory: str | None = None
    setup: Sequence[str] = ()  # lines of shell before the program: modules, a virtual environment


def script(job: Job, batch: Batch, file: str) -> str:
    port = (
        f"export JAX_COORDINATOR_PORT={job.port}"
        if job.port
        else "# The port of process 0 follows from the job's number; JAX_COORDINATOR_PORT=N would choose one."
    )
    return SCRIPT.format(
        title=f"{job.name}: {job.recipe} on {job.nodes} node(s)"
        + (f" with {job.gpus} GPUs" if job.gpus else ""),
        file=file,
        directives="\n".join(f"#SBATCH {line}" for line in directives(job, batch)),
        port=port,
        setup="".join(f"{line}\n" for line in batch.setup),
        run=shell([job.run]),
        resume='bessemer resume "$run"',
        train=shell(job.train()),
        stopped=STOPPED,
        lost=" | ".join(map(str, LOST)),
        restarts=job.restarts,
        count=COUNT_STARTS,
        in_order=ENDED_IN_ORDER,
    )


def directives(job: Job, batch: Batch) -> list[str]:
    """The #SBATCH lines. The signal is a second warning, should the run's own time limit not have come through."""
    limit = (
        []
        if job.seconds is None
        else [f"--time={slurm_time(job.seconds)}", f"--signal=TERM@{job.margin // 2}"]
    )
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
