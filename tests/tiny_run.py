"""A run directory made without training: tiny weights, a tokenizer of bytes and a few merges, real files."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.checkpoint import Checkpoints
from bessemer.config.recipes import saved_tree
from bessemer.data import Tokenizer
from bessemer.job import RunDirectory
from bessemer.job.trust import mark_origin
from bessemer.models.gpt import GPT
from bessemer.topology import unbox

TEXTS = [f"The {n} grey cats and {n + 1} dogs were walking in the rain.\n" * 3 for n in range(40)]

CONFIG = """\
job: BaseTrainer
objective: pretrain
model: {{family: gpt, depth: 2, width: 32, head_dim: 16, vocab_size: 300, window: L}}
architecture: {{block_size: 32, precision: float32}}
training:
  dataset: [[{{name: '{data}', rate: 1.0, style: PMD, suffix: ''}}]]
  validation_steps: 8
  steps: 20
data: {{root: '{root}', val_fraction: 0.2}}
provenance: {{model.depth: recipe tiny, training.steps: command line}}
"""


def tiny_model() -> GPT:
    return GPT(depth=2, width=32, head_dim=16, vocab_size=300, window="L", block_size=32, precision="float32")


def random_params(model: GPT, seed: int = 0, scale: float = 0.3) -> dict:
    """Weights large enough that the next token depends on what came before; nothing is compiled."""
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
    random = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre = 0.5 if len(leaf.shape) < 2 else 0.0  # scales of the residual stream, not matrices
        return jnp.asarray(centre + scale * random.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(draw, shapes)


def tiny_params(seed: int = 0) -> dict:
    return random_params(tiny_model(), seed)


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


def make_run(root: Path, name: str = "tiny", steps: tuple[int, ...] = (10, 20)) -> RunDirectory:
    """Checkpoints at `steps` with different weights each, config, tokenizer, and data to hold out from; marked as
    started here."""
    data = root / "cats.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = RunDirectory(root / "runs" / name).create()
    config = CONFIG.format(data=data, root=root / "store")
    run.config.write_text(config)
    files = {"config.yaml": config, "tokenizer.json": tiny_tokenizer().to_json()}
    checkpoints = Checkpoints(run.checkpoints)
    for step in steps:
        state = {"step": jnp.int32(step), "params": tiny_params(step), "opt_state": {"m": jnp.zeros(3)}}
        checkpoints.save(step, state, files=files, wait=True)
    checkpoints.close()
    mark_origin(run, saved_tree(run.config))
    return run
