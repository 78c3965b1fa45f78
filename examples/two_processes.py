"""Train on two processes and on one, and compare: the same batches, the same loss up to rounding.

    python examples/two_processes.py
    python examples/two_processes.py --processes 4 -- training.dataset=my.txt topology.fsdp=2

`bessemer launch local` starts one process per GPU, or on a machine without GPUs as many as --processes says, on the
CPU. On a cluster `bessemer launch slurm` and `launch k8s` write the job file instead; the run is the same. Words after
`--` are settings of both runs. Stop it with Ctrl-C and start it again with
`bessemer launch local --resume runs/several`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import bessemer as bm


def bessemer(*words: str) -> None:
    """Run a command; stop if it fails."""
    subprocess.run([sys.executable, "-m", "bessemer", *words], check=True)


def losses(name: str) -> dict[int, float]:
    """Return step → training loss of a run."""
    return {row["step"]: row["loss"] for row in bm.Run(name).metrics() if row.get("loss") is not None}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("words", nargs="*", metavar="key=value")
    given = parser.parse_args()
    common = ["quickstart", f"training.steps={given.steps}", *given.words]
    bessemer("launch", "local", *common, "--processes", str(given.processes), "--name", "several")
    alone = [word for word in common if not word.startswith("topology.")]
    bessemer("train", *alone, "--name", "one")
    several, one = losses("several"), losses("one")
    assert several.keys() == one.keys(), "both report the same steps"
    for step, loss in one.items():
        print(f"step {step:>4}  one process {loss:.6f}  {given.processes} processes {several[step]:.6f}")
    apart = max(abs(several[step] - loss) / abs(loss) for step, loss in one.items())
    print(f"largest relative difference of the loss: {apart:.1e}")
