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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bessemer.data import key_of
from bessemer.data.rows.rows import fields_of
from bessemer.errors import InputError
from bessemer.generate import Engine, Request, Result, Sample, SamplingOptions
from bessemer.generate.decoder import end_tokens
from bessemer.generate.engine import round_of
from bessemer.objectives.grpo import GrpoSettings, group_advantages
from bessemer.rl.prompts import Chosen, end_ids
from bessemer.rl.rollout import Rollout, completion_rows, spread
from bessemer.topology import CompiledTogether, agree, forget, share
from bessemer.training.feed import device_batch, fetch
from bessemer.training.validation import added

if TYPE_CHECKING:
    from bessemer.rl.trainer import GRPOTrainer


REWARD_SECONDS = (
    4 * 3600.0
)  # how long the other processes wait for rewards; one that is lost they notice sooner


ROLLOUT = "rollout"  # the purpose of its seeds


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
                steps=min(round_of(), trainer.policy.max_completion_length),
                fetch=fetch,
                scope=trainer.topology.scope,
            )
        return self._engine

    def complete(
        self, what: str, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **options: Any
    ) -> list[Result]:
        """`n` samples of each prompt, shown as `what`. The engine starts empty, so that nothing depends on what it did
        before."""
        trainer, engine = self.trainer, self.engine

        def progress(done: int, total: int) -> None:
            first = "" if engine.compilations else "; compiling the sampler first"
            trainer.show_progress(f"{what} {done}/{total}{first}")

        requests = [
            Request(tuple(ids), trainer.policy.max_completion_length, seed=seed, **options)
            for ids, seed in zip(prompts, seeds, strict=True)
        ]
        engine.update_params(trainer.full_params())
        try:
            return engine.generate(requests, progress)
        finally:
            engine.update_params(None)  # the next step donates them
            engine.reset()

    def rollout(self, number: int) -> Rollout:
        """Rollout `number` of the run: prompts of the plan, completions, and of reinforcement rewards, advantages and
        old log-probabilities. Its metrics say how long sampling, rewards and scoring took."""
        trainer = self.trainer
        size, policy = trainer.passes.group_size, trainer.policy
        chosen = trainer.prompts.prompts(number)
        jax.block_until_ready(trainer.state.step)  # the last step is not time of this rollout
        begun = time.monotonic()
        results = self.drawn(chosen, ROLLOUT, number, n=size, logprobs=trainer.reinforces)
        samples = [sample for result in results for sample in result.samples]
        self.compare(f"rollout {number}", samples)
        times = {"time/rollout_s": time.monotonic() - begun}
        rows = self.rows_of(results)
        cut = np.array([sample.finish != "stop" for sample in samples])
        metrics = {
            "completion_len": float(np.mean([len(sample.ids) for sample in samples])),
            "truncated": float(cut.mean()),
        }
        rewards: dict[str, np.ndarray] = {}
        if trainer.rewards is not None:
            begun = time.monotonic()
            trainer.show_progress(f"rewards of {len(samples)} completions")
            total, each = self.judge(chosen, samples, size)
            times["time/reward_s"] = time.monotonic() - begun
            rewards = {"reward": total, **each}
            metrics["reward"] = float(total.mean())
            metrics |= {f"reward/{name}": float(values.mean()) for name, values in each.items()}
        if isinstance(policy, GrpoSettings):
            if policy.overlong == "mask":
                rows["loss_mask"][cut] = 0
            grouped = rewards["reward"].reshape(-1, size)
            rows["advantages"][:] = group_advantages(grouped, policy.baseline, policy.scale).reshape(-1, 1)
            sampled = spread([sample.logprobs for sample in samples], rows)
            begun = time.monotonic()
            trainer.show_progress(f"log-probabilities of {len(samples)} completions")
            rows["old_logprobs"], gap = self.old_logprobs(rows, sampled)
            times["time/score_s"] = time.monotonic() - begun
            metrics |= {
                "reward_std": float(grouped.std(axis=1).mean()),
                "flat_groups": float((np.ptp(grouped, axis=1) == 0).mean()),
                **gap,
            }
        return Rollout(number, rows, rewards, metrics | times)

    def drawn(self, chosen: Chosen, *purpose: Any, **options: Any) -> list[Result]:
        """Completions sampled as the settings say; each prompt has a seed of its own for the purpose."""
        settings = self.trainer.settings
        sampling = SamplingOptions(self.trainer.policy.temperature, settings.top_k, settings.top_p)
        seeds = [key_of(settings.seed, *purpose, row) % 2**32 for row in range(len(chosen))]
        return self.complete(
            "rollout" if purpose[0] == ROLLOUT else "validation",
            [source.ids[place] for source, place in chosen],
            seeds,
            sampling=sampling,
            **options,
        )

    def rows_of(self, results: Sequence[Result]) -> dict[str, np.ndarray]:
        """A row a completion, every token of it trained."""
        pairs = [(result.prompt_ids, sample.ids) for result in results for sample in result.samples]
        return completion_rows(
            [prompt for prompt, _ in pairs],
            [completion for _, completion in pairs],
            [[1.0] * len(completion) for _, completion in pairs],
            self.trainer.settings.block_size,
            self.engine.pad_id,
            self.trainer.row_types,
        )

    def compare(self, where: str, samples: Sequence[Sample]) -> None:
        """An error where the processes do not hold the same samples."""
        ids = json.dumps([sample.ids for sample in samples])
        agree("the sampled completions", f"{where}: {hashlib.sha256(ids.encode()).hexdigest()[:16]}")

    def judge(
        self, chosen: Chosen, samples: Sequence[Sample], copies: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(Σ weight · reward, each reward) of samples, `copies` of them for each prompt, as process 0 finds them."""
        told = share("rewards", lambda: self._rewards(chosen, samples, copies), REWARD_SECONDS)
        agree("the rewards", hashlib.sha256(told.encode()).hexdigest()[:16])
        forget("rewards")  # all have read them
        total, each = json.loads(told)
        return np.array(total), {name: np.array(values) for name, values in each.items()}

    def _rewards(self, chosen: Chosen, samples: Sequence[Sample], copies: int) -> str:
        """As JSON, which keeps every bit of a float. All columns of a prompt's row go along."""
        prompts = [source.prompts[place] for source, place in chosen for _ in range(copies)]
        columns = {
            name: [source.columns[place][name] for source, place in chosen for _ in range(copies)]
            for name in self.trainer.prompts.columns
        }
        columns["completion_tokens"] = [len(sample.ids) for sample in samples]
        assert self.trainer.rewards is not None
        total, each = self.trainer.rewards(prompts, [sample.text for sample in samples], columns)
        return json.dumps([total.tolist(), {name: values.tolist() for name, values in each.items()}])

    def validate(self) -> dict[str, float]:
        """Mean reward of greedy completions of the held-out prompts."""
        chosen = self.trainer.prompts.held_out
        ids = [source.ids[place] for source, place in chosen]
        results = self.complete("validation", ids, [0] * len(ids), sampling=SamplingOptions(0.0))
        samples = [result.samples[0] for result in results]
        self.compare(f"validation at step {self.trainer.step}", samples)
        total, each = self.judge(chosen, samples, 1)
        row = {"val_reward": float(total.mean())}
        if len(each) > 1:
            row |= {f"val_reward/{name}": float(values.mean()) for name, values in each.items()}
        return row | {"val_completion_len": float(np.mean([len(sample.ids) for sample in samples]))}

    def divergence(self) -> dict[str, float]:
        """The objective itself, for one completion of each held-out prompt; the seeds are the same each time."""
        trainer = self.trainer
        results = self.drawn(trainer.prompts.held_out, "held-out")
        self.compare(f"validation at step {trainer.step}", [result.samples[0] for result in results])
        rows = self.rows_of(results)
        val_step, state = trainer.functions.val_step, trainer.state
        sums = added([val_step(state, batch) for batch in self.batches(rows)])
        return {f"val_{name}": sums[name] / sums["weight"] for name in ("loss", "kl", "nll")}

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
        trainer = self.trainer
        if self._score is None:
            program = jax.jit(
                functools.partial(_scores, trainer.model_parts.apply, trainer.policy.temperature),
                out_shardings=trainer.topology.replicated,  # every process reads all of it
            )
            self._score = CompiledTogether(program, "log-probabilities")
        kept = {name: array for name, array in rows.items() if name not in ("advantages", "old_logprobs")}
        params = trainer.full_params()
        found = fetch([self._score(params, batch) for batch in self.batches(kept)])
        policy, plain = (np.concatenate([_flat(part[which]) for part in found]) for which in (0, 1))
        return policy, plain

    def batches(self, rows: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Device batches as large as a step's; the last is filled up with blank rows, which weigh nothing."""
        trainer, functions, size = self.trainer, self.trainer.functions, self.trainer.data.batch_size
        missing = -len(rows["input_ids"]) % size
        rows = {name: np.pad(array, ((0, missing), (0, 0))) for name, array in rows.items()}
        for first in range(0, len(rows["input_ids"]), size):

            def read(begin: int, end: int, first: int = first) -> dict[str, np.ndarray]:
                return {name: array[first + begin : first + end] for name, array in rows.items()}

            sharding = trainer.topology.batch_sharding(1)
            yield device_batch(read, fields_of(rows), functions.micro, functions.accumulate_steps, sharding)


def _scores(apply: Any, temperature: float, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    def micro(_: None, rows: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        policy = apply(params, rows, temperature, True, method="policy_scores")[0]
        plain = policy if temperature == 1 else apply(params, rows, True, method="token_logprobs")
        return None, (policy, plain)

    return jax.lax.scan(micro, None, batch)[1]


def _flat(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).reshape(-1, array.shape[-1])
