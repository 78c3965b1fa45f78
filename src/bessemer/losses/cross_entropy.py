"""Next-token cross-entropy that never holds the full logits, with its gradient made in the same pass.

For logits l = h W, softcap z = c·tanh(l / c), per token with weight w and target t:

    nll  = logsumexp(z) − z_t
    loss = (1 − ε)·nll + ε·(logsumexp(z) − mean_v z_v) + ζ·logsumexp(z)²      (ε label smoothing, ζ z-loss)

The loss is a sum of scalars, so its gradient is known up to one scalar when the forward pass holds a tile of logits:
dhidden and dW are computed there and only scaled in the backward pass. No tile is ever computed twice, and further
targets of the same hidden states (`Further`) share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal

from bessemer.kernels.fp8 import head_products, over_rows
from bessemer.kernels.loss import shifts_by_cap, softmax_gradient
from bessemer.kernels.norms import on_parts
from bessemer.kernels.ops import Axes
from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain, shards

IGNORED = -1  # a target below 0 has no loss


@dataclass(frozen=True)
class LossOptions:
    """Static options of the loss. Columns of the head beyond `vocab_size` are padding, never predicted."""

    vocab_size: int
    chunks: int
    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    kernel: bool = False
    fp8: str | None = None  # the scaling, when the head's products with their gradients are in float8
    temperature: float = 1.0  # z / temperature in place of z, after the softcap
    tied: bool = False  # the head is the embedding table, (V, D); turned for the loop over tiles, it would be copied

    @property
    def head_axes(self) -> Axes:
        """Logical axes of the head."""
        return ("vocab", "embed") if self.tied else ("embed", "vocab")

    @property
    def gradient_axes(self) -> tuple[str | None, ...]:
        """Logical axes of dW per group of rows and positions: not summed over devices yet."""
        return ("batch", "sequence", *(("vocab", None) if self.tied else (None, "vocab")))


class Further(NamedTuple):
    """n more targets of each hidden state, which add Σ_n share_n · Σ w_n·nll_n to the loss. No smoothing, no z-loss."""

    targets: Array  # (B, T, n)
    weights: Array  # (B, T, n)
    shares: Array  # (n,)

    @property
    def shared(self) -> Array:
        """share · w, (B, T, n)."""
        return self.shares * self.weights


def cross_entropy(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunks: int | str = "auto",
    kernels: str = "xla",
    fp8: str | None = None,
    tied: bool = False,
    further: Further | None = None,
) -> tuple[Array, ...]:
    """(Σ w·loss, Σ w·nll) in float32, with `further` also the mean over n of Σ w_n·nll_n.

    hidden: (B, T, D), or without `further` also (N, D); head: (D, V), or `tied` (V, D); targets, weights: (B, T).
    Targets below 0 are ignored. Only the first result is differentiable, in `hidden` and `head`. Matmuls run in the
    dtype of `hidden`, or in float8 with the scaling `fp8` when a gradient is taken. `chunks` cuts the sequence axis, so
    a batch split over devices stays where it is. `kernels="pallas"`: for the plain loss over an unsplit vocabulary,
    logits stay in the dtype of `hidden` and one kernel per device computes their gradient.
    """
    if hidden.ndim == 2:
        hidden, targets, weights = hidden[None], targets[None], weights[None]
    alone = shards("batch") * shards("sequence") * shards("vocab") == 1
    kernel = kernels == "pallas" and shards("vocab") == 1 and not label_smoothing and not z_loss
    if alone:  # one long row: cutting it copies nothing
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        targets, weights = targets.reshape(1, -1), weights.reshape(1, -1)
        if further is not None:
            ahead = [x.reshape(1, -1, x.shape[-1]) for x in further[:2]]
            further = Further(ahead[0], ahead[1], further.shares)
    sizes = (targets.shape[0], targets.shape[1], head.shape[0 if tied else 1])
    count = choose_chunks(chunks, *sizes, KERNEL_TILE if kernel else None)
    if kernel and row_groups(sizes[0], -(-sizes[1] // count)) != (shards("batch"), shards("sequence")):
        kernel, count = False, choose_chunks(chunks, *sizes)  # devices would have different rows
    options = LossOptions(vocab_size, count, softcap, label_smoothing, z_loss, kernel, fp8, tied=tied)
    weights = jnp.where(targets < 0, 0.0, weights.astype(jnp.float32))
    if further is not None:
        unknown = further.targets < 0
        further = Further(jnp.maximum(further.targets, 0), jnp.where(unknown, 0.0, further.weights), further.shares)
    loss, *nll = _cross_entropy(options, hidden, head, jnp.maximum(targets, 0), weights, further)
    return loss, *map(jax.lax.stop_gradient, nll)


def target_weights(batch: Mapping[str, Array]) -> Array:
    """w of each target, float32: `loss_mask` (1 without one), and 0 where the target is below 0.

    Its sum over the global batch is the one denominator of every token loss.
    """
    targets = batch["target_ids"]
    weights = batch["loss_mask"] if "loss_mask" in batch else jnp.ones(targets.shape, jnp.float32)
    return jnp.where(targets < 0, 0.0, weights.astype(jnp.float32))


def logits_loss(logits: Array, targets: Array, label_smoothing: float, z_loss: float) -> tuple[Array, Array]:
    """Return (loss, nll) per token, (B, T) each, from whole logits (B, T, V)."""
    options = LossOptions(logits.shape[-1], 1, label_smoothing=label_smoothing, z_loss=z_loss)
    z, lse = _statistics(options, logits)
    return _token_loss(options, z, lse, jnp.maximum(targets, 0))


class Projection(NamedTuple):
    """Hidden states (B, T, D) and head of a model, just before the logits exist."""

    hidden: Array
    head: Array | None  # (D, V), or `tied` (V, D); None: `hidden` holds the logits, (B, T, V)
    vocab_size: int
    softcap: float = 0.0
    chunks: int | str = "auto"
    fp8: str | None = None
    kernels: str = "xla"
    tied: bool = False

    @property
    def columns(self) -> Array | None:
        """The head as (D, V)."""
        return self.head.T if self.tied and self.head is not None else self.head


def _logits(hidden: Array, table: Array, dtype: Any = jnp.float32, tied: bool = False) -> Array:
    form = "btd,vd->btv" if tied else "btd,dv->btv"
    logits = jnp.einsum(form, hidden, table, preferred_element_type=dtype)
    return constrain(logits, "batch", "sequence", "vocab")


def _statistics(options: LossOptions, logits: Array) -> tuple[Array, Array]:
    """Capped logits over the temperature, with padding at −∞ (B, t, V), and their logsumexp (B, t)."""
    z = soft_cap(logits, options.softcap)
    if options.temperature != 1:
        z = z / options.temperature
    if options.vocab_size < z.shape[-1]:
        z = jnp.where(jnp.arange(z.shape[-1]) < options.vocab_size, z, -jnp.inf)
    largest = options.softcap / options.temperature
    if shifts_by_cap(largest):
        return z, jnp.log(jnp.sum(jnp.exp(z - largest), axis=-1)) + largest
    return z, jax.nn.logsumexp(z, axis=-1)


def soft_cap(logits: Array, cap: float) -> Array:
    """c·tanh(l / c): keeps logits within ±c; 0 = off."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def _pick(z: Array, targets: Array) -> Array:
    """z[target] as a masked sum: unlike a gather it stays local when the vocabulary is split over devices."""
    return jnp.sum(jnp.where(jnp.arange(z.shape[-1]) == targets[..., None], z, 0.0), axis=-1)


def _token_loss(options: LossOptions, z: Array, lse: Array, targets: Array) -> tuple[Array, Array]:
    """(loss, nll) per token."""
    nll = lse - _pick(z, targets)
    loss = nll
    if options.label_smoothing:
        mean = jnp.sum(jnp.where(jnp.isfinite(z), z, 0.0), axis=-1) / options.vocab_size
        loss = (1 - options.label_smoothing) * nll + options.label_smoothing * (lse - mean)
    if options.z_loss:
        loss = loss + options.z_loss * lse**2
    return loss, nll


def _logit_gradient(options: LossOptions, z: Array, lse: Array, targets: Array, weights: Array) -> Array:
    """∂(Σ w·loss)/∂logits: w/τ · ((1 + 2ζ·lse)·p − (1−ε)·onehot − ε/V) · (1 − (τz/c)²), τ the temperature.

    (B, t, V) float32.
    """
    column = jnp.arange(z.shape[-1])
    scale = weights * (1 + 2 * options.z_loss * lse) if options.z_loss else weights
    gradient = jnp.exp(z - lse[..., None]) * scale[..., None]
    hit = column == targets[..., None]
    gradient -= jnp.where(hit, ((1 - options.label_smoothing) * weights)[..., None], 0.0)
    if options.label_smoothing:
        gradient -= (options.label_smoothing / options.vocab_size) * weights[..., None]
    if options.softcap:
        gradient *= 1 - jnp.square(z * (options.temperature / options.softcap))
    if options.temperature != 1:
        gradient /= options.temperature
    return jnp.where(column < options.vocab_size, gradient, 0.0)


def _sums(weights: Array, loss: Array, nll: Array, further: Further | None, nlls: Array | None) -> Array:
    """(Σ loss, Σ w·nll) of one tile, and of further targets with their nlls (B, t, n) the third number."""
    if further is None or nlls is None:
        return jnp.stack([jnp.sum(weights * loss), jnp.sum(weights * nll)])
    each = jnp.sum(further.weights * nlls, axis=(0, 1))
    total = jnp.sum(weights * loss) + jnp.sum(further.shares * each)
    return jnp.stack([total, jnp.sum(weights * nll), jnp.mean(each)])


def _further_nlls(z: Array, lse: Array, further: Further | None) -> Array | None:
    """nll of each further target, (B, t, n)."""
    if further is None:
        return None
    picked = [_pick(z, further.targets[..., n]) for n in range(further.targets.shape[-1])]
    return lse[..., None] - jnp.stack(picked, axis=-1)


def _pieces(
    options: LossOptions, hidden: Array, targets: Array, weights: Array, further: Further | None
) -> tuple[Array, ...]:
    """What each tile reads, cut into chunks."""
    return tuple(split(x, options.chunks) for x in (hidden, targets, weights, *(further or ())[:2]))


def _of_tile(further: Further | None, pieces: Sequence[Array]) -> Further | None:
    """The further targets of one tile, from what `_pieces` has of it beyond the first three."""
    return None if further is None else Further(pieces[0], pieces[1], further.shares)


def _zeros(further: Further | None) -> Array:
    return jnp.zeros(2 if further is None else 3, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    options: LossOptions, hidden: Array, head: Array, targets: Array, weights: Array, further: Further | None
) -> tuple[Array, ...]:
    """Value only: what evaluation runs."""
    table = constrain(head.astype(hidden.dtype), *options.head_axes)

    def tile(sums: Array, inputs: tuple[Array, ...]) -> tuple[Array, None]:
        h, t, w, *rest = inputs
        more = _of_tile(further, rest)
        z, lse = _statistics(options, _logits(h, table, tied=options.tied))
        loss, nll = _token_loss(options, z, lse, t)
        return sums + _sums(w, loss, nll, more, _further_nlls(z, lse, more)), None

    sums, _ = scan_tiles(tile, _zeros(further), _pieces(options, hidden, targets, weights, further), options.chunks)
    return tuple(sums[i] for i in range(len(sums)))


def _forward(
    options: LossOptions, hidden: Any, head: Any, targets: Any, weights: Any, further: Any
) -> tuple[tuple[Array, ...], tuple[Array, Array | None]]:
    more = jax.tree.map(lambda x: x.value, further, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    values = {"hidden": hidden.value, "head": head.value, "targets": targets.value, "weights": weights.value}
    return loss_and_gradients(options, head.perturbed, **values, further=more)


def loss_and_gradients(
    options: LossOptions,
    trained: bool,
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    tiles: Array | None = None,
    further: Further | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, Array | None]]:
    """Return ((Σ w·loss, Σ w·nll, …), (dhidden, dW)), tile by tile. dW is kept apart per shard (`row_groups`), summed
    over devices once. A head that is not `trained` has none. tiles: () int32, how many have targets; None: all."""
    if options.fp8 is None:
        logits, gradients = _products(head, hidden.dtype, options.tied)
    else:
        logits, gradients = head_products(head, options.fp8)
    groups = row_groups(hidden.shape[0], -(-hidden.shape[1] // options.chunks))

    def tile(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        sums, dhead = carry
        h, t, w, *rest = inputs
        added_sums, dlogits, bound = _loss_and_gradient(options, h, logits, t, w, _of_tile(further, rest))
        dh, added = gradients(h, dlogits, bound, groups if trained else None)
        sums += added_sums
        if added is None:
            return (sums, dhead), dh.astype(h.dtype)
        return (sums, constrain(dhead + added, *options.gradient_axes)), dh.astype(h.dtype)

    pieces = _pieces(options, hidden, targets, weights, further)
    zeros = jnp.zeros((*groups, *head.shape) if trained else (1, 1, 1, 1), jnp.float32)
    start = (_zeros(further), constrain(zeros, *options.gradient_axes))
    (sums, dhead), dhidden = scan_tiles(tile, start, pieces, options.chunks, tiles)
    dhidden = join(dhidden)[:, : hidden.shape[1]]
    totals = tuple(sums[i] for i in range(len(sums)))
    return totals, (dhidden, jnp.sum(dhead, axis=(0, 1)).astype(head.dtype) if trained else None)


def _loss_and_gradient(
    options: LossOptions,
    h: Array,
    logits: Callable[..., Array],
    targets: Array,
    weights: Array,
    further: Further | None,
) -> tuple[Array, Array, Array]:
    """(sums, ∂(Σ w·loss)/∂logits, a bound of its entries) of one tile. h: (B, t, D)."""
    if options.kernel:
        aims, shares = targets, weights
        if further is not None:
            aims = jnp.concatenate([targets[..., None], further.targets], axis=-1)
            shares = jnp.concatenate([weights[..., None], further.shared], axis=-1)
        dlogits, nlls = _by_kernel(options, logits(h, dtype=h.dtype), aims, shares)
        nll, rest = (nlls, None) if further is None else (nlls[..., 0], nlls[..., 1:])
        return _sums(weights, nll, nll, further, rest), dlogits, _bound(jnp.max(weights), further)
    z, lse = _statistics(options, logits(h))
    loss, nll = _token_loss(options, z, lse, targets)
    bound = jnp.max(weights * (1 + 2 * options.z_loss * jnp.abs(lse)))
    gradient = _logit_gradient(options, z, lse, targets, weights)
    if further is not None:
        plain, shared = replace(options, label_smoothing=0.0, z_loss=0.0), further.shared
        for n in range(shared.shape[-1]):
            gradient += _logit_gradient(plain, z, lse, further.targets[..., n], shared[..., n])
    return _sums(weights, loss, nll, further, _further_nlls(z, lse, further)), gradient, _bound(bound, further)


def _bound(own: Array, further: Further | None) -> Array:
    return own if further is None else own + jnp.max(jnp.sum(further.shared, axis=-1))


def _by_kernel(options: LossOptions, logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """(∂(Σ w·nll)/∂logits, nll), each device's rows by its own kernel. logits: (B, t, V), overwritten; targets,
    weights, nll: (B, t), or (B, t, n) with several targets per row."""

    def rows(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
        gradient, nll = softmax_gradient(
            logits.reshape(-1, logits.shape[-1]),
            targets.reshape(-1, *targets.shape[2:]),
            weights.reshape(-1, *weights.shape[2:]),
            vocab_size=options.vocab_size,
            softcap=options.softcap,
        )
        return gradient.reshape(logits.shape), nll.reshape(targets.shape)

    gradient, nll = on_parts(rows, (logits, targets, weights), (), 2)
    return gradient, nll


def _products(
    head: Array, dtype: Any, tied: bool = False
) -> tuple[Callable[..., Array], Callable[..., tuple[Array, Array | None]]]:
    """(h → logits, (h, dlogits, bound of |dlogits|, groups) → (dh, dW (*groups, D, V))); all results float32. groups
    None: the head is frozen, and no dW is made. tied: head and dW are (V, D)."""
    table = constrain(head.astype(dtype), *(("vocab", "embed") if tied else ("embed", "vocab")))

    def gradients(h: Array, dlogits: Array, bound: Array, groups: tuple[int, int] | None) -> tuple[Array, Array | None]:
        dlogits = dlogits.astype(dtype)
        form = "btv,vd->btd" if tied else "btv,dv->btd"
        dh = jnp.einsum(form, dlogits, table, preferred_element_type=jnp.float32)
        if groups is None:
            return dh, None
        return dh, over_rows(dlogits, h, groups) if tied else over_rows(h, dlogits, groups)

    return partial(_logits, table=table, tied=tied), gradients


def _backward(
    options: LossOptions, residuals: tuple[Array, Array | None], cotangents: tuple[Array, ...]
) -> tuple[Array, Array | None, None, None, None]:
    dhidden, dhead = residuals
    g = cotangents[0]
    scaled = None if dhead is None else dhead * g.astype(dhead.dtype)
    return (dhidden * g).astype(dhidden.dtype), scaled, None, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


# -- tiles of rows, so that only one tile of logits is held ------------------------------------------------------------


# Logits held at once. On accelerators 128 MiB in float32. On a CPU a tile that stays in its cache is faster (148 ms
# against 236 ms for 4,096 tokens × 4,096), as long as it has rows enough to pay for adding up dW once a tile.
TILE = 2**25
# One kernel makes the gradient in place of bf16 logits: a tile of 512 MiB, and matmuls 15% faster than at 2**25.
KERNEL_TILE = 2**28
CPU_TILE, CPU_ROWS = 2**20, 256


def choose_chunks(chunks: int | str, batch: int, length: int, vocab: int, tile: int | None = None) -> int:
    """Return how many pieces to cut the sequence into: `chunks`, or tiles of about `tile` (TILE) logits per device.

    A number that divides a device's piece of the sequence is preferred to a slightly smaller one that needs padding.
    """
    if chunks != "auto":
        return max(1, min(int(chunks), length))
    share = shards("batch") * shards("sequence") * shards("vocab")
    if tile is None:
        tile = max(CPU_TILE, CPU_ROWS * vocab) if backend() == "cpu" else TILE
    needed = max(1, min(-(-batch * length * vocab // (share * tile)), length))
    pieces = shards("sequence")
    return next((c for c in range(needed, min(2 * needed, length) + 1) if length % (c * pieces) == 0), needed)


def row_groups(batch: int, length: int) -> tuple[int, int]:
    """Return into how many parts devices split a chunk's rows and positions; 1 where they do not divide."""
    counts = (shards("batch"), shards("sequence"))
    rows, positions = (n if size % n == 0 else 1 for size, n in zip((batch, length), counts, strict=True))
    return rows, positions


def split(x: Array, chunks: int, fill: float = 0) -> Array:
    """(B, T, …) → (chunks, B, T/chunks, …), padded with `fill`.

    A chunk takes every chunks-th position, so a sequence split over devices stays split within each chunk. A single row
    (see cross_entropy) is cut into consecutive pieces.
    """
    length = -(-x.shape[1] // chunks) * chunks
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    if x.shape[0] == 1 and shards("sequence") == 1:
        return x.reshape(chunks, 1, length // chunks, *x.shape[2:])
    return jnp.moveaxis(x.reshape(x.shape[0], length // chunks, chunks, *x.shape[2:]), 2, 0)


def join(x: Array) -> Array:
    """Return the inverse of `split`, padding kept: (chunks, B, t, …) → (B, t·chunks, …)."""
    if x.shape[1] == 1 and shards("sequence") == 1:
        return x.reshape(1, -1, *x.shape[3:])
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def scan_tiles(
    tile: Any, start: Any, pieces: tuple[Array, ...], chunks: int, tiles: Array | None = None
) -> tuple[Any, Any]:
    """lax.scan, without the loop when there is one chunk; the results of those after the first `tiles` are zero."""
    if chunks == 1:
        carry, out = tile(start, tuple(x[0] for x in pieces))
        return carry, jax.tree.map(lambda x: x[None], out)
    if tiles is None:
        return jax.lax.scan(tile, start, pieces)
    results = jax.eval_shape(tile, start, tuple(x[0] for x in pieces))[1]
    buffers = jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), results)

    def one(index: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, out = tile(state[0], tuple(x[index] for x in pieces))
        return carry, jax.tree.map(lambda buffer, new: buffer.at[index].set(new), state[1], out)

    return jax.lax.fori_loop(0, tiles, one, (start, buffers))


# -- multi-token prediction: targets further ahead than the next token -------------------------------------------------
#
#     loss = Σ_t w_t · nll(h_t, token t + 1)  +  Σ_n λ_n(step) Σ_t w_t,n · nll(h_t, token t + 1 + n),    over Σ_t w_t
#
# The same hidden state and the same head predict all of them (Gloeckle et al. 2024, arXiv 2404.19737, without heads of
# their own), so a model has no more parameters than without it, and one tile of logits serves all targets. The one
# denominator stays that of the next token.


PROGRESS = "progress"
"""Field of a training batch, (): the share of the run's steps that are made, where the objective follows it."""


def weights_at(weights: Sequence[float], decay: float, progress: Array | float) -> Array:
    """λ_n = weights_n · max(0, 1 − progress / decay): linear to 0 after the share `decay` of the run. (n,) float32."""
    return jnp.asarray(weights, jnp.float32) * jnp.maximum(0.0, 1.0 - progress / decay)


def further_targets(batch: Mapping[str, Array], ahead: int) -> tuple[Array, Array]:
    """Return (targets, w) of the tokens `ahead` positions beyond the next one, (B, T) each.

    w is that of the position whose next token it is, and 0 beyond the row, behind a position without a target, and
    where that position belongs to another document (`segment_ids`).
    """
    targets, weights = batch["target_ids"], target_weights(batch)
    length = targets.shape[1]

    def moved(x: Array, by: int, fill: int) -> Array:
        return jnp.pad(x[:, by:], ((0, 0), (0, min(by, length))), constant_values=fill)

    weights = moved(weights, ahead, 0)
    for between in range(ahead):
        weights = jnp.where(moved(targets, between, IGNORED) < 0, 0.0, weights)
    if "segment_ids" in batch:
        segments = batch["segment_ids"]
        weights = jnp.where(moved(segments, ahead, 0) == segments, weights, 0.0)
    return moved(targets, ahead, IGNORED), weights


def join_further(batch: Mapping[str, Array], shares: Array) -> Further:
    """Return the targets of n further tokens, which share the logits of the next one. shares: λ, (n,)."""
    found = [further_targets(batch, 1 + index) for index in range(len(shares))]
    targets, weights = (jnp.stack(part, axis=-1) for part in zip(*found, strict=True))
    return Further(targets, weights, shares)
