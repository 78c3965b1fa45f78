"""A base for models of your own: write `__call__`, and the trainer can train, validate and count it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.models.cross_entropy import LossOptions, _pick, _statistics, _token_loss, target_weights
from bessemer.models.divergence import Projection
from bessemer.models.token_scores import policy_scores_of, scores_of
from bessemer.topology import unbox


class LanguageModel(nn.Module):
    """A subclass gives `__call__(input_ids, positions, segment_ids, deterministic) -> logits (B, T, V)`.

    Everything else follows from the logits, at the price of holding them whole: GPT's own loss never does.
    Parameters need no axis names; those without are repeated on every device. A model that declares
    `group_of(path)` tells the optimizer which parameter is what; without it names and shapes decide.
    """

    vocab_size: int = field(
        "model/vocab_size", default=-1, minimum=1, also=(-1,), help="tokens; -1 = the tokenizer's"
    )
    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")

    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Logits (B, T, V). input_ids, positions, segment_ids: (B, T); see docs/data.md for what they hold."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(input_ids, ...) -> logits")

    def loss(
        self,
        batch: Mapping[str, Array],
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """(Σ w·loss, Σ w, {"nll": Σ w·nll}). w is `loss_mask` (1 without one), 0 where the target is below 0."""
        if embedding_noise:
            raise InputError(
                f"{type(self).__name__} does not say where its embeddings are, so it cannot add noise to them: set "
                "sft.neftune_alpha=0, or give it a `loss` that takes embedding_noise."
            )
        targets = batch["target_ids"]
        weights = target_weights(batch)
        logits = self._logits_of(batch, deterministic)
        options = LossOptions(logits.shape[-1], 1, label_smoothing=label_smoothing, z_loss=z_loss)
        z, lse = _statistics(options, logits)
        loss, nll = _token_loss(options, z, lse, jnp.maximum(targets, 0))
        return jnp.sum(weights * loss), jnp.sum(weights), {"nll": jnp.sum(weights * nll)}

    def token_logprobs(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """log p(target) per token, (B, T) float32; 0 where the target is below 0."""
        targets = batch["target_ids"]
        logits = self._logits_of(batch, deterministic)
        z, lse = _statistics(LossOptions(logits.shape[-1], 1), logits)
        return jnp.where(targets < 0, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse)

    def token_scores(self, batch: Mapping[str, Array], deterministic: bool = True) -> tuple[Array, Array]:
        """(log p(target), whether the target is the likeliest token), (B, T) each; (0, True) without a target."""
        targets = batch["target_ids"]
        logits = self._logits_of(batch, deterministic)
        return scores_of(LossOptions(logits.shape[-1], 1), logits, targets)

    def projection(self, batch: Mapping[str, Array], deterministic: bool = True) -> Projection:
        """The logits, for losses that compare whole distributions."""
        logits = self._logits_of(batch, deterministic)
        return Projection(logits, None, logits.shape[-1])

    def policy_scores(
        self, batch: Mapping[str, Array], temperature: float = 1.0, deterministic: bool = True
    ) -> tuple[Array, Array]:
        """(log π(target), entropy of π), (B, T) each, of π = softmax(logits / temperature); (0, 0) without a target."""
        logits = self._logits_of(batch, deterministic)
        return policy_scores_of(LossOptions(logits.shape[-1], 1), logits, batch["target_ids"], temperature)

    def _logits_of(self, batch: Mapping[str, Array], deterministic: bool) -> Array:
        positions, segments = batch.get("positions"), batch.get("segment_ids")
        return self(batch["input_ids"], positions, segments, deterministic).astype(jnp.float32)

    def count_parameters(self) -> dict[str, int]:
        """Parameters by group, with "total" and "scaling" (those that multiply activations). No array is made."""
        counts = {"matrix": 0, "embedding": 0, "scalar": 0}
        for path, shape in self._parameter_shapes():
            counts[_kind(path, shape)] += math.prod(shape)
        return {**counts, "total": sum(counts.values()), "scaling": counts["matrix"]}

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """Training FLOPs per token: 6 × matrices. Attention adds to that, in a way only its model knows: override."""
        return 6.0 * self.count_parameters()["scaling"]

    def _parameter_shapes(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        ids = jax.ShapeDtypeStruct((1, min(8, self.block_size)), jnp.int32)
        variables: Any = jax.eval_shape(self.init, jax.random.key(0), ids)
        leaves = jax.tree_util.tree_leaves_with_path(unbox(variables["params"]))
        return [
            (tuple(str(getattr(key, "key", key)) for key in path), tuple(leaf.shape)) for path, leaf in leaves
        ]


def _kind(path: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """Tables of tokens are looked up, not multiplied; whatever has one axis or none is a scale or a bias."""
    if len(shape) < 2:
        return "scalar"
    return "embedding" if any("embed" in name.lower() for name in path) else "matrix"
