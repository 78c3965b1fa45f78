"""One layer of a GPT: its parameters (a linen module) and its computation (a pure function of them).

Kept apart so that layers can be unrolled, scanned or rematerialized with plain JAX transformations while the
parameter tree stays the same: blocks_0/q, blocks_0/k, … Matrices are stored (fan_in, fan_out).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.kernels import fp8
from bessemer.kernels.feed_forward import can_join, feed_forward
from bessemer.kernels.norms import add_norm, can_pack, mix_norm, unpack_rotate_norm
from bessemer.kernels.ops import Axes, dropout, fold_in, linear, lookup, relu_squared, rms_norm, rotate, rotate_norm
from bessemer.kernels.quantized import Quantized, quantized_linear
from bessemer.models.lora import Adapted, is_node, updates, with_keys
from bessemer.models.moe import AXES as EXPERT_AXES
from bessemer.models.moe import BIAS, NOTHING, ROUTER, Routing, Stats, Watch, expert_sizes, routed_feed_forward
from bessemer.models.shape import ExpertShape, Shape, scan_segments
from bessemer.topology.rules import constrain

QK_SCALE = 1.2  # queries and keys after their norm; sharper attention at the start
# The rows of a value table lie on the axis of "embed": at rest split over fsdp, gathered in use, while its columns
# follow the key-value heads. The lookup then needs no communication.
VALUE_AXES = ("embed", "kv")
# Tensors of a layer that can be listed in architecture/remat.
TENSOR_NAMES = ("q", "k", "v", "attention", "residual", "gate", "up", "mlp_hidden")
OFFLOAD, BLOCK_INPUT = "offload", "block_input"  # the setting, and the tensor that it keeps in host memory

AXES: dict[str, Axes] = {
    "q": ("embed", "heads"),
    "k": ("embed", "kv"),
    "v": ("embed", "kv"),
    "out": ("heads", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}

Attend = Callable[..., Array]  # of q, k, v, and `sinks` in a model that has them


def symmetric(bound: float) -> Callable[..., Array]:
    """U(−bound, bound)."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def ramp(first: float, last: float) -> Callable[..., Array]:
    """Values from `first` to `last`, linear over the layers."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.linspace(first, last, shape[0], dtype=dtype)

    return init


def declare(
    module: nn.Module, name: str, init: Callable[..., Array], axes: tuple[str | None, ...], size: tuple[int, ...]
) -> Array:
    """Declare a float32 parameter with its logical axes. A node may stand in its place when the model is applied."""
    held: Any = module.get_variable("params", name) if module.has_variable("params", name) else None
    if is_node(held):  # flax would compare the shape of its first array
        assert held.shape == size, (name, held.shape, size)
        return cast(Array, held)
    return cast(Array, module.param(name, nn.with_logical_partitioning(init, axes), size))


ROUTER_INIT = 0.02  # deviation of fresh routers


def declare_experts(
    module: nn.Module, shape: ExpertShape, width: int, inits: dict[str, Callable[..., Array]]
) -> dict[str, Array]:
    """Declare the router and the stacks of a layer's experts, from the initializer of each stack."""
    params = {
        name: declare(module, name, inits[name], EXPERT_AXES[name], size)
        for name, size in expert_sizes(shape, width, "expert_gate" in inits, "expert_gate_up" in inits).items()
    }
    normal = nn.initializers.normal(ROUTER_INIT)
    params[ROUTER] = declare(module, ROUTER, normal, ("embed", None), (width, shape.count))
    if shape.biased:
        params[BIAS] = declare(module, BIAS, nn.initializers.zeros, (None,), (shape.count,))
    return params


class BlockParameters(nn.Module):
    """Declares the parameters of one layer. q, k, v: U(±√3/√d); up: 0.4 × that; output projections 0."""

    shape: Shape
    value_embedding: bool

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        s = self.shape
        bound = math.sqrt(3 / s.width)
        zeros = nn.initializers.zeros
        matrices = {
            "q": (symmetric(bound), (s.width, s.query_width)),
            "k": (symmetric(bound), (s.width, s.kv_width)),
            "v": (symmetric(bound), (s.width, s.kv_width)),
            "out": (zeros, (s.query_width, s.width)),
        }
        if s.dense_width:
            matrices["up"] = (symmetric(0.4 * bound), (s.width, s.dense_width))
            matrices["down"] = (zeros, (s.dense_width, s.width))
        params = {name: declare(self, name, init, AXES[name], size) for name, (init, size) in matrices.items()}
        if s.experts is not None:
            inits = {"expert_up": symmetric(0.4 * bound), "expert_down": zeros}
            params |= declare_experts(self, s.experts, s.width, inits)
        if self.value_embedding:
            gate = nn.initializers.uniform(0.02)
            table_size, gate_size = (s.padded_vocab, s.kv_width), (s.gate_channels, s.kv_heads)
            params["value_table"] = declare(self, "value_table", symmetric(bound), VALUE_AXES, table_size)
            params["value_gate"] = declare(self, "value_gate", gate, ("gate", None), gate_size)
        return params


@dataclass(frozen=True)
class LayerOptions:
    """The static options of a layer."""

    head_dim: int
    dtype: Any
    qk_norm: bool
    dropout: float
    kernels: str = "xla"
    fp8: str | None = None  # the scaling, for matrices that fit; None: all products in `dtype`
    routing: Routing | None = None


def layer(
    options: LayerOptions,
    params: dict[str, Array],
    x: Array,
    x0: Array,
    ids: Array,
    rotary: tuple[Array, Array],
    attend: Attend,
    keys: Array | None,
    watch: Watch = NOTHING,
) -> tuple[Array, Array, Stats]:
    """x ← ρx + ξx0; x += attention(norm x); x += W_down relu(W_up norm x)². x, x0: (B, T, D); ids: (B, T).

    Returns (x, x0, what the router measured): x0 goes through every layer, so that its gradient is added up on the way
    back.
    """
    first, second = (None, None) if keys is None else (fold_in(keys, 0), fold_in(keys, 1))
    params = with_keys(params, keys)
    if "rho" in params:
        x, h, x0 = mix_norm(x, x0, params["rho"], params["xi"], options.kernels)
    else:
        h = rms_norm(x)
    mixed = dropout(_attention(options, params, h, ids, rotary, attend), options.dropout, first)
    x, h = add_norm(x, mixed, options.kernels)
    x = checkpoint_name(x, "residual")
    y, stats = _feed_forward(options, params, h, watch)
    x = x + dropout(y, options.dropout, second)
    return constrain(x, "batch", "sequence", "embed_act"), x0, stats


def _attention(
    options: LayerOptions, params: dict[str, Array], h: Array, ids: Array, rotary: tuple[Array, Array], attend: Attend
) -> Array:
    """h: (B, T, D) → (B, T, D)."""
    q, k, v = _queries_keys_values(options, params, h, rotary)
    if "value_table" in params:
        values = lookup(params["value_table"], ids, VALUE_AXES, options.dtype).reshape(v.shape)
        channels = h[..., : params["value_gate"].shape[0]].astype(jnp.float32)
        gate = 3 * jax.nn.sigmoid(channels @ params["value_gate"])  # (B, T, K)
        v = (v + gate[..., None] * values).astype(v.dtype)
    return _linear(options, params, "out", attend_heads(attend, q, k, v))


def attend_heads(attend: Attend, q: Array, k: Array, v: Array) -> Array:
    """(B, T, N, H), (B, T, K, H), (B, T, K, H) → (B, T, N·H)."""
    q = constrain(q, "batch", "sequence", "heads", None)
    k, v = (constrain(x, "batch", "sequence", "kv", None) for x in (k, v))
    out = checkpoint_name(attend(q, k, v), "attention")
    return out.reshape(*out.shape[:2], -1)


def _queries_keys_values(
    options: LayerOptions, params: dict[str, Array], h: Array, rotary: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """(B, T, N, H), (B, T, K, H), (B, T, K, H); queries and keys with their positions and norm."""
    if options.qk_norm and can_pack(options.head_dim, options.kernels):
        packed = checkpoint_name(_packed(options, [params[name] for name in ("q", "k", "v")], h), "q")
        heads, kv_heads = (params[name].shape[1] // options.head_dim for name in ("q", "k"))
        return unpack_rotate_norm(packed, rotary, heads, kv_heads, QK_SCALE)
    q, k, v = (_project(options, params, name, h) for name in ("q", "k", "v"))
    return _turn(options, q, rotary), _turn(options, k, rotary), v


def _packed(options: LayerOptions, matrices: Sequence[Array | Quantized | Adapted], h: Array) -> Array:
    """Queries, keys and values as one product, (B, T, D) → (B, T, sum of widths); quantized ones are one each."""
    bare: list[Any] = [m.w if isinstance(m, Adapted) else m for m in matrices]
    if any(isinstance(w, Quantized) for w in bare):
        return jnp.concatenate([_product(options, "q", m, h) for m in matrices], axis=-1)
    weights = jnp.concatenate(bare, axis=1)
    packed = _product(options, "q", weights, h)
    if not any(isinstance(m, Adapted) for m in matrices):
        return packed
    found = updates(h, matrices, [AXES["q"]] * len(matrices), options.dtype)
    nothing = [jnp.zeros((*h.shape[:-1], m.shape[1]), h.dtype) for m in matrices]
    packed += jnp.concatenate([n if f is None else f for f, n in zip(found, nothing, strict=True)], axis=-1)
    if not any(isinstance(m, Adapted) and m.scales_columns for m in matrices):
        return packed
    factors = [m.factor() if isinstance(m, Adapted) else jnp.ones(m.shape[1], jnp.float32) for m in matrices]
    rows = max((factor.shape[:-1] for factor in factors), key=len)  # () or, of several adapters, (B, 1)
    factors = [jnp.broadcast_to(factor, (*rows, factor.shape[-1])) for factor in factors]
    return (packed * jnp.concatenate(factors, axis=-1)).astype(packed.dtype)


def _project(options: LayerOptions, params: dict[str, Array], name: str, h: Array) -> Array:
    """(B, T, D) → (B, T, heads, head_dim)."""
    y = checkpoint_name(_linear(options, params, name, h), name)
    return y.reshape(*y.shape[:2], -1, options.head_dim)


def _turn(options: LayerOptions, x: Array, rotary: tuple[Array, Array]) -> Array:
    """Rotary positions, then the norm of queries and keys."""
    return rotate_norm(x, *rotary, QK_SCALE) if options.qk_norm else rotate(x, *rotary).astype(x.dtype)


def _feed_forward(options: LayerOptions, params: dict[str, Array], h: Array, watch: Watch) -> tuple[Array, Stats]:
    if options.routing is None:
        return _dense_feed_forward(options, params, h), {}
    y, stats = routed_feed_forward(options.routing, params, h, watch, jax.nn.relu, options.dtype)
    return (y + _dense_feed_forward(options, params, h) if "up" in params else y), stats


def _dense_feed_forward(options: LayerOptions, params: dict[str, Array], h: Array) -> Array:
    matrices, axes = (params["up"], params["down"]), (AXES["up"], AXES["down"])
    plain = not any(is_node(m) for m in matrices)  # the joined forms take arrays alone
    if plain and options.fp8 is not None and fp8.fits(params["up"].shape):
        return fp8.feed_forward(h, *matrices, axes, options.dtype, options.fp8, "mlp_hidden")
    if plain and can_join(h, params["up"], options.kernels):
        return feed_forward(h, *matrices, axes, options.dtype, "mlp_hidden")
    up = constrain(_linear(options, params, "up", h), "batch", "sequence", "mlp")
    return _linear(options, params, "down", relu_squared(up, "mlp_hidden"))


def _linear(options: LayerOptions, params: dict[str, Array], name: str, x: Array) -> Array:
    return _product(options, name, params[name], x)


def _product(options: LayerOptions, name: str, w: Array | Quantized | Adapted, x: Array) -> Array:
    """x W for the matrix called `name`, in the precision of the run; that of its adapter in the compute dtype."""
    if isinstance(w, Adapted):
        return w.add(_product(options, name, w.w, x), x, AXES[name], options.dtype)
    if isinstance(w, Quantized):
        return quantized_linear(x, w, AXES[name], options.dtype)
    if options.fp8 is None or not fp8.fits(w.shape):
        return linear(x, w, AXES[name], options.dtype)
    bound = None if name in ("out", "down") else math.sqrt(w.shape[0])  # the others read the output of a norm
    return fp8.linear(x, w, AXES[name], options.dtype, options.fp8, bound)


# -- a stack of layers: unrolled, scanned, rematerialized --------------------------------------------------------------
# Layers differ in static things (window, value embedding), so a scan runs over groups in which the pattern repeats;
# their parameters are stacked when the program is traced, and the parameter tree stays the same.


# x and the embeddings x0 that every layer mixes in, (B, T, D) each, and what the routers have measured so far
Stream = tuple[Array, Array, Stats]
Step = Callable[[Any, dict[str, Any], Array, Stream], Stream]  # of kind, params, index, stream
After = Callable[[dict[str, Array], Array], Array]  # (params["lookup"], x) → x
Connect = Callable[[Sequence[Array]], Array]  # the embeddings and all outputs so far → what the next layer reads


def run_layers(
    step: Step,
    after: After,
    params: Sequence[dict[str, Any]],
    kinds: Sequence[Hashable],
    x: Array,
    *,
    scan: bool,
    remat: Sequence[str],
    stats: Stats | None = None,
    connect: Connect | None = None,
) -> tuple[Array, Array, Stats]:
    """(output of the last layer, output of layer n//2, stats). x: (B, T, D), the embeddings; stats: to add to.

    kinds: the static part of each layer, such as its window; layers of one kind are one program.
    A layer whose parameters hold "lookup" is followed by `after` with those; its own output is the one before.
    connect: replaces what each layer hands on; not with `scan`.
    """
    start: Carry = ((x, x, stats or {}), x)
    stream, middle = run_some(
        step, after, params, kinds, start, scan=scan, remat=remat, first=0, depth=len(params), connect=connect
    )
    assert middle is not None
    return stream[0], middle, stream[2]


Carry = tuple[Stream, Array | None]
"""The stream, and the output of the middle layer so far; None: it is not wanted."""


def run_some(
    step: Step,
    after: After,
    params: Sequence[dict[str, Any]],
    kinds: Sequence[Hashable],
    carry: Carry,
    *,
    scan: bool,
    remat: Sequence[str],
    first: int | Array,
    depth: int,
    connect: Connect | None = None,
) -> Carry:
    """Run some consecutive layers of a model with `depth` layers; `first` is the number of the first of them."""
    forms = tuple((kind, _form(p)) for kind, p in zip(kinds, params, strict=True))
    segments = scan_segments(forms) if scan else [(layer, 1, 1) for layer in range(len(params))]

    @cache
    def layer(kind: Hashable) -> Callable[..., Stream]:
        """A jitted call, which the compiler inlines: traced and lowered once for all layers of a kind."""

        def run(p: dict[str, Any], index: Array, stream: Stream) -> Stream:
            return step(kind, p, index, (named_input(stream[0], remat), *stream[1:]))

        return jax.jit(rematerialized(run, remat))

    def look_up(p: dict[str, Any], x: Array) -> Array:
        return (
            rematerialized(lambda p, x: after(p, named_input(x, remat)), remat)(p["lookup"], x) if "lookup" in p else x
        )

    def group(start: int, carry: Carry, xs: tuple[Any, Array]) -> tuple[Carry, None]:
        stream, middle = carry
        for offset, p in enumerate(xs[0]):
            stream = layer(kinds[start + offset])(p, xs[1] + offset, stream)
            if middle is not None:
                middle = jnp.where(xs[1] + offset == depth // 2, stream[0], middle)
            stream = (look_up(p, stream[0]), *stream[1:])
        return (stream, middle), None

    outputs = [carry[0][0]]
    for start, period, repeats in segments:
        groups = [params[start + g * period : start + (g + 1) * period] for g in range(repeats)]
        if repeats == 1 and isinstance(first, int):
            stream = layer(kinds[start])(params[start], jnp.int32(first + start), carry[0])
            middle = stream[0] if carry[1] is not None and first + start == depth // 2 else carry[1]
            x = look_up(params[start], stream[0])
            if connect is not None:
                outputs.append(x)
                x = connect(outputs)
            carry = ((x, *stream[1:]), middle)
        elif repeats == 1:
            carry, _ = group(start, carry, (groups[0], jnp.asarray(first + start)))
        else:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)
            starts = first + jnp.arange(start, start + repeats * period, period)
            carry, _ = jax.lax.scan(partial(group, start), carry, (stacked, starts))
    return carry


def _form(params: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal for layers to be stacked: which parameters and adapters they have, and their shapes."""
    leaves, form = jax.tree.flatten(params)
    return (form, *(leaf.shape for leaf in leaves))


def remat_names(remat: Sequence[str]) -> tuple[str, ...] | None:
    """Return None if nothing is recomputed, () for the whole block, else the tensors to recompute."""
    names = tuple(remat)
    if names in ((), ("none",)):
        return None
    return () if names in (("block",), (OFFLOAD,)) else names


def named_input(x: Array, remat: Sequence[str]) -> Array:
    """Name the input of a block that is kept in host memory."""
    return checkpoint_name(x, BLOCK_INPUT) if tuple(remat) == (OFFLOAD,) else x


def rematerialized(function: Callable[..., Any], remat: Sequence[str]) -> Callable[..., Any]:
    """Wrap a layer so that its backward pass recomputes everything (block, offload) or the named tensors.

    The policy lists what is kept: a tensor that is merely excluded would be recomputed from an unnamed, equally large
    neighbor. With `offload` the input of the block, the one tensor that `block` keeps, waits in host memory.
    """
    names = remat_names(remat)
    if names is None:
        return function
    if tuple(remat) == (OFFLOAD,):
        offload = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(function, policy=offload)
    kept = ["adapter", *(name for name in TENSOR_NAMES if name not in names)]
    policy = jax.checkpoint_policies.save_only_these_names(*kept) if names else None
    if "attention" in kept and policy is not None:
        policy = jax.checkpoint_policies.save_from_both_policies(policy, _is_flash_attention)
    return jax.checkpoint(function, policy=policy)


def _is_flash_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is cuDNN's: the output, kept already, and the sums of the softmax. Without those the backward
    pass repeats the kernel: 7 of 194 ms of a step of a Llama of 1.24B parameters with adapters on an H200."""
    return primitive.name.startswith("dot_product_attention_fwd")
