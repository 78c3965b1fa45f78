"""The depth dial: from a model's size to batch, horizon, learning rates and weight decay, each with its reason.

Pure arithmetic on counts that the model supplies. The reference is a model of depth 12 trained with 2^19 tokens per
step. Counts of tokens are exact integers throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from bessemer.errors import InputError

REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19
FLOOR_DEPTH = 8
BATCH_EXPONENT = 0.383
MOST_STEPS = 2**31 - 1  # the device counts steps in 32 bits
RATIO = 10.5  # tokens per scaling parameter when no horizon is set


@dataclass(frozen=True)
class Derivation:
    """One derived number: the setting or quantity, its value and the reason. given: the caller set it."""

    name: str
    value: Any
    reason: str
    given: bool = False


@dataclass(frozen=True)
class Target:
    """How long to train: the first that is set wins, in this order. tokens: one number, or one per stage."""

    steps: int | None = None
    flops: float | None = None
    tokens: int | Sequence[int] | None = None
    epochs: float | None = None
    ratio: float | None = None

    @property
    def total_tokens(self) -> int | None:
        if self.tokens is None:
            return None
        return int(self.tokens) if isinstance(self.tokens, int | float) else sum(int(t) for t in self.tokens)

    @property
    def given(self) -> str | None:
        """The name of the one that wins."""
        return next((f.name for f in fields(self) if getattr(self, f.name) is not None), None)


@dataclass(frozen=True)
class Sizes:
    """What the horizon is measured in. None: unknown for this model or dataset."""

    scaling_parameters: int | None = None  # N: matrices in blocks + head
    flops_per_token: float | None = None
    epoch_tokens: int | None = None


def _exact(number: float) -> Fraction:
    """Return the number as written: 0.1 is one tenth, 1e18 an integer."""
    return Fraction(str(number))


def _steps(target: Target, batch: int, sizes: Sizes) -> tuple[int, str]:
    """(steps, reason) for the target that wins."""
    each = f"{batch:,} tokens per step"
    if target.steps is not None:
        return int(target.steps), "training.steps, given"
    if target.flops is not None:
        per_token = _needed(sizes.flops_per_token, "the model's FLOPs per token", "training.flops")
        steps = round(_exact(target.flops) / (_exact(per_token) * batch))
        return steps, f"training.flops: {target.flops:.3g} / ({per_token:.4g} a token · {each})"
    if target.total_tokens is not None:
        return target.total_tokens // batch, f"training.tokens: {target.total_tokens:,} // {each}"
    if target.epochs is not None:
        epoch = _needed(sizes.epoch_tokens, "a dataset of known length", "training.epochs")
        steps = int(_exact(target.epochs) * epoch) // batch
        return steps, f"training.epochs: {target.epochs:g} of {epoch:,} tokens // {each}"
    if target.ratio is not None:
        count = _needed(sizes.scaling_parameters, "the model's scaling parameters", "training.ratio")
        steps = int(_exact(target.ratio) * count) // batch
        return steps, f"training.ratio: {target.ratio:g} · {count:,} scaling parameters // {each}"
    raise InputError(
        "no horizon: set training.steps, training.flops, training.tokens, training.epochs or training.ratio."
    )


def _needed(value: Any, what: str, setting: str) -> Any:
    if value is None:
        raise InputError(f"{setting} needs {what}, which is not known here; set training.steps instead.")
    return value


def horizon(target: Target, batch_tokens: int, sizes: Sizes | None = None) -> Derivation:
    """Return the optimizer steps of the run.

    flops: round(target / (FLOPs per token · batch tokens)). tokens, epochs·tokens and ratio·N are divided by the batch
    tokens and rounded down, so no run is longer than asked. Less than one step is an InputError.
    """
    if batch_tokens < 1:
        raise InputError(f"a step of {batch_tokens} tokens trains nothing; raise training.batch_size.")
    steps, reason = _steps(target, batch_tokens, sizes or Sizes())
    if steps < 1:
        raise InputError(
            f"the run would have {steps} steps ({reason}); raise training.{target.given}, or lower training.batch_size."
        )
    if steps > MOST_STEPS:
        raise InputError(
            f"the run would have {steps:,} steps ({reason}), more than can be counted ({MOST_STEPS:,}); lower "
            f"training.{target.given}, or raise training.batch_size."
        )
    return Derivation("training/steps", steps, reason, given=target.given == "steps")


def stage_starts(tokens: Sequence[int], batch_tokens: int) -> list[int]:
    """Return the first step of each stage, from 0. Ends are cumulative tokens // batch, so the sum is exact."""
    ends = [sum(tokens[: k + 1]) // batch_tokens for k in range(len(tokens))]
    starts = [0, *ends[:-1]]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        if end <= start:
            raise InputError(
                f"stage {number} has {tokens[number - 1]:,} tokens, less than one step of {batch_tokens:,}; "
                "raise its entry in training.tokens, or lower training.batch_size."
            )
    return starts


@dataclass(frozen=True)
class Reference:
    """Scaling parameters of the model's family at depth 12 and depth 8, counted without lookup layers."""

    parameters: int  # N(12)
    floor_parameters: int  # N(8)
    ratio: float = RATIO

    @property
    def tokens(self) -> int:
        """D_ref = ratio · N(12)."""
        return int(_exact(self.ratio) * self.parameters)

    def share(self, tokens: int, depth: int) -> tuple[float, str]:
        """(D/D_ref, floored at its depth-8 value below depth 8, since decay would grow without bound; why)."""
        share, floor = tokens / self.tokens, self.floor_parameters / self.parameters
        if depth < FLOOR_DEPTH and share < floor:
            return floor, f"D/D_ref {share:.3g}, floored at depth {FLOOR_DEPTH}'s {floor:.3g}"
        return share, f"D/D_ref {share:.3g}"


def derive_batch(share: float, block_size: int) -> int:
    """Return B = B_ref·(D/D_ref)^.383 in tokens, to the nearest power of two and in whole sequences."""
    power = 2 ** round(math.log2(REFERENCE_BATCH * share**BATCH_EXPONENT))
    return max(1, round(power / block_size)) * block_size


def _planned_tokens(target: Target, ratio: float, sizes: Sizes) -> int:
    """Return D before the batch is known: the tokens that are set, else ratio·N."""
    if target.given == "tokens":
        return target.total_tokens or 0
    if target.epochs is not None and target.given == "epochs" and sizes.epoch_tokens is not None:
        return int(_exact(target.epochs) * sizes.epoch_tokens)
    return int(_exact(ratio) * _needed(sizes.scaling_parameters, "scaling parameters", "the depth dial"))


def _batch(
    target: Target, depth: int, sizes: Sizes, reference: Reference, block_size: int, batch_tokens: int
) -> Derivation:
    """Return the batch that is set, checked, or the derived one."""
    if batch_tokens == -1:
        planned = _planned_tokens(target, reference.ratio, sizes)
        if planned < 1:
            raise InputError("training.tokens is 0: there is nothing to train on; raise it.")
        share, words = reference.share(planned, depth)
        reason = f"2^19 · (D/D_ref)^{BATCH_EXPONENT} to a power of two; {words}"
        return Derivation("training/batch_tokens", derive_batch(share, block_size), reason)
    if batch_tokens < 1 or batch_tokens % block_size:
        raise InputError(
            f"training.batch_tokens={batch_tokens} is not a whole number of sequences of {block_size}; "
            "make it a multiple of architecture.block_size, or -1."
        )
    return Derivation("training/batch_tokens", batch_tokens, "given", given=True)


@dataclass(frozen=True)
class Dial:
    """What the dial derives; `rows` are the same numbers with their reasons, in the order of derivation."""

    batch_tokens: int
    steps: int
    tokens: int
    lr_multiplier: float
    weight_decay: float
    rows: list[Derivation]


def dial(
    target: Target,
    *,
    depth: int,
    sizes: Sizes,
    reference: Reference,
    block_size: int,
    batch_tokens: int = -1,
    weight_decay: float = 0.2,
) -> Dial:
    """Return batch, horizon, learning-rate multiplier and weight decay of a model.

    batch_tokens: -1 derives it. Without a target the reference's ratio holds. Rates are scaled by √(B/B_ref); decay is
    wd·√(B/B_ref)·(D_ref/D) with D the actual horizon, steps·B.
    """
    if target.given is None:
        target = Target(ratio=reference.ratio)
    count = _needed(sizes.scaling_parameters, "scaling parameters", "the depth dial")
    batch = _batch(target, depth, sizes, reference, block_size, batch_tokens)
    steps = horizon(target, batch.value, sizes)
    tokens = steps.value * batch.value
    multiplier = math.sqrt(batch.value / REFERENCE_BATCH)
    share, words = reference.share(tokens, depth)
    decay = weight_decay * multiplier / share
    rows = [
        Derivation("scaling parameters", count, "matrices in blocks + head"),
        Derivation("reference tokens", reference.tokens, f"{reference.ratio:g} · {reference.parameters:,} (depth 12)"),
        batch,
        steps,
        Derivation("training tokens", tokens, f"{steps.value:,} steps · {batch.value:,} tokens"),
        Derivation("tokens : scaling parameters", tokens / count, "training tokens / scaling parameters"),
        Derivation("optimization/lr_multiplier", multiplier, f"√(B/B_ref) = √({batch.value:,} / 2^19)"),
        Derivation("optimization/weight_decay", decay, f"{weight_decay:g} · √(B/B_ref) · D_ref/D; {words}"),
    ]
    return Dial(batch.value, steps.value, tokens, multiplier, decay, rows)


def fine_tuning_rate(parameters: int, share: float = 1.0, adapters: bool = False) -> Derivation:
    """Return AdamW's peak rate for fine-tuning a model of `parameters` parameters.

    All parameters: 2e-5·√(1e9/N), at most 1e-3. Adapters: 2e-4·(1e9/N)^¼, at most 1e-3; QLoRA used 2e-4 for 7B to 13B
    and 1e-4 for 33B to 65B (arXiv:2305.14314). share: the objective's factor (`rate_share`).
    """
    peak, exponent, formula = (2e-4, 0.25, "2e-4·(1e9/N)^¼") if adapters else (2e-5, 0.5, "2e-5·√(1e9/N)")
    rate = share * min(1e-3, peak * (1e9 / parameters) ** exponent)
    part = "" if share == 1.0 else f" · {share:.3g} for the objective"
    trained = "adapters of " if adapters else ""
    reason = f"{formula}, at most 1e-3{part}; {trained}N = {parameters:,} parameters"
    return Derivation("optimization/lr", float(f"{rate:.2g}"), reason)
