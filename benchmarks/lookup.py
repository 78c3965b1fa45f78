"""Validation loss and speed with and without lookup layers, at equal training time. One JSON line per case.

    python benchmarks/lookup.py                       # a minute each on a CPU
    python benchmarks/lookup.py --tiles 128x128x64,64x64x64 --tokens 65536 --depth 12 --width 768 --vocab 32768
    python benchmarks/lookup.py --depth 12 --width -1 --head_dim 128 --vocab 32768 --batch 32 --sequence 2048 \
        --seconds 600 --after 5 --text FILE

With --tiles only the attention over rows is timed, forward and backward, for tiles of tokens x rows x blocks, beside
the gather. Else each case trains on the same batches for the same seconds of training steps (compilation and
validation are not counted), then is judged on the same held-out rows. Without --text it reads Python's own standard
library.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.data import DataPlan, Sampling, open_dataset, tokenizer_for
from bessemer.data.plan.batches import sample_tokens
from bessemer.data.stores.catalog import DataSettings
from bessemer.models.gpt import GPT
from bessemer.models.lookup import Allocation, Tiles, compute_lzw_allocation, gathered, tiled
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.optim import build_optimizer
from bessemer.topology import unbox
from bessemer.training.setup.model import make_apply
from bessemer.training.state import StepRules, create_state
from bessemer.training.step import train_step, val_step

VALIDATION_ROWS = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="python-stdlib", help="a file, a glob or a dataset's name")
    parser.add_argument("--after", default="none,1", help="cases: none, or blocks joined by +, such as none,1,1+2")
    parser.add_argument("--path", default="auto", help="cases: auto, gather, sorted")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--k_max", type=int, default=512)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--head_dim", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--schedule_steps", type=int, default=100_000, help="horizon the schedule believes in")
    parser.add_argument("--seconds", type=float, default=60, help="training time of each case")
    parser.add_argument("--tiles", default="", help="time the attention alone: gather, or tokens x rows x blocks")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of --tiles")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_data(args: argparse.Namespace) -> tuple[Any, Any, DataPlan]:
    """(tokenizer, training mixture, plan) of the text."""
    settings = DataSettings(tokenizer=f"train:{args.vocab}", root=str(Path(tempfile.gettempdir()) / "bessemer-bench"))
    sampling = Sampling(args.text)
    tokenizer = tokenizer_for(settings, [sampling])
    open_split = functools.partial(open_dataset, sampling, tokenizer, block_size=args.sequence, settings=settings)
    mixture = [(sampling, open_split(split="train"))]
    held_out = [(sampling, open_split(split="val"))]
    plan = DataPlan([mixture], args.batch, args.seed, validation=held_out, validation_count=VALIDATION_ROWS)
    return tokenizer, mixture, plan


def build(args: argparse.Namespace, after: str, path: str, mixture: Any, vocab: int) -> tuple[GPT, float]:
    """The model, and the seconds its allocation took."""
    layers = [] if after == "none" else [int(layer) for layer in after.split("+")]
    model = GPT(
        depth=args.depth,
        width=args.width,
        head_dim=args.head_dim,
        vocab_size=vocab,
        block_size=args.sequence,
        precision=args.precision,
        lookup_after_layers=layers,
        lookup_rows=args.rows,
        lookup_k_max=args.k_max,
        lookup_tied=args.tied,
        lookup_path=path,
    )
    start = time.perf_counter()
    if layers:
        sample = sample_tokens(mixture, model.lookup_sample, args.seed)
        k = compute_lzw_allocation(sample, vocab, model.shape.lookup.rows, args.k_max)
        frequency = np.bincount(np.concatenate([np.empty(0, np.int64), *sample]), minlength=vocab)
        model = model.clone(allocation=Allocation.of(k, frequency))
    model.check()
    return model, time.perf_counter() - start


def measure(args: argparse.Namespace, after: str, path: str, data: Any) -> dict[str, Any]:
    tokenizer, mixture, plan = data
    model, allocation_seconds = build(args, after, path, mixture, tokenizer.vocab_size)
    optimizer = build_optimizer(
        args.optimizer, lambda cls: cls(), args.schedule_steps, model.group_of, width=model.shape.width
    )
    loss_fn = functools.partial(pretrain, settings=PretrainSettings())

    def create(key: jax.Array) -> Any:
        params = unbox(model.init(key, jnp.zeros((1, 8), jnp.int32)))["params"]
        rules = StepRules(rates=optimizer.rates)
        return create_state(make_apply(model), loss_fn, params, optimizer.tx, rules)

    state = jax.jit(create)(jax.random.key(args.seed))
    key = jax.random.key(1)

    def batch(step: int) -> Any:
        return jax.device_put({name: array[None] for name, array in plan.batch(step).items()})

    jitted = jax.jit(functools.partial(train_step, accumulate_steps=1), donate_argnums=0)
    compiled = jitted.lower(state, batch(0), key).compile()
    steps, spent = 0, 0.0
    while spent < args.seconds:
        rows = batch(steps)
        start = time.perf_counter()
        state, loss, _ = compiled(state, rows, key)
        loss.block_until_ready()
        spent += time.perf_counter() - start
        steps += 1
    held_out = {name: array[None] for name, array in plan.validation_batch(0, VALIDATION_ROWS).items()}
    total, weight, _ = jax.jit(val_step)(state, held_out)
    memory = jax.local_devices()[0].memory_stats() or {}
    shared = model.allocation
    return {
        "after": after,
        "path": path,
        "val_loss": round(float(total) / float(weight), 4),
        "tokens_per_s": round(steps * args.batch * args.sequence / spent),
        "steps": steps,
        "seconds": round(spent, 1),
        "parameters": model.count_parameters()["total"],
        "scaling": model.count_parameters()["scaling"],
        "flops_per_token": model.flops_per_token(),
        "rows": shared.rows if shared else 0,
        "longest_k": shared.longest if shared else 0,
        "mean_k": round(shared.rows / shared.vocab_size, 2) if shared else 0,
        "mean_k_weighted": round(shared.mean_k, 2) if shared else 0,
        "allocation_s": round(allocation_seconds, 2),
        "peak_gib": round(memory["peak_bytes_in_use"] / 2**30, 2) if memory else None,
        "depth": args.depth,
        "width": model.shape.width,
        "vocab": tokenizer.vocab_size,
        "batch": args.batch,
        "sequence": args.sequence,
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


def time_tiles(args: argparse.Namespace, tiles: str, mixture: Any, vocab: int) -> dict[str, Any]:
    """Median milliseconds of the attention over rows with its gradients, on real tokens."""
    model, _ = build(args, "1", "auto", mixture, vocab)
    shared, width, dtype = model.allocation, model.shape.width, model.compute_dtype
    bounds = jnp.asarray(shared.bounds)
    ids = jnp.asarray(np.concatenate(sample_tokens(mixture, args.tokens, args.seed + 1)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (len(ids), width), dtype)
    tables = [jax.random.normal(key, (shared.rows, width)) for key in keys[1:]]

    def loss(h: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        if tiles == "gather":
            out = gathered(h, k, v, ids, bounds, shared.longest)
        else:
            out = tiled(h, k, v, ids, bounds, Tiles(*(int(size) for size in tiles.split("x"))))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(h, *tables, ids).compile()
    taken = []
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(step(h, *tables, ids))
        taken.append(time.perf_counter() - start)
    return {
        "tiles": tiles,
        "ms": round(1e3 * sorted(taken[2:])[5], 2),
        "temp_mib": round(step.memory_analysis().temp_size_in_bytes / 2**20),
        "tokens": len(ids),
        "width": width,
        "rows": shared.rows,
        "longest_k": shared.longest,
        "mean_k_weighted": round(shared.mean_k, 2),
        "device": jax.local_devices()[0].device_kind,
        "jax": jax.__version__,
    }


def main() -> None:
    args = arguments()
    data = make_data(args)
    if args.tiles:
        for tiles in args.tiles.split(","):
            print(json.dumps(time_tiles(args, tiles, data[1], data[0].vocab_size)), flush=True)
        return
    for after in args.after.split(","):
        for path in args.path.split(",") if after != "none" else ["auto"]:
            print(json.dumps(measure(args, after, path, data)), flush=True)


if __name__ == "__main__":
    main()
