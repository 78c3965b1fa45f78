"""Measure how far sampler and training pass are apart in a model with experts, with and without grpo.router_replay.

    python benchmarks/router_replay.py                       # a tiny model on a CPU, some minutes
    python benchmarks/router_replay.py --init runs/moe --prompts prompts.jsonl --precisions bf16

Without --init a llama with experts is pretrained first on the quickstart's text, in float32. Then, per precision, one
rollout is sampled from these weights and scored by the training pass: with the experts that the sampler recorded, and
with those that the pass chooses by itself. The completions are the same.

One JSON line per precision and setting: mean and largest distance of the log-probabilities of sampled tokens
(`logprob_gap`), quantiles of π_trainer / π_sampler, and `routed_apart`, the share of (token, layer) where the training
pass by itself chooses another set of experts than the sampler did; with replay given the replayed layers below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bessemer.job import find_run
from bessemer.models.moe import EXPERT_IDS, ROUTING, recorded
from bessemer.rl.sampler import Sampler
from bessemer.training.launch import build_trainer

SHOWN = ("logprob_gap", "logprob_gap_max", "ratio_p01", "ratio_p50", "ratio_p99", "ess")
TINY = {
    "model.family": "llama",
    "model.depth": 4,
    "model.width": 128,
    "model.head_dim": 32,
    "model.experts": 16,
    "model.experts_active": 4,
    "model.expert_width": 64,
    "architecture.block_size": 128,
    "architecture.precision": "float32",
    "training.batch_size": 32,
    "training.validation": False,
    "logging.preview_interval": 0,
    "logging.plots": False,
    "eval.evaluations": [],
}
QUESTIONS = ("What is a river?", "Write a line about the sea.", "2 + 2", "Who was she?", "Once upon a time", "Why?")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="float32,bf16", help="of sampler and training pass")
    parser.add_argument("--init", type=Path, help="a run with experts; without it a tiny one is trained")
    parser.add_argument("--steps", type=int, default=150, help="of that training")
    parser.add_argument("--prompts", type=Path, help="JSON lines with 'prompt'; without it a few short ones")
    parser.add_argument("--new", type=int, default=48, help="tokens of a completion")
    return parser.parse_args(given)


def own_choices(trainer: Any, ids: np.ndarray) -> np.ndarray:
    """Return the experts that a pass over whole rows chooses by itself, (N, T, layers, k)."""
    model = trainer.model

    def choose(params: Any, ids: Any) -> Any:
        cache = model.init_cache(*ids.shape)
        return recorded(model.apply({"params": params}, ids, cache, method="decode", mutable=[ROUTING])[1])

    return np.asarray(jax.jit(choose)(trainer.state.params, ids))


def measure(trainer: Any) -> list[dict[str, Any]]:
    """Return the figures of one rollout, with and without replay."""
    parts = {field.name: getattr(trainer.sampler, field.name) for field in dataclasses.fields(Sampler)}
    found = []
    with trainer.topology.scope():
        for replay in (True, False):
            settings = dataclasses.replace(trainer.settings, router_replay=replay)
            made = Sampler(**{**parts, "settings": settings}).rollout(1)
            found.append((replay, made))
        (_, replayed), (_, plain) = found
        np.testing.assert_array_equal(replayed.rows["target_ids"], plain.rows["target_ids"])
        routes = replayed.rows[EXPERT_IDS]
        own = own_choices(trainer, replayed.rows["input_ids"])
    differ = (np.sort(own, axis=-1) != np.sort(routes, axis=-1)).any(axis=-1)[routes[..., 0] >= 0].mean()
    apart = {True: replayed.metrics["routed_apart"], False: float(differ)}
    tokens = int((plain.rows["target_ids"] >= 0).sum())
    return [
        {
            "router_replay": replay,
            "tokens": tokens,
            "routed_apart": apart[replay],
            **{n: made.metrics[n] for n in SHOWN},
        }
        for replay, made in found
    ]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        root, init, prompts = Path(folder), args.init, args.prompts
        if init is None:
            trainer = build_trainer("quickstart", {**TINY, "training.steps": args.steps}, name="moe", root=root)
            trainer.run()
            init = find_run("moe", root).path
        if prompts is None:
            prompts = root / "prompts.jsonl"
            prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS * 4))
        lines = []
        for precision in args.precisions.split(","):
            given = {
                "init": str(init),
                "training.dataset": str(prompts),
                "architecture.precision": precision,
                "training.steps": 1,
                "training.batch_size": 64,
                "training.per_device_batch_size": 16,
                "training.validation": False,
                "optimization.lr": 1e-9,
                "grpo.group_size": 8,
                "grpo.mini_batches": 1,
                "grpo.max_completion_length": args.new,
                "grpo.rewards": [{"name": "length_penalty"}],
                "logging.plots": False,
            }
            trainer = build_trainer("grpo", given, name=f"grpo-{precision}", root=root)
            trainer.run()
            lines += [json.dumps({"precision": precision, **row}) for row in measure(trainer)]
        print("\n".join(lines))


if __name__ == "__main__":
    main()
