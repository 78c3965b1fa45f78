"""Hugging Face's names for our parameters: one table, which all model types of the llama family share.

Theirs are (fan_out, fan_in), ours (fan_in, fan_out); our tables of tokens are padded to whole 64s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.checkpoint.tree import Signature

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
