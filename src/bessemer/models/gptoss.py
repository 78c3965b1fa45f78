"""The gpt-oss family: a llama with experts, attention sinks, and biases in attention, router and experts.

    attention   e^s / (e^sink + Σ e^s), a learned sink per head; every other layer slides; YaRN rotary
    router      the experts_active largest of W_r h + b, weighted by the softmax over those
    expert      W_down ((up + 1) · gate · sigmoid(α gate)) + b_down,  gate = min(g, limit), up = clip(u, ±limit)

g and u are the even and the odd columns of one stack, expert_gate_up (E, D, 2F), as files hold it. Files in MXFP4 are
dequantized when they are read (interop/four_bit.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.models.llama import BIASES, ROPE_TYPES, Llama, Vector
from bessemer.models.mixtral import read_experts, write_experts
from bessemer.models.moe import BALANCES, BIAS_AXES, LOGIT_BIAS, SCORES, Routing
from bessemer.models.protocol import ConfigReader, HFType, layer_types
from bessemer.models.transformer import require
from bessemer.registry import hf_types, models
from bessemer.topology.rules import shards

ALPHA, LIMIT, WINDOW = 1.702, 7.0, 128


def clamped_swiglu(alpha: float, limit: float, gate: Array, up: Array) -> Array:
    """(up + 1) · gate · sigmoid(α·gate), gate cut above `limit` and up on both sides."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


@models.register("gptoss")
class GptOss(Llama):
    """gpt-oss: 32 experts (20b) or 128 (120b), 4 of them active."""

    expert_stacks: ClassVar[tuple[str, ...]] = ("expert_gate_up", "expert_down")

    hf_type: str = field("model/hf_type", default="auto", choices=("auto", "gpt_oss"), help="model_type of an export")
    head_dim: int = field("model/head_dim", default=64, minimum=2, help="size of one attention head")
    sliding_window: int = field(
        "model/sliding_window", default=WINDOW, minimum=0, help="keys a sliding layer attends to; 0 = all see all"
    )
    sliding_layers: str = field(
        "model/sliding_layers", default="SL", help="S sliding, L full context; tiled over the layers"
    )
    experts: int = field("model/experts", default=32, minimum=1, help="experts of a feed-forward layer")
    experts_active: int = field("model/experts_active", default=4, minimum=1, help="experts that a token uses")
    expert_score: str = field(
        "architecture/experts/score", default="softmax", choices=SCORES, help="scores of experts from router logits"
    )
    expert_balance: str = field(
        "architecture/experts/balance",
        default="loss",
        choices=BALANCES,
        help="how experts get equal shares of tokens: a bias moved after each step, an auxiliary loss, or not at all",
    )
    attention_bias: str = field(
        "architecture/attention_bias", default="all", choices=BIASES, help="biases of attention: qkv or all"
    )
    rotary_base: float = field("architecture/rotary_base", default=150_000.0, above=1, help="base of frequencies")
    rope_type: str = field(
        "architecture/rope/type", default="default", choices=ROPE_TYPES, help="scaling of rotary frequencies"
    )
    swiglu_alpha: float = field("architecture/swiglu_alpha", default=ALPHA, above=0, help="α of gate · sigmoid(α gate)")
    swiglu_limit: float = field(
        "architecture/swiglu_limit", default=LIMIT, above=0, help="gate and up are clipped at it"
    )

    @property
    def natural_type(self) -> str:
        return "gpt_oss"

    def vector_sizes(self) -> tuple[Vector, ...]:
        sizes, count = self.sizes(), self.experts
        shape = self.expert_shape(self.wide)
        assert shape is not None
        columns = {"expert_gate_up_bias": 2 * shape.width, "expert_down_bias": sizes["width"]}
        return (
            ("sinks", (None,), (sizes["heads"],)),
            (LOGIT_BIAS, (None,), (count,)),
            *((name, axes, (count, columns[name])) for name, axes in BIAS_AXES.items()),
        )

    def check(self) -> None:
        require(self.experts > 0, "model.experts is 0; gpt-oss has experts in every layer. Use model.family=llama.")
        require(
            not self.experts_shared, f"model.experts_shared is {self.experts_shared}; gpt-oss has none. Set it to 0."
        )
        super().check()
        require(
            shards("sequence") == 1,
            f"topology.context={shards('sequence')} splits rows, and attention sinks are for whole ones. Set "
            "topology.context=1.",
        )

    def routing(self) -> Routing | None:
        found = super().routing()
        assert found is not None
        return replace(found, combine=partial(clamped_swiglu, self.swiglu_alpha, self.swiglu_limit))

    def _has_sinks(self) -> bool:
        return True


YARN = {"type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_length": 4096}


def _read(config: ConfigReader, depth: int) -> dict[str, Any]:
    found = {
        **read_experts(config, "intermediate_size", True),
        **config.sliding(depth, [layer % 2 == 0 for layer in range(depth)]),
    }
    for key in ("swiglu_alpha", "swiglu_limit"):
        value = config.real(key)
        if value == 0:
            raise config.refuse(key, "it must be above 0.")
        found[f"architecture/{key}"] = value
    if not config.values.get("rope_parameters") and not config.values.get("rope_scaling"):  # their default
        found |= {f"architecture/rope/{key}": value for key, value in YARN.items()}
    return found


def _write(model: GptOss) -> dict[str, Any]:
    rope = {} if model.rope_type != "default" else {"rope_parameters": _plain_rope(model)}
    return {
        **write_experts(model, "num_local_experts", "intermediate_size"),
        # their masks are made for both kinds of layers, so a window is always said
        "sliding_window": model.sliding_window or WINDOW,
        "layer_types": layer_types(model.shape.windows),
        "swiglu_alpha": model.swiglu_alpha,
        "swiglu_limit": model.swiglu_limit,
        **rope,
    }


def _plain_rope(model: GptOss) -> dict[str, Any]:
    """Said, since their default is YaRN."""
    return {"rope_type": "default", "rope_theta": model.rotary_base}


hf_types.register("gpt_oss")(
    HFType(
        "GptOssForCausalLM",
        "gptoss",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
            "swiglu_alpha": ALPHA,
            "swiglu_limit": LIMIT,
        },
        experts={"router": "mlp.router"},
        whole={
            "sinks": "self_attn.sinks",
            LOGIT_BIAS: "mlp.router.bias",
            "expert_gate_up": "mlp.experts.gate_up_proj",
            "expert_gate_up_bias": "mlp.experts.gate_up_proj_bias",
            "expert_down": "mlp.experts.down_proj",
            "expert_down_bias": "mlp.experts.down_proj_bias",
        },
        read=_read,
        write=_write,
        says=lambda model: {
            "architecture.experts.normalize": model.expert_normalize,
            "architecture.head_norm": not model.head_norm,
        },
    )
)
