"""config.json of a Hugging Face model as our settings, and back. A key without an equivalent raises an error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.config import declared, dotted
from bessemer.errors import InputError
from bessemer.interop.four_bit import check_method, is_mxfp4
from bessemer.models.llama import ROPE_TYPES, Llama
from bessemer.models.moe import AXES as STACKS
from bessemer.models.moe import ROUTER
from bessemer.models.protocol import HFType, Layout, layer_types
from bessemer.models.transformer import MOST_LAYERS
from bessemer.registry import hf_types
from bessemer.storage.weights import Signature

OWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Types of the llama family: what sets them apart is in this file."""
LONGEST_CONTEXT = 8192
"""An import's context: caches and tables are made for it. A longer one is asked for."""
LARGEST = 2**31 - 1
"""Of any count in a config.json: sizes, positions, token ids."""
OUTSIDE = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")
"""Keys of a multi-modal config.json that hold for its text model."""
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
        self.where = where
        values = self._text_of(values)
        kind = str(values.get("model_type"))
        self.values = {**hf_types.get(kind).defaults, **values} if kind in hf_types else values

    def _text_of(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a multi-modal configuration says of its text model."""
        names = [
            entry.name for entry in hf_types if entry.value.text_of and entry.value.text_of == values.get("model_type")
        ]
        if not names:
            return values
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise InputError(f"{self.where}: model_type '{values['model_type']}' needs 'text_config', an object.")
        outside = {key: values[key] for key in OUTSIDE if values.get(key) is not None}
        return {**text, **outside, "model_type": names[0]}

    def refuse(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key} is {_shown(self._at(key))}; {problem}")

    def _at(self, key: str) -> Any:
        """Return the value of a key, `section.key` for one in a section; None where it is missing or null."""
        found: Any = self.values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def _given(self, key: str, default: Any) -> Any:
        """Return the value, or the default; without one, a missing key is an error."""
        found = self._at(key)
        if found is None and default is _NEEDED:
            raise InputError(f"{self.where} has no '{key}', which its model_type '{self.kind}' needs.")
        return default if found is None else found

    def whole(self, key: str, default: Any = _NEEDED, *, least: int = 1, most: int = LARGEST) -> Any:
        """Return an integer in [least, most], or the default."""
        found = self._given(key, default)
        if found is default:
            return found
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise self.refuse(key, f"it must be an integer from {least} to {most:,}.")
        return found

    def real(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a finite number of at least 0, or the default."""
        found = self._given(key, default)
        if found is default:
            return found
        # an integer of 400 digits is below infinity and yet no float
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= sys.float_info.max:
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
        head_dim = self.whole("head_dim", width // heads)
        if head_dim < 2 or head_dim % 2:
            raise InputError(
                f"{self.where}: head_dim is {head_dim} (hidden_size {width}, num_attention_heads {heads}); "
                "rotary positions turn pairs, so it must be even and at least 2."
            )
        positions = self.whole("max_position_embeddings", 2048)
        biased = {"qwen2": "qkv", "mistral": "none"}.get(self.kind, "all" if self.flag("attention_bias") else "none")
        return {
            "model/family": hf_types.get(self.kind).family,
            "model/hf_type": self.kind,
            "model/depth": depth,
            "model/width": width,
            "model/heads": heads,
            "model/kv_heads": kv_heads,
            "model/head_dim": head_dim,
            "model/mlp_width": self.whole("intermediate_size"),
            "model/vocab_size": self.whole("vocab_size"),
            "model/tied_head": self.flag("tie_word_embeddings"),
            **self._windows(depth),
            **self._positionless(depth),
            "model/max_positions": positions,
            "model/end_tokens": self.end_tokens(),
            "architecture/block_size": min(positions, LONGEST_CONTEXT),
            "architecture/attention_bias": biased,
            "architecture/mlp_bias": self.kind in ("llama", "smollm3") and self.flag("mlp_bias"),
            "architecture/head_norm": self.kind == "qwen3",
            "architecture/norm_epsilon": self.real("rms_norm_eps", 1e-6),
            **self._rotaries(positions),
            **hf_types.get(self.kind).read(self, depth),
        }

    def known_kind(self) -> str:
        """Return the model_type; InputError if it is not supported."""
        if self.kind not in hf_types:
            named = self.values.get("architectures")
            made = ", ".join(map(str, named)) if isinstance(named, list) else ""
            raise InputError(
                f"{self.where}: model_type '{self.kind}' (architectures: {made or 'none listed'}) is not supported. "
                f"Supported: {', '.join(hf_types.names())} (smollm and smollm2 are llama)."
            )
        return self.kind

    def _check(self) -> None:
        self.known_kind()
        key, value = hf_types.get(self.kind).activation
        if self.text(key, value) != value:
            raise self.refuse(key, f"{self.kind} has {value}.")
        self.quantization()

    def quantization(self) -> str:
        """Return nf4 (bitsandbytes), mxfp4 (gpt-oss) or none; InputError for weights quantized in another way."""
        if not self._at("quantization_config"):
            return "none"
        section = self.section("quantization_config")
        if self.kind == "gpt_oss" and is_mxfp4(section):
            return "mxfp4"
        return "nf4" if check_method(section, self.where) else "none"

    def end_tokens(self) -> list[int]:
        found = self._given("eos_token_id", [])
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST for i in ids):
            raise self.refuse("eos_token_id", "it must be a token id of at least 0, or a list of them.")
        return list(ids)

    def _windows(self, depth: int) -> dict[str, Any]:
        """Return which layers use sliding windows, in the llama family."""
        if self.kind == "smollm3":
            return self._smollm3_windows(depth)
        off = self.kind not in ("mistral", "qwen2", "qwen3")
        off = off or (self.kind != "mistral" and not self.flag("use_sliding_window"))
        if off or self._at("sliding_window") is None:  # null says that nothing slides
            return {"model/sliding_window": 0, "model/sliding_layers": "S"}
        first = min(0 if self.kind == "mistral" else self.whole("max_window_layers", 28, least=0), depth)
        return self.sliding(depth, [False] * first + [True] * (depth - first))

    def sliding(self, depth: int, default: Sequence[bool]) -> dict[str, Any]:
        """sliding_window and layer_types as settings. default: whether each layer slides, for a file without them."""
        names = {True: "sliding_attention", False: "full_attention"}
        types = self._given("layer_types", [names[slides] for slides in default])
        if not isinstance(types, list) or len(types) != depth or any(name not in names.values() for name in types):
            raise self.refuse("layer_types", f"it must name {depth} layers, sliding_attention or full_attention.")
        letters = "".join("S" if name == names[True] else "L" for name in types)
        if "S" not in letters:
            return {"model/sliding_window": 0, "model/sliding_layers": "S"}
        pattern = letters if "L" in letters else "S"
        return {"model/sliding_window": self.whole("sliding_window"), "model/sliding_layers": pattern}

    def _smollm3_windows(self, depth: int) -> dict[str, Any]:
        """Layers without positions slide, unless layer_types says otherwise and use_sliding_window that none does."""
        slides = self.flag("use_sliding_window") and self._at("sliding_window") is not None
        letters = self._positionless(depth)["model/rotary_layers"] * depth
        found = self.sliding(depth, [slides and letter == "N" for letter in letters[:depth]])
        if found["model/sliding_window"] and not slides:
            # their masks follow layer_types and their kernels use_sliding_window: two models under one configuration
            raise self.refuse("layer_types", "it names sliding layers, and use_sliding_window is not true.")
        return found

    def _positionless(self, depth: int) -> dict[str, Any]:
        """Return which layers have rotary positions: no_rope_layers (1: they have), or all but every interval-th."""
        if self.kind != "smollm3":
            return {"model/rotary_layers": "R"}
        interval = self.whole("no_rope_layer_interval", 4)
        listed = self._given("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(depth)])
        if not isinstance(listed, list) or len(listed) < depth or any(mark not in (0, 1) for mark in listed):
            raise self.refuse("no_rope_layers", f"it must be a list of 0 and 1 for {depth} layers, 1 for rotary.")
        letters = "".join("R" if mark else "N" for mark in listed[:depth])
        return {"model/rotary_layers": letters if "N" in letters else "R"}

    def _rotaries(self, positions: int) -> dict[str, Any]:
        """Newer files hold rope_parameters, older ones rope_theta and rope_scaling."""
        bases, newer = hf_types.get(self.kind).rotary, bool(self._at("rope_parameters"))
        if bases is None:
            base = self.real("rope_theta", 10_000.0)
            return self._rotary(positions, "rope_parameters" if newer else "rope_scaling", base)
        full, local = self.real("rope_theta", bases[0]), self.real("rope_local_base_freq", bases[1])
        if not newer:
            return {**self._rotary(positions, "rope_scaling", full), "architecture/rope/local_base": local}
        parts = ("full_attention", "sliding_attention")
        unknown = [key for key in self.section("rope_parameters") if key not in parts]
        if unknown:
            raise self.refuse("rope_parameters", f"'{unknown[0]}' is not one of {' and '.join(parts)}.")
        first, second = (
            self._rotary(positions, f"rope_parameters.{part}", base)
            for part, base in zip(parts, (full, local), strict=True)
        )
        if first == second:
            return {**first, "architecture/rope/local_base": 0.0}
        if second["architecture/rope/type"] != "default":
            raise self.refuse(
                f"rope_parameters.{parts[1]}", "sliding layers are not scaled, or as the full layers are."
            )
        return {**first, "architecture/rope/local_base": second["architecture/rotary_base"]}

    def _rotary(self, positions: int, section: str, base: float) -> dict[str, Any]:
        """Return the table that a section describes; base: where it says none."""
        rope = self.section(section)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES or any(isinstance(value, Mapping) for value in rope.values()):
            raise InputError(
                f"{self.where}: {section} has rope_type {_shown(kind)}: {_shown(rope)}. Known: "
                f"{', '.join(ROPE_TYPES)}, one for all layers; another would turn queries and keys by wrong angles."
            )
        for key in ("partial_rotary_factor", f"{section}.partial_rotary_factor"):
            if self.real(key, 1) != 1 and not hf_types.get(self.kind).partial_rotary:
                raise self.refuse(key, "only 1 is supported.")
        base = self.real(f"{section}.rope_theta", None) or base
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
    """Return the beginning of a file's value for an error, so that a huge one stays one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def type_of(model: Llama) -> str:
    """model_type of an export, as asked for or the simplest that says all of the model."""
    chosen = model.natural_type if model.hf_type == "auto" else model.hf_type
    for setting, can in (_says(chosen, model) | hf_types.get(chosen).says(model)).items():
        if not can:
            raise InputError(
                f"transformers' {chosen} cannot express {setting}={_value(model, setting)} of this "
                "model, so it cannot be exported as one. Try model.hf_type=auto; there may be no type for it."
            )
    return chosen


def _value(model: Llama, setting: str) -> Any:
    """Return the value of a setting, by its dotted name."""
    names = {dotted(declaration.key): name for name, declaration in declared(type(model)).items()}
    return getattr(model, names[setting])


def _says(kind: str, model: Llama) -> dict[str, bool]:
    """Setting of the llama family → whether a config.json of this type can say it."""
    return {
        "architecture.head_norm": kind not in OWN or model.head_norm == (kind == "qwen3"),
        "architecture.attention_bias": (model.attention_bias == "qkv") == (kind == "qwen2")
        and (kind != "mistral" or model.attention_bias == "none"),
        "architecture.mlp_bias": kind in ("llama", "smollm3") or not model.mlp_bias,
        "model.sliding_window": kind != "llama" or not model.sliding_window,
        "model.sliding_layers": kind != "mistral" or not model.sliding_window or model.sliding_layers == "S",
        "model.rotary_layers": kind == "smollm3" or None not in model.ropes,
        "architecture.rope.local_base": hf_types.get(kind).rotary is not None or not model.rope_local_base,
        "model.experts": bool(hf_types.get(kind).experts) == bool(model.experts),
        "model.experts_shared": not (model.experts and model.experts_shared),
        "model.expert_groups": not (model.experts and model.expert_groups),
        "architecture.experts.score": not model.experts or model.expert_score == "softmax",
        "architecture.experts.balance": not model.experts or model.expert_balance != "bias",
    }


def config_of(model: Llama, dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model, in the keys that old and new versions of transformers read."""
    s, kind = model.shape, type_of(model)
    activation, value = hf_types.get(kind).activation
    config: dict[str, Any] = {
        "architectures": [hf_types.get(kind).architecture],
        "model_type": kind,
        "vocab_size": s.vocab_size,
        "hidden_size": s.width,
        "intermediate_size": s.mlp_width,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        activation: value,
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
    if kind not in ("mistral", "qwen2"):
        config["attention_bias"] = model.attention_bias == "all"
    if kind in ("llama", "smollm3"):
        config["mlp_bias"] = model.mlp_bias
    if kind == "mistral":
        config["sliding_window"] = model.sliding_window or None
    if kind in ("qwen2", "qwen3", "smollm3"):
        types = layer_types(s.windows)
        slides = "sliding_attention" in types
        config |= {"use_sliding_window": slides, "sliding_window": model.sliding_window if slides else None}
        if kind == "smollm3":
            config["no_rope_layers"] = [int(rope is not None) for rope in model.ropes]
        else:
            config["max_window_layers"] = types.index("sliding_attention") if slides else s.depth
        config["layer_types"] = types
    if hf_types.get(kind).rotary:
        full = {"rope_type": "default", **(_scaling(model) or {}), "rope_theta": model.rotary_base}
        local = {"rope_type": "default", "rope_theta": model.rope_local_base} if model.rope_local_base else full
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return config | hf_types.get(kind).write(model)


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


# Hugging Face's names for our parameters. All types share those of matrices and tables; a layer's norms and experts
# have names by type (HFType.norms, HFType.experts).
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
EXPERTS = (ROUTER, *STACKS)  # named by type (HFType.experts)
TOP = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER: dict[str, str] = {
    **{name: f"{theirs}.weight" for name, theirs in MATRICES.items()},
    **{f"{name}_bias": f"{theirs}.bias" for name, theirs in MATRICES.items()},
}
HEAD = TOP["head"]
BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Saved by old versions beside the weights; they follow from the configuration."""


def their_name(name: str, kind: HFType | None = None, expert: int | None = None) -> str:
    """blocks_3/q → model.layers.3.self_attn.q_proj.weight. kind: the type, if norms or experts are asked for."""
    block, _, part = name.rpartition("/")
    if not block:
        return TOP[name]
    inner = LAYER.get(part, "")
    if kind is not None and part in kind.norms:
        inner = f"{kind.norms[part]}.weight"
    elif kind is not None and part in kind.whole:
        inner = kind.whole[part]
    elif kind is not None and part in kind.matrices:
        inner = f"{kind.matrices[part]}.weight"
    elif kind is not None and part in kind.experts:
        inner = f"{kind.experts[part].format(expert)}.weight"
    return f"model.layers.{block.removeprefix('blocks_')}.{inner}"


@dataclass(frozen=True)
class Tensor:
    """One parameter in both layouts, or one expert's part of a stack (E, m, n)."""

    ours: str
    theirs: str
    shape: tuple[int, ...]  # ours
    vocab_size: int
    expert: int | None = None
    whole: bool = False  # files hold it in our layout (HFType.whole)
    layout: Layout | None = None
    matrix: bool = False  # one of HFType.matrices

    @property
    def turned(self) -> bool:
        return not self.whole and self._is_matrix

    @property
    def _is_matrix(self) -> bool:
        return self.matrix or self.ours == "head" or self.ours.rpartition("/")[2] in (*MATRICES, *EXPERTS)

    @property
    def their_shape(self) -> tuple[int, ...]:
        if self.layout is not None:
            return self.layout.shape(self.shape)
        own = self.shape if self.expert is None else self.shape[1:]
        shape = own[::-1] if self.turned else own
        return (self.vocab_size, *shape[1:]) if self.ours in ("embedding", "head") else shape

    def to_ours(self, array: np.ndarray) -> np.ndarray:
        """Return the parameter, or the matrix of one expert, from their array."""
        if self.layout is not None:
            return self.layout.to_ours(array)
        if self.ours in ("embedding", "head"):
            rows = (self.shape[1] if self.turned else self.shape[0]) - self.vocab_size
            array = np.pad(array, ((0, rows), (0, 0))) if rows else array
        return array.T if self.turned else array

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Return their array from our parameter; of a stack, that of one expert."""
        if self.layout is not None:
            return self.layout.to_theirs(array)
        array = array if self.expert is None else array[self.expert]
        array = array.T if self.turned else array
        return array[: self.vocab_size] if self.ours in ("embedding", "head") else array


def tensors_of(shapes: Signature, model: Llama) -> dict[str, Tensor]:
    """Return every tensor by their name, in the order of the layers. `shapes`: of our parameters, by our name."""
    kind = hf_types.get(type_of(model))

    found = []
    for name, (_, shape) in shapes.items():
        part = name.rpartition("/")[2]
        layout = (part in kind.whole, kind.layouts.get(part), part in kind.matrices)
        for expert in range(shape[0]) if len(shape) > 2 and part not in kind.whole else (None,):
            theirs = their_name(name, kind, expert)
            found.append(Tensor(name, theirs, tuple(shape), model.vocab_size, expert, *layout))
    return {tensor.theirs: tensor for tensor in sorted(found, key=_order)}


def _order(tensor: Tensor) -> tuple[int, int, str, int]:
    """Return the key to sort by when writing: by layer, and the experts of a stack one after the other."""
    if tensor.ours in TOP:
        return (0 if tensor.ours == "embedding" else 2, 0, tensor.theirs, 0)
    block = int(tensor.ours.split("/")[0].removeprefix("blocks_"))
    return (1, block, tensor.theirs, 0) if tensor.expert is None else (1, block, tensor.ours, tensor.expert)


class TreeArrays:
    """A tree of parameters as named arrays (see checkpoint.weights.Arrays); `fetch` brings one from its devices."""

    def __init__(self, leaves: Mapping[str, Any], fetch: Callable[[Any], Any] = np.asarray):
        self.leaves, self.fetch = leaves, fetch

    def signature(self) -> Signature:
        return {name: (str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for name, leaf in self.leaves.items()}

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.fetch(self.leaves[name]))
