"""The model of a run: which class, which vocabulary, and the one function that applies it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import linen as nn

from bessemer.config import configure
from bessemer.data import Tokenizer
from bessemer.errors import InputError
from bessemer.registry import models

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


class ModelParts(NamedTuple):
    """`apply(params, *args, method=None, rngs=None)` is the model as objectives see it."""

    model: nn.Module
    tokenizer: Tokenizer | None
    apply: Callable[..., Any]
    counts: dict[str, int]
    flops_per_token: float
    flops_per_token_causal: float


def build_model(trainer: BaseTrainer, tokenizer: Tokenizer | None) -> ModelParts:
    model = trainer.given.model
    if model is None:
        fit_vocabulary(trainer, tokenizer)
        model = configure(trainer.model_class() or models.get(trainer.settings.family))
    if hasattr(model, "check"):
        model.check()
    return describe_model(trainer, model, tokenizer)


def with_model(trainer: BaseTrainer, model: nn.Module) -> ModelParts:
    """The trainer's parts with another module in place of its own, such as one that has learnt of the data."""
    return describe_model(trainer, model, trainer.tokenizer)


def describe_model(trainer: BaseTrainer, model: Any, tokenizer: Tokenizer | None) -> ModelParts:
    block = trainer.settings.block_size
    return ModelParts(
        model,
        tokenizer,
        make_apply(model),
        model.count_parameters(),
        model.flops_per_token(block),
        model.flops_per_token(block, causal=True),
    )


def fit_vocabulary(trainer: BaseTrainer, tokenizer: Tokenizer | None) -> None:
    """model/vocab_size: -1 takes the tokenizer's; a smaller one would index out of the table."""
    if "model/vocab_size" not in trainer.config:
        return
    size = trainer.config["model/vocab_size"]
    if tokenizer is None:
        if size < 1:
            raise InputError(
                "model.vocab_size is not set and there is no tokenizer to take it from; give one of them."
            )
        return
    if size == -1:
        trainer.config.set("model/vocab_size", tokenizer.vocab_size, "the tokenizer's")
    elif size < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size={size}: ids would fall outside the "
            "embedding. Set model.vocab_size=-1 (the tokenizer's), or train a smaller tokenizer."
        )


def make_apply(model: nn.Module) -> Callable[..., Any]:
    def apply(params: Any, *args: Any, method: str | None = None, rngs: Any = None, **kwargs: Any) -> Any:
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply


def flops_share(trainer: BaseTrainer, causal: bool) -> float | None:
    """FLOPs of one token over the peak of all devices; None on a chip without a known peak."""
    chip = trainer.topology.chip
    if chip is None:
        return None
    parts = trainer.model_parts
    flops = parts.flops_per_token_causal if causal else parts.flops_per_token
    return flops / (chip.bf16_flops * trainer.topology.device_count)


def peak_memory() -> dict[str, float]:
    """mem/peak_gib of the busiest local device; empty where the backend does not say (a CPU)."""
    peaks = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return {"mem/peak_gib": max(peaks) / 2**30} if peaks else {}
