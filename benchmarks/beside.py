"""What stands beside ours in peers.py and generate.py: transformers' Llama of the same size, in its own process."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PEER = "transformers"


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Arguments that both systems are built from."""
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--width", type=int, default=-1, help="-1: depth × 64")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--peer_path", default="", help="directory put first on the peer's PYTHONPATH")


def fill_width(args: argparse.Namespace) -> None:
    if args.width < 0:
        args.width = -(-args.depth * 64 // args.head_dim) * args.head_dim


def feed_forward_width(width: int) -> int:
    """Three matrices of w × i as large as two of w × 4w: i = 8w/3, to a multiple of 64 (of 8 below 192)."""
    multiple = 64 if width >= 192 else 8
    return max(1, round(8 * width / 3 / multiple)) * multiple


def missing() -> str | None:
    """Why the peer cannot run here; None where it can."""
    names = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(names)} not installed; pip install torch transformers" if names else None


def make_llama(args: argparse.Namespace, positions: int, **options: Any) -> Any:
    """The Llama of those arguments, on the GPU where there is one."""
    import torch
    import transformers

    torch.manual_seed(0)
    heads = args.width // args.head_dim
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=feed_forward_width(args.width),
        num_hidden_layers=args.depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **options,
    )
    return transformers.LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def in_products(model: Any) -> int:
    """Parameters that are in matrix products."""
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)


def facts_of(model: Any) -> dict[str, Any]:
    """What every line of the peer says about itself. Memory is None on a CPU."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def in_process(script: str, system: str, given: Sequence[str], peer_path: str) -> dict[str, Any]:
    """The line that `script` prints for one system alone, in a process of its own."""
    variables = dict(os.environ)
    if system == PEER and peer_path:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (peer_path, variables.get("PYTHONPATH"))))
    command = [sys.executable, script, *given, "--alone", system]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    if result.returncode:
        said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        return {"system": system, "failed": said[-1]}
    return json.loads(result.stdout.splitlines()[-1])
