"""Prove on your own machine that a real open model goes in, trains and comes out as transformers sees it.

    pip install '.[hf]' torch transformers
    python examples/prove_real_model.py Qwen/Qwen3-0.6B
    python examples/prove_real_model.py path/to/folder --steps 50 --runs proof

It (1) downloads the model, (2) compares our logits with those of transformers, (3) fine-tunes adapters for some steps
on conversations that the script makes, (4) exports the merged model, and (5) compares it with transformers again. Both
sides compute in float32, so the comparison needs memory for two copies of the model at 4 bytes per parameter. One JSON
line per check; the exit code is 0 if all of them hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bessemer as bm
from bessemer.console import no_progress
from bessemer.generate import load_model
from bessemer.generate.export import export_run
from bessemer.interop.folder import fetched, import_folder
from bessemer.job import RunDirectory

BOUND = 2e-5
"""Largest difference of logits, as a share of the largest logit: the bound that docs/huggingface.md states."""
TEXTS = ("The capital of France is", "def fibonacci(n):", "In 1905 a clerk of the patent office in Bern wrote")


def their_logits(folder: Path, texts: tuple[str, ...]) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the ids that transformers makes of the texts, and its float32 logits for them."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        return ids, [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in ids]


def our_logits(run: RunDirectory, ids: list[list[int]]) -> list[np.ndarray]:
    """Return the float32 logits of a run's model for each row of ids."""
    loaded = load_model(run)
    model = loaded.model.clone(precision="float32")
    with loaded.scope(), jax.default_matmul_precision("highest"):
        apply = jax.jit(model.apply)
        return [np.asarray(apply({"params": loaded.params}, np.array([row], np.int32)))[0] for row in ids]


def compare(check: str, run: RunDirectory, folder: Path) -> bool:
    """Print how far our logits are from those of transformers; True if within the bound and the ids are equal."""
    ids, theirs = their_logits(folder, TEXTS)
    tokenizer = load_model(run).tokenizer
    same_ids = tokenizer is not None and [tokenizer.prompt(text) for text in TEXTS] == ids
    ours = our_logits(run, ids)
    vocabulary = theirs[0].shape[-1]
    difference = max(
        float(np.abs(mine[:, :vocabulary] - other).max() / np.abs(other).max())
        for mine, other in zip(ours, theirs, strict=True)
    )
    same_next = all(
        mine[:, :vocabulary].argmax(-1).tolist() == other.argmax(-1).tolist()
        for mine, other in zip(ours, theirs, strict=True)
    )
    good = difference <= BOUND and same_ids
    report(check, good, difference=difference, bound=BOUND, same_ids=same_ids, same_next_tokens=same_next)
    return good


def report(check: str, good: bool, **values: Any) -> None:
    print(json.dumps({"check": check, "holds": good, **values}), flush=True)


def conversations(path: Path, count: int = 400) -> Path:
    """Write short conversations whose answers are easy to learn."""
    rows = []
    for number in range(count):
        word = f"item {number * 7919 % 1009}"
        turns = [("user", f"Repeat in capitals: {word}"), ("assistant", word.upper())]
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    path.write_text("\n".join(rows) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="OWNER/NAME on the hub, or a folder")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of the fine-tuning")
    parser.add_argument("--block", type=int, default=512, help="tokens per row")
    parser.add_argument("--runs", type=Path, default=Path("proof"), help="where models and runs go")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    folder = Path(args.model) if Path(args.model).is_dir() else fetched(f"hf:{args.model}")
    report("downloaded", True, folder=str(folder))

    imported, _ = import_folder(folder, args.runs / "imported")
    checks = [compare("logits of the model", imported, folder)]

    data = conversations(args.runs / "chats.jsonl")
    settings = {"init": str(folder), "training.dataset": str(data), "training.steps": args.steps}
    settings |= {"architecture.block_size": args.block, "training.batch_size": 4}
    run = bm.train("finetune-lora", name="tuned", runs=args.runs, **settings)
    losses = [row["loss"] for row in run.metrics() if "loss" in row]
    checks.append(losses[-1] < losses[0])
    report("loss falls", checks[-1], first=losses[0], last=losses[-1])

    exported = args.runs / "exported"
    export_run(run.directory, exported, "hf", no_progress, dtype="float32")
    again, _ = import_folder(exported, args.runs / "exported-imported")
    checks.append(compare("logits of the tuned and exported model", again, exported))
    sys.exit(0 if all(checks) else 1)


if __name__ == "__main__":
    main()
