"""One attention function for every device: causal, windowed, grouped queries, documents, cached decoding.

A query attends to exactly `window` keys, **itself included** (keys t−window+1 … t); JAX's `local_window_size=(w, 0)`
attends to w + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bessemer.errors import InputError
from bessemer.topology.chips import backend
from bessemer.topology.rules import in_stage, mesh_axes, rule_axes

# -- splash attention: JAX's own Pallas kernel for TPUs, which skips blocks of keys outside the causal window ----------


STEP = 128  # lanes of a TPU: blocks, and so sequences, come in multiples of it
HEAD_STEP = 64
BLOCK = 512


def suits_splash(length: int, head_dim: int) -> bool:
    """Return whether queries of this length and heads of this size fill its blocks."""
    return length % STEP == 0 and head_dim % HEAD_STEP == 0


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_ids: Array | None,
    k_ids: Array | None,
    window: int | None,
    interpret: bool = False,
    softcap: float = 0.0,
) -> Array:
    """Causal attention, the last query at the last key. q: (B, T, N, H); k, v: (B, S, K, H) → (B, T, N, H).

    ids (B, T), (B, S): a query sees keys of its own segment. The kernel does not scale by 1/√H, so q is.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, before = (q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    mask = splash.CausalMask(shape, before) if window is None else splash.LocalMask(shape, (window - 1, 0), before)
    rows, columns = (_block(length) for length in shape)
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[2]),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap or None,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    ids = None if q_ids is None or k_ids is None else splash.SegmentIds(q_ids, k_ids)
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2).astype(v.dtype)


def _block(length: int) -> int:
    """Return the largest multiple of STEP up to BLOCK that divides the length."""
    return max(size for size in range(STEP, BLOCK + 1, STEP) if length % size == 0)


# -- attention on a mesh -----------------------------------------------------------------------------------------------
# Two ways to split a sequence into c equal pieces, both with two rounds of communication per layer:
#
#     heads   all-to-all: each device trades its piece of all heads for the whole sequence of 1/c of them, attends as
#             one device would, and trades back. Any kernel, the same work everywhere. c must divide the KV heads.
#     keys    every device keeps its queries and fetches the keys and values that they can see: all of them by an
#             all-gather, or with a window those of the neighbors before it. The last device has most to do: the first
#             one's keys beyond its own are masked, and nobody ends before the last.


ABSENT = np.iinfo(np.int32).min  # the segment of a key that does not exist: before the start of the sequence
Kernel = Callable[[Array, Array, Array, Array | None, Array | None], Array]  # of q, k, v, ids of q, ids of k


@dataclass(frozen=True)
class Layout:
    """Mesh axes that split each axis of queries (B, T, N, H); `kv`: those of the key heads; c: pieces of a sequence."""

    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    pieces: int = 1
    way: str = "none"  # or "heads", "keys"

    def queries(self, length: int) -> int:
        """Queries a kernel sees at once."""
        return length // self.pieces if self.way == "keys" else length

    def describe(self) -> str:
        """Return a remark for the log; "" where sequences are not split."""
        if self.way == "none":
            return ""
        how = {"heads": "whole sequences of some heads a device", "keys": "keys and values gathered"}
        return f", sequences in {self.pieces} pieces: {how[self.way]}"


def layout_of(q: tuple[int, ...], k: tuple[int, ...]) -> Layout:
    """Return how the ambient rules lay out queries and keys of these shapes, (B, T, N, H) and (B, T, K, H)."""
    mesh = jax.sharding.get_abstract_mesh()
    sequence, heads = mesh_axes("sequence", q[1]), mesh_axes("heads", q[2])
    kv = mesh_axes("kv", k[2]) if heads else ()
    pieces = math.prod(mesh.shape[axis] for axis in sequence)
    own = k[2] // math.prod(mesh.shape[axis] for axis in kv)
    if heads and not kv:  # see _own_heads: one key head for each query head
        own = q[2] // math.prod(mesh.shape[axis] for axis in heads)
    way = "none" if pieces == 1 else "heads" if own % pieces == 0 else "keys"
    return Layout(mesh_axes("batch", q[0]), sequence, heads, kv, pieces, way)


def on_devices(
    kernel: Kernel,
    layout: Layout,
    q: Array,
    k: Array,
    v: Array,
    window: int | None,
    segment_ids: Array | None,
    *,
    whole: bool,
) -> Array:
    """`kernel` on every device's share. whole: XLA can divide the kernel by itself where no sequence is split."""
    alone = not (layout.batch or layout.sequence or layout.heads)
    if layout.way == "none" and (whole or (alone and not in_stage())):
        return kernel(q, k, v, segment_ids, segment_ids)

    def local(q: Array, k: Array, v: Array, ids: Array | None = None) -> Array:
        if layout.heads and not layout.kv:
            k, v = _own_heads(layout, q, k, v)
        if layout.way == "none":
            return kernel(q, k, v, ids, ids)
        attend = _by_heads if layout.way == "heads" else _by_keys
        return attend(kernel, layout, q, k, v, window, ids)

    tokens = rule_axes("batch", q.shape[0]), rule_axes("sequence", q.shape[1])
    queries = PartitionSpec(*tokens, rule_axes("heads", q.shape[2]))
    keys = PartitionSpec(*tokens, rule_axes("kv", k.shape[2]) if layout.kv or not layout.heads else None)
    arrays = (q, k, v) if segment_ids is None else (q, k, v, segment_ids)
    specs = (queries, keys, keys, PartitionSpec(*tokens))[: len(arrays)]
    return jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)(*arrays)


def _own_heads(layout: Layout, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """The key head of each query head here, where the mesh splits the queries' heads and cannot split the keys'."""
    own, total = q.shape[2], q.shape[2] * jax.lax.axis_size(layout.heads)
    first = jax.lax.axis_index(layout.heads) * own
    heads = (first + jnp.arange(own)) // (total // k.shape[2])
    return jnp.take(k, heads, axis=2), jnp.take(v, heads, axis=2)


def _by_heads(
    kernel: Kernel, layout: Layout, q: Array, k: Array, v: Array, window: int | None, ids: Array | None
) -> Array:
    """Pieces of all heads for whole sequences of some; ids travel whole."""
    axes = layout.sequence
    q, k, v = (jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
    if ids is not None:
        ids = jax.lax.all_gather(ids, axes, axis=1, tiled=True)
    out = kernel(q, k, v, ids, ids)
    return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)


def _by_keys(
    kernel: Kernel, layout: Layout, q: Array, k: Array, v: Array, window: int | None, ids: Array | None
) -> Array:
    """Own queries against the keys of this piece and of those before it, as far as the window reaches."""
    axes, pieces, length = layout.sequence, layout.pieces, q.shape[1]
    reach = pieces if window is None else min(pieces, 1 + -(-(window - 1) // length))
    piece = jax.lax.axis_index(axes)

    def seen(x: Array) -> Array:
        """(B, reach·t, …): pieces i−reach+1 … i; before the first piece come others, which are masked."""
        if reach == pieces:
            everything = jax.lax.all_gather(x, axes, axis=1, tiled=True)
            return jnp.roll(everything, -(piece + 1) * length, axis=1)
        back = [[(i, (i + step) % pieces) for i in range(pieces)] for step in range(reach - 1, 0, -1)]
        return jnp.concatenate([*(jax.lax.ppermute(x, axes, pairs) for pairs in back), x], axis=1)

    k, v = jnp.split(seen(jnp.concatenate([k, v], axis=2)), 2, axis=2)  # one collective for both
    place = piece * length + jnp.arange((1 - reach) * length, length)
    own = jnp.zeros(q.shape[:2], jnp.int32) if ids is None else ids
    k_ids = jnp.zeros(k.shape[:2], jnp.int32) if ids is None else seen(ids)
    return kernel(q, k, v, own, jnp.where(place < 0, ABSENT, k_ids))


Implementation = Literal["auto", "xla", "cudnn", "splash"]
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
MAX_BLOCKS = 8  # query blocks of the XLA path: more would skip more masked keys, and compile longer


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int | None = None,
    segment_ids: Array | None = None,
    implementation: Implementation | str = "auto",
    max_documents: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """softmax(q kᵀ / √d) v over the allowed keys. q: (B, T, N, H); k, v: (B, T, K, H), K divides N → (B, T, N, H).

    Query t sees keys ≤ t, and with `segment_ids` (B, T) only those of its own segment. A sequence that the mesh splits
    stays split outside. max_documents: the most runs of equal ids in all B rows together, which the caller guarantees;
    0 = any number (cuDNN then reads a table of T² pairs). softcap: c of scores c·tanh(s/c), 0 = off.
    sinks: (N,), a logit per head that takes part in the softmax and has no value (gpt-oss); XLA alone has it.
    """
    if window is not None and window >= q.shape[1]:
        window = None
    layout = layout_of(q.shape, k.shape)
    masked, capped = segment_ids is not None, softcap > 0
    sunk = sinks is not None
    name = choose_attention(implementation, q.dtype, q.shape[-1], masked, q.shape[1], layout, capped, sunk)
    kernel = partial(KERNELS[name], window=window)
    if capped:
        kernel = partial(kernel, softcap=softcap)
    if sinks is not None:
        if layout.way != "none":
            raise InputError("attention sinks are for whole sequences: set topology.context=1.")
        kernel = partial(kernel, sinks=sinks)
    alone = not (layout.batch or layout.sequence or layout.heads)
    addressed = q.size < 2**31  # offsets are int32
    if name == "cudnn" and segment_ids is not None and max_documents and window is None and alone and addressed:
        kernel = partial(_cudnn_packed, max_documents=max_documents)
    absent = name == "cudnn" and jax.default_backend() != "gpu"  # its stand-in adds up heads and rows, so parts alone
    whole = name == "xla" or (name != "splash" and not absent and not in_stage())
    return on_devices(kernel, layout, q, k, v, window, segment_ids, whole=whole)


def choose_attention(
    implementation: str,
    dtype: Any,
    head_dim: int,
    masked: bool,
    length: int | None = None,
    layout: Layout | None = None,
    capped: bool = False,
    sunk: bool = False,
) -> str:
    """`architecture/attention`: auto takes what the platform has for these heads, and XLA otherwise.

    cuDNN: an NVIDIA GPU, half precision, head dimensions up to 128 in steps of 8, as many keys as queries, an even
    number of them with a document mask, scores without a cap. Splash: a TPU, head dimensions in steps of 64, sequences
    (what a device has of them) in steps of 128. Neither has attention sinks.
    """
    layout = layout or Layout()
    platform = backend()
    half = dtype in (jnp.bfloat16, jnp.float16)
    shaped = half and head_dim % 8 == 0 and head_dim <= 128 and not capped and not sunk
    possible = {
        "cudnn": platform == "gpu" and shaped and layout.way != "keys" and not (masked and (length or 0) % 2),
        "splash": platform == "tpu" and not sunk and (length is None or suits_splash(layout.queries(length), head_dim)),
    }
    if not possible.get(implementation, True):
        raise InputError(f"architecture.attention={implementation} {NEEDS[implementation]}")
    if implementation != "auto":
        return implementation
    return next((name for name, can in possible.items() if can), "xla")


NEEDS = {
    "cudnn": "needs an NVIDIA GPU, half precision, a head dimension of at most 128 in steps of 8, and a "
    "topology.context that divides the key-value heads; with a document mask also a sequence of even length, and no "
    "architecture.attention_cap or attention sinks. Set "
    "architecture.attention=auto.",
    "splash": "is a kernel for TPUs, for head dimensions in steps of 64 and sequences in steps of 128 on each "
    "device, without attention sinks. Set architecture.attention=auto.",
}


def _cudnn(q: Array, k: Array, v: Array, q_ids: Array | None, k_ids: Array | None, window: int | None) -> Array:
    mask = None
    if q_ids is not None and k_ids is not None:  # cuDNN knows no documents: it reads them from a table, (B, 1, T, T)
        mask = (q_ids[:, :, None] == k_ids[:, None])[:, None]
    local = None if window is None else (window - 1, 0)
    if jax.default_backend() != "gpu":  # a plan for a GPU that is not here
        return absent_flash(q, k, v, mask)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=local, implementation="cudnn"
    )


def document_starts(ids: Array) -> Array:
    """Return whether a document begins at each token: (B, T) bool. A document is a run of equal ids (B, T) in a row;
    padding counts as one."""
    return jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def document_table(ids: Array, slots: int) -> tuple[Array, Array]:
    """Return (places, lengths), (slots,) int32, of the documents of all rows (B, T), laid end to end.

    There are at most `slots`; the unused ones begin after the last token and are empty.
    """
    places = jnp.nonzero(document_starts(ids).reshape(-1), size=slots, fill_value=ids.size)[0].astype(jnp.int32)
    return places, jnp.diff(places, append=jnp.int32(ids.size))


def too_many_documents(ids: Array, slots: int) -> Array:
    """Return whether the rows (B, T) hold more than `slots` documents together: () bool."""
    return jnp.sum(document_starts(ids)) > slots


def _cudnn_packed(q: Array, k: Array, v: Array, q_ids: Array | None, k_ids: Array | None, max_documents: int) -> Array:
    """cuDNN's variable-length form: it visits the pairs inside documents only, and reads no table.

    Its cost grows with the slots, since it looks at T tokens of each, used or not. So slots are counted over all rows:
    on an H200 with 8 rows of 2,048 tokens, 32 heads of 64 and one document per row, forward and backward take 2.43 ms
    with 32 slots for each row, and 1.61 without documents (2026-11-16). JAX's own function counts them per row.
    """
    assert q_ids is not None
    if jax.default_backend() != "gpu":  # a plan for a GPU that is not here
        return absent_flash(q, k, v, None, document_slots(q.shape[0], max_documents))
    return _flash_of_documents(q, k, v, *document_operands(q_ids, q.shape[2:], k.shape[2:], max_documents))


def document_slots(rows: int, max_documents: int) -> int:
    """Return the slots of cuDNN's table: as many for each row, and two at least, the form of several documents."""
    return rows * max(2, -(-max_documents // rows))


def document_operands(
    ids: Array, queries: tuple[int, ...], keys: tuple[int, ...], max_documents: int
) -> tuple[Array, Array, Array]:
    """Return (lengths (B, M), starts of queries (B, M + 1), starts of keys) as cuDNN reads them: as lists, in numbers
    from the first of the batch. queries, keys: (heads, head_dim). What is behind the last document is empty."""
    rows, slots = ids.shape[0], document_slots(ids.shape[0], max_documents)
    each = slots // rows
    places, lengths = document_table(ids, slots)
    places = jnp.pad(places, (0, rows), constant_values=ids.size).reshape(rows, each + 1)
    return lengths.reshape(rows, each), places * math.prod(queries), places * math.prod(keys)


@jax.custom_vjp
def _flash_of_documents(q: Array, k: Array, v: Array, lengths: Array, q_starts: Array, k_starts: Array) -> Array:
    """q: (B, T, N, H), k, v: (B, T, K, H). lengths: (B, M), starts: (B, M + 1), read as lists."""
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p

    return _dot_product_attention_fwd_p.bind(
        *_operands(q, k, v, lengths, q_starts, k_starts), **_flash_options(q), is_training=False
    )[0]


def _flash_forward(q: Array, k: Array, v: Array, *documents: Array) -> tuple[Array, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p

    operands = _operands(q, k, v, *documents)
    out, sums = _dot_product_attention_fwd_p.bind(*operands, **_flash_options(q), is_training=True)
    return out, (q, k, v, documents, sums, out)


def _flash_backward(kept: Any, g: Array) -> tuple[Any, ...]:
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_bwd_p

    q, k, v, documents, sums, out = kept
    operands = (*_operands(q, k, v, *documents), sums, out, g)
    return *_dot_product_attention_bwd_p.bind(*operands, **_flash_options(q))[:3], None, None, None


_flash_of_documents.defvjp(_flash_forward, _flash_backward)


def _operands(q: Array, k: Array, v: Array, lengths: Array, q_starts: Array, k_starts: Array) -> tuple[Array, ...]:
    none = jnp.zeros(0, q.dtype)  # no bias, no pages
    return q, k, v, none, lengths, lengths, q_starts, k_starts, none, none


def _flash_options(q: Array) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    return {
        "scale": q.shape[-1] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": MaskType.PADDING_CAUSAL,
        "layout": AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }


def _blocked(
    q: Array,
    k: Array,
    v: Array,
    q_ids: Array | None,
    k_ids: Array | None,
    window: int | None,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Query blocks, each against only the keys that its window can reach: cost follows the window, not T².

    Of S keys the first S − T come before all T queries. With more keys than queries (part of a long sequence) scores
    are recomputed for the gradient: kept, they are T·S numbers per head.
    """
    length, before = q.shape[1], k.shape[1] - q.shape[1]
    size = block_length(length)
    attend: Callable[..., Array] = partial(_attend, softcap=softcap, sinks=sinks)
    attend = jax.checkpoint(attend) if before else attend
    q, k, v = _head_major(q, k, v)
    outputs = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, before + start - window + 1) // size * size
        last = before + stop
        queries, keys = before + jnp.arange(start, stop)[:, None], jnp.arange(first, last)[None, :]
        allowed = keys <= queries
        if window is not None:
            allowed &= keys > queries - window
        allowed = allowed[None]  # (1 or B, t, s)
        if q_ids is not None and k_ids is not None:
            allowed = allowed & (q_ids[:, start:stop, None] == k_ids[:, None, first:last])
        outputs.append(attend(q[:, :, :, start:stop], k[:, :, first:last], v[:, :, first:last], allowed))
    return _token_major(jnp.concatenate(outputs, axis=3))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def absent_flash(q: Array, k: Array, v: Array, mask: Array | None = None, slots: int = 0) -> Array:
    """Shapes of a flash attention and what it keeps for its gradient, for plans on another machine. Never run.

    q: (B, T, N, H); k, v: (B, T, K, H); mask: (B, 1, T, T); slots: of documents, 0 = B → (B, T, N, H). It keeps sums of
    the softmax for every slot, (slots, N, T). What the kernel needs while it runs (`flash_scratch`) is not here.
    """
    return _absent_forward(q, k, v, mask, slots)[0]


def flash_scratch(slots: int, length: int, heads: int, head_dim: int) -> int:
    """Return the bytes that cuDNN's backward pass works in: float32 sums of the queries' gradient and two numbers per
    query, for T tokens of every slot. A Llama of 1.24B parameters took 2.2 GiB less on an H200 when its 192 slots of
    2,048 tokens became fewer (2026-11-18): at 16.5 MiB per slot, those of 136."""
    return 4 * slots * length * heads * (head_dim + 2)


def _absent_forward(q: Array, k: Array, v: Array, mask: Array | None, slots: int) -> tuple[Array, Any]:
    bias = None if mask is None else mask.astype(q.dtype)
    out = q + jnp.sum(v, axis=2, keepdims=True) + jnp.sum(k, axis=2, keepdims=True)
    if bias is not None:
        out = out + jnp.sum(bias, axis=(1, 3))[..., None, None]
    shape = (slots or q.shape[0], q.shape[2], q.shape[1])
    sums = jax.lax.optimization_barrier(jnp.broadcast_to(out[0, 0, 0, 0].astype(jnp.float32), shape))  # in memory
    return out, (q, k, v, bias, out, checkpoint_name(sums, "attention"))


def _absent_backward(slots: int, kept: Any, g: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, bias, out, sums = kept
    if bias is not None:
        g = g + jnp.sum(bias, axis=(1, 2))[..., None, None]
    g = (g + out * sums[0, 0, 0]).astype(q.dtype)
    return g + q, k + jnp.sum(g), v + jnp.sum(g), None


absent_flash.defvjp(_absent_forward, _absent_backward)


KERNELS: dict[str, Callable[..., Array]] = {"xla": _blocked, "cudnn": _cudnn, "splash": splash_attention}


def block_length(length: int) -> int:
    """Query block: 64, or more so that there are at most MAX_BLOCKS of them."""
    size = 64
    while size * MAX_BLOCKS < length:
        size *= 2
    return size


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_positions: Array,
    k_positions: Array,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Attention to a cache. q: (B, T, N, H); k, v: (B, K, S, H), head-major → (B, T, N, H).

    The query at position q_positions[b, t] (B, T) sees the keys at k_positions (B, S) from 0 to its own; a key at a
    negative position is none. A query with no allowed key gives zeros.
    """
    keys, queries = k_positions[:, None], q_positions[..., None]
    allowed = (keys >= 0) & (keys <= queries)  # (B, T, S)
    if window is not None:
        allowed &= keys > queries - window
    return _token_major(_attend(_grouped(q, k.shape[1]), k, v, allowed, softcap, sinks))


def _head_major(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """q: (B, T, N, H) → (B, K, G, T, H), the G queries of a key head together; k, v: (B, S, K, H) → (B, K, S, H)."""
    return _grouped(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _grouped(q: Array, kv_heads: int) -> Array:
    batch, length, heads, head_dim = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    return q.transpose(0, 2, 3, 1, 4)


def _token_major(out: Array) -> Array:
    """(B, K, G, T, H) → (B, T, N, H)."""
    out = out.transpose(0, 3, 1, 2, 4)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def _attend(q: Array, k: Array, v: Array, allowed: Array, softcap: float = 0.0, sinks: Array | None = None) -> Array:
    """Masked softmax attention of head-major arrays, in float32 inside. allowed: (1 or B, T, S) bool; sinks: (N,)."""
    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if sinks is None:
        weights = masked_softmax(scores, allowed[:, None, None]).astype(v.dtype)
    else:
        own = sinks.astype(jnp.float32).reshape(1, *q.shape[1:3], 1, 1)
        weights = softmax_with_sink(scores, allowed[:, None, None], own).astype(v.dtype)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v, preferred_element_type=jnp.float32)
    return out.astype(v.dtype)


@jax.custom_vjp
def masked_softmax(scores: Array, allowed: Array) -> Array:
    """Softmax over the allowed entries of the last axis, 0 elsewhere; a row with none is all 0.

    Its gradient ds = p (g − Σ g p) keeps p alone.
    """
    scores = jnp.where(allowed, scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


def _softmax_forward(scores: Array, allowed: Array) -> tuple[Array, Array]:
    p = masked_softmax(scores, allowed)
    return p, p


def _softmax_backward(p: Array, g: Array) -> tuple[Array, None]:
    return p * (g - jnp.sum(g * p, axis=-1, keepdims=True)), None


masked_softmax.defvjp(_softmax_forward, _softmax_backward)


def softmax_with_sink(scores: Array, allowed: Array, sink: Array) -> Array:
    """e^s / (e^sink + Σ e^s) over the allowed entries of the last axis, 0 elsewhere. sink: (…, 1)."""
    scores = jnp.where(allowed, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top))
