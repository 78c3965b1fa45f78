"""Speculative decoding: a draft of the next tokens is verified in one pass, and the text is that of plain decoding.

The draft is taken from the row's own prompt and text (prompt lookup): what followed the latest earlier place that ends
with the same tokens as the text does, the more of them the better, at most `ngram`. A pass reads the newest token and
the draft d_1 … d_k, and gives the logits of k + 1 positions. At each position a token is chosen exactly as in plain
decoding, with the same noise, of the row's stream at that position; the row goes on to the next position while the
chosen token is the draft's:

    x_i = argmax(scores_i + Gumbel noise of token number i);   x_i is the text;   go on if x_i = d_i

This is rejection sampling from a deterministic draft: x_i = d_i with probability p(d_i), and given that it is not, x_i
has the distribution p without d_i, renormalized (Leviathan et al. 2023, arXiv 2211.17192, with q = 1 at d_i). With the
noise shared, the text is not only distributed as plain decoding's, it is the same text, up to rounding: a pass over
several tokens may add in another order, which decides between two nearly equal tokens. Penalties, stop tokens and
limits are those of each position, since the same code chooses every token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from bessemer.errors import InputError
from bessemer.generate.rows import Output, Rows, Taken, Text, _take, everywhere, in_use, looks
from bessemer.generate.sampling import Way
from bessemer.models.lora import for_rows
from bessemer.models.protocol import Rewinding

DRAFT, NGRAM = 4, 3
WITHOUT = "Set generate.speculate=none, or leave --speculate out"


@dataclass(frozen=True)
class Speculation:
    """Tokens of a draft, and the most tokens that its place in the text must have in common with the end."""

    draft: int = DRAFT
    ngram: int = NGRAM

    def __post_init__(self) -> None:
        for name, value in (("draft", self.draft), ("ngram", self.ngram)):
            if value < 1:
                raise InputError(f"generate.{name} is {value}; it must be at least 1.")

    @classmethod
    def of(cls, kind: str, draft: int = DRAFT, ngram: int = NGRAM) -> Self | None:
        """Return what `generate.speculate` asks for; None: plain decoding."""
        return cls(draft, ngram) if kind == "ngram" else None

    @property
    def width(self) -> int:
        """The most tokens of a row per pass: the draft and one more."""
        return self.draft + 1

    def check(self, model: Any) -> None:
        """Raise InputError if the model's cache cannot take back rejected tokens."""
        if not isinstance(model, Rewinding):
            raise InputError(
                f"generate.speculate=ngram needs a model whose cache can take tokens back (`rewind`, "
                f"docs/extending.md), and {type(model).__name__} has none. {WITHOUT}."
            )
        if not model.most_rewound:
            raise InputError(
                f"generate.speculate=ngram needs a cache that can take tokens back, and {type(model).__name__} has "
                f"recurrent layers, whose state cannot. {WITHOUT}."
            )
        if self.width > model.most_rewound:
            most = model.most_rewound - 1
            remedy = f"Set generate.draft={most} or less (--draft)" if most else WITHOUT
            raise InputError(
                f"generate.draft is {self.draft}, and the model's shortest attention window holds {model.most_rewound} "
                f"tokens: a draft and one more must fit. {remedy}."
            )


def acceptance(tokens: int, passes: int, drafted: int) -> dict[str, float]:
    """Return what drafts saved: a pass makes one token and those of the draft that it accepts."""
    accepted = tokens - passes
    return {
        "passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_pass": round(tokens / max(passes, 1), 4),
    }


@struct.dataclass
class _Pass:
    """What choosing tokens at the positions of one pass changes."""

    rows: Rows
    going: Array  # (B,) whether the row has a token at the next position
    made: Array  # (B,) tokens of this block so far
    buffers: Taken  # (B, room, …)


def find_draft(text: Text, draft: int, ngram: int) -> tuple[Array, Array]:
    """Return (tokens (B, draft), whether there are any (B,)): what followed the place most like the end of the text.

    Of places with equally many tokens in common the latest is taken. A draft that reaches the end of the text goes on
    as the text would if it repeated itself from that place.
    """
    places = jnp.arange(text.ids.shape[1])

    def row(ids: Array, length: Array) -> tuple[Array, Array]:
        same, common = jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
        for back in range(ngram):  # place j has `common[j]` tokens, j the last, in common with the end
            end = ids[jnp.maximum(length - 1 - back, 0)]
            same &= (jnp.roll(ids, back) == end) & (places >= back) & (length > back)
            common += same
        earlier = places < length - 1
        best = jnp.max(jnp.where(earlier, common, 0))
        place = jnp.max(jnp.where(earlier & (common == best), places, 0))
        period = jnp.maximum(length - 1 - place, 1)
        return ids[place + 1 + jnp.arange(draft) % period], best > 0

    return jax.vmap(row)(text.ids, text.length)


def speculate_block(
    speculation: Speculation,
    model: Any,
    pad_id: int,
    steps: int,
    params: Any,
    rows: Rows,
    way: Way | None = None,
    bound: Array | int | None = None,
    top: int = 0,
    policy: bool = False,
    room: int | None = None,
) -> tuple[Rows, Output]:
    """Run up to `steps` passes for every live row, as `rows.decode_block` runs steps; `rows.text` is set.

    room: the most tokens that a row makes; None: those of `steps` passes.
    """
    params = for_rows(in_use(model, params), rows.adapter)
    size, width = rows.token.shape[0], speculation.width
    room = room or steps * width
    before = rows.count

    def goes_on(carry: tuple[Array, Rows, Taken, Array, Array]) -> Array:
        return (carry[0] < (steps if bound is None else bound)) & jnp.any(carry[1].live)

    def advance(_: int, carry: tuple[Array, Rows, Taken, Array, Array]) -> tuple[Array, Rows, Taken, Array, Array]:
        step, rows, buffers, passes, drafted = carry
        assert rows.text is not None
        draft, found = find_draft(rows.text, speculation.draft, speculation.ngram)
        length = jnp.where(found & rows.live, jnp.minimum(speculation.draft, rows.limit - rows.count - 1), 0)
        ids = jnp.concatenate([rows.token[:, None], draft], axis=1)
        added = jnp.where(rows.live, 1 + length, 0)
        logits, cache = model.apply({"params": params}, ids, rows.cache, added, method="decode")
        started = _Pass(rows, rows.live, rows.count - before, buffers)
        done = _choose(pad_id, started, logits, draft, length, way, top, policy)
        kept = done.made - started.made
        cache = model.apply({"params": params}, cache, rows.cache, ids, kept, method="rewind")
        passes, drafted = passes + rows.live, drafted + length
        return step + 1, replace(done.rows, cache=cache), done.buffers, passes, drafted

    buffers = Taken(jnp.full((size, room), pad_id, jnp.int32), jnp.zeros((size, room), jnp.float32))
    if top:
        ranked = (size, room, top)
        buffers = buffers._replace(top_ids=jnp.zeros(ranked, jnp.int32), top_logprobs=jnp.zeros(ranked, jnp.float32))
    if policy:
        buffers = buffers._replace(policy_logprobs=jnp.zeros((size, room), jnp.float32))
    zero = jnp.zeros((size,), jnp.int32)
    some = functools.partial(jax.lax.fori_loop, 0, looks(steps, way), advance)
    carry = (jnp.zeros((), jnp.int32), rows, buffers, zero, zero)
    _, rows, buffers, passes, drafted = jax.lax.while_loop(goes_on, some, carry)
    noted = jax.tree.map(lambda buffer: jnp.swapaxes(buffer, 0, 1), buffers)
    output = Output(made=rows.count - before, live=rows.live, passes=passes, drafted=drafted, **noted._asdict())
    return rows, jax.tree.map(everywhere, output)


def _choose(
    pad_id: int, started: _Pass, logits: Array, draft: Array, length: Array, way: Way | None, top: int, policy: bool
) -> _Pass:
    """Choose tokens position by position, of each row up to the first that is not the draft's.

    logits: (B, draft + 1, V); draft: (B, draft), of which `length` (B,) are real.
    """
    width = logits.shape[1]

    def at(position: Array, done: _Pass) -> _Pass:
        rows, going = done.rows, done.going
        here = jax.lax.dynamic_index_in_dim(logits, position, axis=1, keepdims=False)
        after, taken = _take(pad_id, replace(rows, live=going), here, way, top, policy)
        expected = jax.lax.dynamic_index_in_dim(draft, jnp.minimum(position, width - 2), axis=1, keepdims=False)
        assert rows.text is not None
        rows = replace(
            after,
            token=jnp.where(going, after.token, rows.token),
            live=jnp.where(going, after.live, rows.live),
            text=Text(put_at(rows.text.ids, rows.text.length, after.token, going), rows.text.length + going),
        )
        buffers = jax.tree.map(lambda buffer, new: put_at(buffer, done.made, new, going), done.buffers, taken)
        accepted = going & after.live & (position < length) & (after.token == expected)
        return _Pass(rows, accepted, done.made + going, buffers)

    if way is not None:  # a GPU asks the host at each look whether any row goes on
        return jax.lax.fori_loop(0, width, at, started)

    def goes_on(carry: tuple[Array, _Pass]) -> Array:
        return (carry[0] < width) & jnp.any(carry[1].going)

    def next_position(carry: tuple[Array, _Pass]) -> tuple[Array, _Pass]:
        return carry[0] + 1, at(*carry)

    return jax.lax.while_loop(goes_on, next_position, (jnp.zeros((), jnp.int32), started))[1]


def put_at(array: Array, place: Array, value: Array, where: Array) -> Array:
    """Write value[b] to array[b, place[b]] of the rows `where`. array: (B, N, …); value: (B, …); place, where: (B,)."""
    place = jnp.where(where, place, array.shape[1])  # beyond the end: dropped
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(array, place, value)
