"""model_types of Hugging Face: what a family tells `interop` about its config.json and the names of its weights.

A family registers one `HFType` per model_type in the file that holds its model:

    hf_types.register("olmo2")(HFType("Olmo2ForCausalLM", "olmo", read=…, write=…, says=…, norms=…))

`interop` reads and writes what all of them share: sizes, the rotary table, tokens, the names of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bessemer.errors import InputError


class ConfigReader(Protocol):
    """A config.json whose values are checked as they are read (interop.config.HFConfig)."""

    values: Mapping[str, Any]

    @property
    def kind(self) -> str: ...
    def refuse(self, key: str, problem: str) -> InputError: ...
    def whole(self, key: str, default: Any = ..., *, least: int = 1, most: int = ...) -> Any: ...
    def real(self, key: str, default: Any = ...) -> Any: ...
    def flag(self, key: str, default: bool = False) -> bool: ...
    def sliding(self, depth: int, default: Sequence[bool]) -> dict[str, Any]: ...


def nothing(*_: Any) -> dict[str, Any]:
    """Return no settings, no keys: a type that has only what all types have."""
    return {}


BEFORE = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
"""Names of the norms of a layer whose norms come before attention and feed-forward."""


@dataclass(frozen=True)
class Layout:
    """How files hold a parameter. shape: ours → theirs; to_ours, to_theirs: of arrays."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class HFType:
    """One model_type.

    defaults: values of keys that a config.json may leave out, as transformers has them; activation: the key of the
    feed-forward's activation and the one value it may have; norms: our name of a layer's norm → theirs; rotary: the
    default bases of full and of sliding layers, for a type whose sliding layers have a rotary table of their own;
    experts: our names of a layer's router and stacks → theirs, {} standing for the number of the expert; whole: our
    names of parameters of a layer that files hold in our layout, stacks in one tensor → their full names; layouts:
    those of them that files hold in a third one; matrices: our names of further matrices → theirs; partial_rotary:
    positions may turn a part of each head; text_of: the multi-modal model_type that holds this one in `text_config`;
    left_out: beginnings of the names of tensors that are not read → what they are.
    read: (config.json, layers) → settings beyond the common ones; write: model → keys beyond the common ones;
    says: model → setting → whether a config.json of this type can say it.
    """

    architecture: str
    family: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    rotary: tuple[float, float] | None = None
    experts: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    matrices: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False
    text_of: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[ConfigReader, int], dict[str, Any]] = nothing
    write: Callable[[Any], dict[str, Any]] = nothing
    says: Callable[[Any], dict[str, bool]] = nothing


def layer_types(windows: Sequence[int | None]) -> list[str]:
    """Return `layer_types` of a config.json for layers with these windows."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
