"""Time to the first step of the real command, in fresh processes: with an empty compilation cache, then a warm one.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --words pretrain training.dataset=my.txt model.depth=12 training.steps=2

One JSON line a case: `wall_s` is from the start of the process to the line that says the first step is done, the parts
are the run's own (facts.json). `cold` prepares the data, too; `no cache` has the data but no programs; `warm` has both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = ["quickstart", "training.steps=2", "training.validation_steps=64"]
CASES = ("cold", "no cache", "warm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", nargs="+", default=WORDS, help="recipe and settings of `bessemer train`")
    parser.add_argument("--repeats", type=int, default=1, help="of each case but the first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            for _ in range(1 if case == "cold" else options.repeats):
                if case == "no cache":
                    shutil.rmtree(Path(folder) / "home" / "compiled")
                print(json.dumps(measure(case, options.words, Path(folder))), flush=True)


def measure(case: str, words: list[str], folder: Path) -> dict[str, Any]:
    name = f"run-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "bessemer", "train", *words, "logging.progress=none"]
    begun, load = time.perf_counter(), os.getloadavg()[0]
    environment = os.environ | {"BESSEMER_HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    seconds = None
    with subprocess.Popen(
        [*command, "--name", name, "--runs", str(folder / "runs")], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if seconds is None and line.startswith("first step after"):
                seconds = time.perf_counter() - begun
    if process.returncode or seconds is None:
        raise SystemExit(f"`{' '.join(command)}` ended with {process.returncode} before or after its first step")
    facts = json.loads((folder / "runs" / name / "facts.json").read_text(encoding="utf-8"))
    start = facts["start_up"]
    return {
        "case": case,
        "wall_s": round(seconds, 2),
        "said_s": start["seconds"],
        **{name: round(part, 2) for name, part in start["parts"].items()},
        "cache": start["cache"],
        "load": round(load, 1),
        "devices": f"{facts['devices']['devices']} {facts['devices']['device_kind']}",
        "jax": facts["devices"]["jax"],
    }


if __name__ == "__main__":
    main()
