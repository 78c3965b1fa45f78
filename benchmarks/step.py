"""Time the bare training step, beside a plain matrix product in the same process.

    python benchmarks/step.py --depth 4 --vocab 4096 --batch 16 --sequence 256
    python benchmarks/step.py --depth 12 --batch 32 --sequence 2048 --accumulation 4 --window L
    python benchmarks/step.py --depth 12 --batch 32 --sequence 2048 --accumulation 4 --experts 0,32 --active 4

Prints one JSON line per case: tokens/s, TFLOP/s, both MFU formulas (against the chip's peak, where it is known:
that of float8 with --precision fp8), the share of the measured matrix rate (of the model's FLOPs alone, and with the
optimizer's matrix products), peak memory and compile seconds. Comma-separated values make several cases.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.kernels.fp8 import GPU_OPTIONS
from bessemer.models import moe
from bessemer.models.gpt import GPT
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.optim import build_optimizer
from bessemer.optim.muon import polar_flops as of_one
from bessemer.topology import TopologySettings, make_topology, unbox
from bessemer.training.setup.model import make_apply
from bessemer.training.state import StepRules, create_state
from bessemer.training.step import train_step

SWEPT = ("depth", "batch", "sequence", "accumulation", "window", "window_short", "precision", "optimizer", "experts")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", default="4", help="layers")
    parser.add_argument("--batch", default="16", help="sequences in one micro-batch")
    parser.add_argument("--sequence", default="256", help="tokens in a sequence")
    parser.add_argument("--accumulation", default="1", help="micro-batches in a step")
    parser.add_argument("--window", default="SSSL", help="attention pattern: S short, L long")
    parser.add_argument("--window_short", default="0.5", help="S as a share of the sequence")
    parser.add_argument("--precision", default="auto", help="auto, float32, bf16, fp8")
    parser.add_argument("--fp8_scaling", default="tensorwise", help="tensorwise, rowwise")
    parser.add_argument("--fp8_head", action="store_true", help="convert the head too")
    parser.add_argument("--optimizer", default="muon", help="a name from the optimizers registry")
    parser.add_argument("--experts", default="0", help="as model.experts; 0: dense")
    parser.add_argument("--active", type=int, default=4, help="as model.experts_active")
    parser.add_argument("--expert_width", type=int, default=-1, help="-1: the dense layer's width / active")
    parser.add_argument("--grouped", default="", help="implementation of the experts' products; none: as in training")
    parser.add_argument("--mtp", default="", help="as training.mtp, such as 0.5,0.25: weights of further tokens")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--width", type=int, default=-1, help="-1: depth × 64")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--matmul", type=int, default=2048, help="side of the matrix product measured beside")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps")
    parser.add_argument("--remat", default="none", help="as architecture.remat")
    parser.add_argument("--scan_layers", action="store_true", help="as architecture.scan_layers=true")
    parser.add_argument("--deterministic", action="store_true", help="as topology.deterministic=true")
    parser.add_argument("--top", type=int, default=40, help="trace.py: instructions listed")
    parser.add_argument("--hlo", default="", help="trace.py: file for the compiled program's text")
    return parser.parse_args(given)


def matrix_seconds(side: int, dtype: Any) -> Any:
    """A callable that returns the seconds of one side³ product: on an accelerator ten in a row, read once."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), dtype) for key in keys)
    product = jax.jit(jnp.matmul)
    product(a, b).block_until_ready()

    count = 1 if jax.default_backend() == "cpu" else 10

    def once() -> float:
        start = time.perf_counter()
        results = [product(a, b) for _ in range(count)]
        results[-1].block_until_ready()
        return (time.perf_counter() - start) / count

    return once


def build(case: dict[str, Any], args: argparse.Namespace) -> tuple[Any, Any, Any, GPT]:
    """(jitted step, state, batch, model) for one case."""
    if args.grouped:
        moe.choose_padded = lambda *_: args.grouped
    model = GPT(
        depth=int(case["depth"]),
        width=args.width,
        head_dim=args.head_dim,
        vocab_size=args.vocab,
        block_size=int(case["sequence"]),
        window=case["window"],
        window_short=float(case["window_short"]),
        precision=case["precision"],
        attention="xla" if args.deterministic else "auto",
        remat=args.remat.split(","),
        scan_layers=args.scan_layers,
        fp8_scaling=args.fp8_scaling if case["precision"] == "fp8" else "tensorwise",
        fp8_head=args.fp8_head and case["precision"] == "fp8",
        experts=int(case.get("experts", 0)),
        experts_active=args.active,
        expert_width=args.expert_width,
    )
    model.check()
    apply = make_apply(model)
    optimizer = build_optimizer(case["optimizer"], lambda cls: cls(), 1000, model.group_of, width=model.shape.width)
    loss_fn = functools.partial(
        pretrain, settings=PretrainSettings(mtp=tuple(map(float, filter(None, args.mtp.split(",")))))
    )
    rules = StepRules(rates=optimizer.rates, rebalance=moe.balancer(model), steps=1000 * bool(args.mtp))

    def create(key: jax.Array) -> Any:
        params = unbox(model.init(key, jnp.zeros((1, 8), jnp.int32)))["params"]
        return create_state(apply, loss_fn, params, optimizer.tx, rules)

    state = jax.jit(create)(jax.random.key(0))
    shape = (int(case["accumulation"]), int(case["batch"]), int(case["sequence"]) + 1)
    tokens = np.random.default_rng(0).integers(0, args.vocab, shape, dtype=np.int32)
    batch = {
        "input_ids": tokens[..., :-1],
        "target_ids": tokens[..., 1:],
        "positions": np.broadcast_to(np.arange(shape[2] - 1, dtype=np.int32), tokens[..., 1:].shape),
        "segment_ids": np.ones_like(tokens[..., 1:]),
        "loss_mask": np.ones(tokens[..., 1:].shape, np.float32),
    }
    topology = make_topology(TopologySettings(deterministic=args.deterministic))
    options = {**(topology.compiler_options or {}), **float8_options(case["precision"])}
    step = jax.jit(
        functools.partial(train_step, accumulate_steps=shape[0]), donate_argnums=0, compiler_options=options or None
    )
    return step, state, jax.device_put(batch), model


def float8_options(precision: str) -> dict[str, Any]:
    return GPU_OPTIONS if precision == "fp8" and jax.default_backend() == "gpu" else {}


def polar_flops(model: GPT, params: Any) -> float:
    """Matrix FLOPs of Muon's polar steps, of all matrices."""
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if model.group_of(tuple(part.key for part in path)) in ("matrix", "gate") and leaf.ndim in (2, 3):
            total += of_one(leaf.shape[-2:]) * math.prod(leaf.shape[:-2])  # of a stack of experts each
    return total


def measure(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Steps and matrix products are timed in turn, so that what else the machine does hits both alike."""
    step, state, batch, model = build(case, args)
    key = jax.random.key(1)
    start = time.perf_counter()
    compiled = step.lower(state, batch, key).compile()
    compile_seconds = time.perf_counter() - start
    dtype = model.compute_dtype
    product = matrix_seconds(args.matmul, dtype)
    for _ in range(3):
        state, loss, _ = compiled(state, batch, key)
        loss.block_until_ready()
    steps, products = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        state, loss, _ = compiled(state, batch, key)
        loss.block_until_ready()
        steps.append(time.perf_counter() - start)
        products.append(product())
    seconds = statistics.median(steps)
    tokens = int(np.prod(batch["input_ids"].shape))
    sequence = int(case["sequence"])
    flops = model.flops_per_token(sequence) * tokens / seconds
    causal = model.flops_per_token(sequence, causal=True) * tokens / seconds
    matrix = 2 * args.matmul**3 / statistics.median(products)
    polar = polar_flops(model, state.params) / seconds if case["optimizer"] == "muon" else 0.0
    chip = make_topology().chip
    peak = chip.peak_flops(case["precision"]) if chip else None
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        **case,
        "vocab": args.vocab,
        "parameters": model.count_parameters()["total"],
        "tokens_per_s": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 2),
        "tflops": round(flops / 1e12, 4),
        "tflops_causal": round(causal / 1e12, 4),
        "mfu": round(flops / peak, 4) if peak else None,
        "mfu_causal": round(causal / peak, 4) if peak else None,
        "peak_tflops": round(peak / 1e12, 1) if peak else None,
        "matrix_tflops": round(matrix / 1e12, 4),
        "share_of_matrix_rate": round(flops / matrix, 4),
        "share_with_optimizer": round((flops + polar) / matrix, 4),
        "peak_gib": round(memory["peak_bytes_in_use"] / 2**30, 2) if memory else None,
        "compile_s": round(compile_seconds, 1),
        "loss": round(float(loss), 4),
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main() -> None:
    args = arguments()
    values = [str(getattr(args, name)).split(",") for name in SWEPT]
    for combination in itertools.product(*values):
        print(json.dumps(measure(dict(zip(SWEPT, combination, strict=True)), args)), flush=True)


if __name__ == "__main__":
    main()
