"""Rotary frequencies with the scalings in use, by which a model reads further than it was pretrained.

    default   f_i = base^(−2i/d)
    linear    f_i / factor
    dynamic   f_i up to the pretrained length; what follows beyond depends on how long a text is, so it is not offered
    llama3    f_i where a turn takes fewer than L/high tokens, f_i / factor above L/low, blended between
    yarn      f_i where a dimension turns β_fast times in L tokens, f_i / factor below β_slow turns, a ramp between; the
              rotated queries and keys count `attention_factor` times (arXiv 2309.00071)

L is `original_length`, the length of pretraining.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jax import Array

from bessemer.models.blocks import rows_of_table

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`architecture.rope.*` of one model. 0 in the last three: derived (see `attention_scale`)."""

    base: float
    type: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position of each pair, (head_dim/2,) float64."""
        plain = self.base ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        return self._yarn(plain, head_dim) if self.type == "yarn" else plain

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_length * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / self.factor

    def _yarn(self, plain: np.ndarray, head_dim: int) -> np.ndarray:
        def pair_with(turns: float) -> float:
            return (
                head_dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
            )

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high += 0.001 if low == high else 0
        scaled = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return scaled * plain / self.factor + (1 - scaled) * plain

    @property
    def attention_scale(self) -> float:
        """What rotated queries and keys are multiplied with; 1 but for yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor:
            return self.attention_factor

        def scale(strength: float) -> float:
            return 0.1 * strength * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def table(self, positions: Array, length: int, head_dim: int) -> tuple[Array, Array]:
        """cos and sin for `blocks.rotate`: positions (…, T) below `length` → two (…, T, 1, head_dim/2), float32.

        These models turn the other way round than GPT, (x1, x2) → (x1 cos − x2 sin, x2 cos + x1 sin): sin is negative.
        """
        angle = np.arange(length)[:, None] * self.frequencies(head_dim)
        return rows_of_table(
            positions, self.attention_scale * np.cos(angle), -self.attention_scale * np.sin(angle)
        )
