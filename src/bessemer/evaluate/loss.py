"""Loss on held-out text: nats a token, and the perplexity e^loss. Between tokenizers compare bits per byte."""

from __future__ import annotations

import math
from typing import Any

from bessemer.evaluate.bpb import measure
from bessemer.evaluate.held_out import held_out
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations


@evaluations.register("loss")
def loss(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Plain values. `limit`: sequences in all; `batch_size`: in one pass, all devices together."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size)
    mean = totals["loss"] / totals["weight"]
    return {
        "metric": "nats per token",
        "value": mean,
        "perplexity": math.exp(mean),
        "sequences": len(rows),
        "targets": int(totals["weight"]),
    }
