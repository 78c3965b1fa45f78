"""Generate text with the model in training; its parameters stay in place on their mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from bessemer.data import Tokenizer
from bessemer.data.tokenize.chat import can_chat, is_messages, render, stop_ids
from bessemer.errors import InputError
from bessemer.generate.decoder import GenerationConfig, GenerationResults, bucket, crop, end_tokens, generate_rows
from bessemer.generate.load import check_scores
from bessemer.generate.rows import Output, stop_table
from bessemer.generate.sampling import Filters, way_of
from bessemer.models.protocol import Decoding
from bessemer.models.shape import round_up
from bessemer.topology import CompiledTogether, Topology
from bessemer.training.feed import fetch, place_rows

Generated = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class GenerateFunction:
    """(state, ids, mask) → (sequences, ids, mask); `rows` also returns each row's Output (generate/rows.py).

    ids, mask: (B, T) left-padded, repeated n times in the result. Samples depend on the seed, the row and
    `state.step`: the same state gives the same text, the next one another.
    """

    rows: Callable[[Any, Any, Any], tuple[jax.Array, jax.Array, jax.Array, Output]]

    def __call__(self, state: Any, ids: Any, mask: Any) -> Generated:
        return self.rows(state, ids, mask)[:3]


@dataclass
class Generator:
    """Generates with one jitted program, compiled once per shape, number of tokens and kind of sampling."""

    model: nn.Module
    tokenizer: Tokenizer | None
    topology: Topology

    @functools.cached_property
    def program(self) -> CompiledTogether:
        if not isinstance(self.model, Decoding):
            raise InputError(
                f"{type(self.model).__name__} has no `decode` and `init_cache`, so it cannot write text; see "
                "docs/extending.md."
            )
        call = functools.partial(generate_rows, self.model, self.pad_id)
        made = jax.jit(call, static_argnames=("tokens", "way"))
        return CompiledTogether(made, "generation", ("tokens", "way"))

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id if self.tokenizer is not None else 0

    def stops(self, config: GenerationConfig) -> set[int]:
        """Return the ids that end a row: `config.stop_ids`, the document token, and the end of the assistant's turn if
        the tokenizer has one."""
        tokenizer, given = self.tokenizer, set(config.stop_ids)
        if tokenizer is None:
            return given
        turns = stop_ids(tokenizer) if can_chat(tokenizer) else ()
        return {*given, *end_tokens(self.model, tokenizer), *turns}

    def function(self, config: GenerationConfig) -> GenerateFunction:
        """See BaseTrainer.create_generate_function."""
        call, stops = self.program, stop_table([self.stops(config)])
        filters = Filters.of(config, self.model.vocab_size)
        how = {"tokens": config.max_tokens, "way": way_of([config])}

        def rows(state: Any, ids: Any, mask: Any) -> tuple[jax.Array, jax.Array, jax.Array, Output]:
            streams = config.streams(ids.shape[0] * config.n)
            with self.topology.scope():
                return call(state.whole(), state.step, ids, mask, streams, filters, stops, **how)

        return GenerateFunction(rows)

    def generate(
        self,
        given: list[Any],
        rows: list[list[int]],
        config: GenerationConfig,
        function: GenerateFunction,
        *,
        state: Any,
        sharded: bool,
        return_metadata: bool,
        all_gather: bool,
        say: Callable[[str], None],
    ) -> GenerationResults:
        """Continue `rows` of tokens, the encoded prompts `given`, with the parameters of `state`."""
        if not isinstance(function, GenerateFunction):
            raise TypeError(
                f"create_generate_function returned {type(function).__name__}; `generate` needs a GenerateFunction "
                "(bessemer.training.generation), which also returns the length of each row."
            )
        cropped, notices = crop(rows, config.max_tokens, self.model.block_size)
        for notice in notices:
            say(f"generate: {notice}")
        width = bucket(max(map(len, cropped)), self.model.block_size)
        height = round_up(1 << (len(cropped) - 1).bit_length(), self.topology.data_parallel if sharded else 1)
        ids, mask = left_padded(cropped, (height, width), self.pad_id)
        sharding = NamedSharding(self.topology.mesh, PartitionSpec(self.topology.batch_axes if sharded else None))
        found = function.rows(state, place_rows(ids, sharding), place_rows(mask, sharding))
        output = fetch(found[3])
        total = len(cropped) * config.n
        sequences, prompt_ids, prompt_mask = (
            array[:total] for array in (fetch(found[:3]) if all_gather else found[:3])
        )
        output = Output(output.ids.T[:total], output.logprobs.T[:total], output.made[:total], output.live[:total])
        check_scores(output.logprobs)  # 0 where no token is
        real = (np.arange(config.max_tokens) < output.made[:, None]).astype(np.int32)
        stops = self.stops(config)
        tokens = [output.ids[row, : output.made[row]].tolist() for row in range(total)]
        ended = [bool(row) and row[-1] in stops for row in tokens]
        return GenerationResults(
            generation_results=[self.text(row[:-1] if end else row) for row, end in zip(tokens, ended, strict=True)],
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            sequences=sequences,
            completion_ids=output.ids,
            completion_mask=real,
            decoded_prompts=[self.text(row) for row in cropped],
            completion_prompts=[prompt for prompt in given for _ in range(config.n)],
            metadata=metadata(config, output, ended, notices) if return_metadata else None,
        )

    def encode(
        self, input_ids: Any, attention_mask: Any, prompts: Any, chat: bool
    ) -> tuple[list[Any], list[list[int]]]:
        """Return the prompts as a list and their tokens, from `prompts` or from left-padded `input_ids` (B, T)."""
        if (prompts is None) == (input_ids is None):
            raise ValueError("generate needs prompts (texts or messages) or input_ids, and not both")
        if prompts is not None:
            return self.prompt_rows(prompts, chat)
        rows = self.unpadded(np.asarray(input_ids), attention_mask)
        return [self.text(row) for row in rows], rows

    def prompt_rows(self, prompts: Any, chat: bool) -> tuple[list[Any], list[list[int]]]:
        """Return the prompts as a list and their tokens. prompts: a text, chat messages, or a list of either."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InputError("this run has no tokenizer, so it cannot read text: give input_ids instead of prompts.")
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

    def unpadded(self, ids: np.ndarray, mask: Any) -> list[list[int]]:
        """Return the rows of left-padded ids (B, T). Without a mask, leading padding tokens are the padding."""
        if ids.ndim == 1:
            ids = ids[None]
        real = np.cumsum(ids != self.pad_id, axis=1) > 0 if mask is None else np.asarray(mask).reshape(ids.shape) > 0
        if not real[:, -1].all() or (np.diff(real.astype(np.int8), axis=1) < 0).any():
            raise InputError("input_ids are padded on the left, and every row has at least one token.")
        if ids.min() < 0 or ids.max() >= self.model.vocab_size:
            raise InputError(f"a prompt token lies outside the model's vocabulary of {self.model.vocab_size}.")
        return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]

    def text(self, ids: Sequence[int]) -> str:
        """Decode; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)


def metadata(config: GenerationConfig, output: Any, ended: Sequence[bool], notices: list[str]) -> dict[str, Any]:
    """Return the log-probabilities of each row under the model itself, its length, and why it ended."""
    finish = [
        "stop" if end else "length" if made == config.max_tokens else "context"
        for end, made in zip(ended, output.made, strict=True)
    ]
    return {"config": config, "logprobs": output.logprobs, "lengths": output.made, "finish": finish, "notices": notices}


def left_padded(rows: Sequence[Sequence[int]], shape: tuple[int, int], pad: int) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    width = shape[1]
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask


def settings_of(
    config: GenerationConfig | Mapping[str, Any] | None, *overrides: Mapping[str, Any] | None
) -> GenerationConfig:
    return GenerationConfig.of(config, *(values for values in overrides if values))
