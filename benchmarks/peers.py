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
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from beside import PEER, add_shape, facts_of, fill_width, in_process, in_products, make_llama, missing

SYSTEMS = (PEER, "ours-adamw", "ours-muon")
WARMUP = 3
MEASURES = ("tokens_per_s", "tflops", "step_ms_best", "processor_ms", "parameters", "flops_per_token", "peak_gib")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one micro-batch")
    parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile the peer")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, comma-separated")
    parser.add_argument("--alone", choices=SYSTEMS, help=argparse.SUPPRESS)  # this process is that system
    args = parser.parse_args(given)
    fill_width(args)
    return args


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

    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    model = make_llama(args, args.sequence, use_cache=False).to(dtype=torch.float32).train()
    device = model.device
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
    facts = {
        "optimizer": "adamw",
        "flops_per_token": 6 * in_products(model) + 12 * args.depth * args.width * args.sequence,
        "precision": "bfloat16" if cuda else "float32",
        "compile": args.compile,
        **facts_of(model),
    }
    return line(args, times, facts)


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """This process is one system."""
    if args.alone != PEER:
        return ours(args, args.alone.removeprefix("ours-"))
    if (skipped := missing()) is not None:
        return {"system": PEER, "skipped": skipped}
    return transformers_llama(args)


def ratios(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Ours over the peer's, for what both measured."""
    found = {row["system"]: row for row in lines if "tokens_per_s" in row}
    peer = found.pop(PEER, None)
    if peer is None or not found:
        return None
    return {
        f"{name} / {PEER}": {measure: round(row[measure] / peer[measure], 3) for measure in MEASURES if peer[measure]}
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
        lines.append(in_process(__file__, system, given, args.peer_path))
        print(json.dumps(lines[-1]), flush=True)
    if (compared := ratios(lines)) is not None:
        print(json.dumps({"ratios": compared}))
    return 1 if any("failed" in row for row in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
