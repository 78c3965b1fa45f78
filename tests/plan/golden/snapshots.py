"""Where each parameter lies and what devices send each other, for the shipped recipes on eight virtual devices.

The files beside this one are compared by tests/plan/test_plan_golden.py, so that a change which adds an all-gather is
seen in review. Counts are of one compiled step on the CPU backend, whose compiler has no reduce-scatter and spells it
as an all-reduce; models are cut to two small layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jaxlib

from bessemer.plan.collectives import Layout, collectives_of, describe
from bessemer.plan.trainer import planned_trainer
from bessemer.topology import AXES, placement
from bessemer.training.feed import abstract_batch

SMALL = ["model.depth=2", "model.width=64", "model.head_dim=32", "architecture.block_size=32"]
BATCH = ["training.batch_size=16", "training.per_device_batch_size=1"]
PRETRAIN = ["pretrain", "training.batch_tokens=512", "training.steps=10", "model.vocab_size=256", *SMALL, BATCH[1]]
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}

# name -> (recipe and settings, mesh)
CASES: dict[str, tuple[list[str], dict[str, int]]] = {
    "pretrain-fsdp8": (PRETRAIN, {"fsdp": 8}),
    "pretrain-data8": (PRETRAIN, {"data": 8}),
    "pretrain-fsdp4-tensor2": (PRETRAIN, {"fsdp": 4, "tensor": 2}),
    "quickstart-mixed": (["quickstart", *SMALL, "model.vocab_size=256", *BATCH], MIXED),
    "kl-mixed": (["kl", *SMALL, "model.vocab_size=256", *BATCH], MIXED),
    "sft-mixed": (["sft", *BATCH], MIXED),
    "dpo-mixed": (["dpo", *BATCH], MIXED),
    "reward-mixed": (["reward", *BATCH], MIXED),
    "grpo-mixed": (["grpo", *BATCH], MIXED),
    "distill-mixed": (["distill", "model.width=64", *BATCH], MIXED),
}


def place(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.json")


def read(name: str) -> dict[str, Any]:
    return json.loads(place(name).read_text())


def write(name: str, found: dict[str, Any]) -> None:
    """Programs of another compiler are kept beside: each version has its own list of collectives."""
    before = read(name)["collectives"] if place(name).exists() else {}
    found["collectives"] = dict(sorted((before | found["collectives"]).items()))
    place(name).write_text(json.dumps(found, indent=1) + "\n")


def version() -> str:
    return ".".join(jaxlib.__version__.split(".")[:2])


def snapshot(name: str) -> dict[str, Any]:
    """Build and compile the case on the eight devices here."""
    (recipe, *settings), mesh = CASES[name]
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    words = [*settings, *(f"topology.{axis}={size}" for axis, size in sizes.items())]
    trainer: Any = planned_trainer(recipe, words, compiles=False)
    functions, topology = trainer.functions, trainer.topology
    batch = abstract_batch(trainer.data.fields, functions.micro, functions.accumulate_steps, topology.batch_sharding(1))
    with topology.scope():
        program = functions.train_step.lower(functions.abstract_state, batch, functions.key).compile()
    found = collectives_of(program.as_text(), Layout(sizes, None))
    rows = placement(functions.abstract_state.params, functions.state_shardings.params)
    return {
        "settings": [recipe, *words],
        "placement": {row["name"]: row["spec"] for row in rows},
        "collectives": {version(): describe(sorted(found, key=lambda one: (one.kind, one.axes)))},
    }
