"""The loop: next batch → step → metrics → validation → checkpoint.

It never reads a device value itself. At most two steps are in flight, so that processes stay close to each other.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax

from bessemer.checkpoint import Checkpoints
from bessemer.data import Prefetcher
from bessemer.errors import BessemerError, Stopped, StorageError
from bessemer.job import CheckpointManager, RunLock
from bessemer.topology import StepAgreement, broadcast
from bessemer.training import stages
from bessemer.training.callbacks.base import Callback, Callbacks
from bessemer.training.metrics import StepClock, StepLog, Waits
from bessemer.training.outcome import doing, wait_for_all
from bessemer.training.persistence import frozen, reference, teacher
from bessemer.training.persistence.checkpoints import Branch, rollback_target
from bessemer.training.setup.compiled import Functions, RunPlan
from bessemer.training.signals import stop_signals
from bessemer.training.stages import Stage
from bessemer.training.state import LoopState, RunState, TrainState, Unstable, final_problem
from bessemer.training.step import Meta

IN_FLIGHT = 2


class LoopTrainer(Protocol):
    """What the loop asks of a trainer; a subclass of BaseTrainer may override any of it."""

    functions: Functions
    lock: RunLock | None
    rollout_seconds: float | None

    @property
    def branches(self) -> Sequence[Branch]: ...
    @property
    def checkpoint_manager(self) -> Checkpoints: ...
    @property
    def validates(self) -> bool: ...
    def flops_share(self, causal: bool) -> float | None: ...
    def wall_seconds(self) -> float: ...
    def describe_step(self, step: int) -> dict[str, Any]: ...
    def prefetcher(self, step: int) -> Prefetcher: ...
    def needs_rollout(self, step: int) -> bool: ...
    def on_step_start(self, state: TrainState, step: int) -> TrainState: ...
    def on_step_end(self, state: TrainState, metrics: Meta, step: int) -> tuple[TrainState, Meta]: ...
    def validate(self) -> dict[str, Any]: ...
    def save(self) -> None: ...
    def finish(self) -> None: ...
    def use_stage(self, stage: Stage) -> None: ...
    def prepare_steps(self) -> None: ...
    def take_reference(self) -> None: ...
    def start_over(self) -> None: ...
    def abstract_state(self) -> Any: ...
    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None: ...
    def move_data(self, position: int) -> None: ...


T = TypeVar("T", bound=LoopTrainer)


class Running(NamedTuple):
    """A dispatched step whose completion has not been seen yet."""

    step: int
    loss: Any  # a device array; jax.Array does not declare `is_ready`
    report: bool


class Loop(Generic[T]):
    """One call of `run`, as callbacks see it: step, loop state, trainer, and the requests below."""

    def __init__(self, plan: RunPlan, run: RunState, hooks: T, callbacks: Iterable[Callback]):
        self.plan, self.run_state, self.trainer = plan, run, hooks
        self.steps, self.say = plan.data.steps, plan.context.notes.say
        self.callbacks = Callbacks(callbacks)
        self._stop_reason: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Start to measure and report from the current step: at the start, and again after a rollback."""
        plan, trainer, loop_state = self.plan, self.trainer, self.loop_state
        tokens = plan.tokens_per_step
        self.clock = StepClock(loop_state, tokens, self.steps, trainer.flops_share, trainer.wall_seconds)
        self.log = StepLog(loop_state, trainer.describe_step, self.clock, plan.context.guard, self.say)
        self.stop_agreement = StepAgreement()
        self.want_checkpoint = False
        self._running: collections.deque[Running] = collections.deque()
        self._batches: Prefetcher | None = None  # open while steps are taken
        self._validated: tuple[int, float | None] | None = None  # the last validation: its step and loss or reward

    @property
    def step(self) -> int:
        """Updates dispatched."""
        return self.run_state.step

    @property
    def loop_state(self) -> LoopState:
        return self.run_state.loop_state

    # --- what callbacks may ask for ---
    def request_stop(self, reason: str) -> None:
        """Stop with a checkpoint after the step at which all processes agree; `resume` continues (exit 75)."""
        self._stop_reason = self._stop_reason or reason

    def request_finish(self, reason: str) -> None:
        """End the run early as done. Every process must come to it at the same step (a replicated value)."""
        self.loop_state.finished = reason

    def request_checkpoint(self) -> None:
        self.want_checkpoint = True

    def show_progress(self, text: str) -> None:
        """Report the progress of something besides the steps."""
        self.callbacks.fire("on_progress", self, text)

    # --- the run ---
    def run(self) -> None:
        try:
            with self.plan.context.topology.scope(), stop_signals(self.request_stop):
                self.callbacks.fire("on_train_begin", self)
                wait_for_all("made its state")
                while not self._train():
                    pass
        except BaseException as error:
            self.callbacks.fire("on_error", self, error)
            if isinstance(error, BessemerError) or jax.process_count() == 1:
                with contextlib.suppress(StorageError):  # the first error is the one to report
                    self.trainer.finish()
            raise  # with a peer lost, a save in progress can never be committed: do not wait for it

    def _train(self) -> bool:
        """Train from the current step to the end; return False after a rollback."""
        try:
            self._prepare_state()
            if self.step == 0:
                self.validate()
            with contextlib.closing(self.trainer.prefetcher(self.step)) as batches:
                self._steps(batches)
            self._finish()
        except Unstable as cause:
            if not self.plan.context.guard.rolls_back:
                raise
            self._roll_back(cause)
            return False
        return True

    def _steps(self, batches: Prefetcher) -> None:
        self._batches = batches
        self.clock.start(self.step, self._waits())
        while self.step < self.steps and self.loop_state.finished is None:
            if self._stop_reason is not None:
                self.stop_agreement.propose(self.step)
            if self.stop_agreement.due(self.step):
                self.checkpoint(wait=True)
                raise self._stopped()
            self._one_step()
            self._after_step()

    def _one_step(self) -> None:
        """Dispatch the next step with the next batch. `drain` reads its results later."""
        run, trainer = self.run_state, self.trainer
        if stages.begins(self.plan.stages, run.step):
            with self.paused():
                self._begin_stage()
        if self.plan.data.starts_epoch(run.position):
            self.callbacks.fire("on_epoch_begin", self)
        run.state = trainer.on_step_start(run.state, run.step)
        self.callbacks.fire("on_batch_begin", self)
        if trainer.needs_rollout(run.step):
            self.flush()  # sampling waits for the parameters anyway; rows that are due need not wait for it
        assert self._batches is not None
        batch = self._batches.get(run.position)
        run.state, loss, meta = trainer.functions.train_step(run.state, batch, trainer.functions.key)
        run.step += 1
        run.state, meta = trainer.on_step_end(run.state, meta, run.step)
        report = self.due(self.plan.context.logging.report_interval) or run.step == self.steps
        self._running.append(Running(run.step, loss, report))
        self.log.add(run.step, meta, report)
        self.callbacks.fire("on_optimizer_step", self)
        self._wait_for_steps(IN_FLIGHT)

    def _after_step(self) -> None:
        """Report metrics, validate, call callbacks (evaluations, previews), save a checkpoint: each if it is due."""
        logging, last = self.plan.context.logging, self.step == self.steps
        boundary = stages.begins(self.plan.stages, self.step)
        validate = self.trainer.validates and (boundary or self.due(logging.validation_interval)) and not last
        checkpoint = (boundary or self.due(logging.checkpoint_interval)) and not last
        if validate or checkpoint or last:
            self.flush()
        elif (due := self.log.ready(self.step)) is not None:
            self.drain(due)
        if validate:
            self.validate()
        self.callbacks.fire("on_batch_end", self)
        if (checkpoint or self.want_checkpoint) and not last:
            self.checkpoint()
        if self.plan.data.starts_epoch(self.run_state.position) or last or self.loop_state.finished is not None:
            self.callbacks.fire("on_epoch_end", self)  # the run's end also ends the epoch in progress

    def due(self, interval: int | None) -> bool:
        """Return whether the current step is a multiple of `interval`; None and numbers below 1 mean never."""
        return interval is not None and interval > 0 and self.step % interval == 0

    # --- metrics ---
    def flush(self) -> None:
        """Wait for and read all pending steps, so that the loop state is that of the current step."""
        self._wait_for_steps(0)
        self.drain()

    def _wait_for_steps(self, in_flight: int) -> None:
        """Wait until at most `in_flight` steps are running, and note when each reported one was completed."""
        while self._running and (len(self._running) > in_flight or self._running[0].loss.is_ready()):
            done = self._running.popleft()
            jax.block_until_ready(done.loss)
            if done.report:
                self.clock.mark(done.step, self._waits())

    def _waits(self) -> Waits:
        waited = 0.0 if self._batches is None else self._batches.waited
        return Waits.so_far(waited, self.trainer.rollout_seconds)

    def drain(self, upto: int | None = None) -> None:
        """Report the rows that are due, also those before a fatal step."""
        try:
            rows = self.log.drain(upto)
        except Unstable as error:
            self.report(error.rows)
            raise
        self.report(rows)

    def report(self, rows: list[dict[str, Any]]) -> None:
        self.check_directory()
        for row in rows:
            self.callbacks.fire("on_metrics", self, row)

    def check_directory(self) -> None:
        """Raise StorageError if somebody deleted the run: files that are written later would hide it."""
        if self.trainer.lock is not None:
            self.trainer.lock.check_intact()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the step time."""
        start = time.monotonic()
        yield
        self.clock.pause(time.monotonic() - start)

    # --- validation and checkpoint ---
    def validate(self) -> dict[str, Any] | None:
        """Compute the loss on the fixed held-out sequences, and pass the row to on_validation."""
        if not self.trainer.validates:
            return None
        with self.paused(), doing(self.run_state, f"the validation at step {self.step}"):
            self.callbacks.fire("on_validation_begin", self)
            row = {"step": self.step, **self.trainer.validate()}
            self._validated = self.step, row.get("val_loss", row.get("val_reward"))
            self.callbacks.fire("on_validation", self, row)
        return row

    def checkpoint(self, wait: bool = False) -> None:
        """Save the state after the current step."""
        self.flush()
        self.check_directory()
        with self.paused():
            self.want_checkpoint = False
            self.trainer.save()
            if wait:
                self.trainer.checkpoint_manager.wait()
            self.callbacks.fire("on_checkpoint", self, self.step)

    # --- beginnings and ends ---
    def _prepare_state(self) -> None:
        """Add what neither a fresh state nor a checkpoint holds, and write it before the first step uses it."""
        plan, run, functions = self.plan, self.run_state, self.trainer.functions
        context, topology = plan.context, plan.context.topology
        frozen.save_frozen(context, run)
        if run.step == 0:
            run.state = stages.weighted(run.state, plan.stages[0], topology.replicated)
        if functions.abstract_state.reference is not None and run.state.reference is None:
            self.trainer.take_reference()
        reference.ensure_logps(context, run, plan.data.plan, plan.model.apply, functions.micro)
        teacher.record(plan.teacher, context.directory, topology.is_process_zero)

    def _begin_stage(self) -> None:
        """Begin the stage whose first update comes next. Every process calls it, at the same step."""
        context, run, planned = self.plan.context, self.run_state, self.plan.stages
        stage = next(stage for stage in planned if stage.start == run.step)
        words = [f"stage      {stage.number} of {len(planned)} begins after step {run.step:,}"]
        self.trainer.use_stage(stage)
        functions = self.trainer.functions
        run.state = stages.weighted(run.state, stage, context.topology.replicated)
        if context.settings.stage_reset:
            words.append("the optimizer's moments are reset")
            run.state = stages.with_fresh_moments(run.state, functions.state_shardings.opt_state)
        if stage.reference is None:
            run.state = run.state.replace(reference=None)
        elif stage.reference == run.step:
            self.trainer.take_reference()
        elif run.state.reference is None:
            held = reference.restore(context, functions.abstract_state.reference, planned, run.step)
            run.state = run.state.replace(reference=held)
        if stage.beta > 0:
            words.append(f"β {stage.beta:g} to the parameters of step {stage.reference:,}")
        self.say("; ".join(words))
        self.trainer.prepare_steps()

    def _roll_back(self, cause: Unstable) -> None:
        """Drop the steps in flight, restore the target and skip the batches up to the poisoned one; processes
        renegotiate a requested stop. Every process calls it at the same step: all it depends on is replicated."""
        trainer, run, context = self.trainer, self.run_state, self.plan.context
        limit, interval = context.guard.max_rollbacks, context.logging.checkpoint_interval
        if self.loop_state.rollbacks >= limit:
            raise Unstable(cause.step, f"{cause} {limit} rollbacks (guard.max_rollbacks) have not helped.")
        manager, branches = trainer.checkpoint_manager, trainer.branches
        first, before = run.data_offset, run.loop_state
        manager.wait()  # the save of the last regular checkpoint may still be in progress
        step = int(
            broadcast("rollback", lambda: str(rollback_target(manager, branches, interval, cause.step, self.say)))
        )
        manager.set_aside_after(step)
        reference.drop_after(context, step)
        trainer.start_over()  # release the poisoned state first: there may be no memory for two
        if step > 0:
            trainer.accept(manager.restore(step, trainer.abstract_state()), step, manager)
        run.loop_state.carry_over(before)
        trainer.move_data(cause.step + first)
        self._begin()
        self.say(
            f"rollback {self.loop_state.rollbacks} of at most {limit}: {cause} Back to step {step}; "
            f"batches {step + first} to {run.position - 1} are skipped"
        )
        self.callbacks.fire("on_rollback", self)

    def _stopped(self) -> Stopped:
        """Return the error that ends a stopped run and says how to continue it."""
        reason = self._stop_reason or "another process asked to stop"
        return Stopped(
            f"{reason}: stopped after step {self.step} of {self.steps} with a checkpoint. "
            f"Continue with: bessemer resume {self.plan.context.directory.word}"
        )

    def _finish(self) -> None:
        """Save, validate and judge the final model. The save comes before the final evaluation, so that nothing in it
        can lose the run; a model that fails the judgment is set aside again."""
        self.flush()
        validates = self.trainer.validates and self.loop_state.last_validation != self.step
        rest = [
            "the last checkpoint",
            *(["validation"] if validates else []),
            *(callback.finishing for callback in self.callbacks.all if callback.finishing),
            "weights",
            "report and curves" if self.plan.context.logging.plots else "report",
        ]
        self.say(f"finishing  all steps are done; now {', '.join(rest)}")
        self.checkpoint(wait=True)
        if validates:
            self.validate()
        step, found = self._validated or (None, None)
        problem = final_problem(self.loop_state.non_finite_in_row, found if step == self.step else None)
        if problem:
            self.trainer.checkpoint_manager.set_aside_after(self.step - 1)
            raise Unstable(
                self.step, f"step {self.step} was the last, but {problem}; its checkpoint is set aside (.aside)."
            )
        self.callbacks.fire("on_train_end", self)
