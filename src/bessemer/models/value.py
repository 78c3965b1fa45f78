"""A value head beside a model's own: one number a token, for reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bessemer.models.gpt import GPT
from bessemer.models.layers import declare
from bessemer.models.llama import Llama
from bessemer.models.protocol import HeadedModel
from bessemer.registry import models

VALUE_HEAD = "value_head"


class ValueHead(HeadedModel):
    """A family and a vector v: value = h·v of the normed last hidden state h.

    v begins small but not at 0: blocks of a fresh GPT add nothing, so all answers end in the same h, and at v = 0
    neither would ever get a gradient.
    """

    new_parameters: ClassVar[tuple[str, ...]] = (VALUE_HEAD,)
    """Top-level parameters that the weights of `init` may lack; they then begin as they are made."""

    def setup(self) -> None:
        super().setup()
        small = nn.initializers.normal(0.02)
        self.value_head = declare(self, VALUE_HEAD, small, ("embed",), (self.shape.width,))

    def values(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """One number a position, (B, T) float32: what the model thinks of the row up to there."""
        hidden = self._hidden_of(batch, deterministic).astype(jnp.float32)
        return jnp.einsum("btd,d->bt", hidden, self.value_head)

    def count_parameters(self) -> dict[str, int]:
        counts, more = super().count_parameters(), self.shape.width
        return counts | {"scalar": counts.get("scalar", 0) + more, "total": counts["total"] + more}

    def group_of(self, path: tuple[str, ...]) -> str:
        return "scalar" if path[-1] == VALUE_HEAD else super().group_of(path)  # type: ignore[misc]  # of the family


@models.register("gpt-reward")
class RewardGPT(ValueHead, GPT):
    """What starts from the weights of a GPT."""


@models.register("llama-reward")
class RewardLlama(ValueHead, Llama):
    """What starts from those of a model of the llama family."""
