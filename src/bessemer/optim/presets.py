"""Numbers that belong together: Muon's rates, decay, momentum and its schedule, as two tuned sets.

`classic` is the long-used set. `july2026` is the newer one that nanochat reports as better; it also asks for
a data ratio of 12 tokens per scaling parameter (`Preset.ratio`), which the depth dial reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.errors import InputError, nearest


@dataclass(frozen=True)
class AdamGroup:
    """One AdamW group beside Muon. betas None: the settings' `adam_beta1`, `adam_beta2`."""

    lr: float
    beta1: float | None = None
    beta2: float | None = None
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Preset:
    """Everything `optimization.preset` chooses; a setting given by hand wins over it."""

    matrix_lr: float
    weight_decay: float
    weight_decay_schedule: str  # linear | cosine, to 0 at the end
    momentum_start: float
    momentum: float
    momentum_steps: int
    momentum_final: float  # reached at the end of the warmdown; equal to `momentum`: no fade
    head: AdamGroup
    embedding: AdamGroup
    value_embedding: AdamGroup
    rho: AdamGroup
    xi: AdamGroup
    scalar: AdamGroup  # smear and backout
    warmup_steps: int
    warmdown: float
    final_lr_frac: float
    ratio: float


PRESETS: dict[str, Preset] = {
    "classic": Preset(
        matrix_lr=0.02,
        weight_decay=0.2,
        weight_decay_schedule="linear",
        momentum_start=0.85,
        momentum=0.95,
        momentum_steps=300,
        momentum_final=0.95,
        head=AdamGroup(0.004),
        embedding=AdamGroup(0.3),
        value_embedding=AdamGroup(0.15),
        rho=AdamGroup(0.005),
        xi=AdamGroup(0.5, beta1=0.96),
        scalar=AdamGroup(0.2),
        warmup_steps=0,
        warmdown=0.5,
        final_lr_frac=0.0,
        ratio=10.5,
    ),
    "july2026": Preset(
        matrix_lr=0.02,
        weight_decay=0.28,
        weight_decay_schedule="cosine",
        momentum_start=0.85,
        momentum=0.97,
        momentum_steps=400,
        momentum_final=0.90,
        head=AdamGroup(0.008, beta1=0.8, beta2=0.96, weight_decay=0.01),
        embedding=AdamGroup(0.3, beta1=0.8, beta2=0.995, weight_decay=0.001),
        value_embedding=AdamGroup(0.15, beta1=0.8, beta2=0.995, weight_decay=0.01),
        rho=AdamGroup(0.005, weight_decay=0.05),
        xi=AdamGroup(0.5, beta1=0.96),
        scalar=AdamGroup(0.2),
        warmup_steps=40,
        warmdown=0.65,
        final_lr_frac=0.05,
        ratio=12.0,
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name; an unknown one names the nearest."""
    if name not in PRESETS:
        close = nearest(name, list(PRESETS))
        hint = f" Did you mean '{close}'?" if close else ""
        raise InputError(f"unknown optimization.preset '{name}'.{hint} Known: {', '.join(PRESETS)}.")
    return PRESETS[name]
