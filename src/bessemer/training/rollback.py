"""Back to the last regular checkpoint before a poisoned step, and on with the batch after the poisoned one.

    restored step r, poisoned step s, offset o = data_step − step:    data position r + o  →  s + o

The batches between are not met again, whoever of them was the cause. Where to go back to must not depend on chance, or
a run that was stopped on its way would become another one: only checkpoints at multiples of
logging.checkpoint_interval count, and branch points, not those a stop or a callback asked for; without one it is
step 0. Nothing has to be
written down: a run killed before its next checkpoint meets the same spike again and decides the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.topology import share
from bessemer.training import reference

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


def roll_back(trainer: BaseTrainer, poisoned: int) -> None:
    """Every process calls it at the same step: what it depends on is replicated or shared."""
    manager, before = trainer.checkpoint_manager, trainer.loop_state
    position = poisoned + trainer.data_offset
    manager.wait()  # the save of the last regular checkpoint may still be in progress
    step = int(share("rollback", lambda: str(find_target(trainer, poisoned))))
    manager.set_aside_after(step)
    reference.drop_after(trainer, step)
    trainer.start_over()  # let go of the poisoned state first: there may be no memory for two
    if step > 0:
        trainer.accept(manager.restore(step, trainer.abstract_state()), step, manager)
    loop = trainer.loop_state
    loop.spikes, loop.rollbacks = before.spikes, before.rollbacks + 1
    loop.tracker_id, loop.training_seconds = before.tracker_id, before.training_seconds
    trainer.move_data(position)


def find_target(trainer: BaseTrainer, poisoned: int) -> int:
    """The newest regular checkpoint before the step whose every byte verifies; 0: the initial state."""
    manager = trainer.checkpoint_manager
    for step in reversed(manager.committed()):
        branched = any(branch.step == step for branch in trainer.branches)
        if step >= poisoned or (step != anchor(trainer, step) and not branched):
            continue
        if not (problems := manager.verify(step)):
            return step
        trainer.say(f"warning: checkpoint {step} is damaged and not used: {'; '.join(problems[:3])}")
    return 0


def anchor(trainer: BaseTrainer, step: int) -> int | None:
    """The newest step up to `step` at which a regular checkpoint is taken; None: there is none."""
    interval = trainer.logging.checkpoint_interval
    return step - step % interval or None if interval > 0 else None


def protect_target(trainer: BaseTrainer) -> None:
    """Keep the checkpoint a rollback would go back to: stops on the way must not push it out."""
    if trainer.guard.rolls_back:
        trainer.checkpoint_manager.protect(anchor(trainer, trainer.step), "rollback")
