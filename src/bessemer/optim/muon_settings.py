"""Muon's settings. None means the preset's number: one word moves them all, and each can be moved alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bessemer.config import field
from bessemer.optim.groups import Group, GroupOf, kind_of
from bessemer.optim.muon_schedules import decay_schedule, momentum_schedule
from bessemer.optim.polar import polar_flops
from bessemer.optim.presets import PRESETS, AdamGroup, preset
from bessemer.optim.schedule import Schedule, StepFunction

REFERENCE_WIDTH = 768


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


@dataclass(frozen=True)
class MuonSettings:
    default_schedule: ClassVar[str] = "trapezoid"

    preset: str = field(
        "optimization/preset", default="classic", choices=tuple(PRESETS), help="tuned set of Muon's numbers"
    )
    matrix_lr: float | None = field(
        "optimization/matrix_lr",
        default=None,
        minimum=0.0,
        help="peak rate of matrices in blocks (none: by preset)",
    )
    embedding_lr: float | None = field(
        "optimization/embedding_lr",
        default=None,
        minimum=0.0,
        help="peak rate of the embedding (none: by preset)",
    )
    unembedding_lr: float | None = field(
        "optimization/unembedding_lr",
        default=None,
        minimum=0.0,
        help="peak rate of the head (none: by preset)",
    )
    value_embedding_lr: float | None = field(
        "optimization/value_embedding_lr",
        default=None,
        minimum=0.0,
        help="peak rate of value embeddings and lookup tables (none: by preset)",
    )
    scalar_lr: float | None = field(
        "optimization/scalar_lr",
        default=None,
        minimum=0.0,
        help="peak rate of ξ; ρ takes a hundredth of it (none: by preset)",
    )
    smear_lr: float | None = field(
        "optimization/smear_lr",
        default=None,
        minimum=0.0,
        help="peak rate of smear and backout (none: by preset)",
    )
    scalar_warmup: int = field(
        "optimization/scalar_warmup",
        default=40,
        minimum=0,
        help="steps over which the rates of ρ, ξ, smear and backout rise from 0 (0: no warmup)",
    )
    lr_multiplier: float = field(
        "optimization/lr_multiplier",
        default=1.0,
        minimum=0.0,
        help="times every rate; the depth dial's √(B/B_ref)",
    )
    weight_decay: float | None = field(
        "optimization/weight_decay",
        default=None,
        minimum=0.0,
        help="cautious decay of matrices (none: by preset)",
    )
    weight_decay_schedule: str | None = field(
        "optimization/weight_decay_schedule",
        default=None,
        choices=("linear", "cosine"),
        help="how that decay goes to 0 (none: by preset)",
    )
    momentum: float | None = field(
        "optimization/momentum",
        default=None,
        minimum=0.0,
        below=1.0,
        help="Muon's momentum (none: by preset)",
    )
    momentum_steps: int | None = field(
        "optimization/momentum_steps", default=None, minimum=0, help="steps from .85 to it (none: by preset)"
    )
    momentum_final: float | None = field(
        "optimization/momentum_final",
        default=None,
        minimum=0.0,
        below=1.0,
        help="momentum at the end of the warmdown (none: by preset)",
    )
    muon_beta2: float = field(
        "optimization/muon_beta2", default=0.9, minimum=0.0, below=1.0, help="decay of Muon's second moment"
    )
    adam_beta1: float = field(
        "optimization/adam_beta1",
        default=0.8,
        minimum=0.0,
        below=1.0,
        help="AdamW groups without their own",
    )
    adam_beta2: float = field(
        "optimization/adam_beta2",
        default=0.95,
        minimum=0.0,
        below=1.0,
        help="AdamW groups without their own",
    )
    eps: float = field("optimization/eps", default=1e-10, minimum=0.0, help="epsilon of the AdamW groups")

    def groups(self, width: int | None = None) -> tuple[Group, ...]:
        """The groups with their peak rates: preset, settings, (width/768)^-½ and the dial's multiplier.

        ρ, ξ, smear and backout start with a rate of 0. While all output projections are 0, the residual stream is a
        multiple of x0, and the final norm removes any factor: the gradients of ρ, ξ and backout are then 0 up to
        rounding (about 1e-8), which Adam would turn into a full step of random sign.
        """
        chosen = preset(self.preset)
        narrow = 1.0 if width is None else (width / REFERENCE_WIDTH) ** -0.5
        wd, _ = self.decay_values()
        xi = _given(self.scalar_lr, chosen.xi.lr)
        rho = chosen.rho.lr if self.scalar_lr is None else 0.01 * self.scalar_lr
        embedding = _given(self.embedding_lr, chosen.embedding.lr)
        value = _given(self.value_embedding_lr, chosen.value_embedding.lr)
        matrix = self.lr_multiplier * _given(self.matrix_lr, chosen.matrix_lr)
        return (
            Group("matrix", matrix, wd, (self.momentum_values()[1], self.muon_beta2)),
            self._adam("head", chosen.head, narrow * _given(self.unembedding_lr, chosen.head.lr)),
            self._adam("embedding", chosen.embedding, narrow * embedding),
            self._adam("value_embedding", chosen.value_embedding, narrow * value),
            self._adam("rho", chosen.rho, rho, self.scalar_warmup),
            self._adam("xi", chosen.xi, xi, self.scalar_warmup),
            self._adam("scalar", chosen.scalar, _given(self.smear_lr, chosen.scalar.lr), self.scalar_warmup),
        )

    def _adam(self, name: str, group: AdamGroup, lr: float, warmup: int = 0) -> Group:
        betas = (_given(group.beta1, self.adam_beta1), _given(group.beta2, self.adam_beta2))
        return Group(name, self.lr_multiplier * lr, group.weight_decay, betas, warmup)

    def label(self, path: tuple[str, ...], leaf: Any, group_of: GroupOf | None) -> str:
        """Matrices and gates to Muon; a gate that is a vector has no polar factor: it goes with scalars."""
        kind = kind_of(path, leaf, group_of)
        if kind == "gate":
            return "matrix" if leaf.ndim == 2 else "scalar"
        return kind

    def momentum_values(self) -> tuple[float, float, int, float]:
        """(start, peak, steps from start to peak, final)."""
        chosen = preset(self.preset)
        peak = _given(self.momentum, chosen.momentum)
        steps = chosen.momentum_steps if self.momentum_steps is None else self.momentum_steps
        faded = chosen.momentum_final if chosen.momentum_final != chosen.momentum else peak
        return min(chosen.momentum_start, peak), peak, steps, min(_given(self.momentum_final, faded), peak)

    def decay_values(self) -> tuple[float, str]:
        """(weight decay of the matrices at step 0, shape of its way to 0)."""
        chosen = preset(self.preset)
        return _given(
            self.weight_decay, chosen.weight_decay
        ), self.weight_decay_schedule or chosen.weight_decay_schedule

    def curves(self, schedule: Schedule, steps: int) -> dict[str, StepFunction]:
        """What else changes with the step, by name, for plans and plots."""
        return {
            "momentum": momentum_schedule(self, schedule, steps),
            "weight_decay": decay_schedule(self, steps),
        }

    def update_flops(self, group: str, shape: tuple[int, ...]) -> float:
        """Matrix FLOPs of updating one parameter: the polar factor's."""
        return polar_flops(shape) if group == "matrix" else 0.0
