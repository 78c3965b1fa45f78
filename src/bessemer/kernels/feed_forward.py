"""The feed-forward of a layer with relu² inside its products (relu2_matmul.py), where the chip has them.

    y = relu(h W_up)²        out = y W_down        d = (g W_downᵀ) · 2√y, the gradient at h W_up

Only y is kept for the backward pass, as `ops.relu_squared` does it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.kernels.norms import Implementation, on_rows
from bessemer.kernels.ops import Axes, linear_gradients, over_tokens
from bessemer.topology.chips import backend, traced_device
from bessemer.topology.rules import constrain, shards

SMALLEST = 4096
"""Rows below which a product is over before a kernel's start is paid."""


def _kernels() -> Any:
    """Imported where they are used alone: it takes .2 s of every start."""
    from bessemer.kernels import relu2_matmul

    return relu2_matmul


def can_join(h: Array, up: Array, implementation: Implementation) -> bool:
    """Return whether relu² is done inside the products of h: (B, T, D) and up: (D, F): with enough rows per device."""
    if not joins_on_chip(implementation) or h.shape[0] % shards("batch") or h.shape[1] % shards("sequence"):
        return False
    rows = h.shape[0] * h.shape[1] // (shards("batch") * shards("sequence"))
    return rows >= SMALLEST and _kernels().suits(rows, *up.shape)


def joins_on_chip(implementation: Implementation) -> bool:
    """Return whether the chip is a Hopper GPU, and the matrices whole on it."""
    if implementation != "pallas" or backend() != "gpu":
        return False
    return shards("mlp") == 1 and _kernels().runs_on(traced_device())


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def feed_forward(h: Array, up: Array, down: Array, axes: tuple[Axes, Axes], dtype: Any, name: str) -> Array:
    """relu(h W_up)² W_down; y = relu(h W_up)² is kept under `name`. h: (B, T, D); up: (D, F), down: (F, D) float32."""
    return _forward(h, up, down, axes, dtype, name)[0]


def _forward(h: Array, up: Array, down: Array, axes: tuple[Axes, Axes], dtype: Any, name: str) -> tuple[Array, Any]:
    y = on_rows(lambda *a: (_kernels().up(*a),), (h,), (constrain(up.astype(dtype), *axes[0]),), 1)[0]
    y = checkpoint_name(y, name)
    return y @ constrain(down.astype(dtype), *axes[1]), (h, y, up, down)


def _backward(axes: tuple[Axes, Axes], dtype: Any, name: str, kept: Any, g: Array) -> tuple[Array, Array, Array]:
    h, y, up, down = kept
    turned = constrain(down.astype(dtype), *axes[1]).T
    d = on_rows(lambda g, y, v: (_kernels().back(g, v, y),), (g, y), (turned,), 1)[0]
    dh, dup = linear_gradients(h, up, d, axes[0], dtype)
    return dh, dup, over_tokens(y, g).astype(down.dtype)


feed_forward.defvjp(_forward, _backward)
