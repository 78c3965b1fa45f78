"""Dense connections between layers: what a block reads is a mixture of the outputs of all blocks before it.

    x̄_i = x_i + Σ_{j=0..i} a_ij x_j        a_i = b_i + W_iᵀ gelu(R_iᵀ norm(x_i)), one number per token and output

x_0 is the embedding, x_j the output of the j-th of n blocks (with its lookup layer); block i + 1 reads x̄_i in place of
x_i, and the final norm reads x̄_n. R_i: (D, n + 1), W_i: (n + 1, i + 1), b_i: (i + 1). W and b start at 0, so a fresh
model computes what it does without them.

A light form of MUDD (Xiao et al. 2025, arXiv 2502.12170): one mixture per block instead of one each for queries, keys,
values and the residual stream, no norms of its own, and R of one width in all blocks, so that Muon updates them in one
batch. W = 0 is DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622). All outputs stay in memory until the backward
pass, and depth · (depth + 3) / 2 of them are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.kernels import ops
from bessemer.models.layers import declare, symmetric
from bessemer.topology.rules import constrain

READ_AXES = ("gate", None)


class ConnectionParameters(nn.Module):
    """Declares R (variance 1/D), W and b (0) of one mixture of `outputs` tensors (B, T, width)."""

    outputs: int
    hidden: int
    width: int

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        zeros, hidden, outputs = nn.initializers.zeros, self.hidden, self.outputs
        read = symmetric(math.sqrt(3 / self.width))
        return {
            "connect_read": declare(self, "connect_read", read, READ_AXES, (self.width, hidden)),
            "connect_write": declare(self, "connect_write", zeros, ("gate", None), (hidden, outputs)),
            "connect_bias": declare(self, "connect_bias", zeros, ("gate",), (outputs,)),
        }


def connect(params: dict[str, Array], outputs: Sequence[Array], dtype: Any) -> Array:
    """Return x̄ of the outputs so far, (B, T, D) each; products in `dtype`, the sum in float32.

    It is computed again in the backward pass, which so keeps nothing but the outputs.
    """

    def mixed(params: dict[str, Array], outputs: Sequence[Array]) -> Array:
        x = outputs[-1]
        read = ops.linear(ops.rms_norm(x), params["connect_read"], READ_AXES, dtype).astype(jnp.float32)
        weights = jax.nn.gelu(read) @ params["connect_write"] + params["connect_bias"]  # (B, T, outputs)
        total = x.astype(jnp.float32)
        for index, output in enumerate(outputs):
            total += weights[..., index, None] * output
        return constrain(total.astype(x.dtype), "batch", "sequence", "embed_act")

    return jax.checkpoint(mixed)(params, list(outputs))
