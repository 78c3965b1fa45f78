"""Distill a Hugging Face model into a smaller one with the same tokenizer, and export the student for transformers.

    python examples/distill_hf.py models/Qwen3-0.6B my.txt
    python examples/distill_hf.py models/Qwen3-0.6B my.txt --shrink 4 --out small -- training.steps=2000

The student is a llama with the teacher's head size, half of its layers and half of its width (--shrink 2), from random
weights. Nine tenths of its loss are the divergence from the teacher's distribution over every next token, and a tenth
is the usual loss. Its tokenizer is the teacher's. Words after `--` are further settings. The teacher is read without
torch; a model of the hub (hf:OWNER/NAME) is downloaded first, with the extra `hf`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bessemer.interop.folder import fetched, is_hub


def bessemer(*words: str) -> None:
    """Run a command; stop if it fails."""
    subprocess.run([sys.executable, "-m", "bessemer", *words], check=True)


def student(teacher: Path, shrink: int) -> list[str]:
    """Return the settings of a llama that is `shrink` times shallower and narrower than the teacher."""
    config = json.loads((teacher / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    heads = max(1, heads // shrink)
    return [
        "model.family=llama",
        f"model.depth={max(1, config['num_hidden_layers'] // shrink)}",
        f"model.width={heads * size}",
        f"model.heads={heads}",
        f"model.kv_heads={heads}",
        f"model.head_dim={size}",
        f"model.vocab_size={config['vocab_size']}",  # some models have more rows than their tokenizer has tokens
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("--shrink", type=int, default=2)
    parser.add_argument("--name", default="student")
    parser.add_argument("--out", default="student-hf")
    parser.add_argument("words", nargs="*", metavar="key=value")
    given = parser.parse_args()
    folder = fetched(given.teacher) if is_hub(given.teacher) else Path(given.teacher)
    settings = [f"distill.teacher={folder}", f"training.dataset={given.data}", *student(folder, given.shrink)]
    bessemer("train", "distill", *settings, *given.words, "--name", given.name)
    bessemer("eval", given.name, "--tasks", "bpb")
    bessemer("export", given.name, given.out)
