"""Completions of prompts from the live parameters, scored: how a rollout is made, and how held-out prompts are judged.

The engine holds the trainer's own parameters while it samples, on its mesh; nothing is copied, and its cache is let go
afterwards. What is drawn depends on (seed, rollout, prompt, sample) and the parameters alone.

Of several processes every one asks the engine for the same, so that they run the same programs in the same order, and
reads the same completions. Rewards are anyone's code, which may draw lots, keep a log or ask another machine: process 0
alone calls them, and the others are told what it found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bessemer.data import key_of
from bessemer.data.prompts import PromptRows, end_ids
from bessemer.errors import InputError
from bessemer.generate import Engine, Request, Result, Sample, SamplingOptions
from bessemer.generate.decoder import end_tokens
from bessemer.objectives.advantages import group_advantages
from bessemer.topology import agree, forget, share
from bessemer.training.feed import device_batch, row_fields
from bessemer.training.fetch import fetch
from bessemer.training.rollout import Rollout, completion_rows, spread

if TYPE_CHECKING:
    from bessemer.training.grpo import GRPOTrainer

ROUND = 16  # decode steps between two looks at what has ended
REWARD_SECONDS = (
    4 * 3600.0
)  # how long the other processes wait for rewards; one that is lost they notice sooner


class Sampler:
    """One engine and one scoring program for the whole run."""

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self._engine: Engine | None = None
        self._score: Any = None

    # -- sampling ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            trainer = self.trainer
            assert trainer.tokenizer is not None
            if not hasattr(trainer.model, "decode"):
                raise InputError(
                    f"{type(trainer.model).__name__} has no `decode` and `init_cache`, so it cannot sample; see "
                    "docs/extending.md."
                )
            ends = (*end_ids(trainer.tokenizer), *end_tokens(trainer.model, trainer.tokenizer))
            self._engine = Engine(
                trainer.model,
                None,
                slots=min(trainer.settings.slots, max(trainer.passes.rows, len(trainer.prompts.held_out))),
                tokenizer=trainer.tokenizer,
                end_ids=tuple(dict.fromkeys(ends)),
                steps=min(ROUND, trainer.policy.max_completion_length),
                fetch=fetch,
                scope=trainer.topology.scope,
            )
        return self._engine

    def complete(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any
    ) -> list[Result]:
        """`n` samples of each prompt. The engine starts empty, so that nothing depends on what it did before."""
        trainer, engine = self.trainer, self.engine
        requests = [
            Request(tuple(ids), trainer.policy.max_completion_length, seed=seed, **options)
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        engine.update_params(trainer.full_params())
        try:
            return engine.generate(requests)
        finally:
            engine.update_params(None)  # the next step donates them
            engine.reset()

    def rollout(self, number: int) -> Rollout:
        """Rollout `number` of the run: prompts of the plan, completions, rewards, advantages, old log-probabilities."""
        trainer, begun = self.trainer, time.monotonic()
        passes, settings, policy = trainer.passes, trainer.settings, trainer.policy
        chosen = trainer.prompts.prompts(number)
        sampling = SamplingOptions(policy.temperature, settings.top_k, settings.top_p)
        seeds = [key_of(settings.seed, "rollout", number, row) % 2**32 for row in range(len(chosen))]
        ids = [source.ids[place] for source, place in chosen]
        results = self.complete(ids, seeds, sampling=sampling, n=passes.group_size, logprobs=True)
        samples = [sample for result in results for sample in result.samples]
        total, each = self.judge(f"rollout {number}", chosen, samples, passes.group_size)
        grouped = total.reshape(-1, passes.group_size)
        cut = np.array([sample.finish != "stop" for sample in samples])
        rows = completion_rows(
            [result.prompt_ids for result in results for _ in result.samples],
            [sample.ids for sample in samples],
            [
                [float(policy.overlong == "keep" or not out)] * len(s.ids)
                for s, out in zip(samples, cut, strict=True)
            ],
            settings.block_size,
            self.engine.pad_id,
        )
        advantages = group_advantages(grouped, policy.baseline, policy.scale).reshape(-1, 1)
        rows["advantages"][:] = advantages
        sampled = spread([sample.logprobs for sample in samples], rows)
        rows["old_logprobs"], gap = self.old_logprobs(rows, sampled)
        metrics = {
            "reward": float(total.mean()),
            "reward_std": float(grouped.std(axis=1).mean()),
            "flat_groups": float((np.ptp(grouped, axis=1) == 0).mean()),
            "completion_len": float(np.mean([len(sample.ids) for sample in samples])),
            "truncated": float(cut.mean()),
            **gap,
            **{f"reward/{name}": float(values.mean()) for name, values in each.items()},
            "time/rollout_s": time.monotonic() - begun,
        }
        return Rollout(number, rows, {"reward": total, **each}, metrics)

    def judge(
        self, where: str, chosen: Sequence[tuple[PromptRows, int]], samples: Sequence[Sample], copies: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(Σ weight · reward, each reward) of samples, `copies` of them for each prompt, as process 0 finds them; an
        error where the processes do not hold the same samples."""
        told = share("rewards", lambda: self._rewards(chosen, samples, copies), REWARD_SECONDS)
        ids = json.dumps([sample.ids for sample in samples])
        agree("the sampled completions", f"{where}: {hashlib.sha256(ids.encode()).hexdigest()[:16]}")
        forget("rewards")
        total, each = json.loads(told)
        return np.array(total), {name: np.array(values) for name, values in each.items()}

    def _rewards(
        self, chosen: Sequence[tuple[PromptRows, int]], samples: Sequence[Sample], copies: int
    ) -> str:
        """As JSON, which keeps every bit of a float. All columns of a prompt's row go along."""
        prompts = [source.prompts[place] for source, place in chosen for _ in range(copies)]
        columns = {
            name: [source.columns[place][name] for source, place in chosen for _ in range(copies)]
            for name in self.trainer.prompts.columns
        }
        columns["completion_tokens"] = [len(sample.ids) for sample in samples]
        total, each = self.trainer.rewards(prompts, [sample.text for sample in samples], columns)
        return json.dumps([total.tolist(), {name: values.tolist() for name, values in each.items()}])

    def validate(self) -> dict[str, float]:
        """Mean reward of greedy completions of the held-out prompts."""
        chosen = self.trainer.prompts.held_out
        ids = [source.ids[place] for source, place in chosen]
        results = self.complete(ids, [0] * len(ids), sampling=SamplingOptions(0.0))
        samples = [result.samples[0] for result in results]
        total, each = self.judge(f"validation at step {self.trainer.step}", chosen, samples, 1)
        row = {"val_reward": float(total.mean())}
        if len(each) > 1:
            row |= {f"val_reward/{name}": float(values.mean()) for name, values in each.items()}
        return row | {"val_completion_len": float(np.mean([len(sample.ids) for sample in samples]))}

    # -- log-probabilities ---------------------------------------------------------------------------------------

    def old_logprobs(
        self, rows: dict[str, np.ndarray], sampled: np.ndarray
    ) -> tuple[np.ndarray, dict[str, float]]:
        """(log π_old (N, T), how far the sampler's log-probabilities are from those of a training pass)."""
        trainer = self.trainer
        scored, plain = self.score(rows)
        real = rows["target_ids"] >= 0
        gap = np.abs(np.asarray(plain, np.float64) - sampled)[real]
        measured = {"logprob_gap": float(gap.mean()), "logprob_gap_max": float(gap.max())}
        return (sampled if trainer.settings.old_logprobs == "sampler" else scored), measured

    def score(self, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """log p of every target (N, T): of the policy at its temperature, and of the model itself (temperature 1)."""
        trainer, functions = self.trainer, self.trainer.functions
        if self._score is None:
            self._score = jax.jit(
                functools.partial(_scores, trainer.model_parts.apply, trainer.policy.temperature),
                out_shardings=trainer.topology.replicated,  # every process reads all of it
            )
        kept = {name: array for name, array in rows.items() if name not in ("advantages", "old_logprobs")}
        parts, params, size = [], trainer.full_params(), trainer.data.batch_size
        for first in range(0, len(rows["input_ids"]), size):

            def read(begin: int, end: int, first: int = first) -> dict[str, np.ndarray]:
                return {name: array[first + begin : first + end] for name, array in kept.items()}

            sharding = trainer.topology.batch_sharding(1)
            batch = device_batch(
                read, row_fields(kept), functions.micro, functions.accumulate_steps, sharding
            )
            parts.append(self._score(params, batch))
        found = fetch(parts)
        policy, plain = (np.concatenate([_flat(part[which]) for part in found]) for which in (0, 1))
        return policy, plain


def _scores(apply: Any, temperature: float, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    def micro(_: None, rows: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        policy = apply(params, rows, temperature, True, method="policy_scores")[0]
        plain = policy if temperature == 1 else apply(params, rows, True, method="token_logprobs")
        return None, (policy, plain)

    return jax.lax.scan(micro, None, batch)[1]


def _flat(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).reshape(-1, array.shape[-1])
