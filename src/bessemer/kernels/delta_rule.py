"""The gated delta rule: attention by a state of fixed size, and the short convolution before it. Plain JAX.

    S_t = e^{g_t} S_{t−1} + k_t δ_tᵀ,   δ_t = β_t (v_t − (e^{g_t} S_{t−1})ᵀ k_t),   o_t = S_tᵀ q_t

Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464). Over a chunk of C tokens with G_i = Σ_{j≤i} g_j the δ solve a
triangular system, and what remains is matrix products:

    (I + L) δ = β (v − e^G S_0ᵀ k),   L_ij = β_i e^{G_i − G_j} k_i·k_j for j < i
    o = e^G S_0ᵀ q + (e^{G_i − G_j} q_i·k_j)_{j≤i} δ,   S_C = e^{G_C} S_0 + Σ_j e^{G_C − G_j} k_j δ_jᵀ

Where a document begins, the state before it counts 0 times: pairs of tokens of different documents drop out of L and of
the products, and only tokens before the first border of a chunk see S_0. Everything here is float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

CHUNK = 64
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, begins: Array | None = None
) -> tuple[Array, Array]:
    """Return (o (B, T, H, V), the state after the last token (B, H, K, V)), float32.

    q, k: (B, T, H, K); v: (B, T, H, V); g, beta: (B, T, H), both 0 for a token that is to leave no trace; state:
    (B, H, K, V); begins: (B, T) bool, where a new document begins.
    """
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    if q.shape[1] == 1 and begins is None:
        o, state = _step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return o[:, None], state
    return _chunked(q, k, v, g, beta, state, begins)


def _step(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One token. q, k: (B, H, K); v: (B, H, V); g, beta: (B, H)."""
    state = jnp.exp(g)[..., None, None] * state
    delta = beta[..., None] * (v - _product("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * delta[..., None, :]
    return _product("bhkv,bhk->bhv", state, q), state


def _chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, begins: Array | None
) -> tuple[Array, Array]:
    length = q.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    if begins is None:
        begins = jnp.zeros(q.shape[:2], bool)
    q, k, v, g, beta = (_chunks(x, size) for x in (q, k, v, g, beta))  # (N, B, H, C, …)
    run = jnp.cumsum(_chunks(begins[..., None], size)[:, :, 0], axis=-1)  # (N, B, C): borders so far in the chunk
    total = jnp.cumsum(g, axis=-1)
    place = jnp.arange(size)
    pairs = (run[..., :, None] == run[..., None, :]) & (place[:, None] >= place)  # (N, B, C, C)
    decay = total[..., :, None] - total[..., None, :]
    decay = jnp.where(pairs[:, :, None], jnp.exp(jnp.where(pairs[:, :, None], decay, 0)), 0)
    lower = beta[..., None] * decay * _product("nbhik,nbhjk->nbhij", k, k)
    inverse = _unit_inverse(jnp.where(place[:, None] > place, lower, 0))
    from_start = jnp.exp(total) * (run == 0)[:, :, None]  # of S_0, as token i sees it
    to_end = decay[..., -1, :]  # of token j, in the state that the chunk leaves
    values = _product("nbhij,nbhjv->nbhiv", inverse, beta[..., None] * v)
    keys = _product("nbhij,nbhjk->nbhik", inverse, (beta * from_start)[..., None] * k)
    scores = decay * _product("nbhik,nbhjk->nbhij", q, k)

    def chunk(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, keys, values, scores, added, kept = xs
        delta = values - _product("bhik,bhkv->bhiv", keys, state)
        out = _product("bhik,bhkv->bhiv", queries, state) + _product("bhij,bhjv->bhiv", scores, delta)
        return kept[..., None, None] * state + _product("bhjk,bhjv->bhkv", added, delta), out

    xs = (from_start[..., None] * q, keys, values, scores, to_end[..., None] * k, from_start[..., -1])
    state, out = jax.lax.scan(chunk, state, xs)
    out = jnp.moveaxis(out, (0, 3), (1, 2))  # (B, N, C, H, V)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], state


def _chunks(x: Array, size: int) -> Array:
    """(B, T, H, …) → (N, B, H, C, …), filled up with zeros, which leave no trace."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))


@jax.custom_vjp
def _unit_inverse(lower: Array) -> Array:
    """(I + L)⁻¹ of strictly lower triangular L (…, C, C), C a power of two.

    By halves: the inverse of [[A, 0], [B, D]] is [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]. Products alone, so that it may be split
    over devices.
    """
    size, block = lower.shape[-1], 1
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # of the blocks on the diagonal
    while block < size:
        count = size // (2 * block)
        grid = lower.reshape(*lower.shape[:-2], count, 2 * block, count, 2 * block)
        below = jnp.einsum("...aiaj->...aij", grid)[..., block:, :block]
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product("...ij,...jk,...kl->...il", second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]


def _unit_inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = _unit_inverse(lower)
    return inverse, inverse


def _unit_inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    return (-_product("...ji,...jk,...lk->...il", inverse, gradient, inverse),)


_unit_inverse.defvjp(_unit_inverse_forward, _unit_inverse_backward)


def short_convolution(
    x: Array, weight: Array, before: Array | None = None, begins: Array | None = None
) -> tuple[Array, Array]:
    """Return (silu(Σ_d w_{W−1−d} x_{t−d}) by channel, (B, T, D) float32; the W − 1 inputs before x, followed by x).

    x: (B, T, D); weight: (W, D); before: (B, W − 1, D), the inputs before, None for zeros; begins: (B, T), see above:
    of earlier documents nothing is read.
    """
    width, length = weight.shape[0], x.shape[1]
    if before is None:
        before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    since = None if begins is None else jnp.pad(jnp.cumsum(begins, axis=1), ((0, 0), (width - 1, 0)))
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(width):
        first = width - 1 - back
        term = weight[first] * inputs[:, first : first + length].astype(jnp.float32)
        if since is not None and back:
            same = since[:, first : first + length] == since[:, width - 1 :]
            term = jnp.where(same[..., None], term, 0)
        total = total + term
    return jax.nn.silu(total), inputs


def last_inputs(inputs: Array, added: Array, width: int) -> Array:
    """Return the `width` - 1 inputs before the next token, (B, W − 1, D). inputs: what `short_convolution` gave; added:
    (B,), how many of its tokens are real."""
    at = added[:, None] + jnp.arange(width - 1)
    return jnp.take_along_axis(inputs, at[..., None], axis=1)
