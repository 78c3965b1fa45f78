"""Time the real `bessemer train` beside the bare step of the same shape, in one run on one machine.

    python benchmarks/loop.py --depth 4 --vocab 4096 --batch 16 --sequence 256 --steps 60
    python benchmarks/loop.py --depth 12 --vocab 32768 --batch 32 --sequence 2048 --accumulation 4 --window_short .25

The run is the command itself, in a process of its own: recipe `pretrain` on the source files of Python's standard
library, with metrics, checkpoints, validation and previews at their intervals. Its rate is that of its own report
(`time/total`: the steps after the tenth, without validation, previews and saves where those stop the loop), and beside
it the rate by the clock from row to row of metrics.jsonl, with everything in it: `wall` from the second row on, with
the one compilation of what a preview runs, and `steady` after the first validation, preview and checkpoint, with the
later ones. The bare step is `step.py` with the same shape, in a process of its own, before and after the run, since a
warm chip is slower.

One JSON line: the rates, their shares of the bare step's, how long one such stop takes once everything is compiled
(`stop_s`), and the share of time the loop waited for data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPORT = 10  # steps between rows; the first two rows are left out


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--batch", type=int, default=16, help="sequences in one micro-batch")
    parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--window", default="SSSL", help="attention pattern: S short, L long")
    parser.add_argument("--window_short", type=float, default=0.5, help="S as a share of the sequence")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the tokenizer that is trained first")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps of the run")
    parser.add_argument("--interval", type=int, default=80, help="steps between checkpoints, previews, validations")
    parser.add_argument("--repeats", type=int, default=20, help="timed bare steps")
    parser.add_argument("--runs", type=Path, help="directory of the run; default: a temporary one")
    return parser.parse_args(given)


def bare(args: argparse.Namespace) -> float:
    """Tokens/s of the step alone."""
    shape = ("depth", "batch", "sequence", "accumulation", "window", "window_short", "vocab", "repeats")
    words = [word for name in shape for word in (f"--{name}", str(getattr(args, name)))]
    done = subprocess.run(
        [sys.executable, str(HERE / "step.py"), *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


def train(args: argparse.Namespace, runs: Path) -> list[dict[str, Any]]:
    """The run, made by the command line; its rows."""
    settings = {
        "model.depth": args.depth,
        "model.window": args.window,
        "model.window_short": args.window_short,
        "architecture.block_size": args.sequence,
        "training.dataset": "python-stdlib",
        "training.batch_tokens": args.batch * args.accumulation * args.sequence,
        "training.per_device_batch_size": args.batch,
        "training.steps": args.steps,
        "training.validation_steps": 4 * args.batch,
        "data.tokenizer": f"train:{args.vocab}",
        "logging.report_interval": REPORT,
        "logging.checkpoint_interval": args.interval,
        "logging.preview_interval": args.interval,
        "logging.validation_interval": args.interval,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "bessemer", "train", "pretrain", *words, "--name", "loop", "--runs", str(runs)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        seen = watch(process, runs / "loop" / "metrics.jsonl")
    if process.returncode:
        raise SystemExit(process.returncode)
    return seen


def watch(process: subprocess.Popen[bytes], metrics: Path) -> list[dict[str, Any]]:
    """The rows of the run, each with the time it was first seen."""
    rows: list[dict[str, Any]] = []
    while True:
        over = process.poll() is not None
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        now = time.monotonic()
        rows += [{**json.loads(line), "seen": now} for line in lines[len(rows) :]]
        if over:
            return rows
        time.sleep(0.02)


def rates(rows: list[dict[str, Any]], tokens_per_step: int, interval: int) -> dict[str, Any]:
    """From the rows of the run: its own rate, the clock's, and the wait for data."""
    timed = [row for row in rows if "time/total" in row and row["step"] >= 2 * REPORT]
    first, last = timed[0], timed[-1]
    after = next((row for row in timed if row["step"] > interval), last)

    def rate(begin: dict[str, Any], clock: str) -> int | None:
        tokens, seconds = (last["step"] - begin["step"]) * tokens_per_step, last[clock] - begin[clock]
        return round(tokens / seconds) if seconds else None

    return {
        "steps": last["step"] - first["step"],
        "loop_tokens_per_s": rate(first, "time/total"),
        "wall_tokens_per_s": rate(first, "seen"),
        "steady_tokens_per_s": rate(after, "seen"),
        "stop_s": stop(after, last, interval),
        "data_wait_pct": round(statistics.mean(row["time/data_wait_pct"] for row in timed[1:]), 3),
        "peak_gib": last.get("mem/peak_gib"),
    }


def stop(after: dict[str, Any], last: dict[str, Any], interval: int) -> float | None:
    """Seconds for which a validation, a preview and a checkpoint together stop the loop, once all is compiled."""
    # those of the last row come after it
    times = (last["step"] - 1) // interval - (after["step"] - 1) // interval
    idle = sum(sign * (row["seen"] - row["time/total"]) for row, sign in ((last, 1), (after, -1)))
    return round(idle / times, 3) if times else None


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        before = bare(args)
        rows = train(args, args.runs or Path(scratch))
        after = bare(args)
    step = statistics.mean((before, after))
    found = rates(rows, args.batch * args.accumulation * args.sequence, args.interval)
    shares = {
        f"{kind}_share": round(found[f"{kind}_tokens_per_s"] / step, 4)
        for kind in ("loop", "wall", "steady")
        if found[f"{kind}_tokens_per_s"]
    }
    print(json.dumps({"depth": args.depth, "window": args.window, "bare": [before, after], **found, **shares}))


if __name__ == "__main__":
    main()
