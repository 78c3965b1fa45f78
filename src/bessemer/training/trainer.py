"""BaseTrainer: the research path. Everything comes from the configuration; override one method to change one thing.

    class MyTrainer(bm.BaseTrainer[MyConfig, MyModel]): ...
    MyTrainer(bm.ExecutionSpec.local("runs", name="mine")).run()

The class is a facade: each method delegates to the module that implements it, and the run calls every one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

import jax
import numpy as np
from flax import linen as nn

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, configuration
from bessemer.data import Prefetcher, Tokenizer
from bessemer.evaluate import Evaluator
from bessemer.generate import Completion, LoadedModel
from bessemer.generate.decoder import GenerationConfig, GenerationResults
from bessemer.job import GIVEN, CheckpointManager, ExecutionSpec, RestoreableJob, RunLock, Snapshot, is_path
from bessemer.models.lora import LoraSettings, merge_adapters
from bessemer.registry import jobs
from bessemer.topology import Topology, TopologySettings, init_sharded, process_count, shardings
from bessemer.training import generation, outcome, output, validation
from bessemer.training import stages as run_stages
from bessemer.training import step as step_functions
from bessemer.training.callbacks.base import Callback, Callbacks
from bessemer.training.display import NoBar, ProgressBar, StartUp, header, make_progress
from bessemer.training.loop import Loop
from bessemer.training.persistence import checkpoints, frozen, reference
from bessemer.training.persistence.checkpoints import Branch, Lineage
from bessemer.training.persistence.mirror import make_mirror
from bessemer.training.persistence.teacher import find_teacher, with_targets
from bessemer.training.settings import (
    BaseTrainerConfig,
    GivenParts,
    GuardSettings,
    LoggingSettings,
    Notes,
    RunContext,
    seconds_of,
)
from bessemer.training.setup import compiled, horizon, initial_weights, microbatch, schema
from bessemer.training.setup import data as run_data
from bessemer.training.setup.compiled import Functions, RunPlan, StepHooks, keep_compiled_programs
from bessemer.training.setup.data import CollectFunction, DataParts
from bessemer.training.setup.model import ModelParts, allocate, build_model, flops_share, limit_documents, peak_memory
from bessemer.training.state import LoopState, RunState, TrainState
from bessemer.training.step import Batch, Meta
from bessemer.user_code import refuse_while_importing

C = TypeVar("C", bound=BaseTrainerConfig)
M = TypeVar("M", bound=nn.Module)


@jobs.register("BaseTrainer")
class BaseTrainer(RestoreableJob[C], Generic[C, M]):
    """One training run as a job. Settings come from the current configuration; keywords pass parts directly."""

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

    settings: C
    model_parts: ModelParts
    data: DataParts
    functions: Functions

    state_class: ClassVar[type[TrainState]] = TrainState
    rolls_out: ClassVar[bool] = False  # samples what it trains on
    rollout_seconds: float | None = None  # spent on rollouts in this process; None: it samples nothing

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
        refuse_while_importing()
        super().__init__(spec)
        self.config = schema.config_for(type(self), arguments, spec.root)
        if dataset_train is None:
            self.choose_defaults(self.config)
        self.topology = spec.topology
        self.given_callbacks = tuple(callbacks)
        self.given = GivenParts(model, model_state, dataset_train, dataset_eval, data_collator, tokenizer)
        self.notes = Notes(self.say)
        self.started = time.monotonic()
        self.startup = StartUp()
        self.wall_before = 0.0  # seconds of the starts before this one
        named = [*(part for part, value in self.given._asdict().items() if value is not None)]
        named += ["callbacks"] if self.given_callbacks else []
        if named:
            self.note_derived(GIVEN, named, "passed by the caller, not in the configuration")
        self.preview: Any = None  # made at first use
        self.lineage = Lineage()
        self.run_state = RunState(self._initial_state)
        self._checkpoints: Checkpoints | None = None
        self._reading: Future[checkpoints.InitialParams] | None = None  # of weights that are read while steps compile
        self._failed: Exception | None = None  # what creating the state meanwhile raised
        self.stages: tuple[run_stages.Stage, ...] = ()
        self.functions_by_reference: dict[bool, Functions] = {}  # whether the stage has a reference → its functions
        self.output = output.Output(spec.run_directory, self.topology.is_process_zero)
        with self.configured():
            self.settings = self.config.make(self.config_class())
            self.logging = self.config.make(LoggingSettings)
            self.guard = self.config.make(GuardSettings)
            self.lora = self.config.make(LoraSettings)
            self.context: RunContext[C] = RunContext(
                self.config,
                self.settings,
                self.logging,
                self.guard,
                self.lora,
                self.topology,
                spec.run_directory,
                self.given,
                self.notes,
            )
            self.mirror = make_mirror(self.context)
            self.time_limit = seconds_of(self.settings.time_limit)
            self.model_parts = self.configure_model()
            if self.settings.init is not None and (taken := initial_weights.describe(self.config)) is not None:
                self.note_derived("init", self.settings.init, taken)
            self.lora = self.model_parts.split.lora
            self.teacher = find_teacher(self.context, self.model_parts)
            self.data = self.configure_dataloaders()
            if not self.rolls_out and self.data.plan is not None:  # else there is no row to look at
                self.data = dataclasses.replace(self.data, fields=run_data.batch_fields(self.batch))
            self.logging = horizon.settle_reports(self.context, self.steps)
            self.context = dataclasses.replace(self.context, logging=self.logging)
            self.stages = self.plan_stages()
            if self._checkpoints is not None:  # opened by the data already
                checkpoints.protect_stages(self._checkpoints, self.stages)
            self.startup.lap("data")
            keep_compiled_programs(self.config["data/root"])
            self.plan = RunPlan(self.context, self.model_parts, self.data, self.teacher, self.stages)
            self.functions = self.configure_functions()
            self.check_initial_weights()
        self.settings = self.config.freeze().make(self.config_class())
        self.context = dataclasses.replace(self.context, settings=self.settings)
        self.plan = dataclasses.replace(self.plan, context=self.context)
        self.show_progress: Callable[[str], None] = lambda text: None  # the loop's, while it runs
        self.lock: RunLock | None = None  # of the run directory, while it runs; process 0 holds it
        self.start_over()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        run_data.check_batch_method(cls.batch)

    # --- classes and names -------------------------------------------------------------------------------
    @classmethod
    def config_class(cls) -> type[Any]:
        """Return C of `BaseTrainer[C, M]`, from the class statement."""
        return schema.generic_argument(cls, BaseTrainer, 0) or BaseTrainerConfig

    @classmethod
    def model_class(cls) -> type[Any] | None:
        """Return M of `BaseTrainer[C, M]`; None: the family named by model/family."""
        return schema.generic_argument(cls, BaseTrainer, 1)

    @classmethod
    def choose_defaults(cls, config: Config) -> None:
        """Replace defaults that cannot work here, with `config.set(key, value, why)`; called once, for a new run."""

    @classmethod
    def optimizer(cls) -> Any:
        """Return an optimizer's name, or an optax transformation. The setting optimization/name overrides it."""
        return "adamw"

    @classmethod
    def schedule(cls) -> Any:
        """Return a schedule's name, "auto" for the optimizer's own, an optax schedule (step -> learning rate), or None
        for a constant rate. The setting optimization/schedule overrides it."""
        return "auto"

    def evaluator(self) -> type[Evaluator[Any]] | None:
        """Return the class that evaluates the model with each validation, and for CORE; None: no evaluations.

        It is made with `from_trainer` and the tasks of eval.evaluations; the `value` of every result that its `run`
        returns becomes the metric eval/NAME.
        """
        return Evaluator

    # --- the three build steps ----------------------------------------------------------------------------
    def configure_model(self) -> ModelParts:
        """Return the tokenizer, the module and its counts; no arrays are created."""
        with self.configured():
            tokenizer = run_data.choose_tokenizer(self.context)
            self.context = schema.apply_objective_defaults(self.context)
            self.settings = self.context.settings
            return build_model(self.context, self.model_class(), tokenizer)

    def configure_dataloaders(self) -> DataParts:
        """Return the pure `batch(step)`, the validation rows, and the horizon."""
        with self.configured():
            source = run_data.RowSource(
                self.context,
                self.tokenizer,
                self.data_collator,
                self.output.preparing,
                attach=functools.partial(reference.attach_logps, self.config),
                distill=functools.partial(with_targets, self.context, self.teacher),
            )
            mixtures = source.train()
            self.model_parts = allocate(self.context, self.model_parts, mixtures[0], lambda: self.checkpoint_manager)
            built = run_data.build_data(self.context, self.model_parts, source, mixtures)
            held_out = [] if built.plan.validation is None else built.plan.validation.rows
            self.model_parts = limit_documents(self.context, self.model_parts, [*built.plan.sources, *held_out])
            return built

    def configure_functions(self) -> Functions:
        """Return the optimizer, the state's shardings and the jitted steps."""
        with self.configured():
            return compiled.build_functions(self.plan, self.hooks)

    @property
    def hooks(self) -> StepHooks:
        """Return the members of this class that the compiled side calls."""
        return StepHooks(
            batch=self.batch,
            train_step=self.train_step,
            val_step=self.val_step,
            sharded_init=self.sharded_init,
            optimizer=self.optimizer,
            schedule=self.schedule,
            wants_reference=self.wants_reference,
            state_class=self.state_class,
            rolls_out=self.rolls_out,
            owner=type(self).__name__,
        )

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """Put the trainer's configuration and mesh in force: `configure(MySettings)` works inside."""
        with configuration(self.config), self.topology.scope():
            yield

    def plan_stages(self) -> tuple[run_stages.Stage, ...]:
        """Return what each stage of training.tokens is; one stage is the whole run."""
        distilled = self.teacher is not None and self.teacher.live
        return run_stages.plan(self.data.stage_starts, self.steps, referred=distilled or self.wants_reference())

    def wants_reference(self) -> bool:
        """Return whether the step compares with frozen reference weights (`state.reference`)."""
        return reference.wants_weights(self.config)

    @staticmethod
    def sharded_init(model: nn.Module, key: jax.Array, *args: Any, mesh: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Draw the model's variables on their devices: (variables, var_sharding), both unboxed.

        The run calls it for the parameters of step 0, inside the program that creates the state, so an override
        computes with jax operations and returns the model's own names, shapes and dtypes. Weights from `init` or
        `model_state` replace what it returns.
        """
        topology = Topology(mesh, None, TopologySettings())
        return init_sharded(lambda k: model.init(k, *args, **kwargs), key, topology)

    # --- state ------------------------------------------------------------------------------------------
    @property
    def state(self) -> TrainState:
        """The train state; created at first use. This and the next three are those of `run_state`."""
        return self.run_state.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.run_state.state = state

    def _initial_state(self) -> TrainState:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        adapters = checkpoints.initial_adapters(self.context, self.model_parts)
        return compiled.initial_state(self.plan, self.hooks, self.functions, self.given_params(), adapters)

    @property
    def step(self) -> int:
        """Return the number of optimizer steps dispatched."""
        return self.run_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.run_state.step = step

    @property
    def loop_state(self) -> LoopState:
        """What the loop remembers beside the arrays: the best validation, counts, why it finished."""
        return self.run_state.loop_state

    @property
    def data_offset(self) -> int:
        """Return the number of the next batch, minus `step`."""
        return self.run_state.data_offset

    @property
    def arguments(self) -> Config:
        """All settings: `trainer.arguments["training.steps"]`. `trainer.settings` has the trainer's as attributes."""
        return self.config

    @property
    def dataset_train(self) -> Any:
        """Return the training data passed from Python; None if training.dataset names it.

        `trainer.data.plan` has the rows.
        """
        return self.given.dataset_train

    @property
    def dataset_eval(self) -> Any:
        """Return the held-out data passed from Python, or None. `trainer.data.validation` has the rows."""
        return self.given.dataset_eval

    @property
    def key(self) -> jax.Array:
        """The random key of the run, from `seed`; a step folds its number into it."""
        return self.functions.key

    @property
    def mesh(self) -> Any:
        """The mesh of devices."""
        return self.topology.mesh

    @property
    def model(self) -> M:
        """The model as a module, without its parameters."""
        return cast(M, self.model_parts.model)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if rows of ids were passed without one."""
        return self.model_parts.tokenizer

    @property
    def model_state(self) -> Any:
        """Return the current parameters, with frozen ones and adapters."""
        return self.full_params()

    def full_params(self, state: TrainState | None = None) -> Any:
        """Return the model's parameters of `state` (default: the live one) as plain arrays: trained and frozen ones
        together, with adapters merged."""
        return merge_adapters((self.state if state is None else state).whole())

    @property
    def has_recipe_data(self) -> bool:
        """Whether it trains on data that a recipe names, as opposed to the caller's."""
        return self.context.has_recipe_data

    # --- sizes ------------------------------------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.data.steps

    @property
    def training_batch_size(self) -> int:
        """Sequences of one optimizer step, over all devices."""
        return self.data.batch_size

    @property
    def evaluation_batch_size(self) -> int:
        """Return the sequences in one forward pass of validation, over all devices."""
        return self.functions.micro

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, padding included."""
        return self.data.batch_size * self.settings.block_size

    @property
    def is_process_zero(self) -> bool:
        """Whether this process writes the run directory."""
        return self.topology.is_process_zero

    @property
    def done(self) -> bool:
        """Return whether all optimizer steps are done, or a callback ended the run early."""
        return self.step >= self.steps or self.loop_state.finished is not None

    @property
    def validates(self) -> bool:
        """Whether there are held-out rows."""
        return self.data.validation is not None

    # --- counting ---------------------------------------------------------------------------------------
    def count_model_parameters(self, params: Any) -> int:
        """Return the number of elements of all arrays in `params`."""
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def calculate_number_total_flops(self, params: Any = None, is_training: bool = True) -> float:
        """Return the FLOPs of the whole horizon by the model's formula; a forward pass alone is a third of training."""
        total = self.model_parts.flops_per_token * self.tokens_per_step * self.steps
        return total if is_training else total / 3

    def flops_share(self, causal: bool) -> float | None:
        """Return the share of the devices' peak that one token per second uses; None on a chip without a known peak."""
        return flops_share(self.topology, self.model_parts, causal)

    def wall_seconds(self) -> float:
        """Return the seconds of all starts of the run so far, for time/goodput."""
        return self.wall_before + self.startup.age

    def describe_step(self, step: int) -> dict[str, Any]:
        """Return the part of a metrics row that needs no device value: tokens, epoch, FLOPs so far, memory."""
        tokens = step * self.tokens_per_step
        return {
            "tokens": tokens,
            "epoch": self.data.plan.epoch(step + self.data_offset),
            "total_training_flops": tokens * self.model_parts.flops_per_token,
            **peak_memory(),
        }

    @property
    def derived(self) -> dict[str, Any]:
        """Return the derived and chosen numbers, each with its reason, as saved in derived.json."""
        return self.notes.derived

    def note_derived(self, name: str, value: Any, reason: str) -> None:
        """Record a derived or chosen number with its reason: shown at the start, saved in derived.json."""
        self.notes.derive(name, value, reason)

    # --- showing ----------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """Print one line to the screen and to log.txt, on process 0 only."""
        self.output.say(text)

    def create_progress_bar(self, total: int, desc: str = "", disabled: bool = False) -> ProgressBar:
        """Return the progress display of `total` steps, as logging.progress says."""
        if disabled:
            return NoBar()
        return make_progress(self.logging.progress, self.output.console, self.output.say, total, desc)

    def log_metrics(self, metrics: Mapping[str, Any], pbar: ProgressBar | None, step: int, mode: str = "train") -> None:
        """Show `metrics`, any names and numbers, with `pbar`; None: nowhere. The run calls it for the row of every
        report. `mode` names the source of the metrics, for an override."""
        if pbar is not None:
            pbar.update(step, dict(metrics))

    def log_weight_distribution(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Return a histogram of every parameter, one row each, and append them to weights.jsonl."""
        from bessemer.training.callbacks.builtin import append_weights

        path = self.run_directory.weights
        return append_weights(path, state.params, step, write=self.is_process_zero)

    # --- batches and steps --------------------------------------------------------------------------------
    def batch(self, slice: str = "train", *, step: int | None = None, rows: slice | None = None) -> Mapping[str, Any]:
        """Return host arrays (B, T) of one batch: input_ids, target_ids, positions, segment_ids, loss_mask.

        slice: "train" or "validation". step: the number of the batch; by default the one that the next update takes
        (of validation the first). It is a function of that number: calling it again returns the same batch, and
        nothing advances. rows: only these rows, since a process reads just those of its own devices.
        The run takes every batch from here, ahead of use and in another thread.
        """
        if slice == "train":
            return self.data.plan.batch(self.step + self.data_offset if step is None else step, rows)
        return run_data.validation_batch(self.data, slice, step or 0, self.functions.validation_rows, rows)

    @classmethod
    def train_step(
        cls, state: TrainState, batch: Batch, key: jax.Array, accumulate_steps: int
    ) -> tuple[TrainState, jax.Array, Meta]:
        """Take one optimizer step over batch leaves (S, B, T)."""
        return step_functions.train_step(state, batch, key, accumulate_steps)

    @classmethod
    def val_step(cls, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, Meta]:
        """(Σ loss, Σ weight, further sums) over S micro-batches."""
        return step_functions.val_step(state, batch)

    def on_step_start(self, state: TrainState, step: int) -> TrainState:
        """Called before each step; the state that is returned is the one that is trained."""
        return state

    def on_step_end(self, state: TrainState, metrics: Meta, step: int) -> tuple[TrainState, Meta]:
        """`metrics` are unread device values; what is returned is what is used and logged."""
        return state, metrics

    def prefetcher(self, step: int) -> Prefetcher:
        """Return device batches from `step` on, prefetched by a background thread."""

        def make(position: int) -> dict[str, Any]:
            return compiled.step_batch(self.plan, self.batch, self.functions, position)

        return Prefetcher(make, step + self.data_offset, self.data.prefetch)

    def needs_rollout(self, step: int) -> bool:
        """Return whether the batch of `step` is sampled first, from the parameters of that moment."""
        return False

    def validate(self) -> dict[str, Any]:
        """Return loss and bits per byte on the fixed held-out rows, and record the best in the loop state."""
        assert self.data.validation is not None
        micro, count = self.functions.micro, self.functions.validation_batches
        sharding = self.topology.batch_sharding(1)
        batches = validation.validation_batches(self.batch, self.data.validation, micro, count, sharding)
        sums = validation.added([self.functions.val_step(self.state, batch) for batch in batches])
        return validation.validation_row(sums, self.loop_state, self.step)

    def compile_aot(self) -> bool:
        """Compile both steps before the loop; True if anything was compiled. The loop uses these executables."""
        self.startup.lap("setup")
        new = not self.functions.compiled
        if new:
            with self.topology.scope():
                self.functions = compiled.compile_steps(
                    self.plan, self.hooks, self.functions, self.draws_state, self._create_ahead
                )
        self.startup.lap("compile")
        return new

    def prepare_steps(self) -> None:
        """Compile the steps of the current stage, report it, and check that they fit in memory.

        The weights of `init` are read and the state is created from them meanwhile.
        """
        if not self.functions.compiled:
            self._read_ahead()
        output.compile_shown(self.compile_aot, self.functions.compiled, self.say)
        compiled.check_step(self.plan, self.hooks, self.functions)

    # --- where it starts --------------------------------------------------------------------------------
    def start_over(self) -> None:
        """Return to step 0; the state is created again at its next use."""
        self.run_state.start_over()
        self.use_stage(run_stages.current(self.stages, 0))

    def use_stage(self, stage: run_stages.Stage) -> None:
        """Use the functions of `stage`, with or without a reference. Compiled functions are kept."""
        now, known, wanted = self.functions, self.functions_by_reference, stage.reference is not None
        known[now.abstract_state.reference is not None] = now
        if wanted not in known:
            known[wanted] = compiled.without_reference(self.plan, self.hooks, now)
        self.functions = known[wanted]

    def move_data(self, position: int) -> None:
        """Let the next step take batch `position`."""
        self.run_state.data_offset = position - self.step
        data_step = jax.device_put(np.int32(position), self.topology.replicated)
        self.state = self.state.replace(data_step=data_step)

    @property
    def draws_state(self) -> bool:
        """Whether the state is still to be created, all of it from the seed."""
        return not self.run_state.is_created and self.given.model_state is None and self.settings.init is None

    def check_initial_weights(self) -> None:
        """Raise InputError if the weights of `init` do not fit the model; no array is read."""
        boxed = self.model_parts.boxed
        initial_weights.check_start(self.config, lambda: self.checkpoint_manager, self.model, boxed)

    def given_params(self) -> Any:
        """Return the starting weights: those passed, or those of `init`; the rest is drawn from the seed."""
        if self.given.model_state is not None or self.settings.init is None:
            frozen.check_quantized(self.model_parts.split, "this one has no path")
        if self.given.model_state is not None:
            placed = shardings(self.model_parts.boxed, self.topology.mesh, self.topology.rest_rules)
            # a copy: the step donates its state, and these are needed again to start over
            return jax.device_put(self.given.model_state, placed, may_alias=False)
        if self.settings.init is None:
            return {}
        reading, self._reading = self._reading, None
        found = self._read_initial_params() if reading is None else reading.result()
        self.run_state.base = found.base
        for line in found.lines:
            self.say(line)
        return found.params

    def _read_initial_params(self) -> checkpoints.InitialParams:
        with self.topology.scope():
            return checkpoints.initial_params(self.context, self.model_parts, self.checkpoint_manager)

    def _read_ahead(self) -> None:
        """Begin to read the weights of `init` in another thread: the compiler needs shapes alone."""
        needed = self.settings.init is not None and self.given.model_state is None and not self.run_state.is_created
        if needed and process_count() == 1:  # several processes talk about the base, in one order
            pool = ThreadPoolExecutor(1, thread_name_prefix="bessemer-weights")
            self._reading = pool.submit(self._read_initial_params)
            pool.shutdown(wait=False)

    def _create_ahead(self) -> None:
        """Create the state from weights that are being read. An error is raised where the state is first used: a step
        that does not fit in memory is reported before it."""
        if self._reading is not None:
            try:
                self.state = self._initial_state()
            except Exception as error:  # noqa: BLE001 -- raised by _initial_state
                self._failed = error

    def take_reference(self) -> None:
        """Make the trained parameters as they are (or the teacher's) the reference, in the state and on disk."""
        abstract = self.functions.abstract_state.reference
        reference.take(self.context, self.run_state, abstract, self.teacher, self.checkpoint_manager)

    def gather(self, params: Any) -> Any:
        """Return the parameters replicated on every device, to write them out."""
        return jax.jit(lambda tree: tree, out_shardings=self.topology.replicated)(params)

    # --- checkpoints ------------------------------------------------------------------------------------
    @property
    def checkpoint_manager(self) -> Checkpoints:
        """The run's checkpoints: list, read, save, verify."""
        if self._checkpoints is None:
            self._checkpoints = checkpoints.open_checkpoints(self.context, self.mirror, self.stages)
        return self._checkpoints

    def save(self, suffix: str | int | Path | None = None) -> None:
        """Begin to save the current step in the run's checkpoints, as the loop does; the best validated one is exempt
        from retention. Given a path, save a copy of the checkpoint there instead (see RestoreableJob.save)."""
        if not is_path(suffix):
            checkpoints.protect_best(self.context, self.run_state, self.checkpoint_manager)
        super().save(suffix)

    @property
    def continues(self) -> bool:
        """Whether the run was started before."""
        return self.lineage.continues

    @continues.setter
    def continues(self, continues: bool) -> None:
        self.lineage = dataclasses.replace(self.lineage, continues=continues)

    @property
    def branches(self) -> Sequence[Branch]:
        """Return the branch points before the current step, oldest first."""
        return self.lineage.branches

    def meta(self, step: int) -> dict[str, Any]:
        """meta.json of a checkpoint of `step`."""
        return checkpoints.meta(self.plan, self.run_state, self.functions, self.branches, step)

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint of the current step holds."""
        return checkpoints.snapshot(self.plan, self.run_state, self.meta(self.step))

    def abstract_state(self) -> Any:
        return checkpoints.saved_tree(self.functions.abstract_state)

    def admit(self, step: int, files: CheckpointManager | None = None) -> None:
        """Raise InputError unless this run may continue from checkpoint `step` of `files` (default: its own), which
        the settings and data must match; record the branch point of a change that was allowed."""
        own = self.checkpoint_manager
        self.use_stage(run_stages.current(self.stages, step))
        self.lineage = checkpoints.check_same_run(self.plan, self.lineage, self.meta(step), files or own, own)

    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None:
        """Continue from `tree`, the arrays of checkpoint `step`: state, loop state and position in the data."""
        self.use_stage(run_stages.current(self.stages, step))
        checkpoints.restore_state(self.plan, self.run_state, self.functions.abstract_state, tree, step)
        loop, own = files.read(step, "loop.json"), self.checkpoint_manager
        checkpoints.continue_from(self.run_state, loop, step, self.branches, own)
        checkpoints.protect_target(self.context, own, step)

    def note(self, message: str) -> None:
        self.say(f"warning: {message}")

    @classmethod
    def from_config(cls, saved: Mapping[str, Any], spec: ExecutionSpec) -> Self:
        with configuration(schema.saved_config(spec.run_directory.config)):
            trainer = cls(spec)
        trainer.continues = True
        return trainer

    def finish(self) -> None:
        """Wait for background saves and release what the run holds. `run` calls it last, also when it fails."""
        manager, self._checkpoints = self._checkpoints, None  # opened again at its next use
        if manager is not None:
            manager.close()

    # --- plain files ------------------------------------------------------------------------------------
    def save_pretrained(self, state: TrainState, save_directory: Any = None, to_torch: bool = False) -> Path:
        """Weights, config and tokenizer as plain files: model.safetensors, config.json, tokenizer.json, and the run's
        description in information.md (`save_information`). `run` writes them to RUN/model."""
        files = output.WeightFiles(self.plan, self.step, self.gather, self.save_information)
        return files.save_for_torch(state, save_directory) if to_torch else files.save(state, save_directory)

    def save_information(self, path: Any) -> None:
        """Write a markdown description of the run: parameters, derived numbers, optimizer groups."""
        Path(path).write_text(output.information(self.spec.name, self.plan, self.functions), encoding="utf-8")

    def loaded(self, fetch: Callable[[Any], Any], programs: dict[str, Any]) -> LoadedModel:
        """Return the live model as evaluations take one: the parameters as they are now, not copied.

        fetch: reads device values. programs: keeps what is compiled from one evaluation to the next.
        """
        own = self.data.validation
        return LoadedModel(
            self.model,
            self.state.whole(),
            self.tokenizer,
            self.step,
            self.config.tree(),
            self.run_directory,
            self.topology,
            fetch=fetch,
            programs=programs,
            live=True,
            held_out=None if self.dataset_train is None or own is None else own.rows.rows[0],
        )

    # --- text from the live model ---------------------------------------------------------------------------
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
        config = generation.settings_of(generation_config, config_overrides, sampling)
        given, rows = self.generator.encode(input_ids, attention_mask, prompts, apply_chat_template)
        return self.generator.generate(
            given,
            rows,
            config,
            self.create_generate_function(config),
            state=self.state if state is None else state,
            sharded=shard_inputs is not False,
            return_metadata=return_metadata,
            all_gather=all_gather,
            say=self.say,
        )

    def create_generate_function(
        self, generation_config: GenerationConfig | Mapping[str, Any] | None = None, **sampling: Any
    ) -> generation.GenerateFunction:
        """Return the function (state, ids, mask) → (sequences, ids, mask) of left-padded (B, T) that `generate` calls;
        compiled once per shape."""
        return self.generator.function(generation.settings_of(generation_config, sampling))

    @functools.cached_property
    def generator(self) -> generation.Generator:
        return generation.Generator(self.model, self.tokenizer, self.topology)

    def generate_unified(self, *args: Any, **options: Any) -> GenerationResults:
        """`generate`, under the name it has elsewhere; so is `generate_aio`."""
        return self.generate(*args, **options)

    def generate_aio(self, *args: Any, **options: Any) -> GenerationResults:
        """`generate`, under the name it has elsewhere."""
        return self.generate(*args, **options)

    def maybe_generate(self, state: TrainState, step: int, metrics: Any = None) -> Sequence[Completion]:
        """Preview `state` with `generate` if a preview is due at `step` (logging.preview_interval, and the run's end):
        in samples.jsonl and on the screen. Returns the samples, and adds them to `metrics`. The run's previews are made
        here."""
        from bessemer.training.callbacks.preview import Preview

        if self.preview is None:
            self.preview = self.config.make(Preview)
            self.preview.prepare(self)
        return self.preview.show_if_due(self, state, step, metrics)

    def create_collect_function(
        self, max_sequence_length: int, truncation_mode: str = "keep_end"
    ) -> Callable[[list[Any]], Mapping[str, Any]]:
        """Return the function that pads and truncates examples (texts, {"text"}, {"input_ids", "loss_mask"}) into rows.

        Data given from Python goes through it, unless a data_collator was given. An override may return any function of
        a list of examples; it is then used as a data_collator is.
        """
        return CollectFunction(self.tokenizer, max_sequence_length, truncation_mode)

    @property
    def data_collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        """Return the function passed as data_collator, else that of `create_collect_function`."""
        if self.given.data_collator is not None:
            return self.given.data_collator
        return self.create_collect_function(self.settings.block_size, self.config["data/truncation"])

    # --- running -----------------------------------------------------------------------------------------
    def run(self) -> None:
        """Train to the end (every process calls it). Continues from what `load` restored."""
        Callbacks(self.make_callbacks()).fire("on_check", self)
        functions = self.functions
        microbatch.check_machine(microbatch.state_bytes(functions.abstract_state, functions.state_shardings))
        if self.data.validation is not None:
            validation.check_held_out(self.batch, self.data.validation, functions.validation_rows)
        if not self.rolls_out:
            validation.check_first_batch(self.batch("train", step=0))
        remedy = functools.partial(compiled.memory_remedy, self.plan, self.hooks, functions)
        owner = outcome.Owner(self.context, self.run_state, self.output, functions.micro, remedy)
        with owner.opened(self.mirror, self.continues, self._write_first_files) as self.lock:
            outcome.take_over(self.context, self.run_state, self.checkpoint_manager, self.continues)
            for line in header(self.plan, self.functions):
                self.say(line)
            self.prepare_steps()
            outcome.wait_for_all("compiled")
            loop = Loop(self.plan, self.run_state, self, self.make_callbacks())
            self.show_progress = loop.show_progress
            loop.run()
            try:
                self.save_pretrained(self.state)
                if self.is_process_zero:
                    if self.lock is not None:
                        self.lock.check_intact()
                    output.conclude(self.plan, self.step, self.facts(), self.output.console.width)
            finally:
                self.finish()

    def _write_first_files(self) -> None:
        output.write_setup(self.plan, self.branches)
        self.write_facts()
        fields = outcome.goodput_fields(self.run_directory, self.continues, self.startup.age)
        self.wall_before = fields["wall_before"]
        fields |= {"data_change": self.lineage.data_change} if self.lineage.data_change else {}
        self.run_directory.write_status(state="running", step=self.step, exit_code=None, message="", **fields)

    def facts(self) -> dict[str, Any]:
        """Counts, FLOPs, devices and versions, for facts.json."""
        trained = self.count_model_parameters(self.functions.abstract_state.params)
        flops = self.calculate_number_total_flops()
        return output.run_facts(self.plan, self.functions, trained, flops, self.startup.facts())

    def write_facts(self) -> None:
        """Write `facts()` to facts.json."""
        output.write_facts(self.run_directory, self.facts())

    def make_callbacks(self) -> list[Callback]:
        """Return the callbacks passed in code, those of the setting, then the default ones: what the first add to a row
        is logged."""
        with configuration(self.config):
            names = [*self.settings.callbacks, *self.default_callbacks]
            return [*self.given_callbacks, *schema.make_callbacks(self.config, names)]
