"""A head that is tied to the embedding for the first share of the steps, and then trains by itself.

While tied, row v of the embedding E is column v of the head W at the size of a fresh embedding, which the model's norm
of embeddings removes again, so the function is that of one shared table:

    E_v = s · W_v / rms(W_v)          dL/dW_v = ∂L/∂W_v + s / rms(W_v) · ∂L/∂E_v          s = .8

(E reaches the loss only through its direction, so ∂L/∂E_v is at right angles to E_v, and its size goes with 1/|E_v|.)
After each update of W, E follows it; E's own update is discarded, but its moments take in ∂L/∂E. At the end of the
share nothing jumps: E has the size that its rate is made for, and moments of its own gradient. modded-nanogpt unties by
copying table and moments; there both have one rate, here embedding and head are groups with rates of their own.

Both tables are parameters all along, so a checkpoint, sampling and export know nothing of it. Whether they are still
tied is part of the state: a run that is extended after it was untied is not tied again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from bessemer.errors import InputError
from bessemer.models.gpt import GPT

EMBEDDING, HEAD = "embedding", "head"
EMBEDDING_SIZE = 0.8  # s, the deviation of a fresh embedding
HEAD_SIZE = 0.02  # deviation of a head that starts tied; by itself it is .001, which one step of its rate outweighs


def untying_step(share: float, steps: int, model: Any, fresh: bool, whole: bool) -> int:
    """Return the first step of the untied head, 0 if it is never tied. InputError where it cannot be tied.

    fresh: the run starts from no other weights; whole: all parameters are trained.
    """
    if share == 0:
        return 0
    for holds, problem in (
        (isinstance(model, GPT), f"ties the two tables of model.family=gpt, and this model is {type(model).__name__}"),
        (fresh, "would replace the embedding that the run starts from"),
        (whole, "needs embedding and head to be trained"),
    ):
        if not holds:
            raise InputError(f"training.tied_head={share:g} {problem}. Leave it out.")
    return max(1, round(share * steps))


def tied_start(params: Any) -> Any:
    """Return fresh parameters whose head is the embedding at HEAD_SIZE."""
    embedding = params[EMBEDDING]
    head = (HEAD_SIZE / EMBEDDING_SIZE * embedding.astype(jnp.float32)).T
    return followed({**params, HEAD: head.astype(params[HEAD].dtype)}, jnp.ones((), bool))


def followed(params: Any, tied: jax.Array) -> Any:
    """Return the parameters with an embedding that follows the head, while `tied`."""
    embedding, head = params[EMBEDDING], params[HEAD].astype(jnp.float32).T
    follows = (_stretch(head) * head).astype(embedding.dtype)
    return {**params, EMBEDDING: jnp.where(tied, follows, embedding)}


def tied_gradients(grads: Any, params: Any, tied: jax.Array) -> Any:
    """Return the gradients with the embedding's added to the head's, while `tied`."""
    head = params[HEAD].astype(jnp.float32).T
    added = jnp.where(tied, _stretch(head) * grads[EMBEDDING], 0.0).T
    return {**grads, HEAD: grads[HEAD] + added}


def without_discarded(grads: Any, tied: jax.Array) -> Any:
    """Return the gradients that move the model: without the embedding's, while `tied`."""
    return {**grads, EMBEDDING: jnp.where(tied, 0.0, grads[EMBEDDING])}


def _stretch(rows: jax.Array) -> jax.Array:
    """s / rms of each row, (V, 1); 0 for a row of zeros. rows: (V, D)."""
    size = jnp.sqrt(jnp.mean(jnp.square(rows), axis=-1, keepdims=True))
    return jnp.where(size > 0, EMBEDDING_SIZE / jnp.maximum(size, 1e-30), 0.0)
