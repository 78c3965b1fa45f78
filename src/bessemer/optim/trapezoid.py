"""`trapezoid`: up, flat, down; Muon's default schedule."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bessemer.config import field
from bessemer.optim.muon import PRESETS, preset
from bessemer.optim.schedules import Schedule, as_float, check_steps, ramp_up, share_of
from bessemer.registry import schedules


@dataclass(frozen=True)
class TrapezoidSettings:
    """None means the preset's value. warmup_ratio and warmdown_ratio win over training's shares."""

    preset: str = field(
        "optimization/preset", default="classic", choices=tuple(PRESETS), help="tuned set of Muon's numbers"
    )
    warmup_steps: int | None = field(
        "optimization/warmup_steps", default=None, minimum=0, help="warmup in steps; wins over the shares"
    )
    warmup_ratio: float | None = field(
        "optimization/warmup_ratio",
        default=None,
        minimum=0.0,
        maximum=1.0,
        help="warmup as a share of the horizon",
    )
    warmdown_ratio: float | None = field(
        "optimization/warmdown_ratio",
        default=None,
        minimum=0.0,
        maximum=1.0,
        help="warmdown as a share of the horizon",
    )
    warmup_pct: float | None = field(
        "training/warmup_pct",
        default=None,
        minimum=0.0,
        maximum=1.0,
        help="share of the horizon spent warming up (none: by preset)",
    )
    decay_pct: float | None = field(
        "training/decay_pct",
        default=None,
        minimum=0.0,
        maximum=1.0,
        help="share of the horizon spent decaying (none: by preset)",
    )
    final_lr_frac: float | None = field(
        "optimization/final_lr_frac",
        default=None,
        minimum=0.0,
        maximum=1.0,
        help="share of the peak rate at the end (none: by preset)",
    )

    def parts(self, steps: int) -> tuple[int, int, float]:
        """(warmup steps W, warmdown steps D, final share), the first given of each winning."""
        chosen = preset(self.preset)
        shares = [share for share in (self.warmup_ratio, self.warmup_pct) if share is not None]
        if self.warmup_steps is not None:
            warmup = self.warmup_steps
        else:
            warmup = share_of(shares[0], steps) if shares else chosen.warmup_steps
        downs = [share for share in (self.warmdown_ratio, self.decay_pct) if share is not None]
        warmdown = share_of(downs[0] if downs else chosen.warmdown, steps)
        final = chosen.final_lr_frac if self.final_lr_frac is None else self.final_lr_frac
        return warmup, warmdown, final


@schedules.register("trapezoid", settings=(TrapezoidSettings,))
def trapezoid(settings: TrapezoidSettings, steps: int) -> Schedule:
    """W = round(warmup·N), D = round(warmdown·N): (i+1)/W for i < W; 1 while i ≤ N-D; then
    p + (1-p)·final with p = (N-i)/D."""
    steps = check_steps(steps)
    warmup, warmdown, final = settings.parts(steps)

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        p = jnp.clip((steps - i) / max(warmdown, 1), 0.0, 1.0)
        down = jnp.where(i <= steps - warmdown, 1.0, p + (1.0 - p) * final)
        return jnp.where(i < warmup, ramp_up(i, warmup), down)

    return Schedule(multiplier, steps, steps - warmdown, (warmup, steps - warmdown, steps))
