"""A model of your own: gated causal convolutions in place of attention.

    bessemer train quickstart plugins=[examples/custom_model.py] model.family=convolution --name convolution

Each block mixes the last `kernel` positions, with a dilation that doubles from block to block, so that `layers` blocks
see 1 + (kernel − 1)·(2^layers − 1) tokens. `bm.LanguageModel` adds the loss, log-probabilities, parameter counts and
FLOPs. The optional features of a model are in bessemer/models/protocol.py.
"""

from __future__ import annotations

import flax.linen as nn

import bessemer as bm
from bessemer.registry import models


@models.register("convolution")
class Convolution(bm.LanguageModel):
    """vocab_size and block_size come from the base class."""

    width: int = bm.field("model/width", default=128, minimum=1, help="size of the hidden state")
    layers: int = bm.field("model/layers", default=6, minimum=1, help="blocks; each doubles the reach")
    kernel: int = bm.field("model/kernel", default=3, minimum=2, help="positions that one block mixes")

    @nn.compact
    def __call__(self, input_ids, positions=None, segment_ids=None, deterministic=True):
        """input_ids: (B, T) → logits (B, T, V)."""
        x = nn.Embed(self.vocab_size, self.width, name="embed")(input_ids)  # (B, T, D)
        for layer in range(self.layers):
            x = x + self.block(x, dilation=2**layer, name=f"block_{layer}")
        return nn.Dense(self.vocab_size, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))

    def block(self, x, dilation, name):
        """Return h ⊙ σ(g), projected back: (B, T, D) → (B, T, D)."""
        h = nn.RMSNorm(name=f"{name}_norm")(x)
        mixed = nn.Conv(2 * self.width, (self.kernel,), kernel_dilation=dilation, padding="CAUSAL", name=name)(h)
        value, gate = mixed[..., : self.width], mixed[..., self.width :]
        return nn.Dense(self.width, use_bias=False, name=f"{name}_out")(value * nn.sigmoid(gate))
