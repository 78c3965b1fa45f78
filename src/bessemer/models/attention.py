"""One attention function for every device: causal, windowed, grouped queries, documents, cached decoding.

Window convention: a query attends to exactly `window` keys, **itself included** (keys t−window+1 … t). JAX's
`local_window_size=(w, 0)` attends to w + 1, so it is given window − 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.errors import InputError
from bessemer.models.absent import absent_flash
from bessemer.models.splash import splash_attention, suits_splash
from bessemer.models.split_attention import Layout, layout_of, on_devices
from bessemer.topology.backend import backend

Implementation = Literal["auto", "xla", "cudnn", "splash"]
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
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

    Query t sees keys ≤ t, and with `segment_ids` (B, T) only those of its own segment. A sequence that the mesh splits
    stays split outside: see split_attention.py.
    """
    if window is not None and window >= q.shape[1]:
        window = None
    layout = layout_of(q.shape, k.shape)
    name = choose_attention(implementation, q.dtype, q.shape[-1], segment_ids is not None, q.shape[1], layout)
    kernel = partial(KERNELS[name], window=window)
    return on_devices(kernel, layout, q, k, v, window, segment_ids, whole=name != "splash")


def choose_attention(
    implementation: str,
    dtype: Any,
    head_dim: int,
    masked: bool,
    length: int | None = None,
    layout: Layout | None = None,
) -> str:
    """`architecture/attention`: auto takes what the platform has for these heads, and XLA otherwise.

    cuDNN: an NVIDIA GPU, half precision, head dimensions up to 128 in steps of 8, as many keys as queries, an even
    number of them with a document mask. Splash: a TPU, head dimensions in steps of 64, sequences (what a device has of
    them) in steps of 128.
    """
    layout = layout or Layout()
    platform = backend()
    half = dtype in (jnp.bfloat16, jnp.float16)
    shaped = half and head_dim % 8 == 0 and head_dim <= 128
    possible = {
        "cudnn": platform == "gpu" and shaped and layout.way != "keys" and not (masked and (length or 0) % 2),
        "splash": platform == "tpu" and (length is None or suits_splash(layout.queries(length), head_dim)),
    }
    if not possible.get(implementation, True):
        raise InputError(f"architecture.attention={implementation} {NEEDS[implementation]}")
    if implementation != "auto":
        return implementation
    return next((name for name, can in possible.items() if can), "xla")


NEEDS = {
    "cudnn": "needs an NVIDIA GPU, half precision, a head dimension of at most 128 in steps of 8, and a "
    "topology.context that divides the key-value heads; with a document mask also a sequence of even length. Set "
    "architecture.attention=auto.",
    "splash": "is a kernel for TPUs, for head dimensions in steps of 64 and sequences in steps of 128 on each "
    "device. Set architecture.attention=auto.",
}


def _cudnn(
    q: Array, k: Array, v: Array, q_ids: Array | None, k_ids: Array | None, window: int | None
) -> Array:
    mask = None
    if (
        q_ids is not None and k_ids is not None
    ):  # cuDNN knows no documents: it reads them from a table, (B, 1, T, T)
        mask = (q_ids[:, :, None] == k_ids[:, None])[:, None]
    local = None if window is None else (window - 1, 0)
    if jax.default_backend() != "gpu":  # a plan for a GPU that is not here
        return absent_flash(q, k, v, mask)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="cudnn"
    )


def _blocked(
    q: Array, k: Array, v: Array, q_ids: Array | None, k_ids: Array | None, window: int | None
) -> Array:
    """Query blocks, each against only the keys that its window can reach: cost follows the window, not T².

    The last query stands at the last key: of S keys the first S − T come before all T queries. With more keys than
    queries, part of a long sequence, scores are computed again for the gradient: kept, they are T·S numbers a head.
    """
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    size = block_length(length)
    attend = jax.checkpoint(_attend) if before else _attend
    q, k, v = _head_major(q, k, v)
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, before + start - window + 1) // size * size
        last = before + stop
        queries, keys = before + jnp.arange(start, stop)[:, None], jnp.arange(first, last)[None, :]
        allowed = keys <= queries
        if window is not None:
            allowed &= keys > queries - window
        allowed = allowed[None]  # (1 or B, t, s)
        if q_ids is not None and k_ids is not None:
            allowed = allowed & (q_ids[:, start:stop, None] == k_ids[:, None, first:last])
        outputs.append(attend(q[:, :, :, start:stop], k[:, :, first:last], v[:, :, first:last], allowed))
    return _token_major(jnp.concatenate(outputs, axis=3))


KERNELS = {"xla": _blocked, "cudnn": _cudnn, "splash": splash_attention}


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
