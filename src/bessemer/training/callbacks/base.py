"""Callbacks: small classes with only the hooks they need, fired in order by the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.generate import Completion
    from bessemer.training import loop as running
    from bessemer.training.trainer import BaseTrainer

    Loop = running.Loop[BaseTrainer]


class Callback:
    """Base of all callbacks: every hook is optional.

    The compiled step fuses all micro-batches, so on_batch_begin, on_optimizer_step and on_batch_end fire once per
    optimizer step. After a step the order is: on_optimizer_step (nothing has been read yet), metrics (on_metrics),
    validation (on_validation_begin, on_validation), on_batch_end (evaluations and previews act here; then on_samples),
    checkpoint (on_checkpoint). `loop.step` and `loop.trainer.step` are the same number, always the current one.
    """

    @property
    def finishing(self) -> str:
        """Return what it still does after the last step, in a word; empty: nothing that takes time."""
        return ""

    def on_check(self, trainer: BaseTrainer) -> None:
        """Refuse (InputError) what cannot work, before anything is compiled or written."""

    def on_train_begin(self, loop: Loop) -> None:
        """Before the first step of this process; a resumed run calls it again."""

    def on_epoch_begin(self, loop: Loop) -> None:
        """Before the first step of each pass over the data."""

    def on_batch_begin(self, loop: Loop) -> None:
        """Before each optimizer step."""

    def on_optimizer_step(self, loop: Loop) -> None:
        """After each optimizer step was dispatched; no device value has been read."""

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        """With the row of a report; what a callback of your own adds to it is logged too."""

    def on_validation_begin(self, loop: Loop) -> None:
        """Before a validation."""

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        """With the results of a validation."""

    def on_evaluation(self, loop: Loop, row: dict[str, Any]) -> None:
        """With a step and a score (CORE)."""

    def on_batch_end(self, loop: Loop) -> None:
        """After the step, its report and its validation; evaluations and previews act here."""

    def on_samples(self, loop: Loop, samples: Sequence[Completion]) -> None:
        """With the texts of a preview."""

    def on_weights(self, loop: Loop, rows: list[dict[str, Any]]) -> None:
        """With a histogram of each parameter, where `weight_distribution` is on."""

    def on_checkpoint(self, loop: Loop, step: int) -> None:
        """After a save was started, or finished if it is the last."""

    def on_rollback(self, loop: Loop) -> None:
        """After the run went back to an earlier step: forget what is known of later ones."""

    def on_progress(self, loop: Loop, text: str) -> None:
        """With the progress of something slow besides the steps, such as "rollout 12/128"."""

    def on_epoch_end(self, loop: Loop) -> None:
        """After the last step of each pass over the data, and at the end of the run."""

    def on_error(self, loop: Loop, error: BaseException) -> None:
        """When the run fails or is stopped."""

    def on_train_end(self, loop: Loop) -> None:
        """After the last step, its checkpoint and the final validation."""


class Callbacks:
    """The callbacks of one run, in order; only overridden hooks are called, so an empty one costs nothing."""

    def __init__(self, callbacks: Iterable[Callback]):
        self.all = list(callbacks)
        self._hooks: dict[str, list[Any]] = {}

    def fire(self, hook: str, *args: Any) -> None:
        if hook not in self._hooks:
            base = getattr(Callback, hook)
            self._hooks[hook] = [
                getattr(callback, hook) for callback in self.all if getattr(type(callback), hook, base) is not base
            ]
        for call in self._hooks[hook]:
            call(*args)
