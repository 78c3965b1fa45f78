"""GRPOTrainer: trains on completions sampled from the live parameters, or on stored ones.

Rewards judge the completions of a group (GRPO and its family), or a teacher's distributions do (on-policy
distillation). The loop is BaseTrainer's. A step takes a part of the current rollout; after its last pass the next
rollout is sampled, which is the only time the loop waits for the device. Checkpoints hold the rollout in use, and with
grpo.staleness (rl/ahead.py) the one that is sampled already.

With grpo.entropy_target the coefficient of the entropy's bonus follows the policy's entropy, step by step:

    c ← clip(c + rate · (target − H), 0, most)        H: mean entropy over the trained tokens of the step

It is computed inside the compiled step, and what was added to grpo.entropy_coef is part of the train state, so a
resumed run continues with the same bits. A step whose loss or gradient is not finite leaves it as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, cast

import jax
import jax.numpy as jnp
from flax import struct

from bessemer.config import Config, dotted
from bessemer.data import Prefetcher
from bessemer.data.rows.rows import COMPLETIONS, Fields
from bessemer.errors import InputError
from bessemer.job import CheckpointManager, Snapshot
from bessemer.models.moe import recorded_shape
from bessemer.objectives.grpo import TOKENS, GrpoSettings, SampledSettings
from bessemer.registry import jobs, objectives
from bessemer.rl.ahead import AheadOfTraining, check_ahead, check_staleness
from bessemer.rl.episodes import EpisodeSampler, check_environment
from bessemer.rl.exact import check_exact
from bessemer.rl.prompts import PromptPlan, StoredPlan, build_prompts, build_stored
from bessemer.rl.rewards import Rewards, RewardSpec, check_penalty
from bessemer.rl.rollout import (
    GRPOTrainerConfig,
    Rollout,
    check_packing,
    check_rollout,
    fit_routes,
    pack_fields,
    pack_rows,
    routes_fields,
    row_types,
    unused_settings,
)
from bessemer.rl.sampler import REWARD_SECONDS, Laps, Sampler, check_sampler
from bessemer.rl.selection import PASS_RATE, ByColumn, ByPassRate, check_resampling
from bessemer.rl.workers import check_made
from bessemer.storage.files import PASS_RATES, ROLLOUT, ROLLOUT_AHEAD
from bessemer.topology import agree, broadcast, process_count
from bessemer.training import step
from bessemer.training.feed import device_batch
from bessemer.training.outcome import doing
from bessemer.training.setup.compiled import StepHooks
from bessemer.training.setup.data import DataParts
from bessemer.training.setup.horizon import plan_horizon
from bessemer.training.stages import with_fresh_moments
from bessemer.training.state import TrainState
from bessemer.training.trainer import BaseTrainer, M

# --- a target for the policy's entropy ---


class EntropyState(TrainState):
    """entropy_offset: added to grpo.entropy_coef so far."""

    entropy_offset: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.float32))

    def against(self) -> dict[str, Any]:
        return {**super().against(), "entropy_offset": self.entropy_offset}


def follow_target(step: Callable[..., Any], policy: GrpoSettings, state: EntropyState, *args: Any, **named: Any) -> Any:
    """Return what the training step `step` does, and move the coefficient, which the metrics show as it was used."""
    offset, target = state.entropy_offset, policy.entropy_target
    assert target is not None
    new, loss, meta = step(state, *args, **named)
    entropy, used = meta["entropy"], policy.entropy_coef + offset
    moved = jnp.clip(used + policy.entropy_rate * (target - entropy), 0.0, policy.entropy_coef_max)
    known = meta["finite"] & jnp.isfinite(entropy)
    new = new.replace(entropy_offset=jnp.where(known, moved - policy.entropy_coef, offset))
    return new, loss, {**meta, "entropy_coef": used}


def check_entropy(policy: SampledSettings, config: Config) -> None:
    """Raise InputError for settings that contradict each other or have no effect."""
    if not isinstance(policy, GrpoSettings):
        return
    if policy.entropy_target is None:
        for key in ("grpo/entropy_rate", "grpo/entropy_coef_max"):
            if config.is_set(key):
                raise InputError(f"{dotted(key)} adapts the coefficient to grpo.entropy_target: set that too.")
    elif policy.entropy_coef > policy.entropy_coef_max:
        raise InputError(
            f"grpo.entropy_coef={policy.entropy_coef:g} is above grpo.entropy_coef_max={policy.entropy_coef_max:g}, "
            "the most that grpo.entropy_target may lead to: lower the one or raise the other."
        )


# --- the trainer ---


PER_TOKEN = ("clip_frac", "kl", "entropy", "off_policy")


@jobs.register("GRPOTrainer")
class GRPOTrainer(BaseTrainer[GRPOTrainerConfig, M], Generic[M]):
    """Online unless grpo.offline says otherwise."""

    rolls_out = True
    rewards: Rewards | None
    rollout: Rollout | None
    _compiling: Future[None] | None = None  # of what the first rollout runs
    _packed: tuple[int, dict[str, Any]] | None = None  # with grpo.pack, the rows of a step, by its position

    def configure_dataloaders(self) -> DataParts:
        entry = objectives.entry(self.settings.objective)
        if not entry.traits.get("rollouts"):
            family = [one.name for one in objectives if one.traits.get("rollouts")]
            raise InputError(f"GRPOTrainer trains objective={'|'.join(family)}, not {entry.name}.")
        if isinstance(self.policy, GrpoSettings) and self.policy.exact:
            check_exact(self.settings, self.policy, self.model_parts, self.topology)
        if self.settings.environment is not None:
            check_environment(self.settings.environment, self.policy)
        if not self.offline:
            check_sampler(self.settings, self.model_parts)
        check_packing(self.settings, self.policy, self.model_parts.model)
        check_resampling(self.settings.resample, self.policy)
        check_staleness(self.settings, self.policy)
        self.note_unused_settings()
        named = [spec.label for spec in self.settings.rewards or []]
        check_penalty(self.policy, named, self.settings.environment is not None)
        check_entropy(self.policy, self.config)
        if (
            self.settings.sync_moments
            and self.reinforces
            and not (self.wants_reference() and self.settings.sync_interval)
        ):
            self.say(
                "note: grpo.sync_moments has no effect: no reference is taken anew (grpo.kl_coef, grpo.sync_interval)"
            )
        horizon = functools.partial(plan_horizon, self.context, self.model_parts)
        if self.config.is_set("grpo/router_replay") and self.settings.router_replay and not self.route_fields:
            new = not self.run_directory.config.exists()
            if new and recorded_shape(self.model_parts.model) is None and self.config.asked("grpo/router_replay"):
                raise InputError(
                    "grpo.router_replay=true trains with the experts that the sampler chose, and this model has no "
                    "experts: leave it out."
                )
            self.say("note: grpo.router_replay has no effect: it is for models that learn from rewards online")
        if self.route_fields and self.settings.speculation is not None:
            raise InputError(
                "grpo.router_replay needs the experts of every sampled token, which a pass over a draft does not "
                "record: set generate.speculate=none, or grpo.router_replay=false."
            )
        if isinstance(self.policy, GrpoSettings) and self.policy.offline != "no":
            if self.settings.curriculum != "none":
                raise InputError(f"grpo.curriculum is about prompts, and grpo.offline={self.policy.offline} has none.")
            assert self.tokenizer is not None
            data, self.passes = build_stored(self.settings, self.policy, self.tokenizer, horizon, self.say)
            return data
        if self.settings.old_logprobs == "sampler" and self.config.is_set("grpo/importance"):
            self.say("note: grpo.importance has no effect with grpo.old_logprobs=sampler: the ratio is to the sampler")
        if self.settings.staleness and self.settings.importance == "none" and self.settings.old_logprobs == "forward":
            self.say(
                "note: grpo.importance=none leaves the difference between the weights that sampled and those that are "
                "trained uncorrected (grpo.staleness=1); grpo.old_logprobs=sampler would leave it to the clip"
            )
        unweighted = self.settings.old_logprobs == "sampler" or self.settings.importance == "none"
        if unweighted and self.reinforces and self.config.is_set("grpo/importance_cap"):
            self.say("note: grpo.importance_cap has no effect without importance weights")
        self.rollout_seconds = 0.0
        self.rewards = self.choose_rewards()
        data, self.passes = build_prompts(self.context, self.tokenizer, self.policy, horizon)
        data = dataclasses.replace(data, fields={**data.fields, **self.added_fields})
        plan = cast(PromptPlan, data.plan)
        self.describe_curriculum(plan)
        agree("the prompts", plan.identity)
        if self.rewards is not None:
            self.rewards.check_columns([*plan.columns, "completion_tokens"], plan.partial_columns)
            self.rewards.check_rows(plan.rows)
            for column, lacking in plan.partial_columns.items():
                self.say(f"note: rewards are not given the column '{column}': {lacking}")
        if self.settings.environment is not None:
            check = functools.partial(check_made, self.settings.environment, list(self.config["plugins"]))
            broadcast("environment made", check, REWARD_SECONDS)
        self.note_derived(
            "prompts a rollout",
            self.passes.prompts,
            f"{self.passes.rows} completions in groups of {self.passes.group_size}, {self.passes.steps} steps each",
        )
        return data

    def describe_curriculum(self, plan: PromptPlan) -> None:
        """Print what the curriculum derives, and a note for each of its settings that has no effect."""
        kind = self.settings.curriculum
        if isinstance(plan.curriculum, ByPassRate) and self.rewards is None and not self.settings.environment:
            raise InputError("grpo.curriculum=pass_rate goes by rewards, and a teacher gives none: leave it out.")
        if isinstance(plan.curriculum, ByColumn):
            steps = round(plan.curriculum.rollouts * self.passes.steps)
            given = self.config.is_set("grpo/curriculum_steps")
            self.note_derived("grpo.curriculum_steps", steps, "given" if given else "half of the run")
        for names, used, needs in (
            (("curriculum_start", "curriculum_steps"), isinstance(plan.curriculum, ByColumn), "a column"),
            (("pass_rate_low", "pass_rate_high", "pass_rate_rest"), kind == PASS_RATE, PASS_RATE),
        ):
            for name in names:
                if not used and self.config.is_set(f"grpo/{name}"):
                    self.say(f"note: grpo.{name} has no effect: it is for grpo.curriculum={needs}")

    @property
    def pass_rates(self) -> ByPassRate | None:
        """What grpo.curriculum=pass_rate has measured; None in a plan, which has no prompts."""
        plan = self.data.plan
        made = plan.curriculum if isinstance(plan, PromptPlan) else None
        return made if isinstance(made, ByPassRate) else None

    def note_unused_settings(self) -> None:
        """Print a note for each setting that is set and has no effect in this run."""
        model: Any = self.model_parts.model
        for key, why in unused_settings(self.settings, self.policy, model.vocab_size).items():
            if key in self.config and self.config.is_set(key):
                self.say(f"note: {dotted(key)} has no effect {why}")

    @functools.cached_property
    def policy(self) -> SampledSettings:
        """The objective's settings."""
        return cast(SampledSettings, self.config.make(objectives.entry(self.settings.objective).settings[0]))

    @functools.cached_property
    def sampler(self) -> Sampler:
        """Created at its first use, since its batches are those of the compiled step."""
        parts: dict[str, Any] = {
            "settings": self.settings,
            "policy": self.policy,
            "parts": self.model_parts,
            "topology": self.topology,
            "plan": self.prompts,
            "rewards": self.rewards,
            "micro": self.functions.micro,
            "params": lambda: self.state.whole(),
            "show": lambda text: self.show_progress(text),
        }
        if self.settings.environment is None:
            return Sampler(**parts)
        return EpisodeSampler(**parts, plugins=list(self.config["plugins"]), say=self.say)

    @functools.cached_property
    def ahead(self) -> AheadOfTraining | None:
        """With grpo.staleness, what samples one rollout ahead."""
        return AheadOfTraining(lambda: self.sampler) if self.settings.staleness and not self.offline else None

    @property
    def hooks(self) -> StepHooks:
        """As BaseTrainer's; with grpo.entropy_target the state and the step adapt the coefficient too."""
        hooks, policy = super().hooks, self.policy
        if not isinstance(policy, GrpoSettings) or policy.entropy_target is None:
            return hooks
        step = functools.partial(follow_target, hooks.train_step, policy)
        return dataclasses.replace(hooks, train_step=step, state_class=EntropyState)

    @property
    def reinforces(self) -> bool:
        """Whether it learns from rewards."""
        return isinstance(self.policy, GrpoSettings)

    @property
    def offline(self) -> bool:
        return isinstance(self.policy, GrpoSettings) and self.policy.offline != "no"

    @property
    def row_types(self) -> Mapping[str, Any]:
        return row_types(self.policy)

    @property
    def added_fields(self) -> Fields:
        """Fields of a batch that are not one number per token: experts to replay, the completions of packed rows."""
        return self.route_fields | pack_fields(self.settings)

    @property
    def route_fields(self) -> Fields:
        return routes_fields(self.settings, self.policy, self.model_parts.model)

    @property
    def saved_fields(self) -> Fields:
        """Fields of the rows of a rollout, which is saved as it was sampled, one completion per row."""
        return {name: field for name, field in self.data.fields.items() if name != COMPLETIONS}

    def choose_rewards(self) -> Rewards | None:
        """Return the configured rewards; by default exact match, and none with a teacher."""
        if self.reinforces:
            named = self.settings.rewards
            if named is None and self.settings.environment is not None:
                return None  # the environment's own
            return Rewards([RewardSpec("exact_match")] if named is None else named, self.settings.reward_timeout)
        unused = ("sync_interval", "sync_moments", "old_logprobs", "importance", "importance_cap")
        for key in (f"grpo/{name}" for name in unused):
            if self.config.is_set(key):
                self.say(f"note: {dotted(key)} has no effect with a teacher, which never changes")
        return Rewards(self.settings.rewards, self.settings.reward_timeout) if self.settings.rewards else None

    @property
    def prompts(self) -> PromptPlan:
        """The plan of an online run."""
        return cast(PromptPlan, self.data.plan)

    # --- compilation ---

    def compile_aot(self) -> bool:
        """As BaseTrainer's. Beside it, a thread compiles what the first rollout runs."""
        if not self.functions.compiled and self.compiles_rollouts_ahead:
            pool = ThreadPoolExecutor(1, thread_name_prefix="bessemer-rollout")
            self._compiling = pool.submit(self.sampler.compile_ahead, self.functions.abstract_state.whole())
            pool.shutdown(wait=False)
        return super().compile_aot()

    @property
    def compiles_rollouts_ahead(self) -> bool:
        """Where programs do not depend on how many rows are left, cores are many, and the cache can hold the result.
        Parameters that are merged with adapters inside the step have no abstract form."""
        here = jax.default_backend() != "cpu" and process_count() == 1 and not self.offline
        cached = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
        return here and cached and not self.model_parts.split.tables

    # --- batches ---

    def start_over(self) -> None:
        super().start_over()
        self.rollout = self._packed = None
        if self.pass_rates is not None:
            self.pass_rates.forget()
        if (ahead := self.__dict__.pop("ahead", None)) is not None:  # created again at its next use
            ahead.drop()

    def prefetcher(self, step: int) -> Prefetcher:
        """Online, batches are not made ahead of use: a rollout is sampled from the live parameters."""
        return super().prefetcher(step) if self.offline else Prefetcher(self.device_part, step + self.data_offset, 0)

    def batch(self, slice: str = "train", *, step: int | None = None, rows: slice | None = None) -> Mapping[str, Any]:
        """As BaseTrainer's. Online, the first batch of a rollout samples it from the live parameters."""
        if self.offline or slice != "train":
            return super().batch(slice, step=step, rows=rows)
        part = self.part(self.step + self.data_offset if step is None else step)
        return part if rows is None else {name: array[rows] for name, array in part.items()}

    def part(self, position: int) -> Mapping[str, Any]:
        """Return the rows of one step, from the rollout in use or a new one."""
        number, within = self.passes.place(position)
        if self.rollout is None or self.rollout.number != number:
            self.rollout = self._packed = None  # released before the next one is made
            remedy, clock = "Lower grpo.slots, or grpo.mini_batches in a new run", Laps()
            with doing(self.run_state, f"the sampling of rollout {number}", remedy):
                if self._compiling is not None:
                    self._compiling.result()
                    self._compiling = None
                jax.block_until_ready(self.state.step)  # the last step is not time of this rollout
                if self.ahead is None:
                    self.rollout = self.sampler.rollout(number, clock)
                else:
                    another = (number + 1) * self.passes.steps - self.data_offset < self.steps
                    self.rollout = self.ahead.rollout(number, self.step, another, clock)
            self.rollout_seconds = (self.rollout_seconds or 0.0) + clock.total
        if not self.settings.pack:
            return self.passes.take(self.rollout, within)
        if self._packed is None or self._packed[0] != position:  # a batch is read micro-batch by micro-batch
            rows = self.passes.take(self.rollout, within)
            self._packed = position, pack_rows(rows, rows["loss_mask"] > 0).rows
        return self._packed[1]

    def needs_rollout(self, step: int) -> bool:
        if self.offline:
            return False
        return self.rollout is None or self.rollout.number != self.passes.place(step + self.data_offset)[0]

    def device_part(self, position: int) -> dict[str, Any]:
        functions = self.functions
        return device_batch(
            lambda first, end: self.batch("train", step=position, rows=slice(first, end)),
            self.data.fields,
            functions.micro,
            functions.accumulate_steps,
            self.topology.batch_sharding(1),
        )

    # --- steps ---

    @classmethod
    def train_step(
        cls, state: TrainState, batch: step.Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, step.Meta]:
        """As BaseTrainer's; metrics of tokens are means over tokens, whatever the loss is divided by."""
        state, loss, meta = super().train_step(state, batch, key, accumulate_steps)
        if COMPLETIONS in batch:
            meta["packed_rows"] = jnp.sum(batch[COMPLETIONS] > 0)
        share = meta.pop(TOKENS)
        return state, loss, meta | {name: meta[name] / share for name in PER_TOKEN if name in meta}

    def on_step_end(self, state: TrainState, metrics: step.Meta, step: int) -> tuple[TrainState, step.Meta]:
        """Add the rollout's metrics to the row, and renew the reference when it is due."""
        interval = self.settings.sync_interval if self.teacher is None else 0
        if state.reference is not None and interval and step % interval == 0 and step < self.steps:
            self.step, self.state = step, state.replace(reference=None)  # one copy at a time
            self.take_reference()
            state, done = self.state, f"reference  taken anew from the policy after step {step:,}"
            if self.settings.sync_moments:
                state = with_fresh_moments(state, self.functions.state_shardings.opt_state)
                done += "; the optimizer's moments are reset"
            self.say(done)
        known: dict[str, Any] = {}
        if isinstance(self.data.plan, StoredPlan):
            known = self.data.plan.metrics(step - 1 + self.data_offset)
        elif self.rollout is not None:
            known = self.rollout.metrics
        return state, {**metrics, **known}

    def flops_share(self, causal: bool) -> float | None:
        """As BaseTrainer's; None with grpo.pack, where a step computes fewer rows than its tokens count."""
        return None if self.settings.pack else super().flops_share(causal)

    # --- validation ---

    @property
    def validates(self) -> bool:
        return not self.offline and bool(self.prompts.held_out)

    def validate(self) -> dict[str, Any]:
        """Return val_reward, the mean reward of greedy completions of held-out prompts; with a teacher val_loss, the
        mean divergence from it on the student's own completions."""
        row: dict[str, Any] = {}
        if self.ahead is not None:
            self.ahead.settle()  # rewards are user code: one call at a time
        with self.topology.scope():
            if self.sampler.judges:
                row |= self.sampler.validate(self.step)
            if not self.reinforces:
                val_step = functools.partial(self.functions.val_step, self.state)
                row |= self.sampler.divergence(self.step, val_step)
        score = row["val_loss"] if "val_loss" in row else -row["val_reward"]
        self.loop_state.take_validation(score, self.step)
        return row

    # --- checkpoints ---

    def finish(self) -> None:
        sampler = self.__dict__.get("sampler")
        if isinstance(sampler, EpisodeSampler):
            sampler.close()
        super().finish()

    def snapshot(self) -> Snapshot:
        made = super().snapshot()
        if self.ahead is not None:
            made = dataclasses.replace(made, files={**made.files, **self.ahead.files()})
        if self.pass_rates is not None:
            made = dataclasses.replace(made, files={**made.files, PASS_RATES.name: self.pass_rates.to_bytes()})
        number, within = self.passes.place(self.step + self.data_offset)
        if self.rollout is None or within == 0:
            return made
        assert self.rollout.number == number
        return dataclasses.replace(made, files={**made.files, ROLLOUT.name: self.rollout.to_bytes()})

    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None:
        super().accept(tree, step, files)
        self._packed = None
        path = ROLLOUT.path(files.path(step))
        self.rollout = Rollout.load(path) if path.is_file() else None
        if self.rollout is not None and not self.offline:
            check_rollout(self.rollout, path, self.passes.rows, self.saved_fields, self.model_parts.model)
            fit_routes(self.rollout.rows, self.route_fields)
        agree("the rollout in use", "none" if self.rollout is None else f"rollout {self.rollout.number}")
        if self.pass_rates is not None and not self.pass_rates.load(files.path(step)):
            self.say(f"note: no pass rates of these prompts are in checkpoint {step}; they are measured from here on")
        if self.ahead is not None:
            self.ahead.load(files.path(step))
            if self.ahead.next is not None:
                ahead, path = self.ahead.next.rollout, ROLLOUT_AHEAD.path(files.path(step))
                size, model = self.settings.group_size, self.model_parts.model
                check_ahead(ahead, path, self.passes.rows, size, self.saved_fields, model)
                fit_routes(ahead.rows, self.route_fields)
            agree("the rollout sampled ahead", self.ahead.waiting)
