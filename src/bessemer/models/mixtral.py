"""Mixtral and Qwen3-MoE: llamas whose feed-forward layers are experts, with softmax scores. olmoe.py shares their keys.

Files hold one tensor per expert, which are our stacks (E, fan_in, fan_out) taken apart.
"""

from __future__ import annotations

from typing import Any

from bessemer.models.llama import Llama
from bessemer.models.moe import MOST_EXPERTS
from bessemer.models.protocol import ConfigReader, HFType
from bessemer.registry import hf_types

QWEN_NAMES = {
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}


def read_experts(config: ConfigReader, width: str, normalize: bool) -> dict[str, Any]:
    """Return the settings of experts. width: the key of an expert's width; nothing balances until it is asked for."""
    key = "num_experts" if config.values.get("num_local_experts") is None else "num_local_experts"
    count = config.whole(key, most=MOST_EXPERTS)
    active = config.whole("num_experts_per_tok")
    if active > count:
        raise config.refuse("num_experts_per_tok", f"there are {count} experts.")
    return {
        "model/experts": count,
        "model/experts_active": active,
        "model/experts_shared": 0,
        "model/expert_width": config.whole(width),
        "architecture/experts/score": "softmax",
        "architecture/experts/normalize": normalize,
        "architecture/experts/balance": "none",
        "architecture/experts/aux_loss": config.real("router_aux_loss_coef"),
    }


def write_experts(model: Llama, count: str, width: str) -> dict[str, Any]:
    """Return the keys of experts. count, width: the keys of their number and of an expert's width."""
    shape = model.shape.experts
    assert shape is not None
    return {
        count: shape.count,
        "num_experts_per_tok": shape.active,
        width: shape.width,
        "router_aux_loss_coef": model.expert_aux_loss,
        "output_router_logits": False,
    }


def _window(config: ConfigReader, depth: int) -> dict[str, Any]:
    """All layers slide, or none."""
    if config.values.get("sliding_window") is None:
        return {"model/sliding_window": 0, "model/sliding_layers": "S"}
    return config.sliding(depth, [True] * depth)


def _read_mixtral(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.real("router_jitter_noise", 0.0):
        raise config.refuse("router_jitter_noise", "noise on the input of routers is not supported; set it to 0.")
    return {
        **read_experts(config, "intermediate_size", True),
        **_window(config, depth),
        "architecture/attention_bias": "none",
    }


def _read_qwen3_moe(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.whole("decoder_sparse_step", 1) != 1 or config.values.get("mlp_only_layers"):
        key = "mlp_only_layers" if config.values.get("mlp_only_layers") else "decoder_sparse_step"
        raise config.refuse(key, "models in which some layers have no experts are not supported.")
    slides = config.flag("use_sliding_window")
    off = {"model/sliding_window": 0, "model/sliding_layers": "S"}
    return {
        **read_experts(config, "moe_intermediate_size", config.flag("norm_topk_prob")),
        **(_window(config, depth) if slides else off),
        "architecture/head_norm": True,
    }


def _write_mixtral(model: Llama) -> dict[str, Any]:
    written = write_experts(model, "num_local_experts", "intermediate_size")
    return {**written, "sliding_window": model.sliding_window or None, "router_jitter_noise": 0.0}


def _write_qwen3_moe(model: Llama) -> dict[str, Any]:
    return {
        **write_experts(model, "num_experts", "moe_intermediate_size"),
        "norm_topk_prob": model.expert_normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": bool(model.sliding_window),
        "sliding_window": model.sliding_window or None,
    }


def _says(model: Llama) -> dict[str, bool]:
    return {"model.sliding_layers": not model.sliding_window or None not in model.shape.windows}


hf_types.register("mixtral")(
    HFType(
        "MixtralForCausalLM",
        "llama",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        experts=MIXTRAL_NAMES,
        read=_read_mixtral,
        write=_write_mixtral,
        says=lambda model: (
            _says(model)
            | {
                "architecture.experts.normalize": model.expert_normalize,
                "architecture.attention_bias": model.attention_bias == "none",
                "architecture.head_norm": not model.head_norm,
            }
        ),
    )
)
hf_types.register("qwen3_moe")(
    HFType(
        "Qwen3MoeForCausalLM",
        "llama",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.001,
        },
        experts=QWEN_NAMES,
        read=_read_qwen3_moe,
        write=_write_qwen3_moe,
        says=lambda model: _says(model) | {"architecture.head_norm": model.head_norm},
    )
)
