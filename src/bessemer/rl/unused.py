"""Settings of rollouts that have no effect beside others; a run says so for each that is set."""

from __future__ import annotations

from collections.abc import Iterable

from bessemer.objectives.grpo import GrpoSettings, SampledSettings, needs_reference
from bessemer.rl.rollout import GRPOTrainerConfig

DRAFTS = ("generate/draft", "generate/ngram")
OF_EPISODES = (
    "grpo/max_turns",
    "grpo/on_environment_error",
    "grpo/environment_timeout",
    "grpo/environment_retries",
    "grpo/environment_workers",
    "grpo/environment_overlap",
)
OF_SAMPLING = (
    "generate/speculate",
    *DRAFTS,
    "generate/weights",
    "grpo/top_k",
    "grpo/top_p",
    "grpo/overlong",
    "grpo/old_logprobs",
    "grpo/importance",
    "grpo/importance_cap",
    "grpo/curriculum_start",
    "grpo/curriculum_steps",
    "grpo/pass_rate_low",
    "grpo/pass_rate_high",
    "grpo/pass_rate_rest",
    *OF_EPISODES,
)
"""What has no effect on stored completions. Settings of the sampler's speed that recipes choose are not listed."""


def unused_settings(settings: GRPOTrainerConfig, policy: SampledSettings, vocab_size: int) -> dict[str, str]:
    """Return the settings (a/b) that have no effect in a run, each with the reason."""
    offline = isinstance(policy, GrpoSettings) and policy.offline != "no"
    found: dict[str, str] = {}

    def add(keys: Iterable[str], why: str) -> None:
        for key in keys:
            found.setdefault(key, why)

    if offline:
        add(OF_SAMPLING, "with grpo.offline: nothing is sampled")
        add(("grpo/rewards", "grpo/reward_timeout"), "with grpo.offline: rewards are stored beside the completions")
    if settings.speculation is None:
        add(DRAFTS, "without generate.speculate=ngram")
    if settings.environment is None:
        add(OF_EPISODES, "without grpo.environment")
    exact_match = isinstance(policy, GrpoSettings) and settings.environment is None and settings.rewards is None
    if not settings.rewards and not exact_match:
        add(("grpo/reward_timeout",), "without grpo.rewards")
    if settings.top_k >= vocab_size:
        add(("grpo/top_k",), f"from {vocab_size} on: the model has no more tokens")
    if isinstance(policy, GrpoSettings):
        if policy.clip_eps == 0:
            add(("grpo/clip_eps_high",), "with grpo.clip_eps=0: ratios are not clipped")
        if not needs_reference(policy):
            add(("grpo/kl_estimator", "grpo/sync_interval"), "with grpo.kl_coef=0: no reference is kept")
    return found
