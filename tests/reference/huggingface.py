"""Tiny models of every supported type, run by transformers. Makes huggingface.json; run with torch and transformers:

    python tests/reference/huggingface.py

Weights are drawn from their names, so none is stored. Of each gradient its norm and four products with vectors of ±1
are kept: they differ by about as much as the gradients do.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_suffix(".json")
PROMPT, NEW = 5, 64
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**LLAMA3, "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama-biased": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "smollm": {
        "model_type": "llama",
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 12, "num_key_value_heads": 1},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN},
    "smollm3": {  # layer 1 has no positions; one key head for three queries, which are wider than the model
        "model_type": "smollm3",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "no_rope_layers": [1, 0, 1],
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "olmo2": {  # keys are normed over fewer heads than queries
        "model_type": "olmo2",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "olmo3": {  # two sliding layers with a plain table, a full one with yarn
        "model_type": "olmo3",
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}},
    },
    "gemma2": {  # both caps low enough to bend
        "model_type": "gemma2",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "query_pre_attn_scalar": 7,
        "sliding_window": 6,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 23,
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "qwen3-moe": {  # weights of three experts sum to 1
        "model_type": "qwen3_moe",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "rope_parameters": YARN,
    },
    "olmoe": {  # keys are normed over fewer heads than queries; weights as the router gives them
        "model_type": "olmoe",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "gpt-oss": {  # limits low enough to cut; a window, then all keys; one key head for three queries
        "model_type": "gpt_oss",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 1.5,
        "rope_parameters": {**YARN, "truncate": False},
    },
}
CASES |= {
    "qwen3.5": {  # three values to a key; a delta layer behind the full one; rotary on 6 of 20 dimensions
        "model_type": "qwen3_5_text",
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **DELTA,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.3},
    },
    "qwen3-next": {  # two experts' width in the shared one
        "model_type": "qwen3_next",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "full_attention_interval": 2,
        **DELTA,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    },
}
# Compared only where transformers is installed.
MORE: dict[str, dict[str, Any]] = {
    "llama-dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 8, "truncate": False},
    },
    "llama-deep-tied-mqa": {  # logits up to 60: rounding in float32 is then some 1e-4
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "mistral-whole": {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 3},
    "qwen3-biased": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, "use_sliding_window": False},
    "qwen3-sliding": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
    "smollm3-interval": {  # every second layer has no positions and slides
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 6,
        "mlp_bias": True,  # without biases of keys: where nothing turns them, their gradient is 0 and rounding
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "rope_parameters": {**YARN, "rope_theta": 2000.0},
    },
    "olmo2-biased-tied": {"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True},
    "olmo3-default-layers": {"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 7},
    "gemma2-uncapped": {
        "model_type": "gemma2",
        "head_dim": 16,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "full_attention"],
    },
    "gemma3-full": {
        "model_type": "gemma3_text",
        "head_dim": 6,
        "num_hidden_layers": 7,
        "sliding_window": 4,
        "final_logit_softcapping": 12.0,
        "query_pre_attn_scalar": 6,
    },
    "mixtral-whole": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 12},
    "qwen3-moe-biased": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "olmoe-normalized-tied": {
        "model_type": "olmoe",
        "num_experts": 9,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "qwen3.5-moe-tied": {  # one value to a key, every third layer full
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 3,
        "full_attention_interval": 3,
        **DELTA,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 4,
        "head_dim": 24,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
        "tie_word_embeddings": True,
    },
    "qwen3-next-unnormalized": {
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        **DELTA,
        "head_dim": 16,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    },
    "gpt-oss-default-rope": {  # YaRN with whole dimensions left alone, as config.json has it when it says nothing
        "model_type": "gpt_oss",
        "head_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
}


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights called `name`, large enough that every token depends on those before it."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(shape)
    if "norm" in name:
        return (1 + 0.2 * values).astype(np.float32)
    scale = 0.3 if len(shape) < 2 else 1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5
    return (scale * values).astype(np.float32)


def signs(name: str, size: int) -> np.ndarray:
    """(4, size) of ±1."""
    random = np.random.default_rng(zlib.crc32(f"signs of {name}".encode()))
    return random.integers(0, 2, (4, size)) * 2 - 1


def sketch(name: str, gradient: np.ndarray) -> list[float]:
    flat = gradient.astype(np.float64).reshape(-1)
    return [float(np.linalg.norm(flat)), *(float(x) for x in signs(name, flat.size) @ flat)]


def some_ids(size: int, seed: int = 0, length: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, size, (1, length))


def in_files(kind: str, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Views of a parameter of transformers by their names in files, where experts are tensors of their own."""
    stack, _, part = name.rpartition(".experts.")
    if not stack or kind == "gpt_oss":  # whose files hold stacks
        return {name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name: array}
    half = array.shape[1] // 2
    found = {}
    for number, own in enumerate(array):
        if kind == "mixtral":
            names, prefix = ("w1", "w3", "w2"), f"{stack.replace('.mlp', '.block_sparse_moe')}.experts.{number}"
        else:
            names, prefix = ("gate_proj", "up_proj", "down_proj"), f"{stack}.experts.{number}"
        parts = (own[:half], own[half:]) if part == "gate_up_proj" else (own,)
        for theirs, view in zip(names[:2] if part == "gate_up_proj" else names[2:], parts, strict=True):
            found[f"{prefix}.{theirs}.weight"] = view
    return found


def build(case: dict[str, Any]) -> Any:
    """transformers' own model of a case, with the drawn weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**SIZES, **case}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = np.empty(tuple(parameter.shape), np.float32)
            for theirs, part in in_files(config.model_type, name, whole).items():
                part[...] = drawn(theirs, part.shape)
            parameter.copy_(torch.from_numpy(whole))
    return model


def clear_case(model: Any) -> tuple[Any, Any]:
    """Ids, and the greedy continuation of their beginning, in which no second token comes close to the first."""
    import torch

    for seed in range(50):
        ids = torch.from_numpy(some_ids(model.config.vocab_size, seed))
        with torch.no_grad():
            made = model.generate(
                ids[:, :PROMPT],
                attention_mask=torch.ones_like(ids[:, :PROMPT]),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
            top = model(input_ids=made[:, :-1]).logits[0, PROMPT - 1 :].topk(2).values
        if made.shape[1] == PROMPT + NEW and (top[:, 0] - top[:, 1]).min() > 2e-3:
            return ids, made
    raise AssertionError("every prompt has a near tie")


def gradients_of(model: Any) -> dict[str, np.ndarray]:
    """Their gradients by the names of tensors in files."""
    found = {}
    for name, parameter in model.named_parameters():
        found |= in_files(model.config.model_type, name, parameter.grad.numpy())
    return found


def answers(model: Any) -> dict[str, Any]:
    """Logits, gradient sketches of the mean loss, and the greedy continuation of a prompt."""
    ids, made = clear_case(model)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return {
        "ids": ids.tolist(),
        "logits": [[float(f"{x:.7g}") for x in row] for row in output.logits[0].detach().numpy()],
        "gradients": {
            name: [float(f"{x:.8g}") for x in sketch(name, gradient)] for name, gradient in gradients_of(model).items()
        },
        "generated": made[0, PROMPT:].tolist(),
    }


def main() -> None:
    import torch
    import transformers

    stored: dict[str, Any] = {"made_by": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    for name, case in CASES.items():
        model = build(case)
        config = {k: v for k, v in model.config.to_dict().items() if k != "transformers_version"}
        stored[name] = {"config": config, **answers(model)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in stored.items())
    OUT.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
