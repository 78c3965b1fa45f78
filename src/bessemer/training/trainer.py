"""BaseTrainer: the research path. Everything comes from the configuration; override one method to change one thing.

    class MyTrainer(bm.BaseTrainer[MyConfig, MyModel]): ...
    MyTrainer(bm.ExecutionSpec.local("runs", name="mine")).run()

The class is thin: each member delegates to the room that owns the matter. How a run is built and how it steps is here;
trainer_view has what a trainer says about itself, trainer_kept its checkpoints, trainer_text what its model says.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic

import jax
from flax import linen as nn

from bessemer.config import Config, configuration, configure
from bessemer.data import Prefetcher, Tokenizer
from bessemer.evaluate import Evaluator
from bessemer.job import GIVEN, ExecutionSpec, RunLock
from bessemer.models.lora import LoraSettings
from bessemer.registry import jobs
from bessemer.topology import StepAgreement, Topology, TopologySettings, init_sharded
from bessemer.training import (
    data_parts,
    functions,
    horizon,
    inherit,
    microbatch,
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
from bessemer.training.branches import Branch, Changes
from bessemer.training.cache import keep_compiled_programs
from bessemer.training.callback import Callback, Callbacks
from bessemer.training.header import header
from bessemer.training.loop import Loop
from bessemer.training.mirror import make_mirror
from bessemer.training.settings import BaseTrainerConfig, GuardSettings, LoggingSettings, seconds_of
from bessemer.training.startup import StartUp
from bessemer.training.state import TrainState
from bessemer.training.trainer_kept import TrainerKept
from bessemer.training.trainer_text import TrainerText
from bessemer.training.trainer_view import C, M


@jobs.register("BaseTrainer")
class BaseTrainer(TrainerKept[C, M], TrainerText[C, M], Generic[C, M]):
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
        super().__init__(spec)
        self.config = schema.config_for(type(self), arguments, spec.root)
        if dataset_train is None:
            self.choose_defaults(self.config)
        self.topology = spec.topology
        self.given_callbacks = tuple(callbacks)
        self.given = data_parts.GivenParts(
            model, model_state, dataset_train, dataset_eval, data_collator, tokenizer
        )
        self.derived = {}
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
        self.change: Changes | None = None  # what `resume --change` asks for
        self.branches: list[Branch] = []
        self._state = None
        self._checkpoints = None
        self.stages: tuple[stages.Stage, ...] = ()
        self.other_functions: functions.Functions | None = None  # of the stages of the other kind
        self.output = output.Output(spec.run_directory, self.topology.is_process_zero)
        with self.configured():
            self.settings = configure(self.config_class())
            self.logging = configure(LoggingSettings)
            self.guard = configure(GuardSettings)
            self.lora = configure(LoraSettings)
            self.mirror = make_mirror(self)
            self.time_limit = seconds_of(self.settings.time_limit)
            self.model_parts = self.configure_model()
            if self.settings.init is not None and (taken := inherit.describe(self.config)) is not None:
                self.note_derived("init", self.settings.init, taken)
            self.teacher = teacher.find_teacher(self)
            self.data = data_parts.with_fields(self, self.configure_dataloaders())
            self.logging = horizon.settle_reports(self)
            self.stages = self.plan_stages()
            if self._checkpoints is not None:  # opened by the data already
                restore.protect_stages(self, self._checkpoints)
            self.startup.lap("data")
            keep_compiled_programs(self.config["data/root"])
            self.functions = self.configure_functions()
            inherit.check_start(self)
        self.activity: outcome.Activity | None = None  # besides the steps
        self.show_progress: Callable[[str], None] = lambda text: (
            None
        )  # of that activity; the loop's, while it runs
        self.stop_agreement = StepAgreement()
        self.lock: RunLock | None = None  # of the run directory, while it runs; process 0 holds it
        self.start_over()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        data_parts.check_batch_method(cls.batch)

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
    def choose_defaults(cls, config: Config) -> None:
        """Replace defaults that cannot work here, with `config.set(key, value, why)`; called once, for a new run."""

    @classmethod
    def optimizer(cls) -> Any:
        """An optimizer's name, or an optax transformation. The setting optimization/name overrides it."""
        return "adamw"

    @classmethod
    def schedule(cls) -> Any:
        """A schedule's name, "auto" for the optimizer's own, an optax schedule (step -> learning rate), or None
        for a constant rate. The setting optimization/schedule overrides it."""
        return "auto"

    def evaluator(self) -> type[Evaluator[Any]] | None:
        """The class that judges the model with each validation, and for CORE; None: no evaluations.

        It is made with `from_trainer` and the tasks of eval.evaluations; the `value` of every result that its `run`
        returns becomes the metric eval/NAME.
        """
        return Evaluator

    # --- the three build steps ----------------------------------------------------------------------------
    def configure_model(self) -> model_parts.ModelParts:
        """Tokenizer, module and its counts. No arrays yet."""
        with self.configured():
            return model_parts.build_model(self, data_parts.choose_tokenizer(self))

    def configure_dataloaders(self) -> data_parts.DataParts:
        """The pure `batch(step)`, the validation rows, and the horizon."""
        with self.configured():
            return data_parts.build_data(self)

    def configure_functions(self) -> functions.Functions:
        """Optimizer, state shardings and the jitted steps."""
        with self.configured():
            return functions.build_functions(self)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """The trainer's configuration and mesh in force, as while it is built: `configure(MySettings)` works inside."""
        with configuration(self.config), self.topology.scope():
            yield

    def plan_stages(self) -> tuple[stages.Stage, ...]:
        """What each stage of training.tokens is; one stage is the whole run."""
        taught = self.teacher is not None and self.teacher.live
        return stages.plan(self.data.stage_starts, self.steps, referred=taught or self.wants_reference())

    def wants_reference(self) -> bool:
        """Whether the step compares with frozen reference weights (`state.reference`)."""
        return reference.wanted(self)

    @staticmethod
    def sharded_init(
        model: nn.Module, key: jax.Array, *args: Any, mesh: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Draw the model's variables on their devices: (variables, var_sharding), both unboxed.

        The run calls it for the parameters of step 0, inside the program that creates the state, so an override
        computes with jax operations and returns the model's own names, shapes and dtypes. Weights from `init` or
        `model_state` replace what it returns.
        """
        topology = Topology(mesh, None, TopologySettings())
        return init_sharded(lambda k: model.init(k, *args, **kwargs), key, topology)

    # --- batches and steps --------------------------------------------------------------------------------
    def batch(
        self, slice: str = "train", *, step: int | None = None, rows: slice | None = None
    ) -> Mapping[str, Any]:
        """Host arrays (B, T) of one batch: input_ids, target_ids, positions, segment_ids, loss_mask.

        slice: "train" or "validation". step: the number of the batch; by default the one that the next update takes
        (of validation the first). It is a function of that number: calling it again returns the same batch, and
        nothing advances. rows: only these rows, since a process reads just those of its own devices.
        The run takes every batch from here, ahead of use and in another thread.
        """
        return data_parts.host_batch(self, slice, step, rows)

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

    def prefetcher(self, step: int) -> Prefetcher:
        """Device batches from `step` on, made ahead of use by a background thread."""
        make = functools.partial(data_parts.make_device_batch, self)
        return Prefetcher(make, step + self.data_offset, self.data.prefetch)

    def needs_rollout(self, step: int) -> bool:
        """Whether the batch of `step` is sampled first, from the parameters of that moment."""
        return False

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
        Callbacks(self.make_callbacks()).fire("on_check", self)
        microbatch.check_machine(self)
        validation.check_targets(self)
        with outcome.opened(self):
            header(self)
            output.compile_shown(self)
            outcome.together("compiled")
            loop = Loop(self)
            loop.run()
            try:
                self.save_pretrained(self.state)
                output.conclude(self)
            finally:
                self.finish()

    def make_callbacks(self) -> list[Callback]:
        return schema.make_callbacks(self)
