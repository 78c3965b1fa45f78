"""The exchange of rows between the devices that hold the experts: all-to-all, and no row is ever dropped.

A device has M rows sorted by destination, `sent[d]` of them for device d of the axis. It receives into a buffer of
X · capacity rows in which the rows of source s start at s · capacity. The capacity is the most rows that one device can
have for another, so nothing can overflow. Two implementations:

    ragged   `jax.lax.ragged_all_to_all`, which sends the rows there are. GPU and TPU.
    padded   `jax.lax.all_to_all` of the buffers, which sends the empty rows too. Any device; the CPU has no other.

The buffers take X · capacity rows with either. `send` and `give_back` are each other's transpose, and so each other's
gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.topology.chips import backend

IMPLEMENTATIONS = ("auto", "padded", "ragged")


class Sizes(NamedTuple):
    """Of this device, by other device of the axis, (X,) int32 each.

    start: where its rows for each device begin; sent, received: how many go there and come from there; home: where
    this device's part of their rows begins on each of them.
    """

    start: Array
    sent: Array
    received: Array
    home: Array


def choose(implementation: str) -> str:
    """Return the implementation that runs here."""
    if implementation == "auto":
        return "padded" if backend() == "cpu" else "ragged"
    return implementation


def exchange_sizes(sent: Array, axis: str) -> Sizes:
    """Return the sizes of an exchange along `axis`, known to both ends. sent: (X,) rows for each device."""
    start = jnp.cumsum(sent) - sent
    both = jnp.stack([sent, start], axis=1)  # (X, 2)
    theirs = jax.lax.all_to_all(both, axis, 0, 0, tiled=True)
    return Sizes(start, sent, theirs[:, 0], theirs[:, 1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def send(x: Array, sizes: Sizes, axis: str, capacity: int, implementation: str = "auto") -> Array:
    """Return what the others sent here: x (M, D) sorted by destination → (X · capacity, D), zero where nothing came."""
    devices = sizes.sent.shape[0]
    if choose(implementation) == "ragged":
        empty = jnp.zeros((devices * capacity, x.shape[1]), x.dtype)
        own = jnp.full((devices,), jax.lax.axis_index(axis) * capacity, jnp.int32)
        return jax.lax.ragged_all_to_all(x, empty, sizes.start, sizes.sent, own, sizes.received, axis_name=axis)
    place = jnp.arange(capacity)
    taken = jnp.minimum(sizes.start[:, None] + place, x.shape[0] - 1)
    filled = jnp.where((place < sizes.sent[:, None])[..., None], x[taken], 0)  # (X, capacity, D)
    return jax.lax.all_to_all(filled, axis, 0, 0, tiled=True).reshape(devices * capacity, -1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def give_back(y: Array, sizes: Sizes, axis: str, capacity: int, rows: int, implementation: str = "auto") -> Array:
    """Return the rows that were sent, as the others give them back: y (X · capacity, D) → (rows, D)."""
    devices = sizes.sent.shape[0]
    if choose(implementation) == "ragged":
        empty = jnp.zeros((rows, y.shape[1]), y.dtype)
        begins = jnp.arange(devices, dtype=jnp.int32) * capacity
        return jax.lax.ragged_all_to_all(y, empty, begins, sizes.received, sizes.home, sizes.sent, axis_name=axis)
    back = jax.lax.all_to_all(y.reshape(devices, capacity, -1), axis, 0, 0, tiled=True)
    number = jnp.arange(rows)
    device = jnp.searchsorted(sizes.start + sizes.sent, number, side="right")  # devices without rows are passed over
    return back[device, number - sizes.start[device]]


def _send_forward(x: Array, sizes: Sizes, axis: str, capacity: int, implementation: str) -> tuple[Array, Any]:
    return send(x, sizes, axis, capacity, implementation), (sizes, jnp.zeros((x.shape[0], 0)))


def _send_backward(axis: str, capacity: int, implementation: str, residuals: Any, g: Array) -> tuple[Array, None]:
    sizes, like = residuals
    return give_back(g, sizes, axis, capacity, like.shape[0], implementation), None


def _back_forward(
    y: Array, sizes: Sizes, axis: str, capacity: int, rows: int, implementation: str
) -> tuple[Array, Sizes]:
    return give_back(y, sizes, axis, capacity, rows, implementation), sizes


def _back_backward(
    axis: str, capacity: int, rows: int, implementation: str, sizes: Sizes, g: Array
) -> tuple[Array, None]:
    return send(g, sizes, axis, capacity, implementation), None


send.defvjp(_send_forward, _send_backward)
give_back.defvjp(_back_forward, _back_backward)
