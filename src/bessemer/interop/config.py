"""config.json of a Hugging Face model as our settings, and back. What cannot be said is an error that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.models.llama import ROPE_TYPES, Llama
from bessemer.models.transformer import MOST_LAYERS
from bessemer.storage.weights import Signature

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LONGEST_CONTEXT = 8192
"""An import's context: caches and tables are made for it. A longer one is asked for."""
LARGEST = 2**31 - 1
"""Of any count in a config.json: sizes, positions, token ids."""
_NEEDED: Any = object()
ROPE_OF = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}


class HFConfig:
    """A parsed config.json; `where` is its path, for errors.

    The file may come from anybody: every value is read through `whole`, `real`, `flag`, `text` or `section`, which
    check its type and range and name the key, before anything is built or allocated from it.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def refuse(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key} is {_shown(self._at(key))}; {problem}")

    def _at(self, key: str) -> Any:
        """The value of a key, `section.key` for one in a section; None where it is missing or null."""
        found: Any = self.values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def _given(self, key: str, default: Any) -> Any:
        """The value, or the default; without one, a missing key is an error."""
        found = self._at(key)
        if found is None and default is _NEEDED:
            raise InputError(f"{self.where} has no '{key}', which its model_type '{self.kind}' needs.")
        return default if found is None else found

    def whole(self, key: str, default: Any = _NEEDED, *, least: int = 1, most: int = LARGEST) -> Any:
        """An integer in [least, most], or the default."""
        found = self._given(key, default)
        if found is default:
            return found
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise self.refuse(key, f"it must be an integer from {least} to {most:,}.")
        return found

    def real(self, key: str, default: Any = _NEEDED) -> Any:
        """A finite number of at least 0, or the default."""
        found = self._given(key, default)
        if found is default:
            return found
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise self.refuse(key, "it must be a finite number of at least 0.")
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false; a string such as "false" is refused, since it would count as true."""
        found = self._given(key, default)
        if not isinstance(found, bool):
            raise self.refuse(key, "it must be true or false, without quotes.")
        return found

    def text(self, key: str, default: str) -> str:
        found = self._given(key, default)
        if not isinstance(found, str):
            raise self.refuse(key, "it must be a string.")
        return found

    def section(self, key: str) -> Mapping[str, Any]:
        found = self._given(key, {})
        if not isinstance(found, Mapping):
            raise self.refuse(key, "it must be an object, or null.")
        return found

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type"))

    def settings(self) -> dict[str, Any]:
        """section/name → value: everything that decides the model's shape and what it computes."""
        self._check()
        depth = self.whole("num_hidden_layers", most=MOST_LAYERS)
        width, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        if kv_heads > heads or heads % kv_heads:
            raise self.refuse("num_key_value_heads", f"it must divide num_attention_heads, which is {heads} here.")
        head_dim = self.whole("head_dim", 128 if self.kind == "qwen3" else width // heads)
        if head_dim < 2 or head_dim % 2:
            raise InputError(
                f"{self.where}: head_dim is {head_dim} (hidden_size {width}, num_attention_heads {heads}); "
                "rotary positions turn pairs, so it must be even and at least 2."
            )
        positions = self.whole("max_position_embeddings", 2048)
        biased = {"qwen2": "qkv", "mistral": "none"}.get(self.kind, "all" if self.flag("attention_bias") else "none")
        window, layers = self._windows(depth)
        return {
            "model/family": "llama",
            "model/hf_type": self.kind,
            "model/depth": depth,
            "model/width": width,
            "model/heads": heads,
            "model/kv_heads": kv_heads,
            "model/head_dim": head_dim,
            "model/mlp_width": self.whole("intermediate_size"),
            "model/vocab_size": self.whole("vocab_size"),
            "model/tied_head": self.flag("tie_word_embeddings"),
            "model/sliding_window": window,
            "model/sliding_layers": layers,
            "model/max_positions": positions,
            "model/end_tokens": self.end_tokens(),
            "architecture/block_size": min(positions, LONGEST_CONTEXT),
            "architecture/attention_bias": biased,
            "architecture/mlp_bias": self.kind == "llama" and self.flag("mlp_bias"),
            "architecture/head_norm": self.kind == "qwen3",
            "architecture/norm_epsilon": self.real("rms_norm_eps", 1e-6),
            **self._rotary(positions),
        }

    def _check(self) -> None:
        if self.kind not in CLASSES:
            named = self.values.get("architectures")
            made = ", ".join(map(str, named)) if isinstance(named, list) else ""
            raise InputError(
                f"{self.where}: model_type '{self.kind}' (architectures: {made or 'not said'}) is not supported. "
                f"Supported: {', '.join(CLASSES)} (smollm and smollm2 are llama)."
            )
        if self.text("hidden_act", "silu") != "silu":
            raise self.refuse("hidden_act", "the llama family has silu.")
        if self._at("quantization_config"):
            raise InputError(
                f"{self.where}: quantization_config is set; quantised weights are not read. Take the model's "
                "unquantised files."
            )

    def end_tokens(self) -> list[int]:
        found = self._given("eos_token_id", [])
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in ids):
            raise self.refuse("eos_token_id", "it must be a token id of at least 0, or a list of them.")
        return list(ids)

    def _windows(self, depth: int) -> tuple[int, str]:
        """(keys of a sliding layer, letters of the layers)."""
        off = self.kind == "llama" or (self.kind != "mistral" and not self.flag("use_sliding_window"))
        # Mistral's own default, for a file that leaves the key out; null says that nothing slides
        if off or ("sliding_window" in self.values and self.values["sliding_window"] is None):
            return 0, "S"
        window = self.whole("sliding_window", 4096)
        first = min(0 if self.kind == "mistral" else self.whole("max_window_layers", 28, least=0), depth)
        types = self._given("layer_types", ["full_attention"] * first + ["sliding_attention"] * (depth - first))
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != depth or any(name not in known for name in types):
            raise self.refuse("layer_types", f"it must name {depth} layers, sliding_attention or full_attention.")
        letters = "".join("S" if name == "sliding_attention" else "L" for name in types)
        if "S" not in letters:
            return 0, "S"
        return window, letters if "L" in letters else "S"

    def _rotary(self, positions: int) -> dict[str, Any]:
        """Newer files hold rope_parameters, older ones rope_theta and rope_scaling."""
        section = "rope_parameters" if self._at("rope_parameters") else "rope_scaling"
        rope = self.section(section)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES or any(isinstance(value, Mapping) for value in rope.values()):
            raise InputError(
                f"{self.where}: {section} has rope_type {_shown(kind)}: {_shown(rope)}. Known: "
                f"{', '.join(ROPE_TYPES)}, one for all layers; another would turn queries and keys by wrong angles."
            )
        for key in ("partial_rotary_factor", f"{section}.partial_rotary_factor"):
            if self.real(key, 1) != 1:
                raise self.refuse(key, "only 1 is supported.")
        base = self.real(f"{section}.rope_theta", None) or self.real("rope_theta", 10_000.0)
        settings = {"architecture/rotary_base": base, "architecture/rope/type": kind}
        if kind == "default":
            return settings
        length = "original_max_position_embeddings"
        original = self.whole(f"{section}.{length}", None) or self.whole(length, positions)
        original = positions if kind == "dynamic" else original
        factor = self.real(f"{section}.factor", None) or (positions / original if kind == "yarn" else None)
        missing = [key for key in ("low_freq_factor", "high_freq_factor") if kind == "llama3" and key not in rope]
        if factor is None or missing:
            raise InputError(f"{self.where}: {section} of type {kind} has no '{(missing or ['factor'])[0]}'.")
        settings |= {"architecture/rope/factor": factor, "architecture/rope/original_length": original}
        for key in ROPE_OF[kind]:
            if rope.get(key) is not None:
                name = f"{section}.{key}"
                settings[f"architecture/rope/{key}"] = self.flag(name) if key == "truncate" else self.real(name)
        return settings


def _shown(value: Any) -> str:
    """A value of a file in an error: its beginning, so that a huge one stays one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def type_of(model: Llama) -> str:
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
        "model.sliding_layers": chosen != "mistral" or not model.sliding_window or model.sliding_layers == "S",
    }
    for setting, can in said.items():
        if not can:
            raise InputError(
                f"transformers' {chosen} has no way to say {setting}={getattr(model, setting.split('.')[1])} of this "
                "model, so it cannot be exported as one. Try model.hf_type=auto; there may be no type for it."
            )
    return chosen


def config_of(model: Llama, dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
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


def positions_of(model: Llama) -> int:
    return model.max_positions if model.max_positions > 0 else model.block_size


def _scaling(model: Llama) -> dict[str, Any] | None:
    rope = model.rope
    if rope.type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_length
    values = {key: getattr(rope, key) for key in ROPE_OF[rope.type]}
    derived = ("attention_factor", "mscale", "mscale_all_dim")  # 0: not given
    return scaling | {key: value for key, value in values.items() if value or key not in derived}


# Hugging Face's names for our parameters: one table, which all model types of the llama family share.
#
# Theirs are (fan_out, fan_in), ours (fan_in, fan_out); our tables of tokens are padded to whole 64s.


MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
TOP = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER: dict[str, str] = {
    **{name: f"{theirs}.weight" for name, theirs in (MATRICES | NORMS).items()},
    **{f"{name}_bias": f"{theirs}.bias" for name, theirs in MATRICES.items()},
}
HEAD = TOP["head"]
BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Saved by old versions beside the weights; they follow from the configuration."""


def their_name(name: str) -> str:
    """blocks_3/q → model.layers.3.self_attn.q_proj.weight."""
    block, _, part = name.rpartition("/")
    return f"model.layers.{block.removeprefix('blocks_')}.{LAYER[part]}" if block else TOP[name]


@dataclass(frozen=True)
class Tensor:
    """One parameter in both layouts."""

    ours: str
    shape: tuple[int, ...]  # ours
    vocab_size: int

    @property
    def theirs(self) -> str:
        return their_name(self.ours)

    @property
    def turned(self) -> bool:
        return self.ours == "head" or self.ours.rpartition("/")[2] in MATRICES

    @property
    def their_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.turned else self.shape
        return (self.vocab_size, *shape[1:]) if self.ours in ("embedding", "head") else shape

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        if self.ours in ("embedding", "head"):
            rows = (self.shape[1] if self.turned else self.shape[0]) - self.vocab_size
            array = np.pad(array, ((0, rows), (0, 0))) if rows else array
        return array.T if self.turned else array

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        array = array.T if self.turned else array
        return array[: self.vocab_size] if self.ours in ("embedding", "head") else array


def tensors_of(shapes: Signature, vocab_size: int) -> dict[str, Tensor]:
    """Every parameter by their name, in the order of the layers. `shapes`: of our parameters, by our name."""
    found = [Tensor(name, tuple(shape), vocab_size) for name, (_, shape) in shapes.items()]
    return {tensor.theirs: tensor for tensor in sorted(found, key=_order)}


def _order(tensor: Tensor) -> tuple[int, int, str]:
    if tensor.ours in TOP:
        return (0 if tensor.ours == "embedding" else 2, 0, tensor.theirs)
    return (1, int(tensor.ours.split("/")[0].removeprefix("blocks_")), tensor.theirs)


class TreeArrays:
    """A tree of parameters as named arrays (see checkpoint.weights.Arrays); `fetch` brings one from its devices."""

    def __init__(self, leaves: Mapping[str, Any], fetch: Callable[[Any], Any] = np.asarray):
        self.leaves, self.fetch = leaves, fetch

    def signature(self) -> Signature:
        return {name: (str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for name, leaf in self.leaves.items()}

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.fetch(self.leaves[name]))
