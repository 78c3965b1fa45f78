"""config.json of a Hugging Face model as our settings, and back. What cannot be said is an error that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bessemer.errors import InputError
from bessemer.models.llama_settings import LlamaSettings
from bessemer.models.rotary import ROPE_TYPES

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LONGEST_CONTEXT = 8192
"""An import's context: caches and tables are made for it. A longer one is asked for."""
ROPE_OF = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}


class HFConfig:
    """A parsed config.json; `where` is its path, for errors."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        found = self.values.get(key)
        return default if found is None else found

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise InputError(f"{self.where} has no '{key}', which its model_type '{self.kind}' needs.")
        return self.values[key]

    def refuse(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key} is {self.get(key)!r}; {problem}")

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type"))

    def settings(self) -> dict[str, Any]:
        """section/name → value: everything that decides the model's shape and what it computes."""
        self._check()
        depth, width, heads = (
            self.need(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        head_dim = self.get("head_dim", 128 if self.kind == "qwen3" else width // heads)
        positions = self.get("max_position_embeddings", 2048)
        biased = {"qwen2": "qkv", "mistral": "none"}.get(
            self.kind, "all" if self.get("attention_bias") else "none"
        )
        window, layers = self._windows(depth)
        return {
            "model/family": "llama",
            "model/hf_type": self.kind,
            "model/depth": depth,
            "model/width": width,
            "model/heads": heads,
            "model/kv_heads": self.get("num_key_value_heads", heads),
            "model/head_dim": head_dim,
            "model/mlp_width": self.need("intermediate_size"),
            "model/vocab_size": self.need("vocab_size"),
            "model/tied_head": bool(self.get("tie_word_embeddings", False)),
            "model/sliding_window": window,
            "model/sliding_layers": layers,
            "model/max_positions": positions,
            "model/end_tokens": self.end_tokens(),
            "architecture/block_size": min(positions, LONGEST_CONTEXT),
            "architecture/attention_bias": biased,
            "architecture/mlp_bias": self.kind == "llama" and bool(self.get("mlp_bias")),
            "architecture/head_norm": self.kind == "qwen3",
            "architecture/norm_epsilon": self.get("rms_norm_eps", 1e-6),
            **self._rotary(positions),
        }

    def _check(self) -> None:
        if self.kind not in CLASSES:
            made = ", ".join(self.get("architectures", [])) or "not said"
            raise InputError(
                f"{self.where}: model_type '{self.kind}' (architectures: {made}) is not supported. Supported: "
                f"{', '.join(CLASSES)} (smollm and smollm2 are llama)."
            )
        if self.get("hidden_act", "silu") != "silu":
            raise self.refuse("hidden_act", "the llama family has silu.")
        if self.get("quantization_config"):
            raise InputError(
                f"{self.where}: quantization_config is set; quantised weights are not read. Take the model's "
                "unquantised files."
            )

    def end_tokens(self) -> list[int]:
        found = self.get("eos_token_id", [])
        return list(found) if isinstance(found, list) else [found]

    def _windows(self, depth: int) -> tuple[int, str]:
        """(keys of a sliding layer, letters of the layers)."""
        off = self.kind == "llama" or (self.kind != "mistral" and not self.get("use_sliding_window", False))
        # Mistral's own default, for a file that leaves the key out; null says that nothing slides
        window = self.values.get("sliding_window", 4096)
        if off or window is None:
            return 0, "S"
        first = 0 if self.kind == "mistral" else self.get("max_window_layers", 28)
        types = self.get(
            "layer_types", ["full_attention"] * min(first, depth) + ["sliding_attention"] * (depth - first)
        )
        if len(types) != depth or not set(types) <= {"full_attention", "sliding_attention"}:
            raise self.refuse(
                "layer_types", f"it must name {depth} layers, sliding_attention or full_attention."
            )
        letters = "".join("S" if name == "sliding_attention" else "L" for name in types)
        if "S" not in letters:
            return 0, "S"
        return window, letters if "L" in letters else "S"

    def _rotary(self, positions: int) -> dict[str, Any]:
        """Newer files hold rope_parameters, older ones rope_theta and rope_scaling."""
        section = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        rope = self.get(section, {})
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES or any(isinstance(value, Mapping) for value in rope.values()):
            raise InputError(
                f"{self.where}: {section} has rope_type {kind!r}: {rope}. Known: {', '.join(ROPE_TYPES)}, one for all "
                "layers; another would turn queries and keys by wrong angles."
            )
        if (rope.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1) != 1:
            raise InputError(f"{self.where}: partial_rotary_factor is not 1, which is not supported.")
        settings = {
            "architecture/rotary_base": rope.get("rope_theta") or self.get("rope_theta", 10_000.0),
            "architecture/rope/type": kind,
        }
        if kind == "default":
            return settings
        original = rope.get("original_max_position_embeddings") or self.get(
            "original_max_position_embeddings", positions
        )
        original = positions if kind == "dynamic" else original
        factor = rope.get("factor") or (positions / original if kind == "yarn" else None)
        missing = [
            key for key in ("low_freq_factor", "high_freq_factor") if kind == "llama3" and key not in rope
        ]
        if factor is None or missing:
            raise InputError(f"{self.where}: {section} of type {kind} has no '{(missing or ['factor'])[0]}'.")
        settings |= {"architecture/rope/factor": factor, "architecture/rope/original_length": original}
        given = {key: rope[key] for key in ROPE_OF[kind] if rope.get(key) is not None}
        return settings | {f"architecture/rope/{key}": value for key, value in given.items()}


def type_of(model: LlamaSettings) -> str:
    """model_type of an export, as asked for or the simplest that says all of the model."""
    chosen = model.hf_type
    if chosen == "auto":
        chosen = "llama" if not model.sliding_window else "mistral"
        chosen = "qwen2" if model.attention_bias == "qkv" else "qwen3" if model.head_norm else chosen
    said = {
        "architecture.head_norm": model.head_norm == (chosen == "qwen3"),
        "architecture.attention_bias": (model.attention_bias == "qkv") == (chosen == "qwen2")
        and (chosen != "mistral" or model.attention_bias == "none"),
        "architecture.mlp_bias": chosen == "llama" or not model.mlp_bias,
        "model.sliding_window": chosen != "llama" or not model.sliding_window,
        "model.sliding_layers": chosen != "mistral"
        or not model.sliding_window
        or model.sliding_layers == "S",
    }
    for setting, can in said.items():
        if not can:
            raise InputError(
                f"transformers' {chosen} has no way to say {setting}={getattr(model, setting.split('.')[1])} of this "
                "model, so it cannot be exported as one. Try model.hf_type=auto; there may be no type for it."
            )
    return chosen


def config_of(model: LlamaSettings, dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model, in the keys that old and new versions of transformers read."""
    s, kind = model.shape, type_of(model)
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": s.vocab_size,
        "hidden_size": s.width,
        "intermediate_size": s.mlp_width,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions_of(model),
        "initializer_range": 0.02,
        "rms_norm_eps": model.norm_epsilon,
        "use_cache": True,
        "tie_word_embeddings": model.tied_head,
        "rope_theta": model.rotary_base,
        "rope_scaling": _scaling(model),
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        **tokens,
    }
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = model.attention_bias == "all"
    if kind == "llama":
        config["mlp_bias"] = model.mlp_bias
    if kind == "mistral":
        config["sliding_window"] = model.sliding_window or None
    if kind.startswith("qwen"):
        slides = bool(model.sliding_window)
        letters = ["sliding_attention" if window else "full_attention" for window in s.windows]
        first = letters.index("sliding_attention") if slides else s.depth
        config |= {"use_sliding_window": slides, "sliding_window": model.sliding_window or None}
        config |= {"max_window_layers": first, "layer_types": letters}
    return config


def positions_of(model: LlamaSettings) -> int:
    return model.max_positions if model.max_positions > 0 else model.block_size


def _scaling(model: LlamaSettings) -> dict[str, Any] | None:
    rope = model.rope
    if rope.type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_length
    values = {key: getattr(rope, key) for key in ROPE_OF[rope.type]}
    derived = ("attention_factor", "mscale", "mscale_all_dim")  # 0: not given
    return scaling | {key: value for key, value in values.items() if value or key not in derived}
