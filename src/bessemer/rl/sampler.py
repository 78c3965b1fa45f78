"""Samples and scores completions of the live parameters, for rollouts and for held-out prompts.

The engine uses the run's own parameters on their mesh, without a copy, and frees its cache afterwards. A completion
depends only on (seed, rollout, prompt, sample) and the parameters. Every process sends the engine the same requests, so
all run the same programs in the same order. Rewards are user code, which may be random or call another machine, so only
process 0 calls them and broadcasts the result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.data import key_of
from bessemer.data.rows.rows import COMPLETIONS, Fields, fields_of
from bessemer.errors import InputError, TrainingError
from bessemer.generate import Engine, Request, Result, Sample, SamplingOptions
from bessemer.generate.decoder import bucket, end_tokens
from bessemer.generate.engine import round_of
from bessemer.generate.sampling import Way, way_of
from bessemer.generate.weights import check_weights
from bessemer.losses.exact_scores import exact_scores
from bessemer.models.moe import APART, EXPERT_IDS, ROUTING
from bessemer.models.protocol import Decoding
from bessemer.models.shape import round_up
from bessemer.objectives.grpo import GrpoSettings, SampledSettings, group_advantages, importance_weights
from bessemer.rl.exact import ExactRollouts
from bessemer.rl.prompts import Chosen, PromptPlan, end_ids
from bessemer.rl.rewards import OVERLONG, Rewards, overlong_penalty
from bessemer.rl.rollout import (
    BLANK,
    GRPOTrainerConfig,
    Rollout,
    completion_rows,
    pack_fields,
    pack_rows,
    route_rows,
    routes_fields,
    row_types,
    spread,
)
from bessemer.rl.selection import ByPassRate, Groups, replace_flat
from bessemer.topology import CompiledTogether, Topology, agree, broadcast, forget, unbox
from bessemer.training.feed import abstract_batch, device_batch, fetch
from bessemer.training.setup.model import ModelParts
from bessemer.training.step import used_micro_batches
from bessemer.training.validation import added

REWARD_SECONDS = 4 * 3600.0  # how long the other processes wait for rewards; a lost process is noticed sooner
ROLLOUT = "rollout"  # the purpose of its seeds
SCORED = ("advantages", "old_logprobs")  # fields of a row that are made after scoring
LARGEST_REWARD = 1e37  # a tenth of float32's range: advantages are differences, times importance weights
NOTHING: Mapping[str, float] = {}
CAPACITY_STEP = 64  # a row of the sampler's cache has a multiple of it: the decode kernel's block


def check_sampler(settings: GRPOTrainerConfig, parts: ModelParts) -> None:
    """Raise InputError for a way to sample that the model lacks, before anything is compiled or written."""
    model: Any = parts.model
    if not isinstance(model, Decoding):
        raise InputError(
            f"objective={settings.objective} samples, and {type(model).__name__} has no `decode` and `init_cache`: "
            "give it both (docs/extending.md), or train on stored completions with grpo.offline."
        )
    if settings.speculation is not None:
        settings.speculation.check(model)
    check_weights(model, settings.sampling_weights, unbox(parts.boxed), parts.split.quantized)


class Laps:
    """Divides time into parts without gaps: each ends where the next begins. A part may have several pieces."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.monotonic()

    def end(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part], self._mark = self.seconds.get(part, 0.0) + (now - self._mark), now

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())


@dataclass
class Sampler:
    """One engine and one scoring program for the whole run.

    plan: the prompts of each rollout, and the held-out ones. params: returns the live parameters. micro: rows per
    micro-batch of the training step. show: reports progress.
    """

    settings: GRPOTrainerConfig
    policy: SampledSettings
    parts: ModelParts
    topology: Topology
    plan: PromptPlan
    rewards: Rewards | None
    micro: int
    params: Callable[[], Any]
    show: Callable[[str], None]

    # --- sampling ---

    @property
    def judges(self) -> bool:
        """Whether completions get a reward."""
        return self.rewards is not None

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt."""
        return self.plan.longest

    @property
    def continues(self) -> bool:
        """Whether prompts continue what was sampled before."""
        return False

    def advantages(self, samples: Sequence[Sample], grouped: np.ndarray) -> np.ndarray:
        """Return the advantages (groups, G) of the samples. grouped: their rewards, (groups, G)."""
        assert isinstance(self.policy, GrpoSettings)
        return group_advantages(grouped, self.policy.baseline, self.policy.scale)

    @property
    def sampling(self) -> SamplingOptions:
        """How rollouts are drawn."""
        return SamplingOptions(self.policy.temperature, self.settings.top_k, self.settings.top_p)

    @property
    def alters_logits(self) -> bool:
        """Whether completions are drawn from another distribution than the model's own."""
        return isinstance(self.policy, GrpoSettings) and self.sampling != SamplingOptions(1.0)

    @property
    def routes(self) -> Fields:
        """The field of recorded experts, if the run replays them."""
        return routes_fields(self.settings, self.policy, self.parts.model)

    @functools.cached_property
    def engine(self) -> Engine:
        model: Any = self.parts.model
        tokenizer = self.parts.tokenizer
        assert tokenizer is not None
        ends = (*end_ids(tokenizer), *end_tokens(model, tokenizer))
        longest = self.longest
        return Engine(
            model,
            None,
            slots=min(self.settings.slots, max(self.plan.passes.rows, len(self.plan.held_out))),
            capacity=min(round_up(longest + self.policy.max_completion_length, CAPACITY_STEP), model.block_size),
            tokenizer=tokenizer,
            end_ids=tuple(dict.fromkeys(ends)),
            steps=min(round_of(), self.policy.max_completion_length),
            narrowest=bucket(longest, model.block_size) // 2,  # two widths for prompts of all lengths
            whole=jax.default_backend() != "cpu",  # see `row_sizes`: there, few rows take about as long as all
            least=way_of([self.sampling]) or Way.GREEDY,  # validation needs no program of its own
            reuse=self.continues,
            policy_logprobs=self.alters_logits,
            speculate=self.settings.speculation,
            weights=self.settings.sampling_weights,
            routes=bool(self.routes),
            fetch=fetch,
            scope=self.topology.scope,
        )

    @functools.cached_property
    def exact(self) -> ExactRollouts | None:
        """With grpo.exact, what draws every token again by the training pass."""
        if not (isinstance(self.policy, GrpoSettings) and self.policy.exact):
            return None
        engine, tokenizer = self.engine, self.parts.tokenizer
        assert tokenizer is not None
        return ExactRollouts(
            self.parts.apply,
            self.policy.temperature,
            self.sampling,
            self.topology,
            tokenizer,
            self.micro,
            self.settings.block_size,
            self.policy.max_completion_length,
            engine.capacity,
            engine.pad_id,
            engine.end_ids,
        )

    def compile_ahead(self, params: Any) -> None:
        """Compile what the first rollout runs, from abstract parameters, into JAX's cache on disk.

        Traced one after the other and compiled side by side, in a thread beside the compilation of the step: of a Llama
        of 1.24B parameters on an H200 the first rollout took 14 s, .6 of them for the work itself (2026-11-18).
        """
        with self.topology.scope():
            lowered = self.engine.lower_ahead(params, self.plan.longest)
            if isinstance(self.policy, GrpoSettings):
                names = {name: kind for name, kind in row_types(self.policy).items() if name not in SCORED}
                block = self.settings.block_size
                fields = {**{name: ((block,), np.dtype(kind)) for name, kind in names.items()}, **self.routes}
                fields |= pack_fields(self.settings)
                size, sharding = self.plan.passes.batch_size, self.topology.batch_sharding(1)
                batch = abstract_batch(fields, self.micro, size // self.micro, sharding)
                lowered.append(self._score.program.lower(params, batch))
            with ThreadPoolExecutor(len(lowered)) as pool:
                list(pool.map(lambda program: program.compile(), lowered))

    def complete(
        self, what: str, chosen: Chosen, seeds: Sequence[int], may_fail: bool = False, **options: Any
    ) -> list[Result]:
        """Return `n` samples of each prompt; progress is shown as `what`. The engine starts empty. `may_fail`: so may
        every episode; completions without an environment do not fail."""
        engine = self.engine

        def progress(done: int, total: int) -> None:
            first = "" if engine.compilations else "; compiling the sampler first"
            self.show(f"{what} {done}/{total}{first}")

        requests = [
            Request(tuple(source.ids[place]), self.policy.max_completion_length, seed=seed, **options)
            for (source, place), seed in zip(chosen, seeds, strict=True)
        ]
        engine.update_params(self.params())
        try:
            return engine.generate(requests, progress)
        finally:
            engine.update_params(None)  # the next step donates them
            engine.reset()

    def rollout(self, number: int, clock: Laps | None = None) -> Rollout:
        """Return rollout `number` of the run: prompts, completions, and for reinforcement rewards, advantages and old
        log-probabilities. Its metrics include the seconds of sampling, rewards and scoring. clock: one that runs
        already."""
        clock, counted = clock or Laps(), self.counted
        chosen = self.plan.prompts(number)
        results, samples, rows = self.first_draw(number, chosen)
        clock.end("time/rollout_s")
        rewards: dict[str, np.ndarray] = {}
        if self.judges:
            rewards = self.rewarded(number, chosen, samples)
            clock.end("time/reward_s")
        resampled: dict[str, float] = {}
        if self.settings.resample:
            groups, resampled = self.resampled(number, chosen, results, rewards, clock)
            results, samples = [result for group in groups.results for result in group], groups.samples
            self.take(samples)
            rewards = {name: self.averaged(samples, values.ravel()) for name, values in groups.rewards.items()}
            rows = self.rows_with_routes(results)
        made = self.unscored(number, samples, rows, counted)
        made.rewards = rewards
        return self.scored(made, samples, clock, resampled)

    def first_draw(self, number: int, chosen: Chosen) -> tuple[list[Result], list[Sample], dict[str, np.ndarray]]:
        """Return completions of the prompts of rollout `number`: by prompt, one after the other, and as rows."""
        logprobs = isinstance(self.policy, GrpoSettings)
        results = self.drawn(chosen, ROLLOUT, number, n=self.settings.group_size, logprobs=logprobs)
        samples = [sample for result in results for sample in result.samples]
        self.compare(f"rollout {number}", samples)
        return results, samples, self.rows_with_routes(results)

    @property
    def counted(self) -> tuple[int, int]:
        """The tokens and passes of the engine so far."""
        return self.engine.tokens, self.engine.passes

    def unscored(
        self, number: int, samples: Sequence[Sample], rows: dict[str, np.ndarray], before: tuple[int, int]
    ) -> Rollout:
        """Return a rollout without rewards and scores. before: `counted` when its sampling began."""
        policy, drawn = self.policy, {}
        cut = np.array([sample.finish != "stop" for sample in samples])
        metrics = {
            "completion_len": float(np.mean([sample.length for sample in samples])),
            "truncated": float(cut.mean()),
            **self.plan.report,
        }
        if self.settings.speculation is not None:
            tokens, passes = (now - then for now, then in zip(self.counted, before, strict=True))
            metrics["tokens_per_pass"] = tokens / max(passes, 1)
        if self.exact is not None:
            metrics |= self.exact.report()
        if isinstance(policy, GrpoSettings):
            if policy.overlong == "mask":
                rows["loss_mask"][cut] = 0
            drawn["model"] = drawn["policy"] = spread([sample.logprobs for sample in samples], rows)
            if self.alters_logits:
                drawn["policy"] = spread([sample.policy_logprobs for sample in samples], rows)
        return Rollout(number, rows, {}, metrics, drawn)

    def scored(
        self, made: Rollout, samples: Sequence[Sample], clock: Laps, more: Mapping[str, float] = NOTHING
    ) -> Rollout:
        """Return the rollout `made`, which has its rewards, with advantages and old log-probabilities of the live
        parameters. more: further metrics."""
        rows, rewards = made.rows, made.rewards
        named = {name if name == "reward" else f"reward/{name}": each for name, each in rewards.items()}
        metrics = made.metrics | {name: float(each.mean()) for name, each in named.items()}
        if isinstance(self.policy, GrpoSettings):
            grouped = rewards["reward"].reshape(-1, self.settings.group_size)
            if (largest := float(np.abs(grouped).max())) > LARGEST_REWARD:
                raise TrainingError(
                    f"rollout {made.number} has a reward of {largest:g}, and advantages are numbers of 32 bits: lower "
                    "the weights of grpo.rewards, or bound what they return."
                )
            rows["advantages"][:] = self.advantages(samples, grouped).reshape(-1, 1)
            self.show(f"log-probabilities of {len(rows['input_ids'])} completions")
            rows["old_logprobs"], weights, gap = self.old_logprobs(rows, made.drawn["model"], made.drawn["policy"])
            rows["advantages"] *= weights
            metrics |= {
                "reward_std": float(grouped.std(axis=1).mean()),
                "flat_groups": float(self.flat(samples, grouped).mean()),
                **more,
                **gap,
            }
            clock.end("time/score_s")
        return Rollout(made.number, rows, rewards, metrics | clock.seconds)

    def rows_with_routes(self, results: Sequence[Result]) -> dict[str, np.ndarray]:
        """Return the rows of a rollout, with the experts of their tokens where those are replayed."""
        routes = [sample.routes for result in results for sample in result.samples]
        return self.rows_of(results) | route_rows(routes, self.routes)

    def rewarded(self, number: int, chosen: Chosen, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        """Return the rewards that rollout `number` is trained on, by name; "reward" is their weighted sum."""
        self.show(f"rewards of {len(samples)} completions")
        total, each = self.judge(chosen, samples, self.settings.group_size)
        rewards = self.penalized(total, each, [sample.length for sample in samples])
        self.measure(number, chosen, rewards["reward"], self.kept(samples))
        return rewards

    def measure(self, number: int, chosen: Chosen, rewards: np.ndarray, kept: np.ndarray | None = None) -> None:
        """Note how well the prompts are answered, for grpo.curriculum=pass_rate. rewards: (prompts · G,); kept: those
        that count, None: all."""
        if isinstance(self.plan.curriculum, ByPassRate):
            self.plan.curriculum.measure(number, chosen, rewards, kept)

    def kept(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """Return which samples earned their reward, (n,) bool; None: all."""
        return None

    def penalized(
        self, total: np.ndarray, each: dict[str, np.ndarray], lengths: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the rewards by name, with grpo.overlong_penalty for completions of these lengths."""
        policy = self.policy
        if isinstance(policy, GrpoSettings) and policy.overlong_penalty > 0:
            each[OVERLONG] = overlong_penalty(lengths, policy.max_completion_length, policy.buffer)
            total = total + policy.overlong_penalty * each[OVERLONG]
        return {"reward": total, **each}

    def resampled(
        self, number: int, chosen: Chosen, results: list[Result], rewards: dict[str, np.ndarray], clock: Laps
    ) -> tuple[Groups, dict[str, float]]:
        """Return the groups of rollout `number` with flat ones replaced, and the metrics of it."""
        size, before = self.settings.group_size, clock.total

        def groups(results: list[Result], rewards: dict[str, np.ndarray]) -> Groups:
            grouped = {name: values.reshape(-1, size) for name, values in rewards.items()}
            each = len(results) // len(grouped["reward"])
            parts = [results[first : first + each] for first in range(0, len(results), each)]
            samples = [sample for result in results for sample in result.samples]
            return Groups(parts, grouped, self.flat(samples, grouped["reward"]))

        def draw(turn: int, chosen: Chosen) -> Groups:
            drawn = self.drawn(chosen, ROLLOUT, number, "resample", turn, n=size, logprobs=True, may_fail=True)
            samples = [sample for result in drawn for sample in result.samples]
            self.compare(f"rollout {number}, round {turn}", samples)
            clock.end("time/rollout_s")
            rewards = self.rewarded(number, chosen, samples)
            clock.end("time/reward_s")
            return groups(drawn, rewards)

        def others(turn: int) -> Chosen:
            return self.plan.others(number, turn)

        made = replace_flat(groups(results, rewards), chosen, self.settings.resample, others, draw)
        return made.groups, {**made.metrics, "time/resample_s": clock.total - before}

    def flat(self, samples: Sequence[Sample], grouped: np.ndarray) -> np.ndarray:
        """Return which groups have equal rewards, (groups,). grouped: the rewards of the samples, (groups, G)."""
        return np.ptp(grouped, axis=1) == 0

    def averaged(self, samples: Sequence[Sample], values: np.ndarray) -> np.ndarray:
        """Return the rewards (n,) of the samples; one that has none gets the mean of the others."""
        return values

    def take(self, samples: Sequence[Sample]) -> None:
        """Note that the rollout consists of these samples, of all that were drawn for it."""

    def drawn(self, chosen: Chosen, *purpose: Any, **options: Any) -> list[Result]:
        """Return completions sampled as configured; each prompt has its own seed for the purpose."""
        seeds = [key_of(self.settings.seed, *purpose, row) % 2**32 for row in range(len(chosen))]
        what = {(ROLLOUT, 2): "rollout", (ROLLOUT, 4): "resampling"}.get((purpose[0], len(purpose)), "validation")
        results = self.complete(what, chosen, seeds, sampling=self.sampling, **options)
        return results if self.exact is None else self.exact.verified(self.params(), results)

    def rows_of(self, results: Sequence[Result]) -> dict[str, np.ndarray]:
        """Return one row per completion, every token of it trained."""
        prompts = [result.prompt_ids for result in results for _ in result.samples]
        completions = [sample.ids for result in results for sample in result.samples]
        masks = [[1.0] * len(completion) for completion in completions]
        block, pad = self.settings.block_size, self.engine.pad_id
        return completion_rows(prompts, completions, masks, block, pad, row_types(self.policy))

    def compare(self, where: str, samples: Sequence[Sample]) -> None:
        """Raise if the processes do not hold the same samples."""
        ids = json.dumps([sample.ids for sample in samples])
        agree("the sampled completions", f"{where}: {hashlib.sha256(ids.encode()).hexdigest()[:16]}")

    def judge(self, chosen: Chosen, samples: Sequence[Sample], copies: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return Σ weight · reward and each reward of the samples, `copies` per prompt, as process 0 computes them."""
        return told(lambda: self.rewards_text(chosen, samples, copies))

    def rewards_text(self, chosen: Chosen, samples: Sequence[Sample], copies: int) -> str:
        """Return the rewards as JSON, which keeps every bit of a float."""
        prompts = [source.prompts[place] for source, place in chosen for _ in range(copies)]
        columns = {
            name: [source.columns[place][name] for source, place in chosen for _ in range(copies)]
            for name in self.plan.columns
        }
        columns["completion_tokens"] = [sample.length for sample in samples]
        assert self.rewards is not None
        total, each = self.rewards(prompts, [sample.text for sample in samples], columns)
        return json.dumps([total.tolist(), {name: values.tolist() for name, values in each.items()}])

    def validate(self, step: int) -> dict[str, float]:
        """Return the mean reward of greedy completions of the held-out prompts."""
        chosen = self.plan.held_out
        results = self.complete("validation", chosen, [0] * len(chosen), sampling=SamplingOptions(0.0))
        samples = [result.samples[0] for result in results]
        self.compare(f"validation at step {step}", samples)
        total, each = self.judge(chosen, samples, 1)
        row = {"val_reward": float(total.mean())}
        if len(each) > 1:
            row |= {f"val_reward/{name}": float(values.mean()) for name, values in each.items()}
        return row | {"val_completion_len": float(np.mean([sample.length for sample in samples]))}

    def divergence(self, step: int, val_step: Callable[[Any], Any]) -> dict[str, float]:
        """Return the objective's own metrics for one completion of each held-out prompt, always from the same seeds.

        val_step: batch (S, B, T) -> the sums of a validation step of the live state.
        """
        results = self.drawn(self.plan.held_out, "held-out")
        self.compare(f"validation at step {step}", [result.samples[0] for result in results])
        rows = self.rows_of(results)
        sums = added([val_step(batch) for batch in self.batches(rows)])
        return {f"val_{name}": sums[name] / sums["weight"] for name in ("loss", "kl", "nll")}

    # --- log-probabilities ---

    def old_logprobs(
        self, rows: dict[str, np.ndarray], model: np.ndarray, drawn: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Return log π_old (N, T), importance weights (N, T), and how far sampler and training pass are apart.

        model, drawn: the sampler's log-probabilities of the targets (N, T), see Rollout.drawn.
        logprob_gap compares the model's own log-probabilities; the weights compare with the distribution drawn from.
        With grpo.exact and old_logprobs=sampler there is nothing to measure: the step itself reports `off_policy`.
        """
        if self.exact is not None and self.settings.old_logprobs == "sampler":
            return drawn, np.ones(drawn.shape, np.float32), {}
        scored, plain, routed = self._scored(rows)
        real = rows["target_ids"] >= 0
        gap = np.abs(np.asarray(plain, np.float64) - model)[real]
        measured = {"logprob_gap": float(gap.mean()), "logprob_gap_max": float(gap.max())}
        given = self.settings.old_logprobs == "sampler"  # the ratio of the loss is to the sampler then: no weights
        kind = "none" if given else self.settings.importance
        weights, apart = importance_weights(scored, drawn, real, kind, self.settings.importance_cap)
        return (drawn if given else scored), weights, measured | routed | apart

    def score(self, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return log p of every target (N, T): of the policy at its temperature, and of the model (temperature 1)."""
        return self._scored(rows)[:2]

    def _scored(self, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Return `score`, and the share of replayed choices that the training pass would have made otherwise."""
        inputs = {name: array for name, array in rows.items() if name not in SCORED}
        packed = pack_rows(inputs, rows["target_ids"] >= 0) if self.settings.pack else None
        if packed is not None:
            inputs = {name: array[: max(1, packed.used)] for name, array in packed.rows.items()}
        params = self.params()
        found = fetch([self._score(params, batch) for batch in self.batches(inputs)])
        policy, plain = (np.concatenate([_flat(part[which]) for part in found]) for which in (0, 1))
        if packed is not None:
            policy, plain = packed.unpacked(policy), packed.unpacked(plain)
        if EXPERT_IDS not in rows:
            return policy, plain, {}
        apart = sum(float(part[2].sum()) for part in found)
        return policy, plain, {APART: apart / max(1, int((rows[EXPERT_IDS][..., 0] >= 0).sum()))}

    @functools.cached_property
    def _score(self) -> CompiledTogether:
        program = jax.jit(
            functools.partial(
                _scores if self.exact is None else _exact_scores, self.parts.apply, self.policy.temperature
            ),
            out_shardings=self.topology.replicated,  # every process reads all of it
            compiler_options=self.topology.compiler_options,
        )
        return CompiledTogether(program, "log-probabilities")

    def batches(self, rows: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Yield device batches of a step's size; the last is padded with blank rows, which have no targets."""
        size, sharding = self.plan.passes.batch_size, self.topology.batch_sharding(1)
        missing = -len(rows["input_ids"]) % size
        rows = {name: _padded(array, missing, BLANK.get(name, 0)) for name, array in rows.items()}
        for first in range(0, len(rows["input_ids"]), size):

            def read(begin: int, end: int, first: int = first) -> dict[str, np.ndarray]:
                return {name: array[first + begin : first + end] for name, array in rows.items()}

            yield device_batch(read, fields_of(rows), self.micro, size // self.micro, sharding)


def told(make: Callable[[], str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return Σ weight · reward and each reward, from the JSON that `make` returns on process 0 (`rewards_text`)."""
    text = broadcast("rewards", make, REWARD_SECONDS)
    agree("the rewards", hashlib.sha256(text.encode()).hexdigest()[:16])
    forget("rewards")  # all have read them
    total, each = json.loads(text)
    return np.array(total), {name: np.array(values) for name, values in each.items()}


def _scores(apply: Any, temperature: float, params: Any, batch: Any) -> tuple[jax.Array, ...]:
    """Return log p of the policy and of the model, and where experts are replayed, how many choices differ."""

    def micro(_: None, rows: Any) -> tuple[None, tuple[jax.Array, ...]]:
        routed: tuple[jax.Array, ...] = ()
        score = functools.partial(apply, params, rows, temperature, True, method="policy_scores")
        if EXPERT_IDS in rows:
            (policy, _), seen = score(mutable=[ROUTING])
            routed = seen[ROUTING][APART]
        else:
            policy = score()[0]
        plain = policy if temperature == 1 else apply(params, rows, True, method="token_logprobs")
        return None, (policy, plain, *routed)

    if COMPLETIONS not in batch:
        return jax.lax.scan(micro, None, batch)[1]
    first = jax.tree.map(lambda x: x[0], batch)
    blank = jax.tree.map(
        lambda one: jnp.zeros((len(batch[COMPLETIONS]), *one.shape), one.dtype), jax.eval_shape(micro, None, first)[1]
    )

    def turn(index: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        made = micro(None, jax.tree.map(lambda x: x[index], batch))[1]
        return jax.tree.map(lambda whole, one: whole.at[index].set(one), out, made)

    return jax.lax.fori_loop(0, used_micro_batches(batch), turn, blank)


def _padded(array: np.ndarray, rows: int, value: int) -> np.ndarray:
    """Return the array with `rows` more rows of `value`."""
    return np.pad(array, ((0, rows), *[(0, 0)] * (array.ndim - 1)), constant_values=value)


def _exact_scores(apply: Any, temperature: float, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """As `_scores`, with the bits of the sampler and of the training step."""

    def micro(_: None, rows: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, exact_scores(apply, params, rows, temperature)[::2]

    return jax.lax.scan(micro, None, batch)[1]


def _flat(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).reshape(-1, array.shape[-1])
