"""Train our GPT on the reference token stream and lay its loss curve beside nanochat's stored ones.

    python benchmarks/parity.py DATA_DIR REFERENCE_DIR --depth 8
    python benchmarks/parity.py DATA_DIR REFERENCE_DIR --depth 12 --seeds 0 --set optimization.matrix_lr=0.03

DATA_DIR holds train-*.parquet and val-*.parquet with a `text` column; REFERENCE_DIR holds tokenizer.json and
nanochat_d8_s0.json and the like, which also give the shape. Stream: the files in name order, each document bos +
its tokens. Window i = tokens[i·T : i·T + T + 1]; step s uses windows s·B … (s+1)·B - 1, modulo their number;
validation is the first 8·B windows of val, in nats per token.

The parts are those of a run: settings, model, optimizer, train_step and val_step. `--set` takes any of their
settings, so a trial on a CPU is `--set model.depth=2 architecture.block_size=64 training.batch_size=2
training.steps=5`. A preset or an optimizer that is named there comes with its own numbers in place of the reference's:
`--set optimization.preset=classic`. One JSON line a seed, then the table (with --json: a JSON line too).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from stream import FACTS, Stream, batch_of, check, load_streams, windows

from bessemer.config import Config, Schema, configuration, configure, gather, resolve
from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.models.moe import balancer
from bessemer.objectives.pretrain import PretrainSettings, pretrain
from bessemer.optim import build_optimizer, settings_classes
from bessemer.topology import TopologySettings, make_topology, unbox
from bessemer.training.settings import BaseTrainerConfig
from bessemer.training.setup.model import make_apply
from bessemer.training.state import StepRules, TrainState, create_state
from bessemer.training.step import train_step, val_step
from bessemer.training.tied_head import untying_step

VAL_EVERY, TRAIN_EVERY = 50, 25
VAL_BATCHES = 8
REFERENCE_BATCH = 2**19  # tokens; learning rates go with √(B·T / this)


RATES = (0.02, 0.04)
"""Rates of the matrices of the stored curves."""

SEEDS = {8: 3, 12: 2}
"""Depth: over how many seeds our mean is taken."""

BARS = {(8, 0.02): 3.576, (8, 0.04): 3.461, (12, 0.02): 3.389, (12, 0.04): 3.301}
"""(Depth, rate of the matrices): the validation loss at the end that our mean must reach. It is nanochat's at the same
rate, 3.556 (mean of two seeds), 3.441, 3.369 and 3.281, and .02, the noise between seeds."""

REFERENCE = {
    "optimization.name": "muon",
    "optimization.preset": "july2026",  # AdamW betas, group decays, 40 warmup steps, warmdown .65 to .05
    "optimization.unembedding_lr": 0.008,
    "optimization.embedding_lr": 0.3,
    "optimization.matrix_lr": 0.04,  # the reference has .02; in so short a run .04 learns faster (README)
    "optimization.scalar_lr": 0.5,
    "optimization.weight_decay": 0.1,
    "optimization.weight_decay_schedule": "cosine",
    "optimization.warmup_steps": 40,
    "optimization.warmdown_ratio": 0.65,
    "optimization.final_lr_frac": 0.05,
    "optimization.momentum": 0.97,
    "optimization.momentum_steps": 400,
    "optimization.momentum_final": 0.97,  # the reference names no fade; nanochat's own script has one, to .90
    "training.max_grad_norm": 0.0,  # nanochat does not clip
    "model.window_short": 0.25,
}
"""The reference's settings in our names; the shape and the multiplier √(B·T / 2^19) are added to them."""

SHAPE = {
    "model.depth": "depth",
    "model.width": "width",
    "model.vocab_size": "vocab",
    "model.window": "window",
    "architecture.block_size": "block_size",
    "training.batch_size": "batch",
    "training.steps": "steps",
}
"""Setting: its name in the header of a stored curve."""


# -- the run -----------------------------------------------------------------------------------------------------


def schema_of(values: Mapping[str, Any]) -> Schema:
    chosen = settings_classes(values.get("optimization/name"), values.get("optimization/schedule") or "auto")
    return gather(BaseTrainerConfig, TopologySettings, GPT, PretrainSettings, *chosen)


def recipe_of(shape: Mapping[str, Any], given: Iterable[str] = ()) -> dict[str, Any]:
    """The reference's settings for a shape (the header of a stored curve), less those that the settings named in
    `given` bring numbers of their own for."""
    recipe = {**REFERENCE, **{key: shape[name] for key, name in SHAPE.items()}}
    names = {word.partition("=")[0].strip().replace("/", ".") for word in given}
    if names & {"model.depth", "model.aspect"} and "model.width" not in names:
        recipe["model.width"] = -1
    if names & {"optimization.name", "optimization.preset"}:
        recipe = {key: value for key, value in recipe.items() if not key.startswith("optimization.")}
        recipe["optimization.name"] = "muon"
    return recipe


def settings_of(shape: Mapping[str, Any], given: Sequence[str] = ()) -> Config:
    """The reference's settings for a shape (the header of a stored curve), then what `--set` gives."""
    config = resolve(schema_of, recipe_of(shape, given), given)
    tokens = config["training/batch_size"] * config["architecture/block_size"]
    multiplier = math.sqrt(tokens / REFERENCE_BATCH)
    if "optimization/lr_multiplier" in config and not config.is_set("optimization/lr_multiplier"):
        config.set("optimization/lr_multiplier", multiplier, "√(B·T / 2^19)")
        if not config.is_set("optimization/smear_lr"):
            config.set("optimization/smear_lr", 0.2 / multiplier, "smear and backout: .2 at any batch size")
    return config


def references_of(directory: Path, depth: int, rate: float) -> list[dict[str, Any]]:
    """Return the stored curves of a depth at our rate of the matrices: .04 is in the name (…_lr04.json), .02 is not.

    A curve at another rate is no reference. Raise InputError if there is none of this depth at all.
    """
    found = sorted(directory.glob(f"nanochat_d{depth}_s*.json"))
    if not found:
        raise InputError(f"no nanochat_d{depth}_s*.json in '{directory}'.")
    rates = {path: 0.04 if path.stem.endswith("_lr04") else 0.02 for path in found}
    return [json.loads(path.read_text()) for path in found if math.isclose(rates[path], rate)]


def bar_of(depth: int, rate: float) -> float | None:
    """Return the bar of a depth at a rate of the matrices, or None where there is no stored curve."""
    known = next((known for known in RATES if math.isclose(known, rate)), None)
    return None if known is None else BARS[depth, known]


def shape_of(directory: Path, depth: int) -> dict[str, Any]:
    """Return the header of a stored curve of that depth; all have one shape."""
    found = [curve for rate in RATES for curve in references_of(directory, depth, rate)]
    return found[0]


class Program(NamedTuple):
    """Compiled once, run for every seed."""

    create: Callable[[jax.Array], TrainState]
    train: Callable[..., tuple[TrainState, jax.Array, dict[str, jax.Array]]]
    validate: Callable[..., tuple[jax.Array, jax.Array, dict[str, jax.Array]]]
    model: GPT
    settings: BaseTrainerConfig


def build(config: Config) -> Program:
    """The step of a run with these settings on one device."""
    with configuration(config):
        model, settings = configure(GPT), configure(BaseTrainerConfig)
        topology = make_topology(configure(TopologySettings), jax.devices()[:1])
        optimizer = build_optimizer(
            settings.optimizer or "muon",
            configure,
            settings.steps or 1,
            model.group_of,
            schedule=settings.schedule or "auto",
            width=model.shape.width,
        )
        objective = configure(PretrainSettings)
    loss_fn = functools.partial(pretrain, settings=objective)
    model.check()
    apply = make_apply(model)
    rules = StepRules(
        settings.max_grad_norm,
        settings.ema,
        rates=optimizer.rates,
        rebalance=balancer(model),
        untied_from=untying_step(settings.tied_head, settings.steps or 1, model, True, True),
        steps=(settings.steps or 1) if objective.follows_progress else 0,
    )

    def create(key: jax.Array) -> TrainState:
        params = unbox(model.init(key, jnp.zeros((1, 8), jnp.int32)))["params"]
        return create_state(apply, loss_fn, params, optimizer.tx, rules)

    options = topology.compiler_options
    step = functools.partial(train_step, accumulate_steps=1)
    return Program(
        jax.jit(create),
        jax.jit(step, donate_argnums=0, compiler_options=options),
        jax.jit(val_step, compiler_options=options),
        model,
        settings,
    )


def run(
    program: Program, streams: Mapping[str, Stream], seed: int, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Train from a fresh initialisation; the curve has the reference's points, and its rows' form."""
    settings, length = program.settings, program.settings.block_size
    size, steps = settings.batch_size, settings.steps or 1
    documents = program.model.document_mask
    held_out = windows(streams["val"].tokens, 0, VAL_BATCHES * size, length)
    held_out_batch = jax.device_put(batch_of(held_out.reshape(VAL_BATCHES, size, -1), documents))
    key = jax.random.key(seed)
    state = program.create(key)
    rows: list[dict[str, float]] = []
    timed: list[float] = []
    started = time.perf_counter()
    for step in range(steps + 1):
        if step % VAL_EVERY == 0 or step == steps:
            loss, weight, _ = jax.device_get(program.validate(state, held_out_batch))
            rows.append({"step": step, "val_loss": round(float(loss / weight), 5)})
            say(f"seed {seed} step {step}: val {rows[-1]['val_loss']}")
            started = time.perf_counter()
        if step == steps:
            break
        batch = batch_of(windows(streams["train"].tokens, step, size, length)[None], documents)
        state, loss, _ = program.train(state, batch, key)
        if step % TRAIN_EVERY == 0:
            rows.append({"step": step, "train_loss": round(float(loss), 5)})  # waits: bounds what is queued
            if step > VAL_EVERY and step % VAL_EVERY:  # since the last validation, and nothing compiled
                timed.append((time.perf_counter() - started) / (TRAIN_EVERY + 1))
    final = rows[-1]["val_loss"]
    val = streams["val"].facts
    return {
        "seed": seed,
        "val_loss": final,
        "val_bpb": round(final / math.log(2) * val.tokens / val.bytes, 5),
        "tokens_per_s": round(size * length / statistics.median(timed)) if timed else None,
        "rows": rows,
    }


# -- output ------------------------------------------------------------------------------------------------------


def curve(result: Mapping[str, Any], kind: str) -> dict[int, float]:
    return {row["step"]: row[kind] for row in result["rows"] if kind in row}


def table(results: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]) -> str:
    """Mean over our seeds beside the mean of the stored curves, at every point either has."""
    lines = ["| step | ours, val | nanochat, val | difference | ours, train | nanochat, train |", "|---" * 6 + "|"]
    means = {
        (who, kind): _mean_curve(group, kind)
        for who, group in (("ours", results), ("theirs", references))
        for kind in ("val_loss", "train_loss")
    }
    for step in sorted(set().union(*means.values())):
        cells = {key: values.get(step) for key, values in means.items()}
        ours, theirs = cells["ours", "val_loss"], cells["theirs", "val_loss"]
        difference = "" if ours is None or theirs is None else f"{ours - theirs:+.4f}"
        shown = [_cell(ours), _cell(theirs), difference]
        shown += [_cell(cells["ours", "train_loss"]), _cell(cells["theirs", "train_loss"])]
        lines.append(f"| {step} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _mean_curve(group: Sequence[Mapping[str, Any]], kind: str) -> dict[int, float]:
    curves = [curve(result, kind) for result in group]
    steps = set.intersection(*map(set, curves)) if curves else set()
    return {step: statistics.fmean(values[step] for values in curves) for step in steps}


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def summary(
    results: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], depth: int, rate: float, same: bool
) -> dict[str, Any]:
    """The mean over seeds beside the reference and, for its own shape, its rate and enough seeds, the bar."""
    bar = bar_of(depth, rate)
    mean = round(statistics.fmean(result["val_loss"] for result in results), 5)
    ends = [curve(reference, "val_loss")[reference["steps"]] for reference in references]
    judged = same and bar is not None and len(results) >= SEEDS[depth]
    return {
        "depth": depth,
        "matrix_lr": rate,
        "val_loss": [result["val_loss"] for result in results],
        "mean": mean,
        "nanochat": ends,
        "bar": None if bar is None else f"mean of {SEEDS[depth]} ≤ {bar}",
        "reached": mean <= bar if judged else None,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory of train-*.parquet and val-*.parquet")
    parser.add_argument("reference", type=Path, help="directory of tokenizer.json and nanochat_*.json")
    parser.add_argument("--depth", type=int, default=8, choices=tuple(SEEDS), help="which reference")
    parser.add_argument("--seeds", help="comma-separated; default 0,1,2 at depth 8 and 0,1 at depth 12")
    parser.add_argument("--set", nargs="+", default=[], action="extend", help="settings, section.name=value")
    parser.add_argument("--cache", type=Path, help=".npz that keeps the encoded stream")
    parser.add_argument("--any-stream", action="store_true", help="do not check that it is the reference's")
    parser.add_argument("--json", action="store_true", help="JSON lines alone on stdout")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    shape = shape_of(args.reference, args.depth)
    config = settings_of(shape, args.set)
    rate = config.get("optimization/matrix_lr") or 0.02
    references = references_of(args.reference, args.depth, rate)
    started = time.perf_counter()
    streams = load_streams(args.data, args.reference, args.cache)
    if not args.any_stream:
        for name, stream in streams.items():
            check(name, stream.facts, FACTS[name])
    say = functools.partial(print, file=sys.stderr, flush=True)
    say(f"stream ready in {time.perf_counter() - started:.1f} s; settings: {config.given()}")
    program = build(config)
    seeds = [int(word) for word in args.seeds.split(",")] if args.seeds else range(SEEDS[args.depth])
    results = []
    for seed in seeds:
        started = time.perf_counter()
        results.append(run(program, streams, seed, say))
        line = {"set": args.set, **results[-1], "seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(line), flush=True)
    same = all(config[key] == shape[name] for key, name in SHAPE.items())
    final = summary(results, references, args.depth, rate, same)
    if args.json:
        print(json.dumps({"set": args.set, **final}, ensure_ascii=False))
        return
    print(table(results, references))
    print("\n".join(f"{name}: {value}" for name, value in final.items()))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
