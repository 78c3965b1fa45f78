"""One attention function for every device: causal, windowed, grouped queries, documents, cached decoding.

Window convention: a query attends to exactly `window` keys, **itself included** (keys t−window+1 … t). JAX's
`local_window_size=(w, 0)` attends to w + 1, so it is given window − 1.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.errors import InputError
from bessemer.models.absent import absent_flash
from bessemer.topology.backend import backend

Implementation = Literal["auto", "xla", "cudnn"]
MAX_BLOCKS = 8  # query blocks of the XLA path: more would skip more masked keys, and compile longer


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int | None = None,
    segment_ids: Array | None = None,
    implementation: Implementation | str = "auto",
) -> Array:
    """softmax(q kᵀ / √d) v over the allowed keys. q: (B, T, N, H); k, v: (B, T, K, H), K divides N → (B, T, N, H).

    Query t sees keys ≤ t, and with `segment_ids` (B, T) only those of its own segment.
    """
    if window is not None and window >= q.shape[1]:
        window = None
    if choose_attention(implementation, q.dtype, q.shape[-1], segment_ids is not None) == "cudnn":
        if jax.default_backend() != "gpu":  # a plan for a GPU that is not here
            return absent_flash(q, k, v)
        local = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation="cudnn"
        )
    return _blocked(q, k, v, window, segment_ids)


def choose_attention(implementation: str, dtype: Any, head_dim: int, masked: bool) -> str:
    """`architecture/attention`: auto takes cuDNN where it can, which is in half precision on an NVIDIA GPU, with head
    dimensions up to 128 in steps of 8, and without a document mask."""
    half = dtype in (jnp.bfloat16, jnp.float16)
    possible = backend() == "gpu" and half and head_dim % 8 == 0 and head_dim <= 128 and not masked
    if implementation == "cudnn" and not possible:
        raise InputError(
            "architecture.attention=cudnn needs an NVIDIA GPU, half precision, a head dimension of at most 128 in "
            "steps of 8, and no document mask, which it cannot keep. Set architecture.attention=auto."
        )
    return "cudnn" if possible and implementation != "xla" else "xla"


def _blocked(q: Array, k: Array, v: Array, window: int | None, segment_ids: Array | None) -> Array:
    """Query blocks, each against only the keys that its window can reach: cost follows the window, not T²."""
    length = q.shape[1]
    size = block_length(length)
    q, k, v = _head_major(q, k, v)
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1) // size * size
        queries, keys = jnp.arange(start, stop)[:, None], jnp.arange(first, stop)[None, :]
        allowed = keys <= queries
        if window is not None:
            allowed &= keys > queries - window
        allowed = allowed[None]  # (1 or B, t, s)
        if segment_ids is not None:
            allowed = allowed & (segment_ids[:, start:stop, None] == segment_ids[:, None, first:stop])
        outputs.append(_attend(q[:, :, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], allowed))
    return _token_major(jnp.concatenate(outputs, axis=3))


def block_length(length: int) -> int:
    """Query block: 64, or more so that there are at most MAX_BLOCKS of them."""
    size = 64
    while size * MAX_BLOCKS < length:
        size *= 2
    return size


def cached_attention(
    q: Array, k: Array, v: Array, *, q_positions: Array, k_positions: Array, window: int | None = None
) -> Array:
    """Attention to a cache. q: (B, T, N, H); k, v: (B, K, S, H), head-major → (B, T, N, H).

    The query at position q_positions[b, t] (B, T) sees the keys at k_positions (B, S) from 0 to its own; a key at a
    negative position is none. A query with no allowed key gives zeros.
    """
    keys, queries = k_positions[:, None], q_positions[..., None]
    allowed = (keys >= 0) & (keys <= queries)  # (B, T, S)
    if window is not None:
        allowed &= keys > queries - window
    return _token_major(_attend(_grouped(q, k.shape[1]), k, v, allowed))


def _head_major(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """q: (B, T, N, H) → (B, K, G, T, H), the G queries of a key head together; k, v: (B, S, K, H) → (B, K, S, H).

    The order of the matmuls' batch axes, turned once: otherwise every block is turned by itself.
    """
    return _grouped(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _grouped(q: Array, kv_heads: int) -> Array:
    batch, length, heads, head_dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    return q.transpose(0, 2, 3, 1, 4)


def _token_major(out: Array) -> Array:
    """(B, K, G, T, H) → (B, T, N, H)."""
    out = out.transpose(0, 3, 1, 2, 4)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def _attend(q: Array, k: Array, v: Array, allowed: Array) -> Array:
    """Masked softmax attention of head-major arrays, in float32 inside. allowed: (1 or B, T, S) bool."""
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = masked_softmax(scores, allowed[:, None, None]).astype(v.dtype)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v, preferred_element_type=jnp.float32)
    return out.astype(v.dtype)


@jax.custom_vjp
def masked_softmax(scores: Array, allowed: Array) -> Array:
    """Softmax over the allowed entries of the last axis, 0 elsewhere; a row with none is all 0.

    Own gradient, ds = p (g − Σ g p): it keeps p alone, and p is 0 wherever the mask was False.
    """
    scores = jnp.where(allowed, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def _softmax_forward(scores: Array, allowed: Array) -> tuple[Array, Array]:
    p = masked_softmax(scores, allowed)
    return p, p


def _softmax_backward(p: Array, g: Array) -> tuple[Array, None]:
    return p * (g - jnp.sum(g * p, axis=-1, keepdims=True)), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)
