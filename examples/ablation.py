"""An ablation study: the same recipe with one thing changed, over several seeds, and a verdict.

    python examples/ablation.py --without architecture.smear architecture.value_embeddings
    python examples/ablation.py --seeds 5 --without architecture.qk_norm -- training.steps=300 model.depth=4

Every word of --without is a setting that is true by default; it is turned off in a variant of its own. What comes after
`--` holds for all runs. A difference that is smaller than that between seeds is no result: the table that is printed at
the end (`bessemer compare --noise`) says so. A study that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

from bessemer.job import RunDirectory


def bessemer(*words: str) -> None:
    """Run a command in a process of its own, which gives its memory back."""
    subprocess.run([sys.executable, "-m", "bessemer", *words], check=True)


def variants(switches: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, settings): the whole recipe, then it without each switch."""
    yield "base", []
    for switch in switches:
        yield f"no-{switch.rpartition('.')[2].replace('_', '-')}", [f"{switch}=false"]


def study(recipe: str, switches: list[str], seeds: int, common: list[str], runs: str) -> list[str]:
    """Train what is not trained yet; return the paths of the runs."""
    paths = []
    for seed in range(seeds):
        for name, settings in variants(switches):
            run = RunDirectory(f"{runs}/{name}-{seed}")
            if run.exists():
                bessemer("resume", str(run.path))  # says so if it is finished
            else:
                words = [*common, *settings, f"seed={seed}", "--name", run.name, "--runs", runs]
                bessemer("train", recipe, *words)
            paths.append(str(run.path))
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--without", nargs="+", required=True, metavar="SETTING")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", default="runs/ablation")
    parser.add_argument("words", nargs="*", metavar="key=value")
    given = parser.parse_args()
    made = study(given.recipe, given.without, given.seeds, given.words, given.runs)
    bessemer("compare", *made, "--noise", "--out", f"{given.runs}/compare.png")
