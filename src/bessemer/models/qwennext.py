"""The qwen3-next family, with qwen3.5 and 3.6: a llama in which most layers have a state in place of keys and values.

    delta layer   o_t = norm(S_tᵀ q_t) · silu(W_z x_t), S the state of kernels/delta_rule.py, by head:
                  q, k, v = silu(short convolution of W_qkv x), q and k of length 1, q / √K
                  β = σ(W_b x),  g = −e^A · softplus(W_a x + dt)
    full layer    W_o (attention(x) · σ(W_g x)), rotary on the first quarter of each head, queries and keys normed
    experts       those of moe.py, and a shared one that counts σ(w·x) times

Norms multiply by 1 + w, but for that of the delta layers. Where documents do not see each other, state and convolution
begin anew at every document. A row's state is a fixed number of floats, so a cache cannot go back to an earlier token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.config import field
from bessemer.kernels.delta_rule import gated_delta_rule, last_inputs, short_convolution
from bessemer.kernels.ops import Axes, linear
from bessemer.models.cache import Cache
from bessemer.models.layers import Attend, attend_heads, declare
from bessemer.models.llama import (
    AXES,
    Kind,
    LayerOptions,
    Llama,
    LlamaBlock,
    LlamaShape,
    Params,
    Rope,
    Rotary,
    heads_of,
    linear_of,
    norm,
    normed,
    turned,
)
from bessemer.models.lora import project
from bessemer.models.mixtral import QWEN_NAMES, read_experts, write_experts
from bessemer.models.moe import BALANCES, SCORES, SHARED_GATE
from bessemer.models.protocol import BEFORE, ConfigReader, HFType, Layout
from bessemer.models.transformer import require
from bessemer.registry import hf_types, models
from bessemer.topology.rules import constrain, shards

DELTA, FULL = "D", "F"
DELTA_AXES: dict[str, Axes] = {
    "delta_qkv": ("embed", "heads"),
    "delta_z": ("embed", "heads"),
    "delta_qkvz": ("embed", "heads"),
    "delta_out": ("heads", "embed"),
}
GATES = ("delta_b", "delta_a", "delta_ba", SHARED_GATE)
VECTORS = ("delta_conv", "delta_decay", "delta_dt", "delta_norm")
EPSILON = 1e-6  # of the length of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a delta layer. joint: q, k, v and z are one matrix whose columns lie by key head, β and g another."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    joint: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return 2 * self.keys + self.values

    def matrices(self, width: int) -> dict[str, tuple[int, int]]:
        if self.joint:
            return {"delta_qkvz": (width, self.channels + self.values), "delta_out": (self.values, width)}
        return {"delta_qkv": (width, self.channels), "delta_z": (width, self.values), "delta_out": (self.values, width)}

    def gates(self, width: int) -> dict[str, tuple[int, int]]:
        names = ("delta_ba",) if self.joint else ("delta_b", "delta_a")
        return dict.fromkeys(names, (width, 2 * self.value_heads // len(names)))

    @property
    def vectors(self) -> int:
        """Parameters of convolution, decay and norm."""
        return self.kernel * self.channels + 2 * self.value_heads + self.value_dim

    @property
    def flops(self) -> int:
        """Training FLOPs per token of the recurrence (Sᵀk, k δᵀ, Sᵀq) and the convolution: three times the forward."""
        return 18 * self.value_heads * self.key_dim * self.value_dim + 6 * self.kernel * self.channels


@dataclass(frozen=True, kw_only=True)
class QwenNextShape(LlamaShape):
    delta: DeltaShape

    @property
    def delta_layers(self) -> int:
        return sum(window == 0 for window in self.windows)

    def mixing_parameters(self) -> int:
        full = self.width * (3 * self.query_width + 2 * self.kv_width)
        delta = sum(math.prod(size) for size in self.delta.matrices(self.width).values())
        return self.delta_layers * delta + (self.depth - self.delta_layers) * full

    def gate_parameters(self) -> int:
        shared = self.width if self.experts is not None and self.experts.shared else 0
        return self.delta_layers * 2 * self.width * self.delta.value_heads + self.depth * shared

    def recurrent_flops(self) -> float:
        return self.delta_layers * self.delta.flops


class QwenNextBlock(LlamaBlock):
    """Declares the parameters of one layer. delta: None in a layer of full attention."""

    delta: DeltaShape | None = None

    axes: ClassVar[dict[str, Axes]] = {**AXES, **DELTA_AXES}

    def mixing_sizes(self) -> dict[str, tuple[int, int]]:
        s = self.shape
        if self.delta is not None:
            return self.delta.matrices(s.width)
        return {**super().mixing_sizes(), "q": (s.width, 2 * s.query_width)}

    def further(self) -> Params:
        s, normal, params = self.shape, nn.initializers.normal(0.02), {}
        gates = {} if self.delta is None else self.delta.gates(s.width)
        if s.experts is not None and s.experts.shared:
            gates[SHARED_GATE] = (s.width, 1)
        for name, size in gates.items():
            params[name] = declare(self, name, normal, ("embed", None), size)
        if (d := self.delta) is not None:
            bound = d.kernel**-0.5
            uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
            params["delta_conv"] = declare(
                self, "delta_conv", lambda key, shape: uniform(key, shape), (None, None), (d.kernel, d.channels)
            )
            params["delta_decay"] = declare(self, "delta_decay", _decay_init, (None,), (d.value_heads,))
            params["delta_dt"] = declare(self, "delta_dt", _dt_init, (None,), (d.value_heads,))
            params["delta_norm"] = declare(self, "delta_norm", nn.initializers.ones, (None,), (d.value_dim,))
        return params


def _decay_init(key: Array, shape: tuple[int, ...]) -> Array:
    """A of g = −e^A · softplus(…): e^A uniform in [1, 16], as in Mamba 2 (arXiv 2405.21060)."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))


def _dt_init(key: Array, shape: tuple[int, ...]) -> Array:
    """softplus⁻¹ of values log-uniform in [0.001, 0.1], as there."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


@dataclass(frozen=True)
class QwenNextOptions(LayerOptions):
    delta: DeltaShape | None = None


def mix(options: LayerOptions, params: Params, h: Array, rotary: Rotary, attend: Attend) -> Array:
    """h: (B, T, D) → (B, T, D)."""
    assert isinstance(options, QwenNextOptions)
    if "delta_out" in params:
        return _delta_layer(options, params, h, attend)
    both = checkpoint_name(linear_of(options, params, "q", h), "q")
    q, gate = jnp.split(both.reshape(*h.shape[:2], -1, 2 * options.head_dim), 2, axis=-1)
    q = turned(normed(options, params, "q_norm", q), rotary, options.query_scale)
    k, v = turned(heads_of(options, params, "k", h), rotary), heads_of(options, params, "v", h)
    out = attend_heads(attend, q, k, v)
    gate = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(out.shape)
    return linear_of(options, params, "out", (gate * out.astype(jnp.float32)).astype(out.dtype))


def _delta_layer(options: QwenNextOptions, params: Params, h: Array, recur: Attend) -> Array:
    d = options.delta
    assert d is not None
    inputs, z, b, a = _delta_inputs(options, d, params, h)
    beta = jax.nn.sigmoid(b)
    g = -jnp.exp(params["delta_decay"]) * jax.nn.softplus(a + params["delta_dt"])
    out = checkpoint_name(recur(checkpoint_name(inputs, "q"), params["delta_conv"], g, beta), "attention")
    z = checkpoint_name(z, "gate").astype(jnp.float32).reshape(out.shape)
    out = norm(out, params["delta_norm"], options.epsilon) * jax.nn.silu(z)
    out = out.astype(options.dtype).reshape(*h.shape[:2], -1)
    return project(out, params["delta_out"], DELTA_AXES["delta_out"], options.dtype)


def _delta_inputs(
    options: QwenNextOptions, d: DeltaShape, params: Params, h: Array
) -> tuple[Array, Array, Array, Array]:
    """Return (queries, keys and values before the convolution (B, T, channels), z (B, T, values), and the logits of β
    and g, (B, T, value_heads) float32)."""

    def product(name: str) -> Array:
        return project(h, params[name], DELTA_AXES[name], options.dtype)

    def gate(name: str) -> Array:
        return linear(h.astype(jnp.float32), params[name], ("embed", None), jnp.float32)

    if not d.joint:
        return product("delta_qkv"), product("delta_z"), gate("delta_b"), gate("delta_a")
    group = d.values // d.key_heads
    bounds = np.cumsum([d.key_dim, d.key_dim, group])
    by_head = product("delta_qkvz").reshape(*h.shape[:2], d.key_heads, -1)
    q, k, v, z = (x.reshape(*h.shape[:2], -1) for x in jnp.split(by_head, bounds, axis=-1))
    b, a = jnp.split(gate("delta_ba").reshape(*h.shape[:2], d.key_heads, -1), 2, axis=-1)
    b, a = (x.reshape(*h.shape[:2], -1) for x in (b, a))
    return jnp.concatenate([q, k, v], axis=-1), z, b, a


State = tuple[Array, Array]
"""Of a row in a delta layer: the last inputs of the convolution (B, W − 1, channels), and S (B, H, K, V) float32."""


def recur(
    d: DeltaShape,
    state: State | None,
    begins: Array | None,
    added: Array | None,
    inputs: Array,
    conv: Array,
    g: Array,
    beta: Array,
) -> tuple[Array, State]:
    """Return (o (B, T, H, V) float32, the state after the tokens).

    state: None before the first token; begins: (B, T), where documents begin; added: (B,), how many of the T tokens are
    real, None for all; inputs, g, beta: see `_delta_inputs`.
    """
    batch, length = inputs.shape[:2]
    before, memory = (None, jnp.zeros((batch, *memory_size(d)), jnp.float32)) if state is None else state
    if added is not None:
        real = (jnp.arange(length) < added[:, None])[..., None]
        g, beta = jnp.where(real, g, 0), jnp.where(real, beta, 0)
    mixed, inputs = short_convolution(inputs, conv, before, begins)
    q, k, v = jnp.split(mixed, [d.keys, 2 * d.keys], axis=-1)
    q, k = (_unit(x.reshape(batch, length, d.key_heads, -1)) for x in (q, k))
    q, k = (jnp.repeat(x, d.value_heads // d.key_heads, axis=2) for x in (q * d.key_dim**-0.5, k))
    v = v.reshape(batch, length, d.value_heads, -1)
    q, k, v = (constrain(x, "batch", "sequence", "heads", None) for x in (q, k, v))
    out, memory = gated_delta_rule(q, k, v, g, beta, memory, begins)
    count = jnp.full((batch,), length) if added is None else added
    return out, (last_inputs(inputs, count, d.kernel), memory)


def memory_size(d: DeltaShape) -> tuple[int, int, int]:
    return d.value_heads, d.key_dim, d.value_dim


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


@models.register("qwennext")
class QwenNext(Llama):
    """qwen3.5 and 3.6, dense or with experts; qwen3-next with `architecture.delta.joint`."""

    norm_offset: ClassVar[float] = 1.0

    hf_type: str = field(
        "model/hf_type",
        default="auto",
        choices=("auto", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        help="model_type of an export",
    )
    delta_layers: str = field(
        "model/delta_layers", default="DDDF", help="D gated delta rule, F full attention; tiled over the layers"
    )
    delta_key_heads: int = field("model/delta_key_heads", default=4, minimum=1, help="heads of queries and keys")
    delta_value_heads: int = field(
        "model/delta_value_heads", default=8, minimum=1, help="heads of values, a multiple of model.delta_key_heads"
    )
    delta_key_dim: int = field("model/delta_key_dim", default=64, minimum=1, help="size of a query or key")
    delta_value_dim: int = field("model/delta_value_dim", default=64, minimum=1, help="size of a value")
    delta_kernel: int = field(
        "architecture/delta/kernel", default=4, minimum=2, help="tokens that the convolution reads"
    )
    delta_joint: bool = field(
        "architecture/delta/joint", default=False, help="queries, keys, values and gate are one matrix (qwen3-next)"
    )
    rotary_share: float = field(
        "architecture/rotary_share", default=0.25, above=0, maximum=1, help="share of a head that positions turn"
    )
    head_norm: bool = field("architecture/head_norm", default=True, help="norm with weights of each query and key")
    norm_epsilon: float = field("architecture/norm_epsilon", default=1e-6, minimum=0, help="ε of the norms")
    expert_score: str = field(
        "architecture/experts/score", default="softmax", choices=SCORES, help="scores of experts from router logits"
    )
    expert_balance: str = field(
        "architecture/experts/balance",
        default="loss",
        choices=BALANCES,
        help="how experts get equal shares of tokens: a bias moved after each step, an auxiliary loss, or not at all",
    )

    @property
    def natural_type(self) -> str:
        return "qwen3_next" if self.delta_joint else "qwen3_5_moe_text" if self.experts else "qwen3_5_text"

    @property
    def delta(self) -> DeltaShape:
        return DeltaShape(
            self.delta_key_heads,
            self.delta_value_heads,
            self.delta_key_dim,
            self.delta_value_dim,
            self.delta_kernel,
            self.delta_joint,
        )

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """Whether each layer is a delta layer."""
        return tuple(letter == DELTA for letter in self._tiled(self.delta_layers))

    @property
    def shape(self) -> QwenNextShape:
        sizes, recurrent = self.sizes(), self.recurrent
        width, deltas = sizes["width"], sum(recurrent)
        vectors = width + self.depth * 2 * width + deltas * self.delta.vectors
        return QwenNextShape(
            **sizes,
            windows=tuple(0 if delta else None for delta in recurrent),
            feed_forward=self.wide,
            tied=self.tied_head,
            experts=self.expert_shape(self.wide),
            vectors=vectors + (len(recurrent) - deltas) * 2 * self.head_dim,
            delta=self.delta,
        )

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return tuple(None if delta else self.rope for delta in self.recurrent)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    def check(self) -> None:
        pattern, turned = self.delta_layers, self.rotary_dim
        require(
            bool(pattern) and set(pattern) <= {DELTA, FULL},
            f"model.delta_layers is '{pattern}'; it is a pattern of D (gated delta rule) and F (full attention), such "
            "as DDDF.",
        )
        require(
            not all(self.recurrent),
            f"model.delta_layers is '{pattern}': none of the {self.depth} layers has full attention, and a model of "
            "this family has at least one. Use a pattern with F, or more layers.",
        )
        require(
            self.delta_value_heads % self.delta_key_heads == 0,
            f"model.delta_value_heads {self.delta_value_heads} is no multiple of model.delta_key_heads "
            f"{self.delta_key_heads}; use one.",
        )
        require(
            turned >= 2 and turned % 2 == 0,
            f"architecture.rotary_share {self.rotary_share} of model.head_dim {self.head_dim} is {turned} dimensions; "
            "rotary positions turn pairs, so it must be even and at least 2.",
        )
        for name, value, wanted in (
            ("model.sliding_window", self.sliding_window, 0),
            ("model.rotary_layers", self.rotary_layers, "R"),
            ("architecture.rope.local_base", self.rope_local_base, 0.0),
            ("architecture.attention_bias", self.attention_bias, "none"),
            ("architecture.mlp_bias", self.mlp_bias, False),
            ("architecture.head_norm", self.head_norm, True),
        ):
            require(value == wanted, f"{name} is {value}; the qwennext family has {wanted}. Leave it out.")
        super().check()
        require(
            self.delta_value_heads % shards("heads") == 0,
            f"topology.tensor={shards('heads')} does not divide model.delta_value_heads {self.delta_value_heads}; use "
            "a divisor of it.",
        )
        require(
            shards("sequence") == 1,
            f"topology.context={shards('sequence')} splits rows, and the state of a delta layer passes through the "
            "whole row. Set topology.context=1.",
        )

    def group_of(self, path: tuple[str, ...]) -> str:
        if path[-1] in GATES:
            return "gate"
        return "rho" if path[-1] in VECTORS else super().group_of(path)

    def _block_parameters(self, index: int, biased: tuple[str, ...]) -> LlamaBlock:
        delta, width = self.delta if self.recurrent[index] else None, self.shape.width
        names = {"attention_norm": width, "mlp_norm": width}
        if delta is None:
            names |= {"q_norm": self.head_dim, "k_norm": self.head_dim}
        norms = tuple(names.items())
        return QwenNextBlock(self.shape, biased, norms, self.norm_offset, self.expert_stacks, (), delta)

    def _layer_options(self) -> LayerOptions:
        return QwenNextOptions(**{**vars(super()._layer_options()), "mix": mix, "delta": self.delta})

    def _attend_kind(self, kind: Kind, documents: Array | None) -> Attend:
        if kind.window != 0:
            return super()._attend_kind(kind, documents)
        begins = None
        if documents is not None:
            begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
        run = partial(recur, self.delta, None, begins, None)
        return lambda *args: run(*args)[0]

    # -- decoding ------------------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        d, made = self.delta, super().init_cache(batch, length, dtype)

        def state() -> State:
            inputs = jnp.zeros((batch, d.kernel - 1, d.channels), dtype or self.compute_dtype)
            memory = jnp.zeros((batch, *memory_size(d)), jnp.float32)
            return constrain(inputs, "batch", None, None), constrain(memory, "batch", "heads", None, None)

        return replace(made, states=tuple(state() for delta in self.recurrent if delta))

    def _recur_cache(self, state: tuple[Array, ...], added: Array, states: list[tuple[Array, ...]]) -> Attend:
        inputs, memory = state

        def run(*args: Array) -> Array:
            out, (last, after) = recur(self.delta, (inputs, memory), None, added, *args)
            states.append((last.astype(inputs.dtype), after))
            return out

        return run


# Its config.json, and the names of its weights.

CONV = Layout(
    shape=lambda ours: (ours[1], 1, ours[0]),
    to_ours=lambda array: array[:, 0].T,
    to_theirs=lambda array: array.T[:, None],
)
"""A convolution of each channel: (W, C) is (C, 1, W) in files."""


def _pattern(config: ConfigReader, depth: int) -> str:
    letters = {"linear_attention": DELTA, "full_attention": FULL}
    every = config.whole("full_attention_interval", 4)
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth or any(kind not in letters for kind in kinds):
        raise config.refuse("layer_types", f"it must name {depth} layers, linear_attention or full_attention.")
    return "".join(letters[kind] for kind in kinds)


def _read(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.flag("attention_bias"):
        raise config.refuse("attention_bias", "attention with biases is not supported.")
    share = config.real("rope_parameters.partial_rotary_factor", None)
    return {
        "model/experts": 0,
        "model/delta_layers": _pattern(config, depth),
        "model/delta_key_heads": config.whole("linear_num_key_heads"),
        "model/delta_value_heads": config.whole("linear_num_value_heads"),
        "model/delta_key_dim": config.whole("linear_key_head_dim"),
        "model/delta_value_dim": config.whole("linear_value_head_dim"),
        "architecture/delta/kernel": config.whole("linear_conv_kernel_dim"),
        "architecture/delta/joint": config.kind == "qwen3_next",
        "architecture/rotary_share": config.real("partial_rotary_factor", 0.25) if share is None else share,
        "architecture/head_norm": True,
    }


def _read_experts(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.whole("decoder_sparse_step", 1) != 1 or config.values.get("mlp_only_layers"):
        key = "mlp_only_layers" if config.values.get("mlp_only_layers") else "decoder_sparse_step"
        raise config.refuse(key, "models in which some layers have no experts are not supported.")
    found = read_experts(config, "moe_intermediate_size", config.flag("norm_topk_prob", True))
    shared, rest = divmod(config.whole("shared_expert_intermediate_size"), found["model/expert_width"])
    if rest or not shared:
        raise config.refuse(
            "shared_expert_intermediate_size", "it must be a multiple of moe_intermediate_size, as in all releases."
        )
    return {**_read(config, depth), **found, "model/experts_shared": shared}


def _write(model: QwenNext) -> dict[str, Any]:
    d = model.delta
    rope = model.rope
    scaling = {} if rope.type == "default" else {"factor": rope.factor}
    return {
        "layer_types": ["linear_attention" if delta else "full_attention" for delta in model.recurrent],
        "linear_num_key_heads": d.key_heads,
        "linear_num_value_heads": d.value_heads,
        "linear_key_head_dim": d.key_dim,
        "linear_value_head_dim": d.value_dim,
        "linear_conv_kernel_dim": d.kernel,
        "partial_rotary_factor": model.rotary_share,
        "rope_parameters": {
            "rope_type": rope.type,
            "rope_theta": rope.base,
            "partial_rotary_factor": model.rotary_share,
            **scaling,
        },
    }


def _write_experts(model: QwenNext) -> dict[str, Any]:
    shape = model.shape.experts
    assert shape is not None
    return {
        **_write(model),
        **write_experts(model, "num_experts", "moe_intermediate_size"),
        "shared_expert_intermediate_size": shape.shared_width,
        "norm_topk_prob": model.expert_normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _says(joint: bool, experts: bool, normalizes: bool) -> Callable[[QwenNext], dict[str, bool]]:
    def says(model: QwenNext) -> dict[str, bool]:
        return {
            "architecture.delta.joint": model.delta_joint == joint,
            "model.experts": bool(model.experts) == experts,
            "model.experts_shared": bool(model.experts and model.experts_shared) == experts,
            "architecture.experts.normalize": not experts or model.expert_normalize or not normalizes,
            "model.rotary_layers": True,  # the others are delta layers
            "architecture.rope.type": model.rope_type in ("default", "linear"),
        }

    return says


NORMS = {**BEFORE, "delta_norm": "linear_attn.norm"}
WHOLE = {
    "delta_conv": "linear_attn.conv1d.weight",
    "delta_decay": "linear_attn.A_log",
    "delta_dt": "linear_attn.dt_bias",
}
JOINT = {
    "delta_qkvz": "linear_attn.in_proj_qkvz",
    "delta_ba": "linear_attn.in_proj_ba",
    "delta_out": "linear_attn.out_proj",
}
APART = {
    "delta_qkv": "linear_attn.in_proj_qkv",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
    "delta_out": "linear_attn.out_proj",
}
SHARED = {
    "gate": "mlp.shared_expert.gate_proj",
    "up": "mlp.shared_expert.up_proj",
    "down": "mlp.shared_expert.down_proj",
    SHARED_GATE: "mlp.shared_expert_gate",
}
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "intermediate_size": 512,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
MTP = {"mtp.": "weights of multi-token prediction"}
hf_types.register("qwen3_5_text")(
    HFType(
        "Qwen3_5ForCausalLM",
        "qwennext",
        {**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
        norms=NORMS,
        matrices=APART,
        whole=WHOLE,
        layouts={"delta_conv": CONV},
        partial_rotary=True,
        text_of="qwen3_5",
        left_out={**MTP, "model.visual.": "weights of the vision tower"},
        read=_read,
        write=_write,
        says=_says(joint=False, experts=False, normalizes=False),
    )
)
hf_types.register("qwen3_5_moe_text")(
    HFType(
        "Qwen3_5MoeForCausalLM",
        "qwennext",
        {**DEFAULTS, **EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        norms=NORMS,
        matrices={**APART, **SHARED},
        experts=QWEN_NAMES,
        whole=WHOLE,
        layouts={"delta_conv": CONV},
        partial_rotary=True,
        text_of="qwen3_5_moe",
        left_out={**MTP, "model.visual.": "weights of the vision tower"},
        read=_read_experts,
        write=_write_experts,
        says=_says(joint=False, experts=True, normalizes=True),
    )
)
hf_types.register("qwen3_next")(
    HFType(
        "Qwen3NextForCausalLM",
        "qwennext",
        {**DEFAULTS, **EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
        norms=NORMS,
        matrices={**JOINT, **SHARED},
        experts=QWEN_NAMES,
        whole=WHOLE,
        layouts={"delta_conv": CONV},
        partial_rotary=True,
        left_out=MTP,
        read=_read_experts,
        write=_write_experts,
        says=_says(joint=True, experts=True, normalizes=False),
    )
)
