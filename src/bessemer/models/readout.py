"""What a model says about the next token, before the logits exist: two models are compared tile by tile."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class Readout(NamedTuple):
    """Logits are cap(hidden · head)[:vocab_size]; without a head, `hidden` are the logits themselves.

    hidden: (B, T, D) or (B, T, V); head: (D, V), whose columns beyond `vocab_size` are padding.
    """

    hidden: Array
    head: Array | None
    vocab_size: int
    softcap: float = 0.0
