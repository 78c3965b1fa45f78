"""The engine's rows on the device: S slots that requests enter and leave, and the two programs that change them.

`admit` prefills prompts and puts their rows into free slots; `decode` runs a block of steps, over all slots or over
the few that are in use. Each is compiled once a bucket of rows and of prompt length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.generate.rows import (
    STOPS,
    Asked,
    Output,
    Rows,
    begin_rows,
    decode_block,
    forward,
    no_tokens,
    put_rows,
    take_rows,
)
from bessemer.generate.sampling import Filters, SamplingOptions, Way
from bessemer.models.shape import round_up
from bessemer.topology import CompiledTogether
from bessemer.topology.rules import constrain, shards

SHORTEST = 128
"""The least part of the capacity that is worth a program of its own."""
FACTOR = 4
"""Buckets of rows are 1, 4, 16, …: few to compile, and at most four times the work that is needed."""


class Admission(NamedTuple):
    """R prompts for M slots. Entries that fill a bucket have a slot beyond the last, where they are dropped."""

    prompts: Any  # (R, capacity) int32, right-padded
    lengths: Any  # (R,)
    held: Any  # (R,) tokens of the prompt that its slot holds already
    sources: Any  # (M,) which prompt
    slots: Any  # (M,) which slot
    asked: Asked  # of the M


class Slots:
    """The slots of one model; `compilations` counts the programs."""

    def __init__(self, model: Any, count: int, capacity: int, steps: int, pad_id: int):
        """Call it, and everything else here, under the mesh of the parameters."""
        self.model, self.capacity = model, capacity
        self.shards = shards("batch")
        self.count = round_up(count, self.shards)
        self.rows: Rows | None = None
        start = functools.partial(_empty_rows, model, self.count, capacity)
        admit = functools.partial(_admit, model)
        self.steps = steps
        decode = functools.partial(_decode, model, pad_id, steps)
        self._start = CompiledTogether(jax.jit(start), "the engine's empty rows")
        self._programs = (admit, decode)
        self._admit: Any = None  # CompiledTogether, once it is known where the rows lie
        self._decode: Any = None

    @property
    def compilations(self) -> int:
        return sum(program.compilations for program in (self._admit, self._decode) if program is not None)

    def bucket(self, rows: int) -> int:
        """The number of rows to compute for `rows` of them."""
        size = 1
        while size < rows:
            size *= FACTOR
        return min(round_up(size, self.shards), self.count)

    def admit(self, params: Any, admission: Admission, width: int, reuse: bool) -> None:
        """Put new rows into slots; `width` is the bucket of what their prompts add to the cache."""
        self.rows = self._ready(params)
        self.rows = self._admit(params, self.rows, admission, width=width, reuse=reuse)

    def reach(self, length: int) -> int:
        """The part of the capacity to compute with, when no row is longer than `length` after a block."""
        size = self.capacity
        while size // 2 >= max(length, SHORTEST) and size % 2 == 0:
            size //= 2
        return size

    def decode(
        self, params: Any, active: Sequence[int], length: int, way: Way | None, steps: int, top: int = 0
    ) -> tuple[Output, Sequence[int]]:
        """(output, the column of each of the `active` slots) after `steps` of the block's, see `looks`; no row has more
        than `length` tokens then. `way`: of choosing them; `top`: see `decode_block`.

        Few rows, or short ones, are taken out of the slots for the block and put back: a step's cost follows what it
        reads. On a mesh all rows take part: they stay on their devices.
        """
        self.rows = self._ready(params)
        size = self.count if self.shards > 1 else self.bucket(len(active))
        reach = self.reach(length)
        if size * reach * 2 > self.count * self.capacity:  # copying twice would cost as much as it saves
            size, reach = self.count, self.capacity
        if size == self.count:
            index, columns = None, active
        else:
            index, columns = np.arange(self.count, self.count + size, dtype=np.int32), range(len(active))
            index[: len(active)] = active
        mask = np.zeros(self.count, bool)
        mask[list(active)] = True
        bound = np.int32(steps)  # an argument like the others: rounds of any length are one program
        self.rows, output = self._decode(params, self.rows, mask, index, bound, reach=reach, way=way, top=top)
        return output, columns

    def _ready(self, params: Any) -> Rows:
        """The rows, made at first use; programs keep them where they were made, or they would compile twice."""
        if self.rows is not None:
            return self.rows
        rows = self._start(params)
        if self._admit is None:
            meshed = not jax.sharding.get_abstract_mesh().empty
            places = jax.tree.map(lambda leaf: leaf.sharding, rows) if meshed else None
            admit, decode = self._programs
            self._admit = _program(admit, "prefill", ("width", "reuse"), places)
            out = (places, None) if meshed else None
            self._decode = _program(decode, "decoding", ("reach", "way", "top"), out)
        return rows


def _program(function: Any, name: str, static: tuple[str, ...], places: Any) -> CompiledTogether:
    made = jax.jit(function, static_argnames=static, donate_argnums=1, out_shardings=places)
    return CompiledTogether(made, name, static)


def _empty_rows(model: Any, count: int, capacity: int, params: Any) -> Rows:
    cache = model.init_cache(count, capacity)
    nothing = jnp.zeros((count,), jnp.int32)
    one = jax.ShapeDtypeStruct((count, 1), jnp.int32)
    # as it is after a step: what a cache knows while tracing ("empty") is part of its type
    after = jax.eval_shape(lambda ids, cache: forward(model, params, ids, cache, nothing)[1], one, cache)
    rows = Rows(
        cache=jax.tree.unflatten(jax.tree.structure(after), jax.tree.leaves(cache)),
        token=nothing,
        count=nothing,
        live=jnp.zeros((count,), bool),
        seen=jnp.zeros((count, model.vocab_size), bool),
        made=no_tokens(count, model.vocab_size),
        limit=nothing,
        streams=jnp.zeros((count, 2), jnp.uint32),
        filters=jax.tree.map(jnp.asarray, Filters.rows([SamplingOptions()] * count, model.vocab_size)),
        stops=jnp.full((count, STOPS), -1, jnp.int32),
    )
    placed = jax.tree.map(_by_rows, replace(rows, cache=None))
    return replace(placed, cache=rows.cache)


def _by_rows(leaf: Array) -> Array:
    return constrain(leaf, "batch", *[None] * (leaf.ndim - 1))


def _admit(model: Any, params: Any, rows: Rows, new: Admission, *, width: int, reuse: bool) -> Rows:
    """Prefill, and put each row into its slot. `reuse`: a prompt continues what its slot holds (M = R then)."""
    prompts = new.prompts
    if reuse:
        cache = take_rows(rows.cache, new.slots)
        at = new.held[:, None] + jnp.arange(width)
        ids = prompts.at[jnp.arange(prompts.shape[0])[:, None], at].get(mode="fill", fill_value=0)
    else:
        cache, ids = model.init_cache(prompts.shape[0], width), prompts[:, :width]
    _, cache = forward(model, params, ids, cache, new.lengths - 1 - new.held)
    cache, prompts, lengths = take_rows((cache, prompts, new.lengths), new.sources)
    part = begin_rows(model.vocab_size, cache, prompts, lengths, new.asked)
    return put_rows(rows, part, new.slots)


def _decode(
    model: Any,
    pad_id: int,
    steps: int,
    params: Any,
    rows: Rows,
    mask: Array,
    index: Array | None,
    bound: Array,
    *,
    reach: int,
    way: Way | None,
    top: int = 0,
) -> tuple[Rows, Output]:
    """A block of steps, at most `bound`, for the slots of `mask` (S,), which are those of `index` (R,) if given."""
    rows = replace(rows, live=rows.live & mask)
    whole = jax.tree.leaves(rows.cache)
    part = rows if index is None else take_rows(replace(rows, cache=None), index)
    size = part.token.shape[0]
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(size, reach)))]
    if index is None and shapes == [leaf.shape for leaf in whole]:
        return decode_block(model, pad_id, steps, params, rows, way, bound, top)
    some = [_beginning(leaf, shape, index) for leaf, shape in zip(whole, shapes, strict=True)]
    part = replace(part, cache=jax.tree.unflatten(jax.tree.structure(rows.cache), some))
    if index is not None:
        part = replace(part, live=part.live & (index < rows.live.shape[0]))
    part, output = decode_block(model, pad_id, steps, params, part, way, bound, top)
    return put_rows(rows, part, index), output


def _beginning(leaf: Array, shape: Sequence[int], index: Array | None) -> Array:
    """Rows `index` of an array, cut to `shape`: a short cache is the beginning of a long one."""
    leaf = leaf[(slice(None), *(slice(0, size) for size in shape[1:]))]
    return leaf if index is None else take_rows(leaf, index)
