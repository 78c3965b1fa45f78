"""The loop: feed the compiled step, and after each step do what is due, in a fixed order.

It never reads a device value itself; at most two steps are in flight, so processes stay within reach of each other.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from bessemer.data import Prefetcher
from bessemer.errors import BessemerError, Stopped, StorageError
from bessemer.topology import StepAgreement, share
from bessemer.training import stages
from bessemer.training.callbacks.base import Callbacks
from bessemer.training.console.output import compile_shown
from bessemer.training.metrics import StepClock, StepLog, Waits
from bessemer.training.outcome import doing, together
from bessemer.training.persistence import frozen, reference, teacher
from bessemer.training.persistence.checkpoints import rollback_target
from bessemer.training.signals import stop_signals
from bessemer.training.state import Unstable, final_problem

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

IN_FLIGHT = 2


class Running(NamedTuple):
    """A dispatched step whose completion has not been seen yet."""

    step: int
    loss: Any  # a device array; jax.Array does not declare `is_ready`
    report: bool


class Loop:
    """One call of `run`. Callbacks see it whole: step, state, trainer, loop state, and the requests below."""

    def __init__(self, trainer: BaseTrainer):
        self.trainer = trainer
        self.steps = trainer.steps
        self.callbacks = Callbacks(trainer.make_callbacks())
        trainer.show_progress = self.show_progress
        self._stop_reason: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Take up the trainer's state: at the start, and again after a rollback."""
        trainer = self.trainer
        self.loop_state = trainer.loop_state
        self.clock = StepClock(
            self.loop_state, trainer.tokens_per_step, trainer.steps, trainer.flops_share, trainer.wall_seconds
        )
        self.log = StepLog(self.loop_state, trainer.describe_step, self.clock, trainer.guard, trainer.say)
        self.want_checkpoint = False
        self._running: collections.deque[Running] = collections.deque()
        self._validated: dict[int, float | None] = {}  # the last validation: its step and loss or reward

    @property
    def step(self) -> int:
        """Updates that were dispatched. It is the trainer's own count, so the two never disagree."""
        return self.trainer.step

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
        """Say how far something besides the steps has come."""
        self.callbacks.fire("on_progress", self, text)

    # --- the run ---
    def run(self) -> None:
        trainer = self.trainer
        try:
            with trainer.topology.scope(), stop_signals(self.request_stop):
                self.callbacks.fire("on_train_begin", self)
                together("made its state")
                while not self._train():
                    pass
        except BaseException as error:
            self.callbacks.fire("on_error", self, error)
            if isinstance(error, BessemerError) or jax.process_count() == 1:
                with contextlib.suppress(StorageError):  # the first error is the one to report
                    trainer.finish()
            raise  # with a peer lost, a save in progress can never be committed: do not wait for it

    def _train(self) -> bool:
        """From where the trainer stands to the end; False when it was rolled back on the way."""
        try:
            self._complete_state()
            if self.step == 0:
                self.validate()
            with contextlib.closing(self.trainer.prefetcher(self.step)) as batches:
                self._steps(batches)
            self._finish()
        except Unstable as cause:
            if not self.trainer.guard.rolls_back:
                raise
            self._roll_back(cause)
            return False
        return True

    def _complete_state(self) -> None:
        """Add what neither a fresh state nor a checkpoint holds, and write it before the first step uses it."""
        trainer, run = self.trainer, self.trainer.run_state
        context, functions, topology = trainer.context, trainer.functions, trainer.topology
        frozen.save_frozen(context, run.state.frozen)
        if run.step == 0:
            run.state = stages.weighted(run.state, trainer.stages[0], topology.replicated)
        if functions.abstract_state.reference is not None and run.state.reference is None:
            trainer.take_reference()
        reference.ensure_logps(context, run, trainer.data.plan, trainer.model_parts.apply, functions.micro)
        teacher.record(trainer.teacher, context.directory, topology.is_process_zero)

    def _roll_back(self, cause: Unstable) -> None:
        """Drop the steps in flight, restore the target and skip the batches up to the poisoned one; processes
        renegotiate a requested stop. Every process calls it at the same step: all it depends on is replicated."""
        trainer, run, limit = self.trainer, self.trainer.run_state, self.trainer.guard.max_rollbacks
        if self.loop_state.rollbacks >= limit:
            raise Unstable(cause.step, f"{cause} {limit} rollbacks (guard.max_rollbacks) have not helped.")
        manager, interval = trainer.checkpoint_manager, trainer.logging.checkpoint_interval
        first, before = run.data_offset, run.loop_state
        manager.wait()  # the save of the last regular checkpoint may still be in progress

        def find_target() -> str:
            return str(rollback_target(manager, trainer.branches, interval, cause.step, trainer.say))

        step = int(share("rollback", find_target))
        manager.set_aside_after(step)
        reference.drop_after(trainer.context, step)
        trainer.start_over()  # release the poisoned state first: there may be no memory for two
        if step > 0:
            trainer.accept(manager.restore(step, trainer.abstract_state()), step, manager)
        run.loop_state.carry_over(before)
        trainer.move_data(cause.step + first)
        self._begin()
        trainer.stop_agreement = StepAgreement()
        position = self.step + trainer.data_offset
        trainer.say(
            f"rollback {self.loop_state.rollbacks} of at most {limit}: {cause} Back to step {self.step}; "
            f"batches {self.step + first} to {position - 1} are passed over"
        )
        self.callbacks.fire("on_rollback", self)

    def _steps(self, batches: Prefetcher) -> None:
        self._batches = batches
        self.clock.start(self.step, self._waits())
        agreement = self.trainer.stop_agreement
        while self.step < self.steps and self.loop_state.finished is None:
            if self._stop_reason is not None:
                agreement.propose(self.step)
            if agreement.due(self.step):
                self._stop()
            self._one_step()
            self._after_step()

    def _one_step(self) -> None:
        trainer = self.trainer
        if stages.begins(trainer.stages, self.step):
            with self.paused():
                self._begin_stage()
        new_epoch = trainer.starts_epoch(self.step)
        if new_epoch:
            self.callbacks.fire("on_epoch_begin", self)
        trainer.state = trainer.on_step_start(trainer.state, self.step)
        self.callbacks.fire("on_batch_begin", self)
        if trainer.needs_rollout(self.step):
            self.flush()  # sampling waits for the parameters anyway; rows that are due need not wait for it
        batch = self._batches.get(self.step + trainer.data_offset)
        trainer.state, loss, meta = trainer.functions.train_step(trainer.state, batch, trainer.key)
        trainer.step += 1
        trainer.state, meta = trainer.on_step_end(trainer.state, meta, self.step)
        report = self.due(trainer.logging.report_interval)
        self._running.append(Running(self.step, loss, report))
        self.log.add(self.step, meta, report)
        self.callbacks.fire("on_optimizer_step", self)
        self._complete(IN_FLIGHT)

    def _complete(self, in_flight: int) -> None:
        """Wait until at most `in_flight` steps are running, and note when each reported one was completed."""
        while self._running and (len(self._running) > in_flight or self._running[0].loss.is_ready()):
            done = self._running.popleft()
            jax.block_until_ready(done.loss)
            if done.report:
                self.clock.mark(done.step, self._waits())

    def _waits(self) -> Waits:
        return Waits.so_far(self._batches.waited, self.trainer.rollout_seconds)

    def _begin_stage(self) -> None:
        """Begin the stage whose first update comes next. Every process calls it, at the same step."""
        trainer, run = self.trainer, self.trainer.run_state
        stage = next(stage for stage in trainer.stages if stage.start == run.step)
        words = [f"stage      {stage.number} of {len(trainer.stages)} begins after step {run.step:,}"]
        trainer.use_stage(stage)
        functions = trainer.functions
        run.state = stages.weighted(run.state, stage, trainer.topology.replicated)
        if trainer.settings.stage_reset:
            words.append("the optimizer's moments are reset")
            run.state = stages.with_fresh_moments(run.state, functions.state_shardings.opt_state)
        if stage.reference is None:
            run.state = run.state.replace(reference=None)
        elif stage.reference == run.step:
            trainer.take_reference()
        elif run.state.reference is None:
            abstract = functions.abstract_state.reference
            held = reference.restore(trainer.context, abstract, trainer.stages, run.step)
            run.state = run.state.replace(reference=held)
        if stage.beta > 0:
            words.append(f"β {stage.beta:g} to the parameters of step {stage.reference:,}")
        trainer.say("; ".join(words))
        compile_shown(trainer)

    def due(self, interval: int | None) -> bool:
        return self.step == self.steps or (
            interval is not None and interval > 0 and self.step % interval == 0
        )

    def _after_step(self) -> None:
        """metrics → validation → evaluation, previews (callbacks) → checkpoint."""
        trainer, last = self.trainer, self.step == self.steps
        boundary = stages.begins(trainer.stages, self.step)
        validate = (
            trainer.validates and (boundary or self.due(trainer.logging.validation_interval)) and not last
        )
        checkpoint = (boundary or self.due(trainer.logging.checkpoint_interval)) and not last
        if validate or checkpoint or last:
            self.flush()
        elif (due := self.log.ready(self.step)) is not None:
            self.drain(due)
        if validate:
            self.validate()
        self.callbacks.fire("on_batch_end", self)
        if (checkpoint or self.want_checkpoint) and not last:
            self.checkpoint()
        if trainer.starts_epoch(self.step) or last or self.loop_state.finished is not None:
            self.callbacks.fire("on_epoch_end", self)  # the run's end also ends the epoch in progress

    def flush(self) -> None:
        """Complete and read everything that is pending, so that the loop state is that of the current step."""
        self._complete(0)
        self.drain()

    def drain(self, upto: int | None = None) -> None:
        """Report the rows that are due; those before a fatal step are reported all the same."""
        try:
            rows = self.log.drain(upto)
        except Unstable as error:
            self.report(error.rows)
            raise
        self.report(rows)

    def report(self, rows: list[dict[str, Any]]) -> None:
        self._check_directory()
        for row in rows:
            self.callbacks.fire("on_metrics", self, row)

    def _check_directory(self) -> None:
        """Raise StorageError if somebody deleted the run: files that are written later would hide it."""
        if self.trainer.lock is not None:
            self.trainer.lock.check_intact()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the step time."""
        start = time.monotonic()
        yield
        self.clock.pause(time.monotonic() - start)

    def validate(self) -> dict[str, Any] | None:
        """Loss on the fixed held-out sequences; the row goes to on_validation."""
        if not self.trainer.validates:
            return None
        where = f"the validation at step {self.step}"
        with self.paused(), doing(self.trainer.run_state, where):
            self.callbacks.fire("on_validation_begin", self)
            row = {"step": self.step, **self.trainer.validate()}
            self._validated = {self.step: row.get("val_loss", row.get("val_reward"))}
            self.callbacks.fire("on_validation", self, row)
        return row

    def checkpoint(self, wait: bool = False) -> None:
        """Save the state after the update whose number it bears."""
        self.flush()
        self._check_directory()
        with self.paused():
            self.want_checkpoint = False
            self.trainer.save()
            if wait:
                self.trainer.checkpoint_manager.wait()
            self.callbacks.fire("on_checkpoint", self, self.step)

    def _stop(self) -> None:
        self.checkpoint(wait=True)
        reason = self._stop_reason or "another process asked to stop"
        raise Stopped(
            f"{reason}: stopped after step {self.step} of {self.steps} with a checkpoint. "
            f"Continue with: bessemer resume {self.trainer.run_directory.word}"
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
            "report and curves" if self.trainer.logging.plots else "report",
        ]
        self.trainer.say(f"finishing  all steps are done; now {', '.join(rest)}")
        self.checkpoint(wait=True)
        if validates:
            self.validate()
        problem = final_problem(self.loop_state.non_finite_in_row, self._validated.get(self.step))
        if problem:
            self.trainer.checkpoint_manager.set_aside_after(self.step - 1)
            raise Unstable(
                self.step,
                f"step {self.step} was the last, but {problem}; its checkpoint is set aside (.aside).",
            )
        self.callbacks.fire("on_train_end", self)
