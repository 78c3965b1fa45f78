"""Rows of tokens that grow on the device: prefill, and a loop of decode steps that never asks the host.

A row's cache holds all of its tokens but the newest; a step reads that one and chooses the next. So a prompt's last
token is left to the first step, and a prompt that fans out to n samples is prefilled once and copied n times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.generate.sampling import Filters, Way, choose, row_keys
from bessemer.topology.rules import constrain

STOPS = 16
"""Stop tokens of a row; more are rounded up to a multiple, which compiles again."""
BETWEEN_LOOKS = 8
"""Steps between two looks at whether the loop goes on: a GPU asks the host at each."""


@struct.dataclass
class Rows:
    """B rows; every array has them first."""

    cache: Any
    token: Array  # (B,) the newest token, not in the cache yet
    count: Array  # (B,) new tokens so far
    live: Array  # (B,) bool
    seen: Array  # (B, V) bool: tokens of the row, for the repetition penalty
    made: Array  # (B, V) int16: how often each was generated, for the presence and frequency penalties
    limit: Array  # (B,) new tokens allowed
    streams: Array  # (B, 2) uint32, see `row_keys`
    filters: Filters  # (B,)
    stops: Array  # (B, STOPS) int32, -1 where there is none


class Asked(NamedTuple):
    """What the host says about B new rows."""

    limit: Any  # (B,); 0 for a row that only fills the bucket
    streams: Any  # (B, 2)
    filters: Filters
    stops: Any  # (B, STOPS)


class Output(NamedTuple):
    """What a block of steps made. Row b made the first `made[b]` of its column."""

    ids: Array  # (steps, B) int32
    logprobs: Array  # (steps, B) float32: log p(token) of the model itself
    made: Array  # (B,)
    live: Array  # (B,)
    top_ids: Array | None = (
        None  # (steps, B, K) int32: the K most likely tokens of the model itself, if asked for
    )
    top_logprobs: Array | None = None  # (steps, B, K) float32, falling


class Taken(NamedTuple):
    """What a step made, or (with steps first) the buffers of a block; see `Output`."""

    ids: Array
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def stop_table(stops: Sequence[Iterable[int]]) -> np.ndarray:
    """(B, a multiple of STOPS) int32."""
    each = [sorted(set(ids)) for ids in stops]
    width = max(1, *(-(-len(ids) // STOPS) for ids in each)) * STOPS if each else STOPS
    return np.array([ids + [-1] * (width - len(ids)) for ids in each], np.int32).reshape(len(each), width)


def forward(model: Any, params: Any, ids: Array, cache: Any, lengths: Array) -> tuple[Array, Any]:
    """(logits (B, V) of each row's last real token, cache). ids: (B, n); lengths: (B,)."""
    logits, cache = model.apply({"params": params}, ids, cache, lengths, last_only=True, method="decode")
    return logits[:, 0], cache


def in_use(model: Any, params: Any) -> Any:
    """Parameters as every step reads them, made once before a loop: matrices in the compute dtype, laid out for
    computing. A step would do the same to each of them again."""
    if hasattr(model, "group_of") and hasattr(model, "compute_dtype"):
        params = jax.tree_util.tree_map_with_path(functools.partial(_cast, model), params)
    if jax.sharding.get_abstract_mesh().empty:
        return params
    ids = jax.ShapeDtypeStruct((1, min(8, model.block_size)), jnp.int32)
    boxed = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]

    def gather(box: Any, leaf: Array) -> Array:
        return constrain(leaf, *box.names) if isinstance(box, nn.Partitioned) else leaf

    return jax.tree.map(gather, boxed, params, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def _cast(model: Any, path: Any, leaf: Array) -> Array:
    """Tables are left alone, of which a step reads a few rows, and gates, which are float32 in use."""
    group = model.group_of(tuple(str(getattr(key, "key", key)) for key in path))
    return leaf.astype(model.compute_dtype) if group in ("matrix", "head") else leaf


def begin_rows(vocab_size: int, cache: Any, prompts: Array, lengths: Array, asked: Asked) -> Rows:
    """Rows whose cache holds all of their prompt but its last token. prompts: (B, P), right-padded; lengths: (B,)."""
    rows = prompts.shape[0]
    token = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    real = jnp.arange(prompts.shape[1]) < lengths[:, None]

    def tokens_of(ids: Array) -> Array:
        return jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop")

    return Rows(
        cache=cache,
        token=token,
        count=jnp.zeros(rows, jnp.int32),
        live=asked.limit > 0,
        seen=jax.vmap(tokens_of)(jnp.where(real, prompts, vocab_size)),
        made=no_tokens(rows, vocab_size),
        limit=asked.limit,
        streams=asked.streams,
        filters=asked.filters,
        stops=asked.stops,
    )


def no_tokens(rows: int, vocab_size: int) -> Array:
    """`Rows.made` of rows that have generated nothing. 16 bits: as large as logits in bfloat16, for any vocabulary."""
    return jnp.zeros((rows, vocab_size), jnp.int16)


def looks(steps: int, way: Way | None) -> int:
    """Steps between two looks in a block of `steps`. They cost nothing where no `way` is named (`sampling.way_of`)."""
    return 1 if way is None else math.gcd(steps, BETWEEN_LOOKS)


def decode_block(
    model: Any,
    pad_id: int,
    steps: int,
    params: Any,
    rows: Rows,
    way: Way | None = None,
    bound: Array | int | None = None,
    top: int = 0,
) -> tuple[Rows, Output]:
    """Up to `steps` tokens for every live row; ends early when none is left, or after `bound`, a multiple of `looks`
    that is known to the running program only. `top`: how many of the most likely tokens of each step are noted."""
    params = in_use(model, params)
    size = rows.token.shape[0]
    before = rows.count

    def goes_on(carry: tuple[Array, Rows, Taken]) -> Array:
        return (carry[0] < (steps if bound is None else bound)) & jnp.any(carry[1].live)

    def advance(_: int, carry: tuple[Array, Rows, Taken]) -> tuple[Array, Rows, Taken]:
        step, rows, noted = carry
        logits, cache = forward(model, params, rows.token[:, None], rows.cache, rows.live.astype(jnp.int32))
        rows, taken = _take(pad_id, replace(rows, cache=cache), logits, way, top)
        return step + 1, rows, jax.tree.map(lambda buffer, new: buffer.at[step].set(new), noted, taken)

    some = functools.partial(jax.lax.fori_loop, 0, looks(steps, way), advance)
    noted = Taken(jnp.full((steps, size), pad_id, jnp.int32), jnp.zeros((steps, size), jnp.float32))
    if top:
        ranked = (steps, size, top)
        noted = noted._replace(
            top_ids=jnp.zeros(ranked, jnp.int32), top_logprobs=jnp.zeros(ranked, jnp.float32)
        )
    _, rows, noted = jax.lax.while_loop(goes_on, some, (jnp.zeros((), jnp.int32), rows, noted))
    output = Output(
        noted.ids, noted.logprobs, rows.count - before, rows.live, noted.top_ids, noted.top_logprobs
    )
    return rows, jax.tree.map(everywhere, output)


def _take(pad_id: int, rows: Rows, logits: Array, way: Way | None, top: int) -> tuple[Rows, Taken]:
    """Choose a token for the live rows, and note which of them end with it. logits: (B, V)."""
    chosen = choose(logits, row_keys(rows.streams, rows.count), rows.filters, rows.seen, way, rows.made)
    token = jnp.where(rows.live, chosen, pad_id)
    scores = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    count, was_live = rows.count + rows.live, rows.live
    stopped = jnp.any(token[:, None] == rows.stops, axis=-1)
    live = was_live & ~stopped & (count < rows.limit)
    seen, made = rows.seen, rows.made
    if way is None or way >= Way.FILTERED:  # a row with a penalty never decodes otherwise
        seen = jax.vmap(lambda seen, token, live: seen.at[token].max(live))(seen, token, was_live)
        made = jax.vmap(_counted)(made, token, was_live)
    taken = Taken(token, jnp.where(was_live, logprob, 0.0))
    if top:
        best, ids = jax.lax.top_k(scores, top)
        taken = taken._replace(top_ids=ids.astype(jnp.int32), top_logprobs=best)
    return replace(rows, token=token, count=count, live=live, seen=seen, made=made), taken


def _counted(made: Array, token: Array, live: Array) -> Array:
    """One more of `token`, up to what 16 bits hold. made: (V,)."""
    more = live & (made[token] < jnp.iinfo(made.dtype).max)
    return made.at[token].add(more.astype(made.dtype))


def take_rows(tree: Any, index: Array) -> Any:
    """The rows `index` (R,) of every array; an index beyond the end gives any row."""
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode="clip"), tree)


def put_rows(tree: Any, part: Any, index: Array | None) -> Any:
    """`part` at rows `index` (R,), all different; beyond the end: dropped; None: at all rows. Shorter axes fill the
    beginning: a row in a short cache lies at the same places in a long one."""

    def put(leaf: Array, new: Array) -> Array:
        beginning = tuple(slice(0, size) for size in new.shape[1:])
        if index is None:
            return leaf.at[(slice(None), *beginning)].set(new)
        return leaf.at[(index, *beginning)].set(new.astype(leaf.dtype), mode="drop", unique_indices=True)

    return jax.tree.map(put, tree, part)


def everywhere(array: Array) -> Array:
    """Replicated over the mesh, if there is one: every process reads the whole result."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())
