"""Bits per byte and loss (nats per token) on held-out text. Compare bits per byte between tokenizers.

bits per byte = Σ nats / (ln 2 · Σ bytes)      over targets with bytes, so not over special tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer import console
from bessemer.data import Validation
from bessemer.errors import InputError
from bessemer.evaluate.held_out import held_out
from bessemer.evaluate.scoring import check_batch, on_mesh, replicated, rows_in_a_pass
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations


@evaluations.register("bpb")
def bpb(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return bits per byte, loss and perplexity. `limit`: sequences in total; `batch_size`: per pass, all devices."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size)
    if totals["bytes"] == 0:
        raise InputError("no target of the held-out sequences stands for a byte: bits per byte are not defined.")
    return {
        "metric": "bits per byte",
        "value": totals["nats"] / (math.log(2) * totals["bytes"]),
        "standard_error": standard_error(totals),
        "loss": totals["loss"] / totals["weight"],
        **_counts(rows, totals),
        "bytes": int(totals["bytes"]),
    }


@evaluations.register("loss")
def loss(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return nats per token and perplexity; arguments as of `bpb`."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size)
    return {"metric": "nats per token", "value": totals["loss"] / totals["weight"], **_counts(rows, totals)}


def _counts(rows: Validation, totals: Mapping[str, float]) -> dict[str, Any]:
    perplexity = math.exp(totals["loss"] / totals["weight"])
    return {"perplexity": perplexity, "sequences": len(rows), "targets": int(totals["weight"])}


def measure(loaded: LoadedModel, rows: Validation, batch_size: int | None = None) -> dict[str, float]:
    """Return Σ loss and Σ weight of all targets, Σ nats and Σ bytes of those with bytes, and the sums of their error.

    The device sums single rows, and the host adds those exactly, so the batch size does not matter.
    """
    check_batch(batch_size)
    size = rows_in_a_pass(loaded, loaded.model.block_size, batch_size)
    run = loaded.program("row_sums", lambda: _compiled(loaded))
    found = []
    with loaded.scope():
        for number, batch in enumerate(batches(loaded, rows, size), start=1):
            found.append(run(loaded.params, batch))
            console.tick(min(number * size, len(rows)), len(rows))
        table = np.concatenate(loaded.fetch(found), axis=1)
    nats, size = table[2].astype(np.float64), table[3].astype(np.float64)
    sums = {"nats_nats": nats * nats, "nats_bytes": nats * size, "bytes_bytes": size * size, "rows": size > 0}
    named = zip(("loss", "weight", "nats", "bytes"), table, strict=True)
    return {name: math.fsum(row) for name, row in (*named, *sums.items())}


def standard_error(sums: Mapping[str, float]) -> float | None:
    """Return the standard error of bits per byte over sequences, from sums over them; None for fewer than two.

    With R = Σ nats / Σ bytes it is √(n / (n − 1) · Σ (nats − R · bytes)²) / (ln 2 · Σ bytes): the error of a ratio of
    sums. It treats sequences as independent, so it is too small for text from few documents.
    """
    rows, size = sums.get("rows", 0), sums.get("bytes", 0)
    if rows < 2 or not size:
        return None
    ratio = sums["nats"] / size
    squares = sums["nats_nats"] - 2 * ratio * sums["nats_bytes"] + ratio**2 * sums["bytes_bytes"]
    return math.sqrt(max(0.0, squares) * rows / (rows - 1)) / (math.log(2) * size)


def _compiled(loaded: LoadedModel) -> Any:
    model = loaded.model

    def row_sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logprobs = model.apply({"params": params}, batch, method="token_logprobs")  # (B, T)
        weights = jnp.where(batch["target_ids"] >= 0, batch["loss_mask"], 0.0)
        counted = weights * (batch["target_bytes"] > 0)
        parts = (-logprobs * weights, weights, -logprobs * counted, counted * batch["target_bytes"])
        return jnp.stack([part.sum(axis=1) for part in parts])  # (4, B)

    return jax.jit(row_sums, out_shardings=replicated(loaded))


def batches(loaded: LoadedModel, rows: Validation, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of one shape with the bytes of each target; the last is filled with rows without targets."""
    assert loaded.tokenizer is not None
    for number in range(rows.batches(batch_size)):
        batch: dict[str, Any] = dict(rows.batch(number, batch_size))
        batch["target_bytes"] = loaded.tokenizer.target_bytes(batch["input_ids"], batch["target_ids"])
        yield on_mesh(loaded, batch)
