"""The gemma family: gemma 2 and the text models of gemma 3. A llama with norms on both sides.

    x = √D · embedding
    x += norm(W_o attention(norm x));  x += norm(W_down (gelu(W_gate h) · W_up h)), h = norm x

Norms multiply by 1 + w. Scores are q·k/√`query_scalar`, in gemma 2 capped to c·tanh(s/c), and so are the logits.
Gemma 3 norms each query and key before rotary, and its sliding layers have a rotary base of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.models.llama import LayerOptions, Llama
from bessemer.models.protocol import BEFORE, ConfigReader, HFType, layer_types
from bessemer.models.transformer import require
from bessemer.registry import hf_types, models

WINDOW = 4096
gelu = partial(jax.nn.gelu, approximate=True)


@models.register("gemma")
class Gemma(Llama):
    """gemma 3; gemma 2 with `head_norm=false`, both caps and `sliding_layers=SL`."""

    norm_offset: ClassVar[float] = 1.0

    hf_type: str = field(
        "model/hf_type", default="auto", choices=("auto", "gemma2", "gemma3_text"), help="model_type of an export"
    )
    tied_head: bool = field("model/tied_head", default=True, help="the head is the embedding table")
    sliding_layers: str = field(
        "model/sliding_layers", default="SSSSSL", help="S sliding, L full context; tiled over the layers"
    )
    head_norm: bool = field(
        "architecture/head_norm", default=True, help="norm with weights of each query and key (gemma 3)"
    )
    norm_epsilon: float = field("architecture/norm_epsilon", default=1e-6, minimum=0, help="ε of the norms")
    query_scalar: float = field(
        "architecture/query_scalar",
        default=0.0,
        minimum=0,
        help="attention scores are q·k / √query_scalar; 0 = head_dim",
    )
    attention_cap: float = field(
        "architecture/attention_cap", default=0.0, minimum=0, help="c·tanh(scores/c); 0 = off (gemma 2: 50)"
    )
    softcap: float = field(
        "architecture/softcap", default=0.0, minimum=0.0, help="c·tanh(logits/c); 0 = off (gemma 2: 30)"
    )

    @property
    def natural_type(self) -> str:
        return "gemma3_text" if self.head_norm else "gemma2"

    def norm_sizes(self) -> dict[str, int]:
        width = self.sizes()["width"]
        return super().norm_sizes() | {"attention_post_norm": width, "mlp_post_norm": width}

    def check(self) -> None:
        super().check()
        for name, value in (("attention_cap", self.attention_cap), ("softcap", self.softcap)):
            require(value >= 0, f"architecture.{name} is {value}; 0 turns it off.")
        require(self.query_scalar >= 0, f"architecture.query_scalar is {self.query_scalar}; 0 stands for head_dim.")

    def _cap(self) -> float:
        return self.softcap

    def _attention_cap(self) -> float:
        return self.attention_cap

    def _embed(self, ids: Array) -> Array:
        return super()._embed(ids) * jnp.asarray(self.shape.width**0.5, self.compute_dtype)

    def _layer_options(self) -> LayerOptions:
        scale = (self.head_dim / self.query_scalar) ** 0.5 if self.query_scalar else 1.0
        return replace(super()._layer_options(), query_scale=scale, activation=gelu)


NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q_norm": BEFORE["q_norm"],
    "k_norm": BEFORE["k_norm"],
}


def _read(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention"):
        raise config.refuse("use_bidirectional_attention", "only causal attention is supported.")
    newer = config.kind == "gemma3_text"
    caps = {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        caps[key] = config.real(key, None)
        if caps[key] == 0:
            raise config.refuse(key, "it must be above 0, or null for none.")
    if newer and caps["attn_logit_softcapping"] is not None:
        raise config.refuse("attn_logit_softcapping", "gemma3_text has none: transformers does not apply it there.")
    scalar = config.real("query_pre_attn_scalar")
    if scalar == 0:
        raise config.refuse("query_pre_attn_scalar", "it must be above 0.")
    period = config.whole("sliding_window_pattern") if newer else 2
    return {
        "architecture/head_norm": newer,
        "architecture/query_scalar": scalar,
        "architecture/attention_cap": caps["attn_logit_softcapping"] or 0.0,
        "architecture/softcap": caps["final_logit_softcapping"] or 0.0,
        **config.sliding(depth, [(layer + 1) % period != 0 for layer in range(depth)]),
    }


def _write(model: Gemma) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": int(model.query_scalar) or model.head_dim,
        "attn_logit_softcapping": model.attention_cap or None,
        "final_logit_softcapping": model.softcap or None,
        # their masks are made for both kinds of layers, so a window is always said
        "sliding_window": model.sliding_window or WINDOW,
        "layer_types": layer_types(model.shape.windows),
    }


def _says(model: Gemma) -> dict[str, bool]:
    return {
        "architecture.query_scalar": float(model.query_scalar).is_integer(),
        "model.heads": model.shape.width % model.shape.heads == 0,  # which its configuration insists on
    }


SHARED = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
}
hf_types.register("gemma2")(
    HFType(
        "Gemma2ForCausalLM",
        "gemma",
        {**SHARED, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=NORMS,
        read=_read,
        write=_write,
        says=lambda model: _says(model) | {"architecture.head_norm": not model.head_norm},
    )
)
hf_types.register("gemma3_text")(
    HFType(
        "Gemma3ForCausalLM",
        "gemma",
        {**SHARED, "max_position_embeddings": 131_072, "sliding_window_pattern": 6},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=NORMS,
        rotary=(1_000_000.0, 10_000.0),
        read=_read,
        write=lambda model: {**_write(model), "rope_local_base_freq": model.rope_local_base or model.rotary_base},
        says=lambda model: (
            _says(model)
            | {"architecture.head_norm": model.head_norm, "architecture.attention_cap": not model.attention_cap}
        ),
    )
)
