"""Bits per byte: how many bits the model needs for a byte of held-out text, whatever its tokenizer.

bits per byte = Σ nats / (ln 2 · Σ bytes)      over targets that stand for bytes; special tokens do not count
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.data import Validation
from bessemer.errors import InputError
from bessemer.evaluate.held_out import held_out
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations

TOKENS_IN_A_PASS = 16_384
"""Tokens in one forward pass when no batch size is given."""


@evaluations.register("bpb")
def bpb(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Plain values. `limit`: sequences in all; `batch_size`: in one pass, all devices together."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size or max(1, TOKENS_IN_A_PASS // loaded.model.block_size))
    if totals["bytes"] == 0:
        raise InputError(
            "no target of the held-out sequences stands for a byte: bits per byte are not defined."
        )
    return {
        "metric": "bits per byte",
        "value": totals["nats"] / (math.log(2) * totals["bytes"]),
        "loss": totals["loss"] / totals["weight"],
        "sequences": len(rows),
        "targets": int(totals["weight"]),
        "bytes": int(totals["bytes"]),
    }


def measure(loaded: LoadedModel, rows: Validation, batch_size: int) -> dict[str, float]:
    """Σ loss and Σ weight of all targets, Σ nats and Σ bytes of those with bytes.

    The device gives sums of single rows, which are added exactly on the host: batching does not matter.
    """
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; give at least 1.")
    everywhere = None
    if loaded.topology is not None:
        parallel, everywhere = loaded.topology.data_parallel, loaded.topology.replicated
        batch_size = -(-batch_size // parallel) * parallel
    model = loaded.model

    @partial(jax.jit, out_shardings=everywhere)
    def sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logprobs = model.apply({"params": params}, batch, method="token_logprobs")  # (B, T)
        weights = jnp.where(batch["target_ids"] >= 0, batch["loss_mask"], 0.0)
        counted = weights * (batch["target_bytes"] > 0)
        parts = (-logprobs * weights, weights, -logprobs * counted, counted * batch["target_bytes"])
        return jnp.stack([part.sum(axis=1) for part in parts])  # (4, B)

    with loaded.scope():
        found = [sums(loaded.params, batch) for batch in batches(loaded, rows, batch_size)]
    table = np.concatenate(jax.device_get(found), axis=1)
    return {
        name: math.fsum(row) for name, row in zip(("loss", "weight", "nats", "bytes"), table, strict=True)
    }


def batches(loaded: LoadedModel, rows: Validation, batch_size: int) -> Iterator[dict[str, Any]]:
    """Batches of one shape with the bytes of each target; the last is filled with rows without targets."""
    assert loaded.tokenizer is not None
    lengths = loaded.tokenizer.token_bytes
    for number in range(rows.batches(batch_size)):
        batch: dict[str, Any] = dict(rows.batch(number, batch_size))
        targets = batch["target_ids"]
        batch["target_bytes"] = np.where(targets >= 0, lengths[np.maximum(targets, 0)], 0).astype(np.int32)
        yield batch if loaded.topology is None else jax.device_put(batch, loaded.topology.batch_sharding())
