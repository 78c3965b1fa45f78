"""Rows of tokens on the device: prefill, a loop of decode steps without the host, and the engine's slots.

A row's cache holds all of its tokens but the newest; a step reads that one and chooses the next. So a prompt's last
token is left to the first step, and a prompt with n samples is prefilled once and copied n times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from bessemer.generate.sampling import Filters, SamplingOptions, Way, draw, policy_logits, policy_logprob, row_keys
from bessemer.kernels.quantized import Quantized
from bessemer.models.lora import Adapted, for_rows, holds_several, is_node
from bessemer.models.moe import ROUTING, recorded, recorded_shape
from bessemer.models.protocol import Shortening
from bessemer.models.shape import round_up
from bessemer.models.transformer import Transformer
from bessemer.topology import CompiledTogether
from bessemer.topology.rules import constrain, shards

STOPS = 16  # stop tokens per row; more are rounded up to a multiple, which compiles again
BETWEEN_LOOKS = 8  # steps between two checks of whether the loop goes on: a GPU asks the host at each
SHORTEST = 128  # the shortest part of the capacity that is worth a program of its own
PROMPTS, TOKENS = 16, 4096  # the most prompts and padded tokens of one prefill: enough to keep an H200 computing
ROWS = 128  # the most slots that one prefill fills; a request of at most as many samples is prefilled once


@struct.dataclass
class Text:
    """The tokens of B rows, prompt and continuation, from which drafts are taken."""

    ids: Array  # (B, N) int32
    length: Array  # (B,): of them, the newest included


@struct.dataclass
class Rows:
    """B rows, the first axis of every array."""

    cache: Any
    token: Array  # (B,) the newest token, not yet in the cache
    count: Array  # (B,) new tokens so far
    live: Array  # (B,) bool
    seen: Array  # (B, V) bool: tokens of the row, for the repetition penalty
    made: Array  # (B, V) int16: how often each token was generated, for presence and frequency penalties
    limit: Array  # (B,) new tokens allowed
    streams: Array  # (B, 2) uint32, see `row_keys`
    filters: Filters  # (B,)
    stops: Array  # (B, STOPS) int32, -1 where there is none
    adapter: Array | None = None  # (B,) int32, of several over one base (`stack_adapters`)
    text: Text | None = None  # with speculation


class Asked(NamedTuple):
    """What the host requests of B new rows."""

    limit: Any  # (B,) new tokens allowed; 0 for a row that only fills the bucket
    streams: Any  # (B, 2)
    filters: Filters
    stops: Any  # (B, STOPS)
    adapter: Any = None  # (B,), of several


class Output(NamedTuple):
    """The result of a block of steps. Row b generated the first `made[b]` tokens of its column."""

    ids: Array  # (steps, B) int32
    logprobs: Array  # (steps, B) float32: log p(token) of the model itself
    made: Array  # (B,)
    live: Array  # (B,)
    top_ids: Array | None = None  # (steps, B, K) int32: the model's K most likely tokens, if asked for
    top_logprobs: Array | None = None  # (steps, B, K) float32, descending
    policy_logprobs: Array | None = (
        None  # (steps, B) float32: log p(token) of the distribution drawn from, if asked for
    )
    passes: Array | None = None  # (B,) with speculation: passes of the row, each of one token or more
    drafted: Array | None = None  # (B,) with speculation: tokens of its drafts
    routes: Array | None = None  # (steps, B, layers, k) int16: the experts of the token that each step read


class Taken(NamedTuple):
    """The result of a step, or (with a leading axis of steps) the buffers of a block; see `Output`."""

    ids: Array
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    policy_logprobs: Array | None = None
    routes: Array | None = None


def stop_table(stops: Sequence[Iterable[int]]) -> np.ndarray:
    """Return the stop tokens of each row, (B, a multiple of STOPS) int32, padded with -1."""
    each = [sorted(set(ids)) for ids in stops]
    width = max(1, *(-(-len(ids) // STOPS) for ids in each)) * STOPS if each else STOPS
    return np.array([ids + [-1] * (width - len(ids)) for ids in each], np.int32).reshape(len(each), width)


def forward(model: Any, params: Any, ids: Array, cache: Any, lengths: Array) -> tuple[Array, Any]:
    """Return (logits (B, V) of each row's last real token, cache). ids: (B, n); lengths: (B,)."""
    logits, cache = model.apply({"params": params}, ids, cache, lengths, last_only=True, method="decode")
    return logits[:, 0], cache


def forward_routed(model: Any, params: Any, ids: Array, cache: Any, lengths: Array) -> tuple[Array, Any, Array]:
    """Return what `forward` does, and the experts of every token, (B, n, layers, k) int16."""
    given = {"params": params}
    (logits, cache), seen = model.apply(given, ids, cache, lengths, last_only=True, method="decode", mutable=[ROUTING])
    return logits[:, 0], cache, recorded(seen)


def cast_matrices(model: Any, params: Any) -> Any:
    """Return the parameters with matrices in the compute dtype, as every step reads them."""
    if not isinstance(model, Transformer):
        return params
    return jax.tree_util.tree_map_with_path(functools.partial(_cast, model), params, is_leaf=is_node)


def in_use(model: Any, params: Any) -> Any:
    """Return the parameters as every step reads them: matrices in the compute dtype, laid out for computing.

    Done once before a loop, so that no step repeats it.
    """
    params = cast_matrices(model, params)
    if jax.sharding.get_abstract_mesh().empty:
        return params
    ids = jax.ShapeDtypeStruct((1, min(8, model.block_size)), jnp.int32)
    boxed = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]

    def gather(box: Any, leaf: Any) -> Any:
        if isinstance(leaf, Adapted):
            return replace(leaf, w=gather(box, leaf.w))
        if isinstance(leaf, Quantized):
            return leaf.constrained(box.names)
        return constrain(leaf, *box.names) if isinstance(box, nn.Partitioned) else leaf

    return jax.tree.map(gather, boxed, params, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def _cast(model: Any, path: Any, leaf: Any) -> Any:
    """Cast matrices and adapters only: a step reads few rows of a table, and gates are float32 in use."""
    if isinstance(leaf, Adapted):
        return replace(leaf.in_use(model.compute_dtype), w=_cast(model, path, leaf.w))
    if isinstance(leaf, Quantized):
        return leaf
    group = model.group_of(tuple(str(getattr(key, "key", key)) for key in path))
    return leaf.astype(model.compute_dtype) if group in ("matrix", "head") else leaf


def ends_of(vocab_size: int, prompts: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the last token of each prompt (B,) and the tokens in it (B, V). prompts: (B, P), right-padded."""
    token = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
    real = jnp.arange(prompts.shape[1]) < lengths[:, None]

    def tokens_of(ids: Array) -> Array:
        return jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop")

    return token, jax.vmap(tokens_of)(jnp.where(real, prompts, vocab_size))


def begin_rows(vocab_size: int, cache: Any, token: Array, seen: Array, asked: Asked) -> Rows:
    """Return rows whose cache holds their prompt but its last token. token, seen: see `ends_of`."""
    rows = token.shape[0]
    return Rows(
        cache=cache,
        token=token,
        count=jnp.zeros(rows, jnp.int32),
        live=asked.limit > 0,
        seen=seen,
        made=no_tokens(rows, vocab_size),
        limit=asked.limit,
        streams=asked.streams,
        filters=asked.filters,
        stops=asked.stops,
        adapter=asked.adapter,
    )


def no_tokens(rows: int, vocab_size: int) -> Array:
    """Return `Rows.made` of rows that have generated nothing. 16 bits: as large as logits in bfloat16."""
    return jnp.zeros((rows, vocab_size), jnp.int16)


def looks(steps: int, way: Way | None) -> int:
    """Return the steps between two checks for live rows: 1 on a CPU, where `way` is None and a check is free."""
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
    policy: bool = False,
    routes: bool = False,
) -> tuple[Rows, Output]:
    """Generate up to `steps` tokens for every live row; end early when none is live, or after `bound` steps.

    `bound` (a multiple of `looks`) is a traced value. `top`: how many of the most likely tokens to record per step.
    `policy`: also record log p(token) of the distribution drawn from. `routes`: also the experts of a token.
    """
    params = for_rows(in_use(model, params), rows.adapter)
    size = rows.token.shape[0]
    before = rows.count

    def goes_on(carry: tuple[Array, Rows, Taken]) -> Array:
        return (carry[0] < (steps if bound is None else bound)) & jnp.any(carry[1].live)

    def advance(_: int, carry: tuple[Array, Rows, Taken]) -> tuple[Array, Rows, Taken]:
        step, rows, noted = carry
        given = (model, params, rows.token[:, None], rows.cache, rows.live.astype(jnp.int32))
        logits, cache, *chosen = forward_routed(*given) if routes else forward(*given)
        rows, taken = _take(pad_id, replace(rows, cache=cache), logits, way, top, policy)
        taken = taken._replace(routes=chosen[0][:, 0]) if routes else taken
        return step + 1, rows, jax.tree.map(lambda buffer, new: buffer.at[step].set(new), noted, taken)

    some = functools.partial(jax.lax.fori_loop, 0, looks(steps, way), advance)
    noted = Taken(jnp.full((steps, size), pad_id, jnp.int32), jnp.zeros((steps, size), jnp.float32))
    if top:
        ranked = (steps, size, top)
        noted = noted._replace(top_ids=jnp.zeros(ranked, jnp.int32), top_logprobs=jnp.zeros(ranked, jnp.float32))
    if policy:
        noted = noted._replace(policy_logprobs=jnp.zeros((steps, size), jnp.float32))
    if routes:
        noted = noted._replace(routes=jnp.zeros((steps, size, *(recorded_shape(model) or ())), jnp.int16))
    _, rows, noted = jax.lax.while_loop(goes_on, some, (jnp.zeros((), jnp.int32), rows, noted))
    output = Output(made=rows.count - before, live=rows.live, **noted._asdict())
    return rows, jax.tree.map(everywhere, output)


def _take(pad_id: int, rows: Rows, logits: Array, way: Way | None, top: int, policy: bool) -> tuple[Rows, Taken]:
    """Choose a token for each live row, and mark the rows that end with it. logits: (B, V)."""
    drawn_from = policy_logits(logits, rows.filters, rows.seen, way, rows.made)
    chosen = draw(drawn_from, row_keys(rows.streams, rows.count), rows.filters, way)
    token = jnp.where(rows.live, chosen, pad_id)
    scores = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    count, was_live = rows.count + rows.live, rows.live
    stopped = jnp.any(token[:, None] == rows.stops, axis=-1)
    live = was_live & ~stopped & (count < rows.limit)
    seen, made = rows.seen, rows.made
    if way is None or way >= Way.FILTERED:  # rows with a penalty always decode this way
        seen = jax.vmap(lambda seen, token, live: seen.at[token].max(live))(seen, token, was_live)
        made = jax.vmap(_counted)(made, token, was_live)
    taken = Taken(token, jnp.where(was_live, logprob, 0.0))
    if top:
        best, ids = jax.lax.top_k(scores, top)
        taken = taken._replace(top_ids=ids.astype(jnp.int32), top_logprobs=best)
    if policy:
        found = policy_logprob(drawn_from, token, rows.filters)
        taken = taken._replace(policy_logprobs=jnp.where(was_live, found, 0.0))
    return replace(rows, token=token, count=count, live=live, seen=seen, made=made), taken


def _counted(made: Array, token: Array, live: Array) -> Array:
    """Count one more `token`, up to the largest int16. made: (V,)."""
    more = live & (made[token] < jnp.iinfo(made.dtype).max)
    return made.at[token].add(more.astype(made.dtype))


def take_rows(tree: Any, index: Array) -> Any:
    """Return the rows `index` (R,) of every array; an index beyond the end gives any row."""
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode="clip"), tree)


def put_rows(tree: Any, part: Any, index: Array | None) -> Any:
    """Write `part` to the rows `index` (R,), all distinct; those beyond the end are dropped. None: all rows.

    Shorter axes fill the beginning: a short cache is the beginning of a long one.
    """

    def put(leaf: Array, new: Array) -> Array:
        beginning = tuple(slice(0, size) for size in new.shape[1:])
        if index is None:
            return leaf.at[(slice(None), *beginning)].set(new)
        return leaf.at[(index, *beginning)].set(new.astype(leaf.dtype), mode="drop", unique_indices=True)

    return jax.tree.map(put, tree, part)


def everywhere(array: Array) -> Array:
    """Replicate over the mesh, if there is one, so that every process can read the result."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec())


# --- slots: rows that requests enter and leave ---


class Admission(NamedTuple):
    """R prompts for M slots. Entries that only fill a bucket have a slot beyond the last, and are dropped."""

    prompts: Any  # (R, width + 1) int32, right-padded; (R, capacity) if they continue what their slots hold
    lengths: Any  # (R,)
    held: Any  # (R,) tokens of the prompt that slot `origins` already holds
    sources: Any  # (M,) which prompt
    slots: Any  # (M,) which slot
    asked: Asked  # of the M
    adapters: Any = None  # (R,), of several over one base
    origins: Any = None  # (R,) slots whose beginnings the prompts continue; M = R then


class Slots:
    """The slots of one model, and the two programs that change them: `admit` prefills prompts into free slots,
    `decode` runs a block of steps. Each is compiled once per bucket:

        prefill   by width (a power of two from the engine's narrowest, or the capacity): one prompt for one slot, one
                  prompt for up to ROWS slots, and several prompts for up to ROWS slots (`heights`); for prompts that
                  continue a prefix, by `continued_width`: one prompt and several, for one slot each
        decode    by rows (`sizes`) and by the part of the capacity in use (`reach`)

    whole: every block computes all slots, so that there is one size; for batches whose rows end at about the same time.
    policy, routes: see `decode_block`. Create and call it under the mesh of the parameters.
    """

    def __init__(
        self,
        model: Any,
        count: int,
        capacity: int,
        steps: int,
        pad_id: int,
        whole: bool = False,
        policy: bool = False,
        block: Callable[..., tuple[Rows, Output]] | None = None,  # in place of `decode_block`, on rows with their text
        routes: bool = False,
    ):
        self.routes = routes
        self.capacity, self.steps = capacity, steps
        self.shards = shards("batch")
        self.count = round_up(count, self.shards)
        self.sizes = (self.count,) if whole or self.shards > 1 else row_sizes(self.count)
        # a kernel that reads what rows hold gains nothing from a shorter cache, and every length is a program
        one_kernel = isinstance(model, Transformer) and model.steps_in_one_kernel()
        self.by_length = block is not None or not one_kernel  # the kernel is of single tokens
        self.rows: Rows | None = None
        start = functools.partial(_empty_rows, model, self.count, capacity, texts=block is not None)
        # keep_unused: rows are committed to a device if the parameters are. Programs return committed rows then, and
        # the first prefill would compile again for them: 2.2 s in the second request of a tiny Llama on a CPU.
        self._start = CompiledTogether(jax.jit(start, keep_unused=True), "the engine's empty rows")
        self._model = model
        self._cast = CompiledTogether(jax.jit(functools.partial(_cast_leaves, model)), "the cast of the parameters")
        block = block or functools.partial(decode_block, routes=routes)
        self._programs = (
            functools.partial(_admit, model, routes=routes),
            functools.partial(_decode, model, pad_id, steps, policy=policy, block=block),
        )
        self._admit: Any = None  # CompiledTogether, once it is known where the rows lie
        self._decode: Any = None

    @property
    def compilations(self) -> int:
        return sum(program.compilations for program in (self._admit, self._decode) if program is not None)

    @property
    def most(self) -> int:
        """The most samples of a request that enter together."""
        return min(ROWS, self.count)

    def heights(self, width: int, reuse: bool = False) -> tuple[int, int]:
        """Return the numbers of prompts, a few and many, that programs of this width prefill.

        `reuse`: they continue prefixes, of which a program holds copies: of a quarter of the slots at most.
        """
        few = min(round_up(1, self.shards), self.count)
        many = min(PROMPTS, max(1, TOKENS // width), max(1, self.count // 4) if reuse else self.count)
        return few, min(max(few, round_up(many, self.shards)), self.count)

    def prefills(self, width: int, reuse: bool) -> list[tuple[int, int]]:
        """Return (prompts, slots) of all prefill programs of a width."""
        few, many = self.heights(width, reuse)
        pairs = [(few, few), (many, many)] if reuse else [(few, few), (few, self.most), (many, self.most)]
        return list(dict.fromkeys(pairs))

    def blocks(self) -> list[tuple[int, int]]:
        """Return (rows, tokens of the longest) of all decoding programs."""
        reaches = [self.capacity]
        while (reach := self.reach(reaches[-1] // 2)) < reaches[-1]:
            reaches.append(reach)
        return [(size, reach) for size in self.sizes for reach in reaches]

    def cast(self, params: Any) -> Any:
        """Return the parameters as programs read them: matrices and adapters in the compute dtype. What has it already
        is not copied."""
        return self._with_cast_leaves(params, self._cast)

    def _with_cast_leaves(self, params: Any, make: Callable[[Any], Sequence[Any]]) -> Any:
        """Return `params` with what `make` returns, the result of `_cast_leaves`, where a dtype changes."""
        found = jax.tree.leaves(params)
        after, form = jax.tree.flatten(jax.eval_shape(functools.partial(cast_matrices, self._model), params))
        changed = [n for n, (old, new) in enumerate(zip(found, after, strict=True)) if old.dtype != new.dtype]
        if not changed:
            return params
        for n, leaf in zip(changed, make(params), strict=True):
            found[n] = leaf
        return jax.tree.unflatten(form, found)

    def admit(self, params: Any, admission: Admission, width: int) -> Array | None:
        """Prefill new rows into slots; `width` is the bucket of what their prompts add to the cache.

        With `routes` return the experts of each prompt's tokens but the last, (R, width, layers, k), right-padded.
        """
        self.rows = self._ready(params)
        self.rows, routes = self._admit(params, self.rows, admission, width=width)
        return routes

    def reach(self, length: int) -> int:
        """Return the part of the capacity to compute with if no row is longer than `length` after a block."""
        size = self.capacity
        while self.by_length and size // 2 >= max(length, SHORTEST) and size % 2 == 0:
            size //= 2
        return size

    def decode(
        self, params: Any, active: Sequence[int], length: int, way: Way | None, steps: int, top: int = 0
    ) -> tuple[Output, Sequence[int]]:
        """Return (output, the column of each `active` slot) after `steps` steps; no row exceeds `length` tokens then.

        Few or short rows are copied out of the slots for the block and back, since a step's cost follows what it
        reads. On a mesh all rows take part, so that they stay on their devices.
        """
        self.rows = self._ready(params)
        size = next(size for size in self.sizes if size >= len(active))
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
        bound = np.int32(steps)  # traced: rounds of any length are one program
        self.rows, output = self._decode(params, self.rows, mask, index, bound, reach=reach, way=way, top=top)
        return output, columns

    def _ready(self, params: Any) -> Rows:
        """Return the rows, created at first use; programs keep their sharding, or they would compile twice."""
        if self.rows is not None:
            return self.rows
        rows = self._start(params)
        self._make_programs(rows)
        return rows

    def _make_programs(self, rows: Any) -> None:
        """Create both programs, if there are none yet. rows: arrays, or abstract ones, with their shardings."""
        if self._admit is not None:
            return
        meshed = not jax.sharding.get_abstract_mesh().empty
        places = jax.tree.map(lambda leaf: leaf.sharding, rows) if meshed else None
        admit, decode = self._programs
        out = (places, None) if meshed else None
        self._admit = _program(admit, "prefill", ("width",), out)
        self._decode = _program(decode, "decoding", ("reach", "way", "top"), out)

    def lower_ahead(self, params: Any, admissions: Iterable[tuple[Admission, int]], way: Way | None) -> list[Any]:
        """Return the lowered programs of these prefills, (arrays, width), and of a whole block of decoding.

        params: abstract, with shardings. Rows and cast parameters are compiled here: their shardings are the
        compiler's choice.
        """
        params = self._cast_abstract(params)
        rows = compiled_shapes(self._start.program, params)
        self._make_programs(rows)
        found = [self._admit.program.lower(params, rows, admission, width=width) for admission, width in admissions]
        mask, bound = np.zeros(self.count, bool), np.int32(self.steps)
        decode = self._decode.program.lower(params, rows, mask, None, bound, reach=self.capacity, way=way, top=0)
        return [*found, decode]

    def _cast_abstract(self, params: Any) -> Any:
        """Return what `cast` does to abstract parameters."""
        return self._with_cast_leaves(params, functools.partial(compiled_shapes, self._cast.program))


def row_sizes(count: int) -> tuple[int, ...]:
    """Return the numbers of rows that a block may compute, up to all slots: 1, 4, 16, … on a CPU, where a step's cost
    follows the rows; 1, 16, 256, … elsewhere: on an H200, 128 rows of a 1.2B model take 1.4 times as long as one."""
    factor, sizes = 4 if jax.default_backend() == "cpu" else 16, [1]
    while sizes[-1] < count:
        sizes.append(min(sizes[-1] * factor, count))
    return tuple(sizes)


def compiled_shapes(program: Any, *args: Any) -> Any:
    """Compile `program` for abstract arguments; return its results as abstract arrays with their shardings."""
    lowered = program.lower(*args)
    shapes, places = lowered.out_info, lowered.compile().output_shardings
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _cast_leaves(model: Any, params: Any) -> list[Array]:
    """Return the leaves of `cast_matrices` that have another dtype than before."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(cast_matrices(model, params)), strict=True)
    return [new for old, new in pairs if new.dtype != old.dtype]


def _program(function: Any, name: str, static: tuple[str, ...], places: Any) -> CompiledTogether:
    made = jax.jit(function, static_argnames=static, donate_argnums=1, out_shardings=places)
    return CompiledTogether(made, name, static)


def _empty_rows(model: Any, count: int, capacity: int, params: Any, texts: bool = False) -> Rows:
    cache = model.init_cache(count, capacity)
    nothing = jnp.zeros((count,), jnp.int32)
    adapter = nothing if holds_several(params) else None
    chosen = for_rows(params, adapter)
    one = jax.ShapeDtypeStruct((count, 1), jnp.int32)
    # the structure it has after a step: static facts of a cache ("empty") are part of its type
    after = jax.eval_shape(lambda ids, cache: forward(model, chosen, ids, cache, nothing)[1], one, cache)
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
        adapter=adapter,
        text=Text(jnp.zeros((count, capacity + 1), jnp.int32), nothing) if texts else None,
    )
    placed = jax.tree.map(_by_rows, replace(rows, cache=None))
    return replace(placed, cache=rows.cache)


def _by_rows(leaf: Array) -> Array:
    return constrain(leaf, "batch", *[None] * (leaf.ndim - 1))


def _admit(
    model: Any, params: Any, rows: Rows, new: Admission, *, width: int, routes: bool = False
) -> tuple[Rows, Array | None]:
    """Prefill, and write each row to its slot. With `new.origins` a prompt continues what that slot holds.

    Returns the rows, and with `routes` the experts of the new tokens, (R, width, layers, k).
    """
    prompts, adapted = new.prompts, for_rows(params, new.adapters)
    if new.origins is not None:
        cache = take_rows(rows.cache, new.origins)
        shortens = isinstance(model, Shortening)
        if shortens:
            last = jnp.take_along_axis(prompts, jnp.maximum(new.held - 1, 0)[:, None], axis=1)[:, 0]
            cache = model.apply({"params": adapted}, cache, last, new.held, method="shorten")
        at = new.held[:, None] + jnp.arange(width)
        ids = prompts.at[jnp.arange(prompts.shape[0])[:, None], at].get(mode="fill", fill_value=0)
    else:
        cache, ids = model.init_cache(prompts.shape[0], width), prompts[:, :width]
    given = (model, adapted, ids, cache, new.lengths - 1 - new.held)
    _, cache, *chosen = forward_routed(*given) if routes else forward(*given)
    ends = ends_of(model.vocab_size, prompts, new.lengths)
    cache, (token, seen) = take_rows((cache, ends), new.sources)
    begun = begin_rows(model.vocab_size, cache, token, seen, new.asked)
    if rows.text is not None:
        begun = replace(begun, text=take_rows(Text(prompts, new.lengths), new.sources))
    return put_rows(rows, begun, new.slots), everywhere(chosen[0]) if routes else None


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
    policy: bool = False,
    block: Callable[..., tuple[Rows, Output]] = decode_block,
) -> tuple[Rows, Output]:
    """Run a block of at most `bound` steps for the slots in `mask` (S,), which are those of `index` (R,) if given."""
    rows = replace(rows, live=rows.live & mask)
    whole = jax.tree.leaves(rows.cache)
    part = rows if index is None else take_rows(replace(rows, cache=None), index)
    size = part.token.shape[0]
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(size, reach)))]
    if index is None and shapes == [leaf.shape for leaf in whole]:
        return block(model, pad_id, steps, params, rows, way, bound, top, policy)
    some = [_beginning(leaf, shape, index) for leaf, shape in zip(whole, shapes, strict=True)]
    part = replace(part, cache=jax.tree.unflatten(jax.tree.structure(rows.cache), some))
    if index is not None:
        part = replace(part, live=part.live & (index < rows.live.shape[0]))
    part, output = block(model, pad_id, steps, params, part, way, bound, top, policy)
    return put_rows(rows, part, index), output


def _beginning(leaf: Array, shape: Sequence[int], index: Array | None) -> Array:
    """Return rows `index` of an array, cut to `shape`."""
    leaf = leaf[(slice(None), *(slice(0, size) for size in shape[1:]))]
    return leaf if index is None else take_rows(leaf, index)
