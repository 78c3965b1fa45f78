"""What grpo.exact costs: the parts of a step without it, with it, and with it but without the scoring pass.

    python benchmarks/exact.py --folder /tmp/exact
    python benchmarks/exact.py --depth 1 --width 32 --new 8 --steps 4 --repeats 1 --folder /tmp/exact   # does it run?

One process per case, in turn, on a model of the llama family with random weights. One JSON line per case: medians over
the steps from the third on of all repeats, from the run's own metrics, in seconds (rollout, with the pass that draws
again; score; train, the optimizer step), the completion tokens of a rollout, and the largest `logprob_gap_max` and
`off_policy` of any step. With one optimizer step per rollout, `off_policy` is 0 if sampler and trainer have the same
bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"grpo.exact": "true"},
    "exact, no scoring pass": {"grpo.exact": "true", "grpo.old_logprobs": "sampler"},
}
PARTS = ("time/rollout_s", "time/score_s", "time/train_s", "time/step_ms")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--completions", type=int, default=32, help="completions of a rollout")
    parser.add_argument("--new", type=int, default=96, help="tokens of a completion at most")
    parser.add_argument("--block", type=int, default=160, help="tokens of a row")
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=6, help="rollouts, each with one optimizer step")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each case")
    parser.add_argument("--folder", type=Path, default=Path("exact"), help="data and runs")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the tokenizer's folder and the file of prompts."""
    from bessemer.data import Tokenizer

    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    tokenizer, data = args.folder / "tokenizer", args.folder / "prompts.jsonl"
    tokenizer.mkdir(parents=True, exist_ok=True)
    Tokenizer.train(texts, args.vocab).save(tokenizer)
    lines = [line for text in texts for line in text.splitlines() if 20 < len(line) < 90]
    data.write_text("\n".join(json.dumps({"prompt": line}) for line in lines) + "\n")
    return tokenizer, data


def run(args: argparse.Namespace, tokenizer: Path, data: Path, case: str) -> list[dict[str, Any]]:
    """Return the metrics of the steps of one run of the command."""
    runs = args.folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    settings = {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": data,
        "training.batch_size": args.completions,
        "training.per_device_batch_size": args.micro,
        "training.steps": args.steps,
        "training.validation": "false",
        "data.tokenizer": tokenizer,
        "model.family": "llama",
        "model.depth": args.depth,
        "model.width": args.width,
        "model.head_dim": min(64, args.width),
        "architecture.block_size": args.block,
        "grpo.max_completion_length": args.new,
        "grpo.rewards": "[{name: length_penalty}]",
        "grpo.slots": args.completions,
        "optimization.name": "adamw",
        "optimization.lr": 1e-3,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": -1,
        "logging.preview_interval": 0,
        "logging.plots": "false",
        "logging.progress": "none",
    }
    words = [f"{key}={value}" for key, value in (settings | CASES[case]).items()]
    command = [sys.executable, "-m", "bessemer", "train", "quickstart", *words, "--name", "exact", "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: exit code {done.returncode}: {done.stderr[-600:]}")
    rows = [json.loads(line) for line in (runs / "exact" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def main() -> None:
    args = arguments()
    tokenizer, data = prepare(args)
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(args.repeats):
        for case, rows in found.items():
            rows += run(args, tokenizer, data, case)
    for case, rows in found.items():
        timed = [row for row in rows if row["step"] > 2]
        line: dict[str, Any] = {"case": case}
        for part in PARTS:
            seconds = [row[part] / (1e3 if part.endswith("_ms") else 1) for row in timed]
            line[part.removeprefix("time/").removesuffix("_ms").removesuffix("_s") + "_s"] = round(
                statistics.median(seconds), 4
            )
        line["completion_tokens"] = round(args.completions * statistics.mean(row["completion_len"] for row in timed))
        for name in ("logprob_gap_max", "off_policy", "redrawn"):
            line[name] = max((row[name] for row in rows if name in row), default=None)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
