"""Time our training step beside the same-size Llama of transformers on torch, in one run on one machine.

    python benchmarks/peers.py --depth 4 --vocab 4096 --batch 16 --sequence 256
    python benchmarks/peers.py --depth 12 --vocab 32768 --batch 32 --sequence 2048 --accumulation 4 --compile

Each system runs in a process of its own, one after the other, so that memories do not mix. Alike in all: depth,
width, heads, vocabulary, untied head, batch, sequence, accumulation, AdamW (ours a second time with Muon), gradient
norm clipped at 1, float32 master weights, matrix products in bf16 on a GPU (torch: autocast) and float32 on a CPU.
Torch has its fast parts on: scaled-dot-product attention, fused AdamW, TF32 for what stays float32, and with
--compile torch.compile. The feed-forward of the Llama (three matrices) is as wide as makes it as large as ours (two).

One JSON line a system, then one with the ratios of ours over transformers. FLOPs per token, for all:
6 · (parameters in matrix products) + 12 · depth · width · T. On a CPU that others use too, pin the run to one core
(taskset -c 0) and read processor_ms, the processor time of a step: with two threads one waits for the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

PEER = "transformers"
SYSTEMS = (PEER, "ours-adamw", "ours-muon")
WARMUP = 3
MEASURES = (
    "tokens_per_s",
    "tflops",
    "step_ms_best",
    "processor_ms",
    "parameters",
    "flops_per_token",
    "peak_gib",
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=4, help="layers")
    parser.add_argument("--width", type=int, default=-1, help="-1: depth × 64")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one micro-batch")
    parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile the peer")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, comma-separated")
    parser.add_argument("--peer_path", default="", help="directory put first on the peer's PYTHONPATH")
    parser.add_argument("--alone", choices=SYSTEMS, help=argparse.SUPPRESS)  # this process is that system
    args = parser.parse_args(given)
    if args.width < 0:
        args.width = -(-args.depth * 64 // args.head_dim) * args.head_dim
    return args


def feed_forward_width(width: int) -> int:
    """Three matrices of w × i as large as two of w × 4w: i = 8w/3, to a multiple of 64 (of 8 below 192)."""
    multiple = 64 if width >= 192 else 8
    return max(1, round(8 * width / 3 / multiple)) * multiple


def timed(step: Callable[[], float], repeats: int) -> dict[str, float]:
    """`step` does one optimizer step, waits for it and returns its loss."""
    started = time.perf_counter()
    loss = step()
    first = time.perf_counter() - started
    for _ in range(WARMUP - 1):
        step()
    seconds, processor = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return {
        "seconds": statistics.median(seconds),
        "step_ms_best": round(min(seconds) * 1e3, 2),
        "processor_ms": round(statistics.median(processor) * 1e3, 2),
        "first_step_s": round(first, 1),
        "loss": round(loss, 4),
    }


def line(args: argparse.Namespace, times: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    """What every system reports, in the same words. Peak memory on a CPU is that of the whole process."""
    seconds = times.pop("seconds")
    tokens = args.batch * args.sequence * args.accumulation
    flops = facts["flops_per_token"]
    if facts.get("peak_gib") is None:
        facts["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    shape = ("depth", "width", "head_dim", "vocab", "batch", "sequence", "accumulation")
    return {
        "system": args.alone,
        "tokens_per_s": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 2),
        "tflops": round(flops * tokens / seconds / 1e12, 4),
        **facts,
        **times,
        **{name: getattr(args, name) for name in shape},
        "python": platform.python_version(),
    }


def ours(args: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    """Our GPT, all its devices of architecture on, full attention in every layer."""
    import jax
    from step import arguments as step_arguments
    from step import build

    case = {
        "depth": args.depth,
        "batch": args.batch,
        "sequence": args.sequence,
        "accumulation": args.accumulation,
        "window": "L",
        "window_short": 0.5,
        "precision": "auto",
        "optimizer": optimizer,
    }
    shape = ("width", "head_dim", "vocab")
    given = step_arguments([f"--{name}={getattr(args, name)}" for name in shape])
    step, state, batch, model = build(case, given)
    key = jax.random.key(1)

    def once() -> float:
        nonlocal state
        state, loss, _ = jax.block_until_ready(step(state, batch, key))
        return float(loss)

    times = timed(once, args.repeats)
    memory = jax.local_devices()[0].memory_stats()
    facts = {
        "optimizer": optimizer,
        "parameters": model.count_parameters()["total"],
        "flops_per_token": model.flops_per_token(args.sequence),
        "precision": model.compute_dtype.__name__,
        "peak_gib": round(memory["peak_bytes_in_use"] / 2**30, 2) if memory else None,
        "device": jax.local_devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
    }
    return line(args, times, facts)


def transformers_llama(args: argparse.Namespace) -> dict[str, Any]:
    """transformers' Llama, trained as its users train it: autocast, fused AdamW, the model's own loss."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    heads = args.width // args.head_dim
    config = transformers.LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=feed_forward_width(args.width),
        num_hidden_layers=args.depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=args.sequence,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(device=device, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.01, fused=True)
    forward = torch.compile(model) if args.compile else model
    shape = (args.accumulation, args.batch, args.sequence)
    tokens = torch.randint(0, args.vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)

    def once() -> float:
        total = torch.zeros((), device=device)
        for rows in tokens:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = forward(input_ids=rows, labels=rows).loss / args.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        return float(total)

    times = timed(once, args.repeats)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    facts = {
        "optimizer": "adamw",
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": 6 * matrices + 12 * args.depth * args.width * args.sequence,
        "precision": "bfloat16" if cuda else "float32",
        "compile": args.compile,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return line(args, times, facts)


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """This process is one system."""
    if args.alone != PEER:
        return ours(args, args.alone.removeprefix("ours-"))
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return {
            "system": PEER,
            "skipped": f"{' and '.join(missing)} not installed; pip install torch transformers",
        }
    return transformers_llama(args)


def in_process(system: str, given: Sequence[str], peer_path: str) -> dict[str, Any]:
    """The line of one system, from a process of its own."""
    variables = dict(os.environ)
    if system == PEER and peer_path:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (peer_path, variables.get("PYTHONPATH"))))
    command = [sys.executable, __file__, *given, "--alone", system]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    if result.returncode:
        said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        return {"system": system, "failed": said[-1]}
    return json.loads(result.stdout.splitlines()[-1])


def ratios(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Ours over the peer's, for what both measured."""
    found = {row["system"]: row for row in lines if "tokens_per_s" in row}
    peer = found.pop(PEER, None)
    if peer is None or not found:
        return None
    return {
        f"{name} / {PEER}": {
            measure: round(row[measure] / peer[measure], 3) for measure in MEASURES if peer[measure]
        }
        for name, row in found.items()
    }


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    args = arguments(given)
    if args.alone:
        print(json.dumps(alone(args)))
        return 0
    lines = []
    for system in args.systems.split(","):
        if system not in SYSTEMS:
            sys.exit(f"error: unknown system '{system}'; known: {', '.join(SYSTEMS)}.")
        lines.append(in_process(system, given, args.peer_path))
        print(json.dumps(lines[-1]), flush=True)
    if (compared := ratios(lines)) is not None:
        print(json.dumps({"ratios": compared}))
    return 1 if any("failed" in row for row in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
