"""Text from a live trainer: its parameters as they are, on its mesh, never copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bessemer.config import configuration, configure
from bessemer.data.tokenize.chat import can_chat, is_messages, render, stop_ids
from bessemer.errors import InputError
from bessemer.generate import Completion
from bessemer.generate.decoder import (
    GenerationConfig,
    GenerationResults,
    bucket,
    crop,
    end_tokens,
    generate_rows,
)
from bessemer.generate.load import check_scores
from bessemer.generate.rows import Output, stop_table
from bessemer.generate.sampling import Filters, way_of
from bessemer.models.shape import round_up
from bessemer.topology import CompiledTogether
from bessemer.training.feed import fetch

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

Generated = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class GenerateFunction:
    """(state, ids, mask) → (sequences, ids, mask); `rows` also returns what each row made (generate/rows.py: Output).

    ids, mask: (B, T) left-padded, repeated n times in the result. Draws depend on the seed, the row and `state.step`:
    the same state gives the same text, the next one another.
    """

    rows: Callable[[Any, Any, Any], tuple[jax.Array, jax.Array, jax.Array, Output]]

    def __call__(self, state: Any, ids: Any, mask: Any) -> Generated:
        return self.rows(state, ids, mask)[:3]


def program(trainer: BaseTrainer) -> Any:
    """The trainer's one jitted function; a shape, a number of tokens and of samples compile once."""
    if trainer.generate_program is None:
        if not hasattr(trainer.model, "decode"):
            raise InputError(
                f"{type(trainer.model).__name__} has no `decode` and `init_cache`, so it cannot write text; see "
                "docs/extending.md."
            )
        call = functools.partial(generate_rows, trainer.model, pad_id(trainer))
        made = jax.jit(call, static_argnames=("tokens", "way"))
        trainer.generate_program = CompiledTogether(made, "generation", ("tokens", "way"))
    return trainer.generate_program


def pad_id(trainer: BaseTrainer) -> int:
    return trainer.tokenizer.pad_id if trainer.tokenizer is not None else 0


def end_ids(trainer: BaseTrainer) -> set[int]:
    """The document token, and the end of the assistant's turn where the tokenizer has one."""
    tokenizer = trainer.tokenizer
    if tokenizer is None:
        return set()
    return {*end_tokens(trainer.model, tokenizer), *(stop_ids(tokenizer) if can_chat(tokenizer) else ())}


def generate_function(trainer: BaseTrainer, config: GenerationConfig) -> GenerateFunction:
    """See BaseTrainer.create_generate_function."""
    call = program(trainer)
    filters = Filters.of(config.sampling, trainer.model.vocab_size)
    stops = stop_table([end_ids(trainer) | set(config.stop_ids)])
    how = {"tokens": config.max_tokens, "way": way_of([config.sampling])}

    def rows(state: Any, ids: Any, mask: Any) -> tuple[jax.Array, jax.Array, jax.Array, Output]:
        streams = config.sampling.streams(ids.shape[0] * config.n)
        with trainer.topology.scope():
            return call(state.whole(), state.step, ids, mask, streams, filters, stops, **how)

    return GenerateFunction(rows)


def generate(
    trainer: BaseTrainer,
    input_ids: Any,
    attention_mask: Any,
    prompts: Any,
    config: GenerationConfig,
    *,
    state: Any,
    apply_chat_template: bool,
    shard_inputs: bool | None,
    return_metadata: bool,
    all_gather: bool,
) -> GenerationResults:
    """See BaseTrainer.generate."""
    if (prompts is None) == (input_ids is None):
        raise ValueError("generate needs prompts (texts or messages) or input_ids, and not both")
    if prompts is not None:
        given, rows = prompt_rows(trainer, prompts, apply_chat_template)
    else:
        rows = unpadded(trainer, np.asarray(input_ids), attention_mask)
        given = [text_of(trainer, row) for row in rows]
    cropped, notices = crop(rows, config.max_tokens, trainer.model.block_size)
    for notice in notices:
        trainer.say(f"generate: {notice}")
    width = bucket(max(map(len, cropped)), trainer.model.block_size)
    sharded = shard_inputs is not False
    height = round_up(1 << (len(cropped) - 1).bit_length(), trainer.topology.data_parallel if sharded else 1)
    ids, mask = left_padded(cropped, (height, width), pad_id(trainer))
    with trainer.topology.scope():
        placed = [place(trainer, array, sharded) for array in (ids, mask)]
    found = generating(trainer, config).rows(state, *placed)
    output = fetch(found[3])
    total = len(cropped) * config.n
    sequences, prompt_ids, prompt_mask = (
        array[:total] for array in (fetch(found[:3]) if all_gather else found[:3])
    )
    output = Output(output.ids.T[:total], output.logprobs.T[:total], output.made[:total], output.live[:total])
    check_scores(output.logprobs)  # 0 where no token is
    real = (np.arange(config.max_tokens) < output.made[:, None]).astype(np.int32)
    stops = end_ids(trainer) | set(config.stop_ids)
    tokens = [output.ids[row, : output.made[row]].tolist() for row in range(total)]
    ended = [bool(row) and row[-1] in stops for row in tokens]
    return GenerationResults(
        generation_results=[
            text_of(trainer, row[:-1] if end else row) for row, end in zip(tokens, ended, strict=True)
        ],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        sequences=sequences,
        completion_ids=output.ids,
        completion_mask=real,
        decoded_prompts=[text_of(trainer, row) for row in cropped],
        completion_prompts=[prompt for prompt in given for _ in range(config.n)],
        metadata=metadata(config, output, ended, notices) if return_metadata else None,
    )


def generating(trainer: BaseTrainer, config: GenerationConfig) -> GenerateFunction:
    """What the trainer's `create_generate_function` returns, made sure of."""
    function = trainer.create_generate_function(config)
    if not isinstance(function, GenerateFunction):
        raise TypeError(
            f"{type(trainer).__name__}.create_generate_function returned {type(function).__name__}; `generate` needs a "
            "GenerateFunction (bessemer.training.generation), which also says how long each row is."
        )
    return function


def metadata(
    config: GenerationConfig, output: Any, ended: Sequence[bool], notices: list[str]
) -> dict[str, Any]:
    """What else is known of each row: log p of its tokens under the model itself, and why it ended."""
    finish = [
        "stop" if end else "length" if made == config.max_tokens else "context"
        for end, made in zip(ended, output.made, strict=True)
    ]
    return {
        "config": config,
        "logprobs": output.logprobs,
        "lengths": output.made,
        "finish": finish,
        "notices": notices,
    }


def prompt_rows(trainer: BaseTrainer, prompts: Any, chat: bool) -> tuple[list[Any], list[list[int]]]:
    """(prompts as given, their tokens). One text or conversation, or a list of them."""
    tokenizer = trainer.tokenizer
    if tokenizer is None:
        raise InputError(
            "this run has no tokenizer, so it cannot read text: give input_ids instead of prompts."
        )
    given = [prompts] if isinstance(prompts, str) or is_messages(prompts) else list(prompts)
    if not given:
        raise ValueError("generate needs at least one prompt")
    rows = []
    for prompt in given:
        if isinstance(prompt, str) and not chat:
            rows.append(tokenizer.prompt(prompt))
        elif isinstance(prompt, str):
            rows.append(render([{"role": "user", "content": prompt}], tokenizer))
        elif is_messages(prompt):
            rows.append(render(prompt, tokenizer))
        else:
            raise InputError(f"a prompt is a text or a list of chat messages; got {type(prompt).__name__}.")
    return given, rows


def unpadded(trainer: BaseTrainer, ids: np.ndarray, mask: Any) -> list[list[int]]:
    """Rows of left-padded ids (B, T). Without a mask the leading padding tokens are the padding."""
    if ids.ndim == 1:
        ids = ids[None]
    real = (
        np.cumsum(ids != pad_id(trainer), axis=1) > 0
        if mask is None
        else np.asarray(mask).reshape(ids.shape) > 0
    )
    if not real[:, -1].all() or (np.diff(real.astype(np.int8), axis=1) < 0).any():
        raise InputError("input_ids are padded on the left, and every row has at least one token.")
    if ids.min() < 0 or ids.max() >= trainer.model.vocab_size:
        raise InputError(f"a prompt token lies outside the model's vocabulary of {trainer.model.vocab_size}.")
    return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]


def left_padded(
    rows: Sequence[Sequence[int]], shape: tuple[int, int], pad: int
) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    width = shape[1]
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask


def place(trainer: BaseTrainer, array: np.ndarray, sharded: bool) -> Any:
    """Rows over the mesh's batch axes, or whole on every device."""
    topology = trainer.topology
    sharding = NamedSharding(topology.mesh, PartitionSpec(topology.batch_axes if sharded else None))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def text_of(trainer: BaseTrainer, ids: Sequence[int]) -> str:
    """ "" without a tokenizer."""
    return "" if trainer.tokenizer is None else trainer.tokenizer.decode(ids)


def settings_of(
    config: GenerationConfig | Mapping[str, Any] | None, *overrides: Mapping[str, Any] | None
) -> GenerationConfig:
    return GenerationConfig.of(config, *(values for values in overrides if values))


def maybe_preview(trainer: BaseTrainer, state: Any, step: int, metrics: Any) -> list[Completion]:
    """See BaseTrainer.maybe_generate."""
    from bessemer.training.callbacks.preview import Preview

    if trainer.preview is None:
        with configuration(trainer.config):
            trainer.preview = configure(Preview)
        trainer.preview.prepare(trainer)
    if not trainer.preview.due(trainer, step):
        return []
    found = trainer.preview.show(trainer, state, step)
    if metrics is not None:
        metrics["samples"] = [f"{sample.prompt} ▸ {sample.text}" for sample in found]
    return found
