"""The llama family: llama 2 and 3, mistral, qwen2, qwen3, smollm. Norms with weights, SwiGLU, rotary with scalings.

    x += W_o attention(norm x);  x += W_down (silu(W_gate h) · W_up h), h = norm x

Matrices are stored (fan_in, fan_out), blocks_0/q, blocks_0/k, …, as in GPT; `interop` knows Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.models import blocks
from bessemer.models.attention import attention
from bessemer.models.axes import constrain
from bessemer.models.cache import Cache
from bessemer.models.headed import AttendAt
from bessemer.models.layers import AXES as MATRIX_AXES
from bessemer.models.layers import declare
from bessemer.models.llama_settings import LlamaSettings, LlamaShape, check_llama
from bessemer.models.stack import Stream, run_layers
from bessemer.registry import models

AXES = {**MATRIX_AXES, "gate": MATRIX_AXES["up"]}
NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "norm")
INIT = 0.02  # deviation of fresh matrices and tables, as these models are begun
BIASED = {"none": (), "qkv": ("q", "k", "v"), "all": ("q", "k", "v", "out")}

Attend = Callable[[Array, Array, Array], Array]
Params = dict[str, Array]


def norm(x: Array, weight: Array, epsilon: float) -> Array:
    """w · x / √(mean(x²) + ε) over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * r * weight).astype(x.dtype)


class LlamaBlock(nn.Module):
    """Declares the parameters of one layer."""

    shape: LlamaShape
    biased: tuple[str, ...]
    head_norm: bool

    @nn.compact
    def __call__(self) -> Params:
        s = self.shape
        sizes = {
            "q": (s.width, s.query_width),
            "k": (s.width, s.kv_width),
            "v": (s.width, s.kv_width),
            "out": (s.query_width, s.width),
            "gate": (s.width, s.mlp_width),
            "up": (s.width, s.mlp_width),
            "down": (s.mlp_width, s.width),
        }
        normal, ones, zeros = nn.initializers.normal(INIT), nn.initializers.ones, nn.initializers.zeros
        params = {name: declare(self, name, normal, AXES[name], size) for name, size in sizes.items()}
        for name in self.biased:
            params[f"{name}_bias"] = declare(self, f"{name}_bias", zeros, (None,), sizes[name][1:])
        norms = {"attention_norm": s.width, "mlp_norm": s.width}
        if self.head_norm:
            norms |= {"q_norm": s.head_dim, "k_norm": s.head_dim}
        return params | {name: declare(self, name, ones, (None,), (size,)) for name, size in norms.items()}


@dataclass(frozen=True)
class LayerOptions:
    """The static part of a layer."""

    head_dim: int
    dtype: Any
    epsilon: float
    dropout: float


def layer(
    options: LayerOptions,
    params: Params,
    x: Array,
    rotary: tuple[Array, Array],
    attend: Attend,
    keys: Array | None,
) -> Array:
    """x: (B, T, D) → (B, T, D)."""
    first, second = (None, None) if keys is None else (blocks.fold_in(keys, 0), blocks.fold_in(keys, 1))
    h = norm(x, params["attention_norm"], options.epsilon)
    x = x + blocks.dropout(_attention(options, params, h, rotary, attend), options.dropout, first)
    x = checkpoint_name(x, "residual")
    h = norm(x, params["mlp_norm"], options.epsilon)
    x = x + blocks.dropout(_feed_forward(options, params, h), options.dropout, second)
    return constrain(x, "batch", "sequence", "embed_act")


def _attention(
    options: LayerOptions, params: Params, h: Array, rotary: tuple[Array, Array], attend: Attend
) -> Array:
    q, k, v = (_heads(options, params, name, h) for name in ("q", "k", "v"))
    q, k = (blocks.rotate(x, *rotary).astype(x.dtype) for x in (q, k))
    q = constrain(q, "batch", "sequence", "heads", None)
    k, v = (constrain(x, "batch", "sequence", "kv", None) for x in (k, v))
    out = checkpoint_name(attend(q, k, v), "attention")
    return _linear(options, params, "out", out.reshape(*out.shape[:2], -1))


def _heads(options: LayerOptions, params: Params, name: str, h: Array) -> Array:
    """(B, T, D) → (B, T, heads, head_dim), normed where the model has a norm for it."""
    y = checkpoint_name(_linear(options, params, name, h), name)
    y = y.reshape(*y.shape[:2], -1, options.head_dim)
    weight = params.get(f"{name}_norm")
    return y if weight is None else norm(y, weight, options.epsilon)


def _feed_forward(options: LayerOptions, params: Params, h: Array) -> Array:
    gate = constrain(_linear(options, params, "gate", h), "batch", "sequence", "mlp")
    up = constrain(_linear(options, params, "up", h), "batch", "sequence", "mlp")
    return _linear(options, params, "down", checkpoint_name(jax.nn.silu(gate) * up, "mlp_hidden"))


def _linear(options: LayerOptions, params: Params, name: str, x: Array) -> Array:
    y = blocks.linear(x, params[name], AXES[name], options.dtype)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)


@models.register("llama")
class Llama(LlamaSettings):
    """Any open model of the family, trained and sampled like a GPT. Methods: see HeadedModel."""

    def check(self) -> None:
        """Raise InputError when the settings contradict each other; before anything is compiled."""
        check_llama(self)

    def group_of(self, path: tuple[str, ...]) -> str:
        """The optimizer group of a parameter: norms and biases train at the rate of scales near 1."""
        name = path[-1]
        if name in NORMS or name.endswith("_bias"):
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
        self.blocks = [LlamaBlock(s, biased, self.head_norm) for _ in range(s.depth)]
        self.norm = declare(self, "norm", nn.initializers.ones, (None,), (s.width,))

    def hidden(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        keys: Array | None = None,
    ) -> Array:
        if positions is None:
            positions = jnp.arange(input_ids.shape[1])[None]
        documents = segment_ids if self.document_mask else None
        dropping = self.dropout > 0 and not deterministic
        if keys is None and (dropping or embedding_noise > 0):
            keys = blocks.row_keys(self.make_rng("dropout"), jnp.arange(len(input_ids)))
        x = self._embed(input_ids)
        if keys is not None and embedding_noise > 0:
            x = blocks.add_noise(x, embedding_noise, keys)
        keys = keys if dropping else None
        x = constrain(x, "batch", "sequence", "embed_act")
        rotary = self.rope.table(positions, max(self.block_size, x.shape[1]), self.head_dim)
        options = self._layer_options()

        def step(window: int | None, params: Params, index: Array, stream: Stream) -> Stream:
            attend = partial(attention, window=window, segment_ids=documents, implementation=self.attention)
            layer_keys = None if keys is None else blocks.fold_in(keys, index)
            return layer(options, params, stream[0], rotary, attend, layer_keys), stream[1]

        params = [block() for block in self.blocks]
        x, _ = run_layers(
            step, lambda _, x: x, params, self.shape.windows, x, scan=self.scan_layers, remat=self.remat
        )
        return norm(x, self.norm, self.norm_epsilon)

    def _decode_layers(
        self, input_ids: Array, cache: Cache, positions: Array, attend: AttendAt
    ) -> tuple[Array, Array]:
        embedded = x = self._embed(input_ids)
        # Where every layer slides, the cache is shorter than the text; padding may lie beyond either.
        length = max(self.block_size, cache.capacity) + input_ids.shape[1]
        rotary = self.rope.table(positions, length, self.head_dim)
        for index, block in enumerate(self.blocks):
            x = layer(self._layer_options(), block(), x, rotary, attend(index), None)
        return norm(x, self.norm, self.norm_epsilon), embedded[..., : cache.previous.shape[-1]]

    def _embed(self, ids: Array) -> Array:
        return blocks.lookup(self.embedding, ids, ("vocab", None), self.compute_dtype)

    def _head(self) -> Array:
        return self.embedding.T if self.tied_head else self.head

    def _layer_options(self) -> LayerOptions:
        return LayerOptions(self.head_dim, self.compute_dtype, self.norm_epsilon, self.dropout)
