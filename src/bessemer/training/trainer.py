"""BaseTrainer: the research path. Everything comes from the configuration; override one method to change one thing.

    class MyTrainer(bm.BaseTrainer[MyConfig, MyModel]): ...
    MyTrainer(bm.ExecutionSpec.local("runs", name="mine")).run()

The class is thin: each member delegates to the room that owns the matter.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import jax
import numpy as np
from flax import linen as nn

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, configuration, configure
from bessemer.data import Prefetcher, Tokenizer
from bessemer.generate.results import GenerationConfig, GenerationResults
from bessemer.job import CheckpointManager, ExecutionSpec, RestoreableJob, Snapshot
from bessemer.models.lora import LoraSettings
from bessemer.registry import jobs
from bessemer.topology import StopAgreement, Topology, TopologySettings, init_sharded, shardings
from bessemer.training import (
    data_parts,
    functions,
    generation,
    goodput,
    inherit,
    model_parts,
    outcome,
    output,
    reference,
    restore,
    schema,
    stages,
    step,
    teacher,
    validation,
)
from bessemer.training.cache import keep_compiled_programs
from bessemer.training.callback import Callback
from bessemer.training.collate import collect_function
from bessemer.training.loop import Loop
from bessemer.training.mirror import make_mirror
from bessemer.training.progress import NoBar, ProgressBar, make_progress
from bessemer.training.settings import BaseTrainerConfig, GuardSettings, LoggingSettings, seconds_of
from bessemer.training.startup import StartUp
from bessemer.training.state import LoopState, TrainState

GIVEN = "given from Python"

C = TypeVar("C", bound=BaseTrainerConfig)
M = TypeVar("M", bound=nn.Module)


@jobs.register("BaseTrainer")
class BaseTrainer(RestoreableJob[C], Generic[C, M]):
    """One training run as a job. With the spec alone everything comes from the configuration in force;
    the keywords give parts directly."""

    default_callbacks: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "evaluation",
        "metric_logger",
        "progress_bar",
        "start_up",
        "gradient_clipping",
        "validation",
        "preview",
        "time_limit",
        "tracker",
        "garbage_collector",
    )

    state_class: ClassVar[type[TrainState]] = TrainState
    rolls_out: ClassVar[bool] = False  # samples what it trains on

    def __init__(
        self,
        spec: ExecutionSpec,
        *,
        model: M | None = None,
        model_state: Any = None,
        dataset_train: Any = None,
        dataset_eval: Any = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        tokenizer: Tokenizer | None = None,
        callbacks: Iterable[Callback] = (),
        arguments: Mapping[str, Any] | None = None,
    ):
        assert spec.topology is not None, "the spec has no topology: use ExecutionSpec.local(root, name=...)"
        super().__init__(spec)
        self.config: Config = schema.config_for(type(self), arguments, spec.root)
        self.topology: Topology = spec.topology
        self.given_callbacks = tuple(callbacks)
        self.given = data_parts.GivenParts(
            model, model_state, dataset_train, dataset_eval, data_collator, tokenizer
        )
        self.derived: dict[str, Any] = {}
        self.started = time.monotonic()
        self.startup = StartUp()
        self.wall_before = 0.0  # seconds of the starts before this one
        named = [*(part for part, value in self.given._asdict().items() if value is not None)]
        named += ["callbacks"] if self.given_callbacks else []
        if named:
            self.note_derived(GIVEN, named, "brought by the caller, not by the configuration")
        self.generate_program: Any = None  # made at first use, as is the preview
        self.preview: Any = None
        self.continues = False
        self.data_change = ""
        self._state: TrainState | None = None
        self._checkpoints: Checkpoints | None = None
        self.stages: tuple[stages.Stage, ...] = ()
        self.other_functions: functions.Functions | None = None  # of the stages of the other kind
        self.output = output.Output(spec.run_directory, self.topology.is_process_zero)
        with configuration(self.config), self.topology.scope():
            self.settings: C = configure(self.config_class())
            self.logging = configure(LoggingSettings)
            self.guard = configure(GuardSettings)
            self.lora = configure(LoraSettings)
            self.mirror = make_mirror(self)
            self.time_limit = seconds_of(self.settings.time_limit)
            self.model_parts = self.configure_model()
            if self.settings.init is not None and (taken := inherit.describe(self.config)) is not None:
                self.note_derived("init", self.settings.init, taken)
            self.teacher = teacher.find_teacher(self)
            self.data = self.configure_dataloaders()
            self.stages = self.plan_stages()
            if self._checkpoints is not None:  # opened by the data already
                restore.protect_stages(self, self._checkpoints)
            self.startup.lap("data")
            keep_compiled_programs(self.config["data/root"])
            self.functions = self.configure_functions()
            inherit.check_start(self)
        self.activity: outcome.Activity | None = None  # besides the steps
        self.stop_agreement = StopAgreement()
        self.start_over()

    # --- classes and names -------------------------------------------------------------------------------
    @classmethod
    def config_class(cls) -> type[Any]:
        """C of `BaseTrainer[C, M]`, found from the class statement."""
        return schema.generic_argument(cls, BaseTrainer, 0) or BaseTrainerConfig

    @classmethod
    def model_class(cls) -> type[Any] | None:
        """M of `BaseTrainer[C, M]`; None: the family named by model/family."""
        return schema.generic_argument(cls, BaseTrainer, 1)

    @classmethod
    def optimizer(cls) -> Any:
        """An optimizer's name, or an optax transformation. The setting optimization/name overrides it."""
        return "adamw"

    @classmethod
    def schedule(cls) -> Any:
        """A schedule's name, "auto" for the optimizer's own, an optax schedule (step -> learning rate), or None
        for a constant rate. The setting optimization/schedule overrides it."""
        return "auto"

    def evaluator(self) -> Any:
        """Which Evaluator judges the model during training; None: none."""
        return None

    # --- the three build steps ----------------------------------------------------------------------------
    def configure_model(self) -> model_parts.ModelParts:
        """Tokenizer, module and its counts. No arrays yet."""
        return model_parts.build_model(self, data_parts.choose_tokenizer(self))

    def configure_dataloaders(self) -> data_parts.DataParts:
        """The pure `batch(step)`, the validation rows, and the horizon."""
        return data_parts.build_data(self)

    def configure_functions(self) -> functions.Functions:
        """Optimizer, state shardings and the jitted steps."""
        return functions.build_functions(self)

    def plan_stages(self) -> tuple[stages.Stage, ...]:
        """What each stage of training.tokens is; one stage is the whole run."""
        taught = self.teacher is not None and self.teacher.live
        return stages.plan(self.data.stage_starts, self.steps, referred=taught or self.wants_reference())

    @staticmethod
    def sharded_init(
        model: nn.Module, key: jax.Array, *args: Any, mesh: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Parameters born on their devices: (variables, var_sharding)."""
        topology = Topology(mesh, None, TopologySettings())
        return init_sharded(lambda k: model.init(k, *args, **kwargs), key, topology)

    # --- state -------------------------------------------------------------------------------------------
    @property
    def state(self) -> TrainState:
        """The state tree; made at first use, so that a restore never allocates it twice."""
        if self._state is None:
            self._state = functions.initial_state(self)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    @property
    def key(self) -> jax.Array:
        return self.functions.key

    @property
    def mesh(self) -> Any:
        return self.topology.mesh

    @property
    def model(self) -> M:
        return cast(M, self.model_parts.model)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model_parts.tokenizer

    @property
    def model_state(self) -> Any:
        """The parameters as they are now."""
        return self.full_params()

    def full_params(self, state: TrainState | None = None) -> Any:
        """The model's parameters, trained and frozen ones together, of `state` (default: the live one)."""
        return (self.state if state is None else state).whole()

    def wants_reference(self) -> bool:
        """Whether the step compares with frozen reference weights (`state.reference`)."""
        return reference.wanted(self)

    @property
    def steps(self) -> int:
        return self.data.steps

    @property
    def training_batch_size(self) -> int:
        return self.data.batch_size

    @property
    def evaluation_batch_size(self) -> int:
        """Sequences in one forward pass of validation, all devices together."""
        return self.functions.micro

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.settings.block_size

    @property
    def is_process_zero(self) -> bool:
        return self.topology.is_process_zero

    is_enable = is_process_zero

    @property
    def done(self) -> bool:
        """All optimizer steps taken (or an early end decided by a callback)."""
        return self.step >= self.steps or self.loop_state.finished is not None

    def start_over(self) -> None:
        """Back to step 0, as the run began; the state is made again at its first use."""
        self._state = None
        self.loop_state = LoopState()
        self.step = self.data_offset = 0
        stages.select(self, 0)

    def move_data(self, position: int) -> None:
        """The next step takes batch `position`."""
        self.data_offset = position - self.step
        data_step = jax.device_put(np.int32(position), self.topology.replicated)
        self.state = self.state.replace(data_step=data_step)

    # --- batches and steps --------------------------------------------------------------------------------
    def batch(self, slice: str = "train") -> Mapping[str, Any]:
        """The next batch as host arrays (B, T): input_ids, target_ids, positions, segment_ids, loss_mask."""
        if slice == "train":
            return self.data.plan.batch(self.step + self.data_offset)
        assert self.data.validation is not None, "this run has no validation rows"
        return self.data.validation.read(0, self.evaluation_batch_size)

    @classmethod
    def train_step(
        cls, state: TrainState, batch: step.Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, step.Meta]:
        """One optimizer step over batch leaves (S, B, T)."""
        return step.train_step(state, batch, key, accumulate_steps)

    @classmethod
    def val_step(cls, state: TrainState, batch: step.Batch) -> tuple[jax.Array, jax.Array, step.Meta]:
        """(Σ loss, Σ weight, further sums) over S micro-batches."""
        return step.val_step(state, batch)

    def on_step_start(self, state: TrainState, step: int) -> TrainState:
        return state

    def on_step_end(self, state: TrainState, metrics: step.Meta, step: int) -> tuple[TrainState, step.Meta]:
        """`metrics` are unread device values; what is returned is what is used and logged."""
        return state, metrics

    def starts_epoch(self, step: int) -> bool:
        return self.data.starts_epoch(step + self.data_offset)

    def prefetcher(self, step: int) -> Prefetcher:
        """Device batches from `step` on, made ahead of use by a background thread."""
        make = functools.partial(data_parts.make_device_batch, self)
        return Prefetcher(make, step + self.data_offset, self.data.prefetch)

    @property
    def validates(self) -> bool:
        return self.data.validation is not None

    def validate(self) -> dict[str, Any]:
        """Loss and bits per byte on the fixed held-out sequences; keeps the best in the loop state."""
        return validation.validate(self)

    def compile_aot(self) -> bool:
        """Compile both steps before the loop; True if anything was compiled. The loop uses these executables."""
        self.startup.lap("setup")
        with self.topology.scope():
            self.functions, compiled = functions.compile_steps(self)
        self.startup.lap("compile")
        return compiled

    # --- running -----------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train to the end (every process calls it). Continues from what `load` restored."""
        with outcome.opened(self):
            output.header(self)
            output.compile_shown(self)
            outcome.together("compiled")
            loop = Loop(self)
            loop.run()
            self.step = loop.step
            self.save_pretrained(self.state)
            output.conclude(self)

    def make_callbacks(self) -> list[Callback]:
        return schema.make_callbacks(self)

    def finish(self) -> None:
        """Wait for background saves and release what the run holds."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    # --- checkpoints --------------------------------------------------------------------------------------
    @property
    def checkpoint_manager(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = restore.open_checkpoints(self)
        return self._checkpoints

    def save_checkpoint(self, wait: bool = False) -> None:
        """Begin to save the current step; the best validated one is kept from retention."""
        restore.save(self, wait)

    def snapshot(self) -> Snapshot:
        return restore.snapshot(self)

    def abstract_state(self) -> Any:
        return restore.saved_tree(self.functions.abstract_state)

    def admit(self, step: int) -> None:
        restore.check_same_run(self, step)

    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None:
        restore.accept(self, tree, step)

    def note(self, message: str) -> None:
        self.say(f"warning: {message}")

    @classmethod
    def from_config(cls, saved: Mapping[str, Any], spec: ExecutionSpec) -> Self:
        with configuration(schema.saved_config(spec.run_directory.config)):
            trainer = cls(spec)
        trainer.continues = True
        return trainer

    def save_pretrained(self, state: TrainState, save_directory: Any = None, to_torch: bool = False) -> Path:
        """Weights, config and tokenizer as plain files: model.safetensors, config.json, tokenizer.json."""
        return output.save_pretrained(self, state, save_directory, to_torch)

    def save_information(self, path: Any) -> None:
        """A markdown description of the run."""
        output.save_information(self, path)

    # --- counting ----------------------------------------------------------------------------------------
    def count_model_parameters(self, params: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def calculate_number_total_flops(self, params: Any = None, is_training: bool = True) -> float:
        """FLOPs of the whole horizon from the model's own formula; a forward pass alone is a third of training."""
        total = self.model_parts.flops_per_token * self.tokens_per_step * self.steps
        return total if is_training else total / 3

    def flops_share(self, causal: bool) -> float | None:
        """Share of the devices' peak that one token per second uses; None on a chip without a known peak."""
        return model_parts.flops_share(self, causal)

    def wall_seconds(self) -> float:
        """Of all starts of the run so far, for time/goodput."""
        return goodput.wall_seconds(self)

    def describe_step(self, step: int) -> dict[str, Any]:
        """What a row says about its step without reading the device: tokens, epoch, rates, FLOPs so far."""
        tokens = step * self.tokens_per_step
        return {
            "tokens": tokens,
            "epoch": self.data.plan.epoch(step + self.data_offset),
            "total_training_flops": tokens * self.model_parts.flops_per_token,
            **model_parts.peak_memory(),
        }

    def note_derived(self, name: str, value: Any, reason: str) -> None:
        """Remember a derived or chosen number with its reason: shown at the start, saved in derived.json."""
        self.derived[name] = {"value": value, "reason": reason}

    def given_params(self) -> Any:
        """The starting weights: those given, or those of `init`; what is not among them is drawn from the seed."""
        if self.given.model_state is not None:
            placed = shardings(self.model_parts.boxed, self.topology.mesh, self.topology.rest_rules)
            # a copy: the step donates its state, and these are the caller's, and needed again to start over
            return jax.device_put(self.given.model_state, placed, may_alias=False)
        return {} if self.settings.init is None else restore.initial_params(self)

    def gather(self, params: Any) -> Any:
        """Parameters whole on every device, for writing them out."""
        return jax.jit(lambda tree: tree, out_shardings=self.topology.replicated)(params)

    # --- showing -----------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """One line to the screen and to log.txt, on process 0 only."""
        self.output.say(text)

    def create_progress_bar(self, total: int, desc: str = "", disabled: bool = False) -> ProgressBar:
        if disabled:
            return NoBar()
        return make_progress(self.logging.progress, self.output.console, self.output.say, total, desc)

    def log_metrics(self, metrics: dict[str, Any], pbar: ProgressBar, step: int, mode: str = "train") -> None:
        pbar.update(step, metrics)

    def log_weight_distribution(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Histograms of every parameter, one row each, also appended to weights.jsonl."""
        from bessemer.training.callbacks.weight_distribution import append_weights

        path = self.run_directory.weights
        return append_weights(path, state.params, step, write=self.is_process_zero)

    # --- text --------------------------------------------------------------------------------------------
    def generate(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        prompts: Any = None,
        *,
        state: TrainState | None = None,
        apply_chat_template: bool = False,
        generation_config: GenerationConfig | Mapping[str, Any] | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        shard_inputs: bool | None = None,
        return_metadata: bool = False,
        all_gather: bool = False,
        **sampling: Any,
    ) -> GenerationResults:
        """Continue prompts (a text, chat messages, or a list of either) or left-padded `input_ids` (B, T) with the
        parameters of `state` (default: the live ones). Every process gives the same prompts.

        Settings are those of GenerationConfig: `generation_config`, then `config_overrides`, then `sampling` over it.
        shard_inputs: rows over the mesh (default), or False: whole on every device. return_metadata: log-probabilities,
        lengths and why each row ended. all_gather: prompts and sequences as NumPy arrays on every process; otherwise
        they stay on the devices. Neither prompts nor ids: ValueError.
        """
        return generation.generate(
            self,
            input_ids,
            attention_mask,
            prompts,
            generation.settings_of(generation_config, config_overrides, sampling),
            state=self.state if state is None else state,
            apply_chat_template=apply_chat_template,
            shard_inputs=shard_inputs,
            return_metadata=return_metadata,
            all_gather=all_gather,
        )

    def create_generate_function(
        self, generation_config: GenerationConfig | Mapping[str, Any] | None = None, **sampling: Any
    ) -> generation.GenerateFunction:
        """The compiled function (state, ids, mask) → (sequences, ids, mask) of left-padded (B, T); compiled once."""
        return generation.generate_function(self, generation.settings_of(generation_config, sampling))

    def maybe_generate(self, state: TrainState, step: int, metrics: Any = None) -> None:
        """Preview `state` if one is due at `step` (logging.preview_interval): in samples.jsonl and on the screen; the
        samples are added to `metrics`, for trackers."""
        generation.maybe_preview(self, state, step, metrics)

    def create_collect_function(
        self, max_sequence_length: int, truncation_mode: str = "keep_end"
    ) -> Callable[[list[Any]], dict[str, Any]]:
        """Examples (ids, or dicts with input_ids) -> padded, truncated rows."""
        return collect_function(self.tokenizer, max_sequence_length, truncation_mode)
