"""`make prove`: every recipe learns its own demonstration, from the command line, on three seeds.

Each line is measured by a fresh process on held-out data that no phase has seen: before the first step and after the
last, by the metric named, with the bar it has to pass. Exit 1 if one does not.

    python -m tests.prove                    all
    python -m tests.prove sft --seeds 1      some, with fewer seeds
    python -m tests.prove grpo --seeds 8     or more: 3, 4, … after the three

`kl` is no single number before and after, but an order of four runs: tests/prove/kl.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEEDS = (1337, 1, 2)
KL = "kl"


def seeds_of(count: int) -> list[int]:
    """The first of the three and, where they are not enough, 3, 4, …"""
    return [*SEEDS[:count], *range(len(SEEDS), count)]


@dataclass(frozen=True)
class Proof:
    """`recipe` with its defaults; `first` are the recipes it begins from, trained with the same seed.

    `metric` is a column of metrics.jsonl: at most `before` in its first row, at least `after` in its last. Each of
    `logged` is more than 0 in some row.
    """

    recipe: str
    metric: str
    before: float
    after: float
    first: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()


PROOFS = {
    "sft": Proof("sft", "eval/exact:toy-reverse", before=0.05, after=0.95, first=("toy",)),
    **{
        name: Proof(name, "eval/exact:toy-reverse", before=0.05, after=0.95, first=("toy", "toy-start"))
        for name in ("finetune-lora", "finetune-qlora", "finetune-full")
    },
    # At first the policy is its reference: margins are 0 but for rounding, so right or wrong is chance.
    "dpo": Proof("dpo", "val_pref_acc", before=0.6, after=0.9, first=("toy", "sft")),
    "grpo": Proof("grpo", "val_reward", before=0.3, after=0.8, first=("toy", "toy-start"), logged=("clip_frac", "kl")),
    "grpo-tools": Proof(
        "grpo-tools", "val_reward", before=0.4, after=0.95, first=("toy", "toy-start-tools"), logged=("env/turns", "kl")
    ),
    "grpo-multiturn": Proof(
        "grpo-multiturn",
        "val_reward",
        before=0.4,
        after=0.95,
        first=("toy", "toy-start-guess"),
        logged=("env/turns", "kl"),
    ),
    "distill-online": Proof(
        "distill-online", "eval/exact:toy-reverse", before=0.4, after=0.9, first=("toy", "toy-start", "sft")
    ),
}


def bessemer(*words: str) -> str:
    """The command line in a process of its own; its output, or the end of it as an error."""
    variables = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, "-m", "bessemer", *words], env=variables, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bessemer {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def measured(run: Path, metric: str) -> list[float]:
    """The values of a metric, from the first on."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[metric] for row in rows if metric in row]


def prove(name: str, proof: Proof, seed: int, folder: Path) -> bool:
    runs = folder / f"seed-{seed}"
    common = [f"seed={seed}", "logging.progress=none", "--runs", str(runs)]
    begun, spent = time.monotonic(), {}
    for recipe in proof.first:
        if not (runs / f"{recipe}-base").is_dir():
            start = time.monotonic()
            bessemer("train", recipe, *common, "--name", f"{recipe}-base")
            spent[recipe] = time.monotonic() - start
    bessemer("train", proof.recipe, *common, "--name", name)
    before, *_, after = measured(runs / name, proof.metric)
    highest = {logged: max(measured(runs / name, logged), default=0.0) for logged in proof.logged}
    good = before <= proof.before and after >= proof.after and all(value > 0 for value in highest.values())
    beside = "".join(f"  {logged} up to {value:.3f}" for logged, value in highest.items())
    others = "".join(f", {recipe} first {seconds:.0f} s" for recipe, seconds in spent.items())
    print(
        f"{name:<8} seed {seed:<5} {proof.metric}  {before:.4f} -> {after:.4f}  (bars {proof.before}, {proof.after})"
        f"{beside}  {time.monotonic() - begun:.0f} s{others}  {'ok' if good else 'FAILED'}",
        flush=True,
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.prove")
    parser.add_argument("names", nargs="*", help=f"which: {', '.join([*PROOFS, KL])}; default all")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds: 1337, 1, 2, 3, …")
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary directory")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in (*PROOFS, KL)]:
        parser.error(f"unknown: {', '.join(unknown)}")
    import jax

    print(
        f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}  python {platform.python_version()}  jax {jax.__version__}  "
        f"{os.cpu_count()} cores  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.folder or Path(temporary)).absolute()
        results = [
            prove(name, PROOFS[name], seed, folder)
            for name in chosen.names or PROOFS
            if name != KL
            for seed in seeds_of(chosen.seeds)
        ]
    if not chosen.names or KL in chosen.names:
        results.append(subprocess.run([sys.executable, "-m", "tests.prove.kl"]).returncode == 0)
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
