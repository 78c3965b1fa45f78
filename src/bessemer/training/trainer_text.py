"""What a trainer's model says while it is trained: prompts continued with the live parameters, and previews."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from bessemer.generate import Completion
from bessemer.generate.results import GenerationConfig, GenerationResults
from bessemer.training import generation
from bessemer.training.collate import CollectFunction
from bessemer.training.state import TrainState
from bessemer.training.trainer_view import C, M, TrainerView


class TrainerText(TrainerView[C, M], Generic[C, M]):
    """A base of BaseTrainer."""

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
            self._whole,
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
        """The function (state, ids, mask) → (sequences, ids, mask) of left-padded (B, T) that `generate` calls;
        compiled once per shape."""
        return generation.generate_function(self._whole, generation.settings_of(generation_config, sampling))

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
        return generation.maybe_preview(self._whole, state, step, metrics)

    def create_collect_function(
        self, max_sequence_length: int, truncation_mode: str = "keep_end"
    ) -> Callable[[list[Any]], Mapping[str, Any]]:
        """The function that pads and truncates examples (texts, {"text"}, {"input_ids", "loss_mask"}) into rows.

        Data given from Python goes through it, unless a data_collator was given. An override may return any function of
        a list of examples; it is then used as a data_collator is.
        """
        return CollectFunction(self.tokenizer, max_sequence_length, truncation_mode)

    @property
    def data_collator(self) -> Callable[[list[Any]], Mapping[str, Any]]:
        """The function given as data_collator, else the one of `create_collect_function`."""
        if self.given.data_collator is not None:
            return self.given.data_collator
        return self.create_collect_function(self.settings.block_size, self.config["data/truncation"])
