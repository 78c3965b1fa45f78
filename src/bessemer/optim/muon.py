"""Muon for the matrices inside blocks, AdamW groups for everything else.

Muon (Jordan 2024) replaces the momentum of a matrix by its polar factor. With it: row equalization, rescaling to the
exact norm, a second moment per output or input unit (NorMuon, arXiv 2510.05491), and cautious decay. Matrices are
(fan_in, fan_out); a parameter with one axis more is a stack of matrices, such as a layer's experts. Matrices of one
shape are stacked for one batched polar step; the state is kept per parameter, so its shardings follow the parameters'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bessemer.config import field
from bessemer.errors import InputError, did_you_mean
from bessemer.optim.schedules import Schedule, StepFunction, as_float, check_steps, ramp_up
from bessemer.optim.state import Spread
from bessemer.optim.transform import CAUTIOUS_HELP, Group, GroupOf, apply_rate, in_float32, kind_of, path_names
from bessemer.registry import optimizers, schedules
from bessemer.topology.chips import backend

# -- presets: rates, decay, momentum and schedule that were tuned together ---------------------------------------------
# `classic` is the long-used set. `july2026` is newer, and better as nanochat reports; its data ratio is 12 tokens per
# scaling parameter (`Preset.ratio`), which the depth dial reads.


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
    """Return the preset of that name; the error for an unknown one names the nearest."""
    if name not in PRESETS:
        hint = did_you_mean(name, list(PRESETS))
        raise InputError(f"unknown optimization.preset '{name}'.{hint} Known: {', '.join(PRESETS)}.")
    return PRESETS[name]


# -- the polar factor, by Polar Express (Amsel et al. 2025, arXiv 2505.16932) ------------------------------------------
# For X = U Σ Vᵀ the result is close to U Vᵀ: every direction of a gradient gets the same weight. Five steps of an odd
# polynomial need matrix products alone. Singular values of at least 1e-3 of the norm end within 1 ± .142.


COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

EPSILON = 1e-6
"""Guards every division: a zero matrix (padding, or a layer without a gradient) stays zero."""


def default_dtype() -> jnp.dtype:
    """Return bf16 on accelerators, float32 on a CPU, where bf16 products are emulated and slower."""
    return jnp.dtype(jnp.float32 if backend() == "cpu" else jnp.bfloat16)


def _norm(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Euclidean norm over `axis`, kept as size one, accumulated in float32."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axis, keepdims=True))


def equalize_rows(x: jax.Array) -> jax.Array:
    """Scale each row to the mean row norm, ‖X‖/√rows, for a better conditioned spectrum.

    x: (..., fan_in, fan_out). A row feeds one output unit, so it runs along fan_in here.
    """
    target = _norm(x, (-2, -1)) / x.shape[-1] ** 0.5
    scale = target / jnp.maximum(_norm(x, -2), EPSILON)
    return x * scale.astype(x.dtype)


def polar_express(x: jax.Array) -> jax.Array:
    """X /= 1.01‖X‖ + 1e-6, then five times X ← aX + X(bA + cA²) with A = XᵀX, or its mirror image when wide.

    x: (..., m, n), any float dtype, in which the products run. The smaller Gram matrix is always taken.
    """
    x = x * (1.0 / (1.01 * _norm(x, (-2, -1)) + EPSILON)).astype(x.dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in COEFFICIENTS:
        xt = jnp.swapaxes(x, -1, -2)
        gram = xt @ x if tall else x @ xt
        mixed = b * gram + c * (gram @ gram)
        x = a * x + (x @ mixed if tall else mixed @ x)
    return x


def polar_flops(shape: tuple[int, ...]) -> float:
    """Return the matrix FLOPs of `polar_express` for each m × n matrix (m ≤ n) of a stack: 4m²n + 2m³ per step."""
    m, n = sorted(shape[-2:])
    return float(math.prod(shape[:-2]) * len(COEFFICIENTS) * (4 * m * m * n + 2 * m**3))


def orthogonalize(x: jax.Array) -> jax.Array:
    """Rows equalized, polar factor, then rescaled to ‖·‖_F = √min(m, n), as if exact. float32 out."""
    y = polar_express(equalize_rows(x)).astype(jnp.float32)
    return y * (min(x.shape[-2:]) ** 0.5 / jnp.maximum(_norm(y, (-2, -1)), EPSILON))


# -- momentum and weight decay by step ---------------------------------------------------------------------------------


def momentum_schedule(settings: MuonSettings, schedule: Schedule, steps: int) -> StepFunction:
    """start → peak over the first steps (0 steps: peak from the start); to the final value over the schedule's decay.

    If both overlap in a short run, the smaller of the two holds, so the momentum never jumps.
    """
    start, peak, ramp, final = settings.momentum_values()
    fade = max(steps - schedule.decay_start, 1)

    def momentum(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        risen = jnp.minimum(i / ramp, 1.0) if ramp else 1.0
        up = start + (peak - start) * risen
        down = peak + (final - peak) * jnp.clip((i - schedule.decay_start) / fade, 0.0, 1.0)
        return jnp.minimum(up, down)

    return momentum


def decay_schedule(settings: MuonSettings, steps: int) -> StepFunction:
    """Weight decay of the matrices, from its full value at step 0 to 0 at N: linear, or half a cosine."""
    wd, shape = settings.decay_values()

    def weight_decay(step: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip(as_float(step) / steps, 0.0, 1.0)
        return wd * (1.0 - progress if shape == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))

    return weight_decay


# -- settings; None means the preset's number --------------------------------------------------------------------------


REFERENCE_WIDTH = 768
NORMALIZED = ("longer", "output", "none")


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


@dataclass(frozen=True)
class MuonSettings:
    default_schedule: ClassVar[str] = "trapezoid"

    preset: str = field(
        "optimization/preset", default="classic", choices=tuple(PRESETS), help="tuned set of Muon's numbers"
    )
    matrix_lr: float | None = field(
        "optimization/matrix_lr", default=None, minimum=0.0, help="peak rate of matrices in blocks (none: by preset)"
    )
    embedding_lr: float | None = field(
        "optimization/embedding_lr", default=None, minimum=0.0, help="peak rate of the embedding (none: by preset)"
    )
    unembedding_lr: float | None = field(
        "optimization/unembedding_lr", default=None, minimum=0.0, help="peak rate of the head (none: by preset)"
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
        "optimization/smear_lr", default=None, minimum=0.0, help="peak rate of smear and backout (none: by preset)"
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
        help="multiplies every rate; the depth dial sets √(B/B_ref)",
    )
    weight_decay: float | None = field(
        "optimization/weight_decay", default=None, minimum=0.0, help="decay of matrices (none: by preset)"
    )
    weight_decay_schedule: str | None = field(
        "optimization/weight_decay_schedule",
        default=None,
        choices=("linear", "cosine"),
        help="how the weight decay falls to 0 (none: by preset)",
    )
    cautious: str = field(
        "optimization/cautious",
        default="matrices",
        choices=("none", "matrices", "all"),
        help=CAUTIOUS_HELP + "of matrices, of none, or in the AdamW groups as well",
    )
    momentum: float | None = field(
        "optimization/momentum", default=None, minimum=0.0, below=1.0, help="Muon's momentum (none: by preset)"
    )
    momentum_steps: int | None = field(
        "optimization/momentum_steps",
        default=None,
        minimum=0,
        help="steps over which momentum rises from .85 (none: by preset)",
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
    muon_normalize: str = field(
        "optimization/muon_normalize",
        default="longer",
        choices=NORMALIZED,
        help="NorMuon's second moment: one per index of the longer axis, one per output unit as in the paper, or none",
    )
    adam_beta1: float = field(
        "optimization/adam_beta1", default=0.8, minimum=0.0, below=1.0, help="β1 of AdamW groups without their own"
    )
    adam_beta2: float = field(
        "optimization/adam_beta2", default=0.95, minimum=0.0, below=1.0, help="β2 of AdamW groups without their own"
    )
    eps: float = field("optimization/eps", default=1e-10, minimum=0.0, help="epsilon of the AdamW groups")

    def groups(self, width: int | None = None) -> tuple[Group, ...]:
        """Return the groups with their peak rates: preset, settings, (width/768)^-½ and the dial's multiplier.

        ρ, ξ, smear and backout start with a rate of 0: while all output projections are 0, the gradients of ρ, ξ and
        backout are only rounding (about 1e-8), which Adam would turn into a full step of random sign.
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
        decay = _given(self.weight_decay, chosen.weight_decay)
        return decay, self.weight_decay_schedule or chosen.weight_decay_schedule

    def curves(self, schedule: Schedule, steps: int) -> dict[str, StepFunction]:
        """Return what else changes with the step, by name, for plans and plots."""
        return {"momentum": momentum_schedule(self, schedule, steps), "weight_decay": decay_schedule(self, steps)}

    def update_flops(self, group: str, shape: tuple[int, ...]) -> float:
        """Matrix FLOPs of updating one parameter: the polar factor's."""
        return polar_flops(shape) if group == "matrix" else 0.0


class MuonState(NamedTuple):
    momentum: Any  # like the parameters
    second: Any  # like the parameters, with size one along the axis that is averaged over


def _averaged_axis(shape: tuple[int, ...], normalize: str) -> int:
    """Return the axis the second moment averages over: the shorter one; fan_in of a square matrix and for `output`."""
    return -2 if normalize == "output" or shape[-1] >= shape[-2] else -1


def _second_like(p: jax.Array, normalize: str) -> jax.Array:
    shape = list(p.shape)
    shape[_averaged_axis(p.shape, normalize)] = 1
    if normalize == "none":
        shape[-2:] = [1, 1]
    return jnp.zeros(shape, jnp.float32)


def orthogonalize_stacked(leaves: list[jax.Array], dtype: jnp.dtype, spread: Spread | None = None) -> list[jax.Array]:
    """Return `orthogonalize` of each leaf, in one batched call per shape; float32.

    A leaf is a matrix (fan_in, fan_out), or a stack of matrices (n, fan_in, fan_out), such as a layer's experts.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        shapes.setdefault(leaf.shape, []).append(index)
    out = list(leaves)
    for shape, members in shapes.items():
        matrices = [leaves[index].astype(dtype) for index in members]
        if len(shape) > 2:
            for index, stack in zip(members, _orthogonalize_stacks(matrices, dtype, spread), strict=True):
                out[index] = stack
            continue
        if spread is None:
            stack = orthogonalize(jnp.stack(matrices))  # (n, fan_in, fan_out)
        else:
            layout = spread.over(len(matrices))
            matrices = [spread.align(matrix) for matrix in matrices]
            matrices += [jnp.zeros_like(matrices[0])] * (-len(matrices) % layout.multiple)
            stack = layout.run(lambda x: orthogonalize(x).astype(dtype), jnp.stack(matrices))
            stack = stack.astype(jnp.float32)  # travels in the compute dtype
        for position, index in enumerate(members):
            out[index] = stack[position]
    return out


def _orthogonalize_stacks(stacks: list[jax.Array], dtype: jnp.dtype, spread: Spread | None) -> list[jax.Array]:
    """Return `orthogonalize` of each matrix of each stack (n, fan_in, fan_out), all stacks in one batched call."""
    count = len(stacks[0])
    joined = jnp.concatenate(stacks)
    if spread is None:
        made = orthogonalize(joined)
    else:
        layout = spread.over(len(joined))
        padded = jnp.pad(joined, ((0, -len(joined) % layout.multiple), (0, 0), (0, 0)))
        made = layout.run(lambda x: orthogonalize(x).astype(dtype), padded).astype(jnp.float32)
    return [made[first : first + count] for first in range(0, len(joined), count)]


def _normalize(g: jax.Array, second: jax.Array, beta2: float, normalize: str) -> tuple[jax.Array, jax.Array]:
    """v ← lerp(v, mean g², 1-β2); g/√v, rescaled so that ‖g‖_F is kept. Returns (g, v). Of a stack: each matrix."""
    if normalize == "none":
        return g, second
    if g.ndim > 2:
        return jax.vmap(lambda g, second: _normalize(g, second, beta2, normalize))(g, second)
    axis = _averaged_axis(g.shape, normalize)
    mean_square = jnp.mean(jnp.square(g), axis=axis, keepdims=True)
    second = second + (1.0 - beta2) * (mean_square - second)
    scale = jax.lax.rsqrt(jnp.maximum(second, 1e-10))
    before = jnp.sqrt(jnp.sum(mean_square))
    after = jnp.sqrt(jnp.sum(mean_square * jnp.square(scale)))
    return g * (scale * (before / jnp.maximum(after, 1e-10))), second


def scale_by_muon(
    momentum: StepFunction,
    beta2: float = 0.9,
    *,
    normalize: str = "longer",
    spread: Spread | None = None,
    compute_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """m ← lerp(m, g, 1-μ); Nesterov lerp(g, m, μ); orthogonalize; second moment. Every leaf is a matrix or a stack.

    The polar step runs in `compute_dtype` (bf16 on accelerators, float32 on a CPU unless given).
    """
    dtype = default_dtype() if compute_dtype is None else jnp.dtype(compute_dtype)

    def init(params: Any) -> MuonState:
        def check(path: Any, p: Any) -> None:
            if p.ndim not in (2, 3):
                raise InputError(
                    f"Muon takes matrices (fan_in, fan_out) and stacks of them, but {'/'.join(path_names(path))} has "
                    f"shape {p.shape}; store it as a matrix, or let group_of give it another group."
                )

        jax.tree_util.tree_map_with_path(check, params)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return MuonState(zeros, jax.tree.map(lambda p: _second_like(p, normalize), params))

    def update(
        updates: Any, state: MuonState, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, MuonState]:
        mu = momentum(step)
        mean = jax.tree.map(lambda m, g: m + (1.0 - mu) * (g - m), state.momentum, updates)
        ahead, tree = jax.tree_util.tree_flatten(jax.tree.map(lambda g, m: g + mu * (m - g), updates, mean))
        polar = orthogonalize_stacked(ahead, dtype, spread)
        pairs = [_normalize(g, v, beta2, normalize) for g, v in zip(polar, jax.tree.leaves(state.second), strict=True)]
        scaled = jax.tree_util.tree_unflatten(tree, [g for g, _ in pairs])
        return scaled, MuonState(mean, jax.tree_util.tree_unflatten(tree, [v for _, v in pairs]))

    return optax.GradientTransformationExtraArgs(init, update)


def apply_matrix_rate(
    rate: StepFunction, weight_decay: StepFunction, cautious: bool = True
) -> optax.GradientTransformationExtraArgs:
    """u → -lr·√max(1, fan_out/fan_in)·u - lr·wd·p; the second only where u·p ≥ 0 if `cautious`."""

    def update(
        updates: Any, state: Any, params: Any = None, *, step: jax.typing.ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        lr, wd = rate(step), weight_decay(step)

        def one(u: jax.Array, p: jax.Array) -> jax.Array:
            stretch = max(1.0, p.shape[-1] / p.shape[-2]) ** 0.5
            return -lr * (stretch * u + (jnp.where(u * p >= 0.0, wd * p, 0.0) if cautious else wd * p))

        return jax.tree.map(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@optimizers.register("muon", settings=(MuonSettings,))
def muon(
    settings: MuonSettings,
    schedule: Schedule,
    steps: int,
    group_of: GroupOf | None = None,
    *,
    width: int | None = None,
    spread: Spread | None = None,
    compute_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for matrices and gates; AdamW with its own rate, betas and decay for each other group.

    width: the model's; AdamW rates of head and embeddings go with (width/768)^-½. spread: how a stack of
    matrices is laid over the mesh for the polar step (`mesh_spread`).
    """
    groups = {group.name: group for group in settings.groups(width)}

    transforms: dict[str, optax.GradientTransformationExtraArgs] = {
        "matrix": optax.chain(
            scale_by_muon(
                momentum_schedule(settings, schedule, steps),
                settings.muon_beta2,
                normalize=settings.muon_normalize,
                spread=spread,
                compute_dtype=compute_dtype,
            ),
            apply_matrix_rate(
                groups["matrix"].rate(schedule), decay_schedule(settings, steps), settings.cautious != "none"
            ),
        )
    }
    for name, group in groups.items():
        if name != "matrix":
            beta1, beta2 = group.betas
            transforms[name] = optax.chain(
                optax.scale_by_adam(beta1, beta2, settings.eps),
                apply_rate(group.rate(schedule), group.weight_decay, cautious=settings.cautious == "all"),
            )

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: settings.label(path_names(path), leaf, group_of), params
        )

    return in_float32(optax.partition(transforms, labels))


# -- Muon's default schedule -----------------------------------------------------------------------------------------


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
        "optimization/warmup_ratio", default=None, minimum=0.0, maximum=1.0, help="warmup as a share of the horizon"
    )
    warmdown_ratio: float | None = field(
        "optimization/warmdown_ratio", default=None, minimum=0.0, maximum=1.0, help="warmdown as a share of the horizon"
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
            warmup = round(shares[0] * steps) if shares else chosen.warmup_steps
        downs = [share for share in (self.warmdown_ratio, self.decay_pct) if share is not None]
        warmdown = round((downs[0] if downs else chosen.warmdown) * steps)
        final = chosen.final_lr_frac if self.final_lr_frac is None else self.final_lr_frac
        return warmup, warmdown, final


@schedules.register("trapezoid", settings=(TrapezoidSettings,))
def trapezoid(settings: TrapezoidSettings, steps: int) -> Schedule:
    """(i+1)/W for i < W; 1 while i ≤ N-D; then p + (1-p)·final with p = (N-i)/D. W warmup, D warmdown of N steps."""
    steps = check_steps(steps)
    warmup, warmdown, final = settings.parts(steps)

    def multiplier(step: jax.typing.ArrayLike) -> jax.Array:
        i = as_float(step)
        p = jnp.clip((steps - i) / max(warmdown, 1), 0.0, 1.0)
        down = jnp.where(i <= steps - warmdown, 1.0, p + (1.0 - p) * final)
        return jnp.where(i < warmup, ramp_up(i, warmup), down)

    return Schedule(multiplier, steps, steps - warmdown, (warmup, steps - warmdown, steps))
