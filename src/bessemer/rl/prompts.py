"""Prompts for reinforcement: rows of a dataset with all their columns, and the tokens a completion is to follow.

A row's prompt is its `prompt` (text or messages), its `messages` up to the last assistant's turn (whose text becomes
the column `answer` where there is none), or its `question`. Rows are held in memory: they are short, and rewards want
every column.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from bessemer.data import BatchPlan, DataPlan, Validation
from bessemer.data.plan.mixture import Sampling
from bessemer.data.rows.rows import Batch, Fields
from bessemer.data.sources.files import Files
from bessemer.data.sources.held_out import hashed_below, own_held_out
from bessemer.data.sources.readers import Raw, read_file_rows
from bessemer.data.stores.catalog import find_source
from bessemer.data.tokenize.chat import can_chat, is_messages, render, stop_ids
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.rl.rollout import GRPOTrainerConfig, Passes, row_types
from bessemer.training.context import RunContext
from bessemer.training.setup.data import DataParts

Row = dict[str, Any]
Horizon = Callable[[int], tuple[int, int]]
"""(rows of one epoch) -> batch size in rows, steps."""
TAKEN = ("prompts", "completions", "completion_tokens")
"""Arguments of every reward: no column may have these names."""


def read_split(sampling: Sampling, val_fraction: float) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows). A registered dataset may have a held-out part of its own; otherwise rows whose
    content hash falls below `val_fraction` are held out, whatever their order."""
    rows = list(read_rows(sampling.name))
    held_out = own_held_out(sampling.name)
    if held_out is not None:
        return rows, [checked_row(row, f"{sampling.name} (held out)") for row in held_out]
    texts = (json.dumps(row, sort_keys=True, default=str).encode() for row in rows)
    hashes = np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), ">u8")
    held = hashed_below(hashes, val_fraction)
    return list(compress(rows, ~held)), list(compress(rows, held))


def read_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a registered dataset, or of files of JSON lines or parquet, here or in an object store."""
    source = find_source(name)
    if isinstance(source, Files):
        for row in (row for file in source.files for row in read_file_rows(file)):
            if not isinstance(row, Raw):
                raise InputError(f"{row}.")
            yield checked_row(row.value, row.where())
        return
    for number, item in enumerate(source.items):
        yield checked_row(item, f"{name} row {number + 1}")


def checked_row(item: Any, where: str) -> Row:
    if not isinstance(item, Mapping):
        raise InputError(f"{where}: expected a row with columns, not {type(item).__name__}.")
    return {str(column): value for column, value in item.items()}


def prompt_of(row: Row, where: str) -> tuple[Any, Row]:
    """(the prompt: a text or messages, the row with what follows from it)."""
    if "prompt" in row:
        return _checked_prompt(row["prompt"], where), row
    if "messages" in row:
        messages = row["messages"]
        if not is_messages(messages):
            raise InputError(f"{where}: 'messages' is not a list of messages.")
        if messages[-1].get("role") == "assistant":
            row = {"answer": messages[-1].get("content"), **row}
            messages = messages[:-1]
        return _checked_prompt(messages, where), row
    if "question" in row:
        return _checked_prompt(row["question"], where), row
    raise InputError(
        f"{where}: a row needs a prompt under 'prompt', 'messages' or 'question'; it has {', '.join(row) or 'nothing'}."
    )


def _checked_prompt(prompt: Any, where: str) -> Any:
    if (isinstance(prompt, str) and prompt.strip()) or is_messages(prompt):
        return prompt
    raise InputError(
        f"{where}: a prompt is a text or a list of messages, and not empty; got {prompt!r:.100}."
    )


def prompt_ids(prompt: Any, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """The tokens before the completion. A text is a user's message, or with `chat` off (or a tokenizer without the
    tokens of a conversation) plain text."""
    if not isinstance(prompt, str):
        return render(prompt, tokenizer)
    if chat and can_chat(tokenizer):
        return render([{"role": "user", "content": prompt}], tokenizer)
    return tokenizer.prompt(prompt)


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a completion: the document token, and the end of the assistant's turn, first where there is one."""
    turns = stop_ids(tokenizer) if can_chat(tokenizer) else ()
    return tuple(dict.fromkeys((*turns, tokenizer.bos_id)))


class PromptRows:
    """Prompts of one source by number, as rows of a DataPlan: a "batch" holds where in `sources` each prompt is.

    Prompts longer than `longest` tokens are left out and counted.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        name: str,
        tokenizer: Tokenizer,
        block_size: int,
        *,
        longest: int,
        chat: bool = True,
        number: int = 0,
    ):
        self.block_size, self.number, self.name = block_size, number, name
        self.fields: Fields = {"source": ((), np.dtype(np.int64)), "prompt": ((), np.dtype(np.int64))}
        self.places: list[int] = []  # the row of each prompt in its source, from 1
        self.prompts: list[Any] = []
        self.ids: list[list[int]] = []
        self.columns: list[Row] = []
        too_long = 0
        for place, row in enumerate(rows):
            where = f"{name} row {place + 1}"
            if taken := [column for column in TAKEN if column in row]:
                raise InputError(
                    f"{where}: the column '{taken[0]}' is an argument of every reward; rename it."
                )
            prompt, row = prompt_of(row, where)
            ids = prompt_ids(prompt, tokenizer, chat)
            if len(ids) > longest:
                too_long += 1
                continue
            self.prompts.append(prompt)
            self.ids.append(ids)
            self.columns.append(row)
            self.places.append(place + 1)
        if rows and not self.ids:
            raise InputError(
                f"every one of the {len(rows)} prompts of {name} is longer than {longest} tokens: raise "
                "grpo.max_prompt_length (and architecture.block_size)."
            )
        self.stats: dict[str, Any] = {"prompts": len(self.ids), "too_long": too_long}
        facts = json.dumps([self.ids, self.columns], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.ids)

    def get(self, indices: np.ndarray) -> Batch:
        """(n,) each: which source, and which of its prompts."""
        numbers = np.asarray(indices, np.int64)
        return {"source": np.full_like(numbers, self.number), "prompt": numbers}

    def column_names(self) -> set[str]:
        """Columns that every row has."""
        names = [set(row) for row in self.columns]
        return set.intersection(*names) if names else set()


# --- the plan: which prompts a rollout samples from, a pure function of (data, seed, rollout number) ---

Chosen = list[tuple[PromptRows, int]]
"""Prompts, each as its source and its number there."""


class PromptPlan(BatchPlan):
    """The prompts of every rollout, and the held-out ones: a plan whose entries are prompts, not rows of tokens."""

    validation = None  # rows of tokens are not what is held out here

    def __init__(
        self,
        mixture: Sequence[tuple[Sampling, PromptRows]],
        held_out: Sequence[tuple[Sampling, PromptRows]],
        passes: Passes,
        validation_count: int,
    ):
        self.passes = passes
        self.inner = DataPlan([list(mixture)], passes.prompts, passes.seed)
        kept = [(sampling, rows) for sampling, rows in held_out if len(rows)]
        chosen = Validation(kept, validation_count) if kept else None
        self.held_out: Chosen = []
        if chosen is not None:
            pairs = zip(chosen.source.tolist(), chosen.index.tolist(), strict=True)
            self.held_out = [(kept[source][1], index) for source, index in pairs]

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Return the source and the number of each prompt of the rollout that a step trains on, (prompts,) each."""
        return self.inner.batch(self.passes.place(step)[0], rows)

    def prompts(self, number: int) -> Chosen:
        batch = self.inner.batch(number)
        pairs = zip(batch["source"].tolist(), batch["prompt"].tolist(), strict=True)
        return [(self.sources[source], index) for source, index in pairs]

    @property
    def sources(self) -> list[PromptRows]:
        return self.inner.sources  # type: ignore[return-value]

    @cached_property
    def columns(self) -> list[str]:
        """Columns that every row has: those that rewards are given."""
        every = [
            rows.column_names()
            for rows in {id(r): r for r in [*self.sources, *self._held_sources()]}.values()
        ]
        return sorted(set.intersection(*every))

    @cached_property
    def partial_columns(self) -> dict[str, str]:
        """Columns that some rows have and others lack, each with how many lack it and the first that does."""
        sources = {id(rows): rows for rows in [*self.sources, *self._held_sources()]}.values()
        rows = [
            (row, f"{source.name} row {source.places[number]}")
            for source in sources
            for number, row in enumerate(source.columns)
        ]
        some = sorted({column for row, _ in rows for column in row} - set(self.columns))
        lacking = {column: [where for row, where in rows if column not in row] for column in some}
        return {
            column: f"{len(where)} of {len(rows)} rows lack it, first {where[0]}"
            for column, where in lacking.items()
        }

    def _held_sources(self) -> list[PromptRows]:
        return [rows for rows, _ in self.held_out]

    def epoch(self, step: int) -> float:
        """How often the prompts have been sampled from before the step."""
        return self.inner.epoch(1) * step / self.passes.steps

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """By dataset alone: prompts are not laid out in rows of some style."""
        pairs = zip(self.inner.samplings, self.sources, strict=True)
        return {"/".join(filter(None, (s.name, s.suffix))): rows.stats for s, rows in pairs}

    @property
    def fingerprint(self) -> str:
        return _digest([self.inner.fingerprint, dataclasses.astuple(self.passes)])

    @property
    def identity(self) -> str:
        """All prompts in a few characters, the held-out ones too: what several processes must have in common."""
        return _digest([self.fingerprint, [(rows.fingerprint, place) for rows, place in self.held_out]])[:16]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def build_prompts(
    context: RunContext[GRPOTrainerConfig],
    tokenizer: Tokenizer | None,
    policy: SampledSettings,
    horizon: Horizon,
) -> tuple[DataParts, Passes]:
    """Return the data of an online run, prompts in place of rows, and how its steps divide a rollout."""
    settings = context.settings
    mixture, held_out = read_prompts(context, tokenizer, longest_prompt(settings, policy))
    each = settings.group_size * settings.num_iterations
    batch_size, steps = horizon(sum(len(rows) for _, rows in mixture) * each)
    check_groups(batch_size, settings.group_size, policy)
    passes = Passes(
        batch_size, settings.group_size, settings.mini_batches, settings.num_iterations, settings.seed
    )
    plan = PromptPlan(mixture, held_out, passes, settings.validation_steps)
    fields = {name: ((settings.block_size,), dtype) for name, dtype in row_types(policy).items()}
    return DataParts(plan, None, batch_size, steps, [0], 0, fields, len(plan.held_out)), passes


def read_prompts(
    context: RunContext[GRPOTrainerConfig], tokenizer: Tokenizer | None, longest: int
) -> tuple[list[Any], list[Any]]:
    """Return the training and the held-out prompts of every source, those over `longest` tokens left out."""
    settings, given = context.settings, context.given
    val_fraction: float = context.config["data/val_fraction"]
    if tokenizer is None:
        raise InputError("prompts need a tokenizer: set data.tokenizer, or init=RUN to take that of a run.")
    if len(settings.datasets) > 1:
        raise InputError("training.dataset has several stages; reinforcement has one mixture of prompts.")
    mixture: list[Any] = []
    held_out: list[Any] = []
    in_memory = given.dataset_train is not None
    for number, sampling in enumerate([Sampling("given")] if in_memory else settings.datasets[0]):
        if in_memory:
            parts = [list(given.dataset_train), list(given.dataset_eval or [])]
        else:
            parts = list(read_split(sampling, val_fraction if settings.validate else 0.0))
        for rows, into in zip(parts, (mixture, held_out), strict=True):
            made = PromptRows(
                rows,
                sampling.name,
                tokenizer,
                settings.block_size,
                longest=longest,
                chat=settings.chat,
                number=number,
            )
            into.append((sampling, made))
            if made.stats["too_long"]:
                context.notes.say(
                    f"note: {made.stats['too_long']} of {len(rows)} prompts of {sampling.name} are longer than "
                    f"{longest} tokens (grpo.max_prompt_length) and left out"
                )
        if not mixture[-1][1]:
            raise InputError(f"{sampling.name} holds no prompt to train on.")
    if settings.validate and not any(len(rows) for _, rows in held_out):
        context.notes.say(
            f"note: no prompt is held out (data.val_fraction={val_fraction:g} of so few), so nothing is validated"
        )
    return mixture, held_out if settings.validate else []


def longest_prompt(settings: GRPOTrainerConfig, policy: SampledSettings) -> int:
    """Return grpo.max_prompt_length, or what the block leaves beside a completion."""
    block, longest = settings.block_size, policy.max_completion_length
    room = block + 1 - longest  # the last token of a row is a target only
    given = settings.max_prompt_length
    if room < 1 or (given is not None and given > room):
        prompt = "a prompt" if given is None else f"grpo.max_prompt_length={given}"
        raise InputError(
            f"{prompt} and grpo.max_completion_length={longest} do not fit into architecture.block_size={block}: "
            "shorten them, or lengthen the block."
        )
    return room if given is None else given


def check_groups(batch_size: int, group_size: int, policy: SampledSettings) -> None:
    """Groups are whole, and large enough for what is computed within them."""
    if batch_size % group_size:
        raise InputError(
            f"training.batch_size={batch_size} is not a whole number of groups of grpo.group_size={group_size}: it "
            "counts completions. Make it a multiple."
        )
    if not isinstance(policy, GrpoSettings):
        return
    within = policy.baseline in ("group", "leave_one_out")
    if group_size == 1 and (within or policy.scale):
        raise InputError(
            f"grpo.group_size=1 leaves nothing to compare a completion with: grpo.baseline={policy.baseline} and "
            f"grpo.scale={str(policy.scale).lower()} mean nothing. Use a larger group, or grpo.baseline=rollout and "
            "grpo.scale=false."
        )
    if policy.scale and not within:
        raise InputError(
            f"grpo.scale divides by the deviation within a group, which is 0 where all of its rewards are equal, and "
            f"with grpo.baseline={policy.baseline} such groups count: set grpo.scale=false."
        )
