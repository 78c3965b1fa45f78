"""GRPO and its family: policy gradients from groups of completions of one prompt.

For completion i of a group, token t, advantage A_i (`group_advantages`), ρ = π_θ / π_old of the token:

    L_t = −min(ρ·A, clip(ρ, 1 − ε_lo, 1 + ε_hi)·A) + β·KL_t − c·H_t   d = log π_θ − log π_ref

    KL_t:  squared d²;  k1 d;  k3 exp(−d) − 1 + d                    (Schulman 2020, "Approximating KL divergence")
    H_t:   entropy of π_θ before the token; c is grpo.entropy_coef, by default 0
    loss:  token  Σ L_t / Σ tokens;   sequence  mean_i (Σ_t L_t / tokens_i);   fixed  Σ L_t / (rows · longest)

π_old is the policy that sampled, at its temperature; π_ref a frozen copy. All three denominators are sums over the
global batch. Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO
(2507.18071), RLOO (2402.14740), REINFORCE (Williams 1992).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.config import field
from bessemer.data.rows.rows import COMPLETIONS
from bessemer.errors import InputError
from bessemer.losses.exact_scores import exact_scores, value_of
from bessemer.models.moe import EXPERT_IDS
from bessemer.objectives import Apply, Batch, Sums
from bessemer.registry import objectives

TOKENS = "trained_tokens"
"""Name of Σ mask: every other metric is a sum over these tokens, whatever the loss is divided by."""


@dataclass(frozen=True)
class SampledSettings:
    """How completions are sampled; for every objective with the trait `rollouts`."""

    temperature: float = field(
        "grpo/temperature",
        default=1.0,
        minimum=1e-3,
        help="sampling temperature; with rewards also that of the trained policy",
    )
    max_completion_length: int = field(
        "grpo/max_completion_length", default=64, minimum=1, help="tokens of a completion at most"
    )


@dataclass(frozen=True)
class GrpoSettings(SampledSettings):
    """Settings of the loss and the advantages. A variant is the same class with other defaults."""

    clip_eps: float = field("grpo/clip_eps", default=0.2, minimum=0, help="ε of the ratio's clip; 0 = no clip")
    clip_eps_high: float | None = field(
        "grpo/clip_eps_high", default=None, minimum=0, help="ε above 1; none: the same as clip_eps"
    )
    kl_coef: float = field(
        "grpo/kl_coef", default=0.01, minimum=0, help="β of the KL to the reference; 0 = no reference is kept"
    )
    kl_estimator: str = field(
        "grpo/kl_estimator", default="squared", choices=("squared", "k1", "k3"), help="how the KL is estimated"
    )
    ratio: str = field(
        "grpo/ratio",
        default="token",
        choices=("token", "sequence"),
        help="ρ of each token, or the geometric mean over the completion",
    )
    normalization: str = field(
        "grpo/normalization",
        default="token",
        choices=("token", "sequence", "fixed"),
        help="what the sum of token losses is divided by",
    )
    baseline: str = field(
        "grpo/baseline",
        default="group",
        choices=("group", "leave_one_out", "rollout", "none"),
        help="what is taken off a reward: mean of its group, of the others in it, of the whole rollout, nothing",
    )
    scale: bool = field("grpo/scale", default=True, help="divide advantages by the group's standard deviation")
    overlong: str = field(
        "grpo/overlong",
        default="keep",
        choices=("keep", "mask"),
        help="completions cut at max_completion_length: train on them, or leave their tokens out",
    )
    overlong_penalty: float = field(
        "grpo/overlong_penalty",
        default=0.0,
        minimum=0,
        help="taken off the reward at max_completion_length, less over the overlong_buffer tokens before it; 0 = off",
    )
    overlong_buffer: int | None = field(
        "grpo/overlong_buffer",
        default=None,
        minimum=1,
        help="tokens below max_completion_length over which overlong_penalty rises; none: a fifth of it",
    )
    entropy_coef: float = field(
        "grpo/entropy_coef", default=0.0, minimum=0, help="weight of the policy's entropy, which is maximized; 0 = off"
    )
    entropy_target: float | None = field(
        "grpo/entropy_target",
        default=None,
        above=0,
        help="nats per token that entropy_coef is adapted to, as part of the saved state; none: it is constant",
    )
    entropy_rate: float = field(
        "grpo/entropy_rate", default=1e-3, above=0, help="change of the coefficient per step and nat off the target"
    )
    entropy_coef_max: float = field(
        "grpo/entropy_coef_max", default=0.1, above=0, help="the largest coefficient that the target may lead to"
    )
    offline: str = field(
        "grpo/offline",
        default="no",
        choices=("no", "reference", "logprobs"),
        help="train on stored completions: ρ is to the reference, or to their stored log-probabilities",
    )
    exact: bool = field(
        "grpo/exact",
        default=False,
        help="sampler and trainer read whole rows, one at a time, and agree bit for bit on a CPU in float32; slower",
    )

    @property
    def buffer(self) -> int:
        """The tokens below the longest completion over which the penalty rises."""
        return -(-self.max_completion_length // 5) if self.overlong_buffer is None else self.overlong_buffer

    @property
    def clip(self) -> tuple[float, float]:
        """(ε_lo, ε_hi); infinite without a clip."""
        if self.clip_eps == 0:
            return float("inf"), float("inf")
        return self.clip_eps, self.clip_eps if self.clip_eps_high is None else self.clip_eps_high


def needs_reference(settings: GrpoSettings) -> bool:
    return settings.kl_coef > 0 or settings.offline == "reference"


def grpo(
    apply: Apply,
    params: Any,
    batch: Batch,
    key: Array | None,
    settings: GrpoSettings,
    reference: Any = None,
    entropy_offset: Array | None = None,
) -> Sums:
    """(Σ loss, Σ weight, sums over tokens) of the module's formula; no dropout, as ρ compares like with like.

    entropy_offset: with grpo.entropy_target, what is added to the coefficient of the entropy.

    batch, (B, T) each: input_ids, target_ids, loss_mask (1 on completion tokens and their end), advantages (those of
    the row, times `importance_weights`), old_logprobs (absent: those of the reference), expert_ids if experts are
    replayed (models/moe.py). With `completions`, (B, 1), each segment of a row is a completion (rl/rollout.py).
    """
    if "advantages" not in batch:
        raise InputError("this objective trains on completions with advantages: add job=GRPOTrainer.")

    explores = settings.entropy_coef > 0 or entropy_offset is not None

    def scores(weights: Any, rows: Batch) -> tuple[Array, Array]:
        return apply(weights, rows, settings.temperature, True, method="policy_scores")

    def exactly(weights: Any, rows: Batch) -> tuple[Array, Array]:
        return exact_scores(apply, weights, rows, settings.temperature)[:2]

    extra = [True] if explores else []  # the entropy has a gradient
    logprobs, entropy = apply(params, batch, settings.temperature, True, *extra, method="policy_scores")
    if settings.exact:  # the value is that of the rows read one at a time, the gradient that of the batch
        exact = exactly(params, batch)
        logprobs, entropy = value_of(exact[0], logprobs), value_of(exact[1], entropy)
    own = {name: value for name, value in batch.items() if name != EXPERT_IDS}  # a reference routes by itself
    read = exactly if settings.exact else scores
    against = None if reference is None else jax.lax.stop_gradient(read(reference, own)[0])
    old = batch.get("old_logprobs", against)
    if old is None:
        raise InputError("stored completions without log-probabilities need grpo.offline=reference.")
    mask = batch["loss_mask"].astype(jnp.float32)
    coef = settings.entropy_coef if entropy_offset is None else settings.entropy_coef + entropy_offset
    bonus = coef * entropy if explores else None
    packed = Segments(batch["segment_ids"], batch[COMPLETIONS]) if COMPLETIONS in batch else None
    loss, weight, sums = policy_loss(logprobs, old, against, batch["advantages"], mask, settings, bonus, packed)
    if settings.exact:
        sums["off_policy"] = jnp.sum(mask * (logprobs != old))
    return loss, weight, {**sums, "entropy": jnp.sum(mask * entropy)}


class Segments(NamedTuple):
    """The completions of packed rows: their numbers (B, T), 0 in padding, and how many each row holds, (B, 1)."""

    ids: Array
    counts: Array

    def sums(self, values: Array) -> Array:
        """Return Σ of values (B, T) over each segment, (B, T + 1)."""
        length = values.shape[1] + 1
        return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=length))(values, self.ids)

    def totals(self, values: Array) -> Array:
        """Return for each token the Σ of values (B, T) over its segment, (B, T)."""
        return jnp.take_along_axis(self.sums(values), self.ids, axis=1)


def policy_loss(
    logprobs: Array,
    old: Array,
    reference: Array | None,
    advantages: Array,
    mask: Array,
    settings: GrpoSettings,
    bonus: Array | None = None,
    packed: Segments | None = None,
) -> Sums:
    """The loss from log-probabilities; all arrays (B, T), float32. Only `logprobs` is differentiated, and `bonus`: what
    is taken off the loss of each token. packed: the completions of rows that may hold several."""

    def totals(values: Array) -> Array:  # over each token's completion: (B, 1), or (B, T)
        return jnp.sum(values, axis=-1, keepdims=True) if packed is None else packed.totals(values)

    lengths = totals(mask)
    shares = mask / jnp.maximum(lengths, 1.0)
    log_ratio = jnp.where(mask > 0, logprobs - old, 0.0)
    if settings.ratio == "sequence":
        log_ratio = jnp.broadcast_to(totals(shares * log_ratio), mask.shape)
    ratio = jnp.exp(log_ratio)
    low, high = settings.clip
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    losses, sums = -gain, {TOKENS: jnp.sum(mask), "clip_frac": jnp.sum(mask * clipped)}
    if reference is not None:
        divergence = kl_estimate(jnp.where(mask > 0, logprobs - reference, 0.0), settings.kl_estimator)
        losses = losses + settings.kl_coef * divergence
        sums["kl"] = jnp.sum(mask * divergence)
    if bonus is not None:
        losses = losses - bonus
    if settings.normalization == "sequence":
        each = lengths if packed is None else packed.sums(mask)
        return jnp.sum(shares * losses), jnp.sum(each > 0).astype(jnp.float32), sums
    total = jnp.sum(mask * losses)
    if settings.normalization == "token":
        return total, jnp.sum(mask), sums
    if packed is not None:
        return total, jnp.sum(packed.counts) * settings.max_completion_length, sums
    return total, jnp.float32(mask.shape[0] * settings.max_completion_length), sums


def kl_estimate(d: Array, estimator: str) -> Array:
    """KL(π_θ ‖ π_ref) from one sample of π_θ, d = log π_θ − log π_ref."""
    if estimator == "squared":
        return jnp.square(d)
    return d if estimator == "k1" else jnp.exp(-d) - 1 + d


def variant(**defaults: Any) -> type[GrpoSettings]:
    """GrpoSettings with other defaults."""
    known = {one.name: one for one in dataclasses.fields(GrpoSettings)}
    changed = [
        (name, known[name].type, dataclasses.field(default=value, metadata=known[name].metadata))
        for name, value in defaults.items()
    ]
    made = dataclasses.make_dataclass("GrpoSettings", changed, bases=(GrpoSettings,), frozen=True)
    made.__module__ = __name__
    return made


VARIANTS: dict[str, type[GrpoSettings]] = {
    "grpo": GrpoSettings,
    "dr_grpo": variant(scale=False, normalization="fixed"),
    "dapo": variant(clip_eps_high=0.28, kl_coef=0.0, overlong="mask"),
    "gspo": variant(ratio="sequence", normalization="sequence", clip_eps=3e-4, clip_eps_high=4e-4, kl_coef=0.0),
    "rloo": variant(baseline="leave_one_out", scale=False, normalization="fixed"),
    "reinforce": variant(baseline="rollout", scale=False, normalization="fixed", clip_eps=0.0),
}
for _name, _settings in VARIANTS.items():
    objectives.register(
        _name,
        settings=(_settings,),
        reference=needs_reference,
        rollouts=True,
        chat=True,
        rate_share=1 / 20,  # DeepSeekMath 7B: 1e-6 (arXiv:2402.03300)
    )(grpo)


EPSILON = 1e-4
"""Added to a group's standard deviation: a group of equal rewards has advantages of 0, not 0/0."""


def group_advantages(
    rewards: np.ndarray, baseline: str = "group", scale: bool = True, kept: np.ndarray | None = None
) -> np.ndarray:
    """A = (r − b) / (s + ε) in float64. rewards: (groups, G) → (groups, G).

    b: "group" mean of the group; "leave_one_out" mean of the others in it; "rollout" mean of all; "none" 0.
    s: standard deviation of the group (n − 1 below), with `scale`; otherwise nothing is divided.
    kept: (groups, G) bool, those that count; the others get 0. One that is alone in its group has nothing to compare.
    """
    rewards = np.asarray(rewards, np.float64)
    if kept is not None and not kept.all():
        return _advantages_of_some(rewards, baseline, scale, kept)
    size = rewards.shape[1]
    if baseline == "group":
        centered = rewards - rewards.mean(axis=1, keepdims=True)
    elif baseline == "leave_one_out":
        others = (rewards.sum(axis=1, keepdims=True) - rewards) / max(1, size - 1)
        centered = rewards - others
    elif baseline == "rollout":
        centered = rewards - rewards.mean()
    else:
        centered = rewards
    if not scale:
        return centered
    deviation = rewards.std(axis=1, ddof=1, keepdims=True) if size > 1 else np.zeros((len(rewards), 1))
    return centered / (deviation + EPSILON)


def importance_weights(
    old: np.ndarray, sampled: np.ndarray, real: np.ndarray, kind: str = "truncated", cap: float = 2.0
) -> tuple[np.ndarray, dict[str, float]]:
    """Return w (N, T) float32, by which advantages are multiplied, and how far sampler and trainer are apart.

    old: log π_old of the tokens by a training pass; sampled: log μ, as they were drawn; real: bool, which tokens count.

        r_t = π_old(t) / μ(t)      truncated  w_t = min(r_t, cap)      sequence  w_t = min(Π_t r_t, cap)     none  w = 1

    `truncated` corrects each token given what comes before it, `sequence` the completion as a whole, with more
    variance. Tokens that top-k or top-p removed have μ = 0 and are never sampled: no weight brings them back.
    Metrics: quantiles of r_t; ess, the effective sample size (Σr)² / (n·Σr²), 1 where they agree; the share of w at the
    cap. Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    log_ratio = np.where(real, np.asarray(old, np.float64) - sampled, 0.0)
    ratio = np.exp(log_ratio)
    known = ratio[real]
    low, middle, high = np.quantile(known, (0.01, 0.5, 0.99))
    metrics = {
        "ratio_p01": float(low),
        "ratio_p50": float(middle),
        "ratio_p99": float(high),
        "ess": float(known.sum() ** 2 / (known.size * np.square(known).sum())),
    }
    if kind == "none":
        return np.ones(real.shape, np.float32), metrics
    if kind == "sequence":
        ratio = np.broadcast_to(np.exp(log_ratio.sum(axis=1, keepdims=True)), real.shape)
    metrics["importance_capped"] = float((ratio[real] > cap).mean())
    return np.where(real, np.minimum(ratio, cap), 1.0).astype(np.float32), metrics


def _advantages_of_some(rewards: np.ndarray, baseline: str, scale: bool, kept: np.ndarray) -> np.ndarray:
    advantages = np.zeros_like(rewards)
    if baseline in ("rollout", "none"):
        advantages[kept] = group_advantages(rewards[kept][None], "group" if baseline == "rollout" else "none", False)[0]
        return advantages
    for group, counts, out in zip(rewards, kept, advantages, strict=True):
        if counts.sum() > 1:
            out[counts] = group_advantages(group[counts][None], baseline, scale)[0]
    return advantages
