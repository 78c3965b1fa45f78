"""Reward models: a family with a value head, one number per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bessemer.models.gemma import Gemma
from bessemer.models.gpt import GPT
from bessemer.models.gptoss import GptOss
from bessemer.models.layers import declare
from bessemer.models.llama import Llama
from bessemer.models.olmo import Olmo
from bessemer.models.olmoe import Olmoe
from bessemer.models.qwennext import QwenNext
from bessemer.models.transformer import Transformer
from bessemer.registry import models

VALUE_HEAD = "value_head"


class ValueHead(Transformer):
    """Adds a vector v to a family: value = h·v of the normed last hidden state h.

    v starts small but not at 0: blocks of a fresh GPT add nothing, so all answers end in the same h, and at v = 0
    neither would ever get a gradient.
    """

    new_parameters: ClassVar[tuple[str, ...]] = (VALUE_HEAD,)

    def setup(self) -> None:
        super().setup()
        small = nn.initializers.normal(0.02)
        self.value_head = declare(self, VALUE_HEAD, small, ("embed",), (self.shape.width,))

    def values(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """Return one number per position, (B, T) float32: the value of the row up to there."""
        hidden, _ = self._hidden_of(batch, deterministic)
        return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), self.value_head)

    def count_parameters(self) -> dict[str, int]:
        counts, more = super().count_parameters(), self.shape.width
        return counts | {"scalar": counts.get("scalar", 0) + more, "total": counts["total"] + more}

    def group_of(self, path: tuple[str, ...]) -> str:
        return "scalar" if path[-1] == VALUE_HEAD else super().group_of(path)  # type: ignore[safe-super]


@models.register("gpt-reward")
class RewardGPT(ValueHead, GPT):
    """Starts from the weights of a GPT."""


@models.register("llama-reward")
class RewardLlama(ValueHead, Llama):
    """Starts from the weights of a llama-family model."""


@models.register("olmo-reward")
class RewardOlmo(ValueHead, Olmo):
    """Starts from the weights of an olmo."""


@models.register("gemma-reward")
class RewardGemma(ValueHead, Gemma):
    """Starts from the weights of a gemma."""


@models.register("gptoss-reward")
class RewardGptOss(ValueHead, GptOss):
    """Starts from the weights of a gpt-oss."""


@models.register("olmoe-reward")
class RewardOlmoe(ValueHead, Olmoe):
    """Starts from the weights of an olmoe."""


@models.register("qwennext-reward")
class RewardQwenNext(ValueHead, QwenNext):
    """Starts from the weights of a qwen3-next or qwen3.5."""
