"""How a trainer's state is kept and taken up again: where it starts, checkpoints, and the weights as plain files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Self

import jax
import numpy as np

from bessemer.checkpoint import Checkpoints
from bessemer.config import configuration
from bessemer.job import CheckpointManager, ExecutionSpec, Snapshot, is_path
from bessemer.topology import shardings
from bessemer.training import output, restore, schema, stages
from bessemer.training.state import LoopState, TrainState
from bessemer.training.trainer_view import C, M, TrainerView


class TrainerKept(TrainerView[C, M], Generic[C, M]):
    """A base of BaseTrainer: its side of RestoreableJob."""

    # --- where it starts --------------------------------------------------------------------------------
    def start_over(self) -> None:
        """Back to step 0, as the run began; the state is made again at its first use."""
        self._state = None
        self.loop_state = LoopState()
        self.step = self.data_offset = 0
        stages.select(self._whole, 0)

    def move_data(self, position: int) -> None:
        """The next step takes batch `position`."""
        self.data_offset = position - self.step
        data_step = jax.device_put(np.int32(position), self.topology.replicated)
        self.state = self.state.replace(data_step=data_step)

    @property
    def draws_state(self) -> bool:
        """Whether a state is still to be made, all of it from the seed."""
        return self._state is None and self.given.model_state is None and self.settings.init is None

    def given_params(self) -> Any:
        """The starting weights: those given, or those of `init`; what is not among them is drawn from the seed."""
        if self.given.model_state is not None:
            placed = shardings(self.model_parts.boxed, self.topology.mesh, self.topology.rest_rules)
            # a copy: the step donates its state, and these are the caller's, and needed again to start over
            return jax.device_put(self.given.model_state, placed, may_alias=False)
        return {} if self.settings.init is None else restore.initial_params(self._whole)

    def gather(self, params: Any) -> Any:
        """Parameters whole on every device, for writing them out."""
        return jax.jit(lambda tree: tree, out_shardings=self.topology.replicated)(params)

    # --- checkpoints ------------------------------------------------------------------------------------
    @property
    def checkpoint_manager(self) -> Checkpoints:
        if self._checkpoints is None:
            self._checkpoints = restore.open_checkpoints(self._whole)
        return self._checkpoints

    def save(self, suffix: str | int | Path | None = None) -> None:
        """Begin to save the current step in the run's checkpoints, as the loop does; the best validated one is exempt
        from retention. Given a path, save a copy of the checkpoint there instead (see RestoreableJob.save)."""
        if not is_path(suffix):
            restore.protect_best(self._whole)
        super().save(suffix)

    def snapshot(self) -> Snapshot:
        return restore.snapshot(self._whole)

    def abstract_state(self) -> Any:
        return restore.saved_tree(self.functions.abstract_state)

    def admit(self, step: int, files: CheckpointManager | None = None) -> None:
        restore.check_same_run(self._whole, step, files or self.checkpoint_manager)

    def accept(self, tree: Any, step: int, files: CheckpointManager) -> None:
        restore.accept(self._whole, tree, step, files)

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
        return output.save_pretrained(self._whole, state, save_directory, to_torch)

    def save_information(self, path: Any) -> None:
        """Write a markdown description of the run: parameters, derived numbers, optimizer groups."""
        output.save_information(self._whole, path)
