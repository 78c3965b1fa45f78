"""Peak memory of `bessemer import` and `bessemer export` of a random Llama of 1.24 billion parameters in bfloat16.

    python benchmarks/import_memory.py [FOLDER] [--train]

Needs 7 GB of disk in FOLDER (default: a temporary one, removed). Peaks are ru_maxrss of each command's own process.
With --train also of one step of `bessemer train` from that folder with adapters: 11 GiB of memory, 10 GB more of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bessemer.storage.weights import write_file

CONFIG = {  # the sizes of Llama-3.2-1B
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "eos_token_id": 128001,
}


def shapes() -> dict[str, tuple[int, ...]]:
    d, m, kv = 2048, 8192, 512
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, d)}
    for layer in range(16):
        at = f"model.layers.{layer}"
        for name, shape in {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d)}.items():
            found[f"{at}.self_attn.{name}_proj.weight"] = shape
        for name, shape in {"gate": (m, d), "up": (m, d), "down": (d, m)}.items():
            found[f"{at}.mlp.{name}_proj.weight"] = shape
        found |= {f"{at}.input_layernorm.weight": (d,), f"{at}.post_attention_layernorm.weight": (d,)}
    return found | {"model.norm.weight": (d,)}


def make(folder: Path) -> int:
    """A folder of random bits that are finite bfloat16 numbers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes, random = shapes(), np.random.default_rng(0)
    pool = (random.standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16)

    def read(name: str) -> np.ndarray:
        return np.resize(pool, sizes[name])

    entries = {name: ("bfloat16", shape) for name, shape in sizes.items()}
    return write_file(folder / "model.safetensors", entries, read, {"format": "pt"})


def measured(*command: str) -> tuple[float, float]:
    """(seconds, peak bytes) of a command in a process of its own."""
    code = (
        "import resource, subprocess, sys; r = subprocess.call(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    unit = 1 if sys.platform == "darwin" else 1024
    return time.monotonic() - start, int(result.stdout.split()[-1]) * unit


def one_step(root: Path) -> tuple[str, ...]:
    """Words after `bessemer`: a row of 64 tokens, adapters of rank 8 on every matrix, everything written at the end."""
    text = root / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    given = {
        "init": root / "hf",
        "training.dataset": text,
        "training.steps": 1,
        "training.batch_size": 1,
        "training.per_device_batch_size": 1,
        "training.validation": "false",
        "data.tokenizer": "train:300",
        "data.root": root / "data",
        "architecture.block_size": 64,
        "optimization.name": "adamw",
        "lora.rank": 8,
        "logging.preview_interval": 0,
        "logging.plots": "false",
        "logging.progress": "none",
    }
    words = (f"{key}={value}" for key, value in given.items())
    return ("train", "quickstart", *words, "--name", "one", "--runs", str(root / "runs"))


def main(root: Path, train: bool) -> dict[str, Any]:
    size = make(root / "hf")
    bessemer = (sys.executable, "-m", "bessemer")
    found: dict[str, Any] = {"weights_bytes": size}
    commands: dict[str, tuple[str, ...]] = {
        "nothing": ("-c", "import bessemer.interop.folder, bessemer.interop.folder, bessemer.generate.export"),
        "import": ("import", str(root / "hf"), str(root / "run")),
        "export": ("export", str(root / "run"), str(root / "out")),
    }
    if train:
        commands["train"] = one_step(root)
    for name, command in commands.items():
        program = (sys.executable,) if name == "nothing" else bessemer
        seconds, peak = measured(*program, *command)
        found[name] = {"seconds": round(seconds, 1), "peak_gib": round(peak / 2**30, 2), "of_weights": peak / size}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="an empty directory")
    parser.add_argument("--train", action="store_true", help="one step of training, too")
    args = parser.parse_args()
    if args.folder is not None:
        print(json.dumps(main(args.folder, args.train), indent=1))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(main(Path(temporary), args.train), indent=1))
