"""The llama family: llama 2 and 3, mistral, qwen2, qwen3, smollm 1 to 3, and with experts mixtral and qwen3-moe.

Weighted norms, SwiGLU, rotary with scalings.

    x += W_o attention(norm x);  x += W_down (silu(W_gate h) · W_up h), h = norm x

Matrices are stored (fan_in, fan_out), blocks_0/q, blocks_0/k, …, as in GPT. A related family is a subclass in a file of
its own: it overrides `norm_sizes`, `vector_sizes`, `ropes`, `_layer_options` or `_embed`, and registers its model_types
(protocol.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.config import field
from bessemer.kernels import ops
from bessemer.kernels.ops import Axes, rows_of_table
from bessemer.models.cache import Cache
from bessemer.models.layers import AXES as MATRIX_AXES
from bessemer.models.layers import After, Attend, Step, Stream, attend_heads, declare, declare_experts
from bessemer.models.lora import project_all, with_keys
from bessemer.models.moe import (
    BIAS,
    NOTHING,
    ROUTER,
    SHARED_GATE,
    ExpertSettings,
    Routing,
    Stats,
    Watch,
    add_stats,
    no_stats,
    routed_feed_forward,
)
from bessemer.models.pipeline import Rows, Stack, run_stack
from bessemer.models.protocol import HFType
from bessemer.models.shape import Shape, round_up
from bessemer.models.transformer import AttendAt, Tokens, Transformer, require
from bessemer.registry import hf_types, models
from bessemer.topology.rules import constrain

# -- rotary frequencies, with the scalings by which a model reads further than it was pretrained -----------------------
#
#     default   f_i = base^(−2i/d)
#     linear    f_i / factor
#     dynamic   f_i up to the pretrained length; what follows beyond depends on how long a text is, so it is not offered
#     llama3    f_i where a turn takes fewer than L/high tokens, f_i / factor above L/low, blended between
#     yarn      f_i where a dimension turns β_fast times in L tokens, f_i / factor below β_slow turns, a ramp between;
#               the rotated queries and keys count `attention_factor` times (arXiv 2309.00071)
#
# L is `original_length`, the length of pretraining.


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`architecture.rope.*` of one model. 0 in the last three: derived (see `attention_scale`)."""

    base: float
    type: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position of each pair, (head_dim/2,) float64."""
        plain = self.base ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain, head_dim) if self.type == "yarn" else plain

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / self.factor

    def _yarn(self, plain: np.ndarray, head_dim: int) -> np.ndarray:
        def pair_with(turns: float) -> float:
            return head_dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0
        scaled = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return scaled * plain / self.factor + (1 - scaled) * plain

    @property
    def attention_scale(self) -> float:
        """What rotated queries and keys are multiplied with; 1 but for yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor

        def scale(strength: float) -> float:
            return 0.1 * strength * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def table(self, positions: Array, length: int, head_dim: int) -> tuple[Array, Array]:
        """cos and sin for `blocks.rotate`: positions (…, T) below `length` → two (…, T, 1, head_dim/2), float32.

        These models turn the other way round than GPT, (x1, x2) → (x1 cos − x2 sin, x2 cos + x1 sin): sin is negative.
        """
        angle = np.arange(length)[:, None] * self.frequencies(head_dim)
        return rows_of_table(positions, self.attention_scale * np.cos(angle), -self.attention_scale * np.sin(angle))


BIASES = ("none", "qkv", "all")
HF_TYPES = ("auto", "llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe")
DTYPES = ("float32", "bfloat16", "float16")
MLP_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaShape(Shape):
    """All derived sizes of one model of the family; none of GPT's extra features."""

    value_embeddings: bool = False
    smear: bool = False
    residual_mix: bool = False
    backout: bool = False
    feed_forward: int = 0
    tied: bool = False
    vectors: int = 0  # parameters of norms and biases

    mlp_matrices: ClassVar[int] = 3

    @property
    def mlp_width(self) -> int:
        return self.feed_forward

    @property
    def remembered(self) -> int:
        return 1  # nothing, but a cache holds an array of it

    def count_parameters(self) -> dict[str, int]:
        """By optimizer group, with `total` and `scaling` (matrices in blocks + head; of experts the active ones).

        A tied table is the head.
        """
        table = self.padded_vocab * self.width
        router, router_bias = self.router_parameters()
        counts = {
            "matrix": self.mixing_parameters() + self.depth * self.feed_forward_parameters(),
            "gate": router + self.gate_parameters(),
            "embedding": 0 if self.tied else table,
            "head": table,
            "rho": self.vectors,
            "scalar": router_bias,
        }
        scaling = counts["matrix"] - self.idle_experts() + table
        return {**counts, "total": sum(counts.values()), "scaling": scaling}

    def mixing_parameters(self) -> int:
        """Parameters of the matrices by which tokens reach each other, all layers."""
        return self.depth * self.width * (2 * self.query_width + 2 * self.kv_width)

    def gate_parameters(self) -> int:
        """Parameters of narrow matrices beside the routers, all layers."""
        return 0


AXES = {**MATRIX_AXES, "gate": MATRIX_AXES["up"]}
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm", "norm")
INIT = 0.02  # deviation of fresh matrices and tables, as these models are begun
BIASED = {"none": (), "qkv": ("q", "k", "v"), "all": ("q", "k", "v", "out")}

Params = dict[str, Array]
STACKS = ("expert_gate", "expert_up", "expert_down")
Vector = tuple[str, tuple[str | None, ...], tuple[int, ...]]  # name, logical axes and shape of a parameter


def norm(x: Array, weight: Array, epsilon: float, offset: float = 0.0) -> Array:
    """(offset + w) · x / √(mean(x²) + ε) over the last axis, in float32."""
    weight = weight + offset if offset else weight
    wide = x.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * r * weight).astype(x.dtype)


class LlamaBlock(nn.Module):
    """Declares the parameters of one layer."""

    shape: LlamaShape
    biased: tuple[str, ...]
    norms: tuple[tuple[str, int], ...]  # (name, size)
    norm_offset: float = 0.0
    stacks: tuple[str, ...] = STACKS
    vectors: tuple[Vector, ...] = ()

    axes: ClassVar[dict[str, Axes]] = AXES

    @nn.compact
    def __call__(self) -> Params:
        s, sizes = self.shape, self.mixing_sizes()
        if s.dense_width:
            into, out = (s.width, s.dense_width), (s.dense_width, s.width)
            sizes |= {"gate": into, "up": into, "down": out}
        normal, zeros = nn.initializers.normal(INIT), nn.initializers.zeros
        params = {name: declare(self, name, normal, self.axes[name], size) for name, size in sizes.items()}
        if s.experts is not None:
            params |= declare_experts(self, s.experts, s.width, dict.fromkeys(self.stacks, normal))
        for name, axes, size in self.vectors:
            params[name] = declare(self, name, zeros, axes, size)
        for name in self.biased:
            params[f"{name}_bias"] = declare(self, f"{name}_bias", zeros, (None,), sizes[name][1:])
        ones = nn.initializers.constant(1.0 - self.norm_offset)
        params |= {name: declare(self, name, ones, (None,), (size,)) for name, size in self.norms}
        return params | self.further()

    def mixing_sizes(self) -> dict[str, tuple[int, int]]:
        """Return name → size of the matrices by which tokens reach each other."""
        s = self.shape
        return {
            "q": (s.width, s.query_width),
            "k": (s.width, s.kv_width),
            "v": (s.width, s.kv_width),
            "out": (s.query_width, s.width),
        }

    def further(self) -> Params:
        """Declare what a related family has besides."""
        return {}


Rotary = tuple[Array, Array] | None  # cos and sin; None: a layer without positions
Mixing = Callable[["LayerOptions", Params, Array, Rotary, Attend], Array]
"""(options, parameters, normed stream (B, T, D), …) → what the layer adds before its feed-forward part."""


class Kind(NamedTuple):
    """The static part of a layer that differs between layers."""

    window: int | None
    rope: Rope | None


@dataclass(frozen=True)
class LayerOptions:
    """The static part of a layer."""

    head_dim: int
    dtype: Any
    epsilon: float
    dropout: float
    norm_offset: float = 0.0
    query_scale: float = 1.0
    activation: Callable[[Array], Array] = jax.nn.silu
    routing: Routing | None = None
    mix: Mixing | None = None  # in place of `self_attention`


def layer(
    options: LayerOptions,
    params: Params,
    x: Array,
    rotary: Rotary,
    attend: Attend,
    keys: Array | None,
    watch: Watch = NOTHING,
) -> tuple[Array, Stats]:
    """x: (B, T, D) → (B, T, D), and what the router measured."""
    first, second = (None, None) if keys is None else (ops.fold_in(keys, 0), ops.fold_in(keys, 1))
    params, mix = with_keys(params, keys), options.mix or self_attention
    h = normed(options, params, "attention_norm", x)
    y = normed(options, params, "attention_post_norm", mix(options, params, h, rotary, attend))
    x = checkpoint_name(x + ops.dropout(y, options.dropout, first), "residual")
    h = normed(options, params, "mlp_norm", x)
    y, stats = _feed_forward(options, params, h, watch)
    x = x + ops.dropout(normed(options, params, "mlp_post_norm", y), options.dropout, second)
    return constrain(x, "batch", "sequence", "embed_act"), stats


def normed(options: LayerOptions, params: Params, name: str, x: Array) -> Array:
    """Return norm(x), or x in a model that has no norm of this name."""
    weight = params.get(name)
    return x if weight is None else norm(x, weight, options.epsilon, options.norm_offset)


def self_attention(options: LayerOptions, params: Params, h: Array, rotary: Rotary, attend: Attend) -> Array:
    names = ("q", "k", "v")
    q, k, v = (
        split_heads(options, params, name, y)
        for name, y in zip(names, linears_of(options, params, names, h), strict=True)
    )
    q, k = turned(q, rotary, options.query_scale), turned(k, rotary)
    if "sinks" in params:
        attend = partial(attend, sinks=params["sinks"])
    return linear_of(options, params, "out", attend_heads(attend, q, k, v))


def turned(x: Array, rotary: Rotary, scale: float = 1.0) -> Array:
    """Return scale · x with its positions, on as many of the first dimensions as the table has; rounded once."""
    if rotary is not None and (size := 2 * rotary[0].shape[-1]) < x.shape[-1]:
        y = jnp.concatenate([ops.rotate(x[..., :size], *rotary), x[..., size:].astype(jnp.float32)], axis=-1)
    else:
        y = x if rotary is None else ops.rotate(x, *rotary)
    return (y if scale == 1 else scale * y.astype(jnp.float32)).astype(x.dtype)


def heads_of(options: LayerOptions, params: Params, name: str, h: Array) -> Array:
    """Return `split_heads` of the product of h with the matrix `name`. h: (B, T, D)."""
    return split_heads(options, params, name, linear_of(options, params, name, h))


def split_heads(options: LayerOptions, params: Params, name: str, y: Array) -> Array:
    """(B, T, W) → (B, T, heads, head_dim), normed where the model has a norm: of each head, or of all of them."""
    y = checkpoint_name(y, name)
    weight = params.get(f"{name}_norm")
    of_heads = weight is None or weight.shape[-1] == options.head_dim
    if not of_heads:
        y = normed(options, params, f"{name}_norm", y)
    y = y.reshape(*y.shape[:2], -1, options.head_dim)
    return normed(options, params, f"{name}_norm", y) if of_heads else y


def _feed_forward(options: LayerOptions, params: Params, h: Array, watch: Watch) -> tuple[Array, Stats]:
    if options.routing is None:
        return _dense_feed_forward(options, params, h), {}
    y, stats = routed_feed_forward(options.routing, params, h, watch, options.activation, options.dtype)
    if "up" not in params:
        return y, stats
    shared = _dense_feed_forward(options, params, h)
    if SHARED_GATE in params:
        gate = jax.nn.sigmoid(h.astype(jnp.float32) @ params[SHARED_GATE])
        shared = (gate * shared.astype(jnp.float32)).astype(shared.dtype)
    return y + shared, stats


def _dense_feed_forward(options: LayerOptions, params: Params, h: Array) -> Array:
    names = ("gate", "up")
    gate, up = (
        constrain(checkpoint_name(y, name), "batch", "sequence", "mlp")
        for name, y in zip(names, linears_of(options, params, names, h), strict=True)
    )
    return linear_of(options, params, "down", checkpoint_name(options.activation(gate) * up, "mlp_hidden"))


def linear_of(options: LayerOptions, params: Params, name: str, x: Array) -> Array:
    """Return the product of x with the matrix `name`, and its bias if there is one."""
    return linears_of(options, params, (name,), x)[0]


def linears_of(options: LayerOptions, params: Params, names: Sequence[str], x: Array) -> list[Array]:
    """Return `linear_of` of each name; adapters read x together."""
    products = project_all(x, [params[name] for name in names], [AXES[name] for name in names], options.dtype)
    biases = [params.get(f"{name}_bias") for name in names]
    return [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(products, biases, strict=True)]


@models.register("llama")
class Llama(Transformer, ExpertSettings):
    """Any open model of the family; llama, mistral, qwen2, qwen3 and the smollms differ in settings."""

    projected_groups: ClassVar[tuple[str, ...]] = ("matrix",)
    remat_with_adapters: ClassVar[tuple[str, ...]] = ("mlp_hidden",)
    has_stages: ClassVar[bool] = True
    cast_groups: ClassVar[tuple[str, ...]] = ("matrix", "embedding", "head")
    norm_offset: ClassVar[float] = 0.0  # a norm multiplies by this plus its weight
    expert_stacks: ClassVar[tuple[str, ...]] = STACKS

    mlp_width: int = field(
        "model/mlp_width",
        default=-1,
        minimum=1,
        also=(-1,),
        help="width of the feed-forward layer; -1 = 8/3 of the width, up to 64s",
    )
    tied_head: bool = field("model/tied_head", default=False, help="the head is the embedding table")
    sliding_window: int = field(
        "model/sliding_window", default=0, minimum=0, help="keys a sliding layer attends to; 0 = all layers see all"
    )
    sliding_layers: str = field(
        "model/sliding_layers", default="S", help="S sliding, L full context; tiled over the layers"
    )
    rotary_layers: str = field(
        "model/rotary_layers", default="R", help="R rotary positions, N none (smollm3: RRRN); tiled over the layers"
    )
    max_positions: int = field(
        "model/max_positions",
        default=-1,
        minimum=1,
        also=(-1,),
        help="context an export declares; -1 = architecture.block_size",
    )
    end_tokens: list[int] = field(
        "model/end_tokens", default_factory=list, minimum=0, help="ids that end a text, besides the tokenizer's"
    )
    hf_type: str = field(
        "model/hf_type", default="auto", choices=HF_TYPES, help="model_type of an export; auto: by the settings"
    )
    weights_dtype: str = field(
        "model/weights_dtype", default="float32", choices=DTYPES, help="dtype of exported weights; training is float32"
    )

    attention_bias: str = field(
        "architecture/attention_bias", default="none", choices=BIASES, help="biases of attention: qkv (qwen2) or all"
    )
    mlp_bias: bool = field("architecture/mlp_bias", default=False, help="biases of the feed-forward layer")
    head_norm: bool = field(
        "architecture/head_norm", default=False, help="norm with weights of each query and key (qwen3)"
    )
    norm_epsilon: float = field("architecture/norm_epsilon", default=1e-5, minimum=0, help="ε of the norms")
    rotary_base: float = field("architecture/rotary_base", default=10_000.0, above=1, help="base of rotary frequencies")
    rope_type: str = field(
        "architecture/rope/type", default="default", choices=ROPE_TYPES, help="scaling of rotary frequencies"
    )
    rope_local_base: float = field(
        "architecture/rope/local_base",
        default=0.0,
        above=1,
        also=(0.0,),
        help="base of sliding layers, which are then not scaled; 0 = as the other layers",
    )
    rope_factor: float = field("architecture/rope/factor", default=1.0, minimum=1, help="context over pretraining's")
    rope_original_length: int = field(
        "architecture/rope/original_length", default=0, minimum=0, help="context of pretraining"
    )
    rope_low_freq_factor: float = field("architecture/rope/low_freq_factor", default=1.0, above=0, help="llama3's low")
    rope_high_freq_factor: float = field(
        "architecture/rope/high_freq_factor", default=4.0, above=0, help="llama3's high"
    )
    rope_beta_fast: float = field("architecture/rope/beta_fast", default=32.0, above=0, help="yarn's β_fast")
    rope_beta_slow: float = field("architecture/rope/beta_slow", default=1.0, above=0, help="yarn's β_slow")
    rope_truncate: bool = field("architecture/rope/truncate", default=True, help="yarn: whole dimensions only")
    rope_attention_factor: float = field(
        "architecture/rope/attention_factor",
        default=0.0,
        minimum=0,
        help="yarn: factor on queries and keys; 0 = derived",
    )
    rope_mscale: float = field(
        "architecture/rope/mscale",
        default=0.0,
        minimum=0,
        help="yarn: strength of attention_factor; used if mscale_all_dim is set too",
    )
    rope_mscale_all_dim: float = field(
        "architecture/rope/mscale_all_dim",
        default=0.0,
        minimum=0,
        help="yarn: strength of the divisor of attention_factor; used if mscale is set too",
    )

    @property
    def natural_type(self) -> str:
        """The simplest model_type that can say all of the model, for `hf_type=auto`."""
        if self.experts:
            return "qwen3_moe" if self.head_norm else "mixtral"
        if "N" in self._tiled(self.rotary_layers):
            return "smollm3"
        if self.attention_bias == "qkv":
            return "qwen2"
        return "qwen3" if self.head_norm else "mistral" if self.sliding_window else "llama"

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_tokens", tuple(self.end_tokens))
        super().__post_init__()

    @property
    def wide(self) -> int:
        """Width of the dense feed-forward layer."""
        return self.mlp_width if self.mlp_width > 0 else round_up(8 * self.sizes()["width"] // 3, MLP_MULTIPLE)

    @property
    def shape(self) -> LlamaShape:
        sizes = self.sizes()
        width, depth = sizes["width"], self.depth
        wide = self.wide
        window = self.sliding_window or None
        queries, keys = sizes["heads"] * self.head_dim, sizes["kv_heads"] * self.head_dim
        biases = {"none": 0, "qkv": queries + 2 * keys, "all": queries + 2 * keys + width}[self.attention_bias]
        biases += (2 * wide + width) * self.mlp_bias
        more = sum(math.prod(size) for _, _, size in self.vector_sizes())
        return LlamaShape(
            **sizes,
            windows=tuple(window if letter == "S" else None for letter in self._tiled(self.sliding_layers)),
            feed_forward=wide,
            tied=self.tied_head,
            experts=self.expert_shape(wide),
            vectors=depth * (sum(self.norm_sizes().values()) + biases + more) + width,
        )

    def norm_sizes(self) -> dict[str, int]:
        """Return name → size of the norms of a layer, those of NORMS that it has."""
        width = self.sizes()["width"]
        heads = {"q_norm": self.head_dim, "k_norm": self.head_dim} if self.head_norm else {}
        return {"attention_norm": width, "mlp_norm": width, **heads}

    def vector_sizes(self) -> tuple[Vector, ...]:
        """Return further parameters of a layer, which begin at 0 and train at the rate of norms."""
        return ()

    def _tiled(self, pattern: str) -> str:
        """Return one letter per layer."""
        return (pattern * self.depth)[: self.depth]

    @property
    def rope(self) -> Rope:
        return Rope(
            base=self.rotary_base,
            type=self.rope_type,
            factor=self.rope_factor,
            original_length=self.rope_original_length,
            low_freq_factor=self.rope_low_freq_factor,
            high_freq_factor=self.rope_high_freq_factor,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            truncate=self.rope_truncate,
            attention_factor=self.rope_attention_factor,
            mscale=self.rope_mscale,
            mscale_all_dim=self.rope_mscale_all_dim,
        )

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary frequencies of each layer; None: no positions."""
        local = Rope(self.rope_local_base) if self.rope_local_base else self.rope
        kinds = zip(self._tiled(self.rotary_layers), self.shape.windows, strict=True)
        return tuple(None if letter == "N" else self.rope if window is None else local for letter, window in kinds)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that positions turn, the first ones."""
        return self.head_dim

    def check(self) -> None:
        super().check()
        require(
            self.precision != "fp8",
            "architecture.precision=fp8 is of the gpt family: its bounds rest on norms without weights. Use auto or "
            "bf16.",
        )
        self.check_experts()
        require(
            not (self.experts and self.mlp_bias),
            "architecture.mlp_bias=true is for dense feed-forward layers; experts have no biases. Set it to false.",
        )
        require(
            bool(self.sliding_layers) and set(self.sliding_layers) <= set("SL"),
            f"model.sliding_layers is '{self.sliding_layers}'; it is a pattern of S (sliding) and L (long), such as S.",
        )
        require(
            bool(self.rotary_layers) and set(self.rotary_layers) <= set("RN"),
            f"model.rotary_layers is '{self.rotary_layers}'; it is a pattern of R (rotary) and N (none), such as RRRN.",
        )
        require(self.rotary_base > 1, f"architecture.rotary_base is {self.rotary_base}; it must be above 1.")
        kind, length = self.rope_type, self.rope_original_length
        require(
            kind not in ("llama3", "yarn", "dynamic") or length > 0,
            f"architecture.rope.type={kind} needs architecture.rope.original_length, the context of pretraining.",
        )
        require(
            kind != "dynamic" or self.block_size <= length,
            f"architecture.rope.type=dynamic is offered up to the pretrained context of {length} tokens, beyond which "
            f"its angles would change while a text grows; set architecture.block_size={length} or less.",
        )
        require(
            kind != "llama3" or self.rope_high_freq_factor > self.rope_low_freq_factor,
            "architecture.rope.high_freq_factor must be above architecture.rope.low_freq_factor.",
        )

    def group_of(self, path: tuple[str, ...]) -> str:
        """The optimizer group of a parameter: norms and biases train at the rate of scales near 1."""
        name = path[-1]
        if name in (ROUTER, BIAS):
            return "gate" if name == ROUTER else "scalar"
        if name in NORMS or name.endswith("_bias") or name == "sinks":
            return "rho"
        if name == "embedding":
            return "head" if self.tied_head else "embedding"
        return "head" if name == "head" else "matrix"

    def setup(self) -> None:
        s = self.shape
        normal, table = nn.initializers.normal(INIT), (s.padded_vocab, s.width)
        self.embedding = declare(self, "embedding", normal, ("vocab", "embed"), table)
        if not self.tied_head:
            self.head = declare(self, "head", normal, ("embed", "vocab"), table[::-1])
        biased = (*BIASED[self.attention_bias], *(("gate", "up", "down") if self.mlp_bias else ()))
        self.blocks = [self._block_parameters(index, biased) for index in range(s.depth)]
        ones = nn.initializers.constant(1.0 - self.norm_offset)
        self.norm = declare(self, "norm", ones, (None,), (s.width,))

    def _block_parameters(self, index: int, biased: tuple[str, ...]) -> LlamaBlock:
        """Return the module that declares the parameters of layer `index`. biased: the matrices with a bias."""
        norms = tuple(self.norm_sizes().items())
        return LlamaBlock(self.shape, biased, norms, self.norm_offset, self.expert_stacks, self.vector_sizes())

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(Kind(window, rope) for window, rope in zip(self.shape.windows, self.ropes, strict=True))

    def _attend_kind(self, kind: Kind, documents: Array | None) -> Attend:
        """Return how the tokens of whole rows reach each other in a layer."""
        return self._attend(kind.window, documents)

    def _layers(self, x: Array, tokens: Tokens) -> tuple[Array, Stats]:
        ids, positions, documents, keys, _, watch = tokens
        x = constrain(x, "batch", "sequence", "embed_act")
        stack = Stack(partial(self._block, max(self.block_size, x.shape[1])), self.kinds, self.scan_layers, self.remat)
        rows, stats = Rows(ids, positions, documents, keys, *watch), no_stats(self.routing(), self.depth, watch)
        x, stats = run_stack(stack, [block() for block in self.blocks], {}, x, rows, stats)
        return norm(x, self.norm, self.norm_epsilon, self.norm_offset), stats

    def _block(self, length: int, rows: Rows) -> tuple[Step, After]:
        """Return what a layer computes on `rows`, whose positions are below `length`."""
        rotary, options = self._tables(rows.positions, length), self._layer_options()

        def step(kind: Kind, params: Params, index: Array, stream: Stream) -> Stream:
            attend = self._attend_kind(kind, rows.documents)
            keys = None if rows.keys is None else ops.fold_in(rows.keys, index)
            x, seen = layer(options, params, stream[0], rotary[kind.rope], attend, keys, rows.watch.of_layer(index))
            return x, stream[1], add_stats(stream[2], seen, index)

        return step, lambda _, x: x

    def _decode_layers(self, input_ids: Array, cache: Cache, positions: Array, attend: AttendAt) -> tuple[Array, Array]:
        embedded = x = self._embed(input_ids)
        # Where every layer slides, the cache is shorter than the text; padding may lie beyond either.
        length = max(self.block_size, cache.capacity) + input_ids.shape[1]
        rotary = self._tables(positions, length)
        for index, (block, rope) in enumerate(zip(self.blocks, self.ropes, strict=True)):
            x, seen = layer(self._layer_options(), block(), x, rotary[rope], attend(index), None)
            self._record(seen)
        return norm(x, self.norm, self.norm_epsilon, self.norm_offset), embedded[..., : cache.previous.shape[-1]]

    def _tables(self, positions: Array, length: int) -> dict[Rope | None, Rotary]:
        """Return cos and sin of every kind of layer, for positions below `length`."""
        kinds = dict.fromkeys(self.ropes)
        return {rope: None if rope is None else rope.table(positions, length, self.rotary_dim) for rope in kinds}

    def _embed(self, ids: Array) -> Array:
        return ops.lookup(self.embedding, ids, ("vocab", None), self.compute_dtype)

    def _head(self) -> Array:
        return self.embedding if self.tied_head else self.head

    @property
    def head_is_embedding(self) -> bool:
        return self.tied_head

    def _layer_options(self) -> LayerOptions:
        options = (self.head_dim, self.compute_dtype, self.norm_epsilon, self.dropout, self.norm_offset)
        return LayerOptions(*options, routing=self.routing())


# Their config.json is read and written in interop/config.py.
hf_types.register("llama")(HFType("LlamaForCausalLM", "llama"))
hf_types.register("mistral")(HFType("MistralForCausalLM", "llama", {"sliding_window": 4096}))
hf_types.register("qwen2")(HFType("Qwen2ForCausalLM", "llama", {"sliding_window": 4096}))
hf_types.register("qwen3")(HFType("Qwen3ForCausalLM", "llama", {"sliding_window": 4096, "head_dim": 128}))
hf_types.register("smollm3")(
    HFType(
        "SmolLM3ForCausalLM",
        "llama",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
        },
    )
)
