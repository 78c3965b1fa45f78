"""Splash attention, JAX's own Pallas kernel for TPUs: blocks of keys outside the causal window are never visited."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

STEP = 128  # lanes of a TPU: blocks, and so sequences, come in multiples of it
HEAD_STEP = 64
BLOCK = 512


def suits_splash(length: int, head_dim: int) -> bool:
    """Whether queries of this length and heads of this size fill its blocks."""
    return length % STEP == 0 and head_dim % HEAD_STEP == 0


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_ids: Array | None,
    k_ids: Array | None,
    window: int | None,
    interpret: bool = False,
) -> Array:
    """Causal attention, the last query at the last key. q: (B, T, N, H); k, v: (B, S, K, H) → (B, T, N, H).

    ids (B, T), (B, S): a query sees keys of its own segment. The kernel does not scale by 1/√H, so q is.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, before = (q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    mask = (
        splash.CausalMask(shape, before)
        if window is None
        else splash.LocalMask(shape, (window - 1, 0), before)
    )
    rows, columns = (_block(length) for length in shape)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    ids = None if q_ids is None or k_ids is None else splash.SegmentIds(q_ids, k_ids)
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2).astype(v.dtype)


def _block(length: int) -> int:
    """The largest multiple of STEP up to BLOCK that divides the length."""
    return max(size for size in range(STEP, BLOCK + 1, STEP) if length % size == 0)
