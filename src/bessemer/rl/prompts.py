"""The data of RL: prompts with their columns for online runs, and stored groups of completions for offline ones.

A row's prompt is its `prompt` (text or messages), its `messages` up to the last assistant's turn (whose text becomes
the column `answer` if there is none), or its `question`. Rows are kept in memory: they are short, and rewards need
every column. A row of an offline run is one group; a completion that is a text gets the model's end token:

    {"prompt": …, "completions": [text or ids, …], "rewards": [number, …],
     "logprobs": [[number per token, …], …], "masks": [[0 or 1 per token, …], …]}    (the last two are optional)

Without log-probabilities the ratio is to the reference (grpo.offline=reference), renewed every grpo.sync_interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from numbers import Integral, Real
from typing import Any

import numpy as np

from bessemer.data import BatchPlan, DataPlan, Validation, key_of
from bessemer.data.plan.mixture import Sampling
from bessemer.data.rows.rows import Batch, Fields, Rows, fields_of
from bessemer.data.sources.datasets import hashed_below, own_held_out
from bessemer.data.sources.files import Files
from bessemer.data.sources.readers import Raw, read_file_rows
from bessemer.data.stores.catalog import find_source
from bessemer.data.tokenize.chat import tools_of
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.text import prompt_ids, turn_ends
from bessemer.objectives.grpo import GrpoSettings, SampledSettings, group_advantages
from bessemer.rl.environments.base import Row, prompt_of, question_of
from bessemer.rl.rollout import FIELDS, TOKEN_FIELDS, GRPOTrainerConfig, Passes, completion_rows, row_types, spread
from bessemer.rl.selection import Curriculum, build_curriculum, replaced
from bessemer.training.settings import RunContext
from bessemer.training.setup.data import DataParts

Horizon = Callable[[int], tuple[int, int]]
"""(rows of one epoch) -> batch size in rows, steps."""
LISTS = (list, tuple, np.ndarray)  # as files and registered datasets have them
TAKEN = ("prompts", "completions", "completion_tokens")  # arguments of every reward, so not names of columns


def read_split(sampling: Sampling, val_fraction: float) -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows: the dataset's own held-out part, or rows whose content hash is below
    `val_fraction`, in any order."""
    train, held = numbered_split(sampling, val_fraction)
    return list(train.values()), list(held.values())


def numbered_split(sampling: Sampling, val_fraction: float) -> tuple[dict[int, Row], dict[int, Row]]:
    """Return what `read_split` does, by the number of each row in its source, from 1."""
    rows = list(read_rows(sampling.name))
    numbered = list(enumerate(rows, 1))
    held_out = own_held_out(sampling.name)
    if held_out is not None:
        own = (checked_row(row, f"{sampling.name} (held out)") for row in held_out)
        return dict(numbered), dict(enumerate(own, 1))
    texts = (json.dumps(row, sort_keys=True, default=str).encode() for row in rows)
    hashes = np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), ">u8")
    held = hashed_below(hashes, val_fraction)
    return dict(compress(numbered, ~held)), dict(compress(numbered, held))


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


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a completion: the ends of the assistant's turn, if there are any, and of documents."""
    return tuple(dict.fromkeys((*turn_ends(tokenizer), tokenizer.bos_id)))


class PromptRows:
    """Prompts of one source, as rows of a DataPlan: a "batch" says which prompt of which source each entry is.

    Prompts longer than `longest` tokens are skipped and counted. numbers: of the rows in their source, for messages.
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
        environment: bool = False,  # which makes the prompts itself
        numbers: Sequence[int] | None = None,
    ):
        self.block_size, self.number, self.name = block_size, number, name
        self.fields: Fields = {"source": ((), np.dtype(np.int64)), "prompt": ((), np.dtype(np.int64))}
        self.places: list[int] = []  # the row of each prompt in its source, from 1
        self.prompts: list[Any] = []
        self.ids: list[list[int]] = []
        self.columns: list[Row] = []
        too_long = 0
        for place, row in zip(numbers or range(1, len(rows) + 1), rows, strict=True):
            where = f"{name} row {place}"
            if taken := [column for column in TAKEN if column in row]:
                raise InputError(f"{where}: the column '{taken[0]}' is an argument of every reward; rename it.")
            if environment:
                prompt = question_of(row)  # for previews and rewards
                with named_row(where):
                    ids = [] if prompt is None else prompt_ids(prompt, tokenizer, chat)
                ids = ids if len(ids) <= longest else []
            else:
                prompt, row = prompt_of(row, where)
                with named_row(where):
                    ids = prompt_ids(prompt, tokenizer, chat, tools_of(row))
            if len(ids) > longest:
                too_long += 1
                continue
            self.prompts.append(prompt)
            self.ids.append(ids)
            self.columns.append(row)
            self.places.append(place)
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
        """Return the source of each prompt and its number there, (n,) each."""
        numbers = np.asarray(indices, np.int64)
        return {"source": np.full_like(numbers, self.number), "prompt": numbers}


Chosen = list[tuple[PromptRows, int]]
"""Prompts, each as its source and its number there."""


class PromptPlan(BatchPlan):
    """The prompts of every rollout, a pure function of (data, seed, rollout number), and the held-out ones. With a
    curriculum (rl/selection.py) some are replaced."""

    validation = None  # prompts are held out, not rows of tokens

    def __init__(
        self,
        mixture: Sequence[tuple[Sampling, PromptRows]],
        held_out: Sequence[tuple[Sampling, PromptRows]],
        passes: Passes,
        validation_count: int,
    ):
        self.passes, self.mixture = passes, list(mixture)
        self.inner = DataPlan([list(mixture)], passes.prompts, passes.seed)
        self._streams: dict[int, DataPlan] = {}  # of the rounds of grpo.resample
        self.curriculum: Curriculum | None = None
        self.report: dict[str, float] = {}  # of the curriculum, about the rollout drawn last
        kept = [(sampling, rows) for sampling, rows in held_out if len(rows)]
        self.held_out: Chosen = []
        if kept:
            chosen = Validation(kept, validation_count)
            pairs = zip(chosen.source.tolist(), chosen.index.tolist(), strict=True)
            self.held_out = [(kept[source][1], index) for source, index in pairs]

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Return the source and the number of each prompt of the rollout that a step trains on, (prompts,) each."""
        return self.inner.batch(self.passes.place(step)[0], rows)

    def prompts(self, number: int) -> Chosen:
        """Return the prompts of rollout `number`; with grpo.curriculum=pass_rate they depend on what is measured."""
        chosen = self._chosen(self.inner.batch(number))
        if self.curriculum is None:
            return chosen
        kept, count = replaced(self.curriculum, chosen, number, self.passes.seed)
        share = np.concatenate([self.curriculum.allowed(source, number) for source in self.sources]).mean()
        self.report = {"curriculum/replaced": float(count), "curriculum/share": float(share)}
        return kept

    def others(self, number: int, turn: int) -> Chosen:
        """Return the prompts that round `turn` of resampling draws from, (prompts,); each round has its own order."""
        if turn not in self._streams:
            seed = key_of(self.passes.seed, "resample", turn)
            self._streams[turn] = DataPlan([self.mixture], self.passes.prompts, seed)
        chosen = self._chosen(self._streams[turn].batch(number))
        if self.curriculum is None:
            return chosen
        allowed = {source.number: self.curriculum.allowed(source, number) for source in self.sources}
        return [(source, place) for source, place in chosen if allowed[source.number][place]]

    def _chosen(self, batch: Batch) -> Chosen:
        pairs = zip(batch["source"].tolist(), batch["prompt"].tolist(), strict=True)
        return [(self.sources[source], index) for source, index in pairs]

    @property
    def sources(self) -> list[PromptRows]:
        return self.inner.sources  # type: ignore[return-value]

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest prompt, held-out ones included."""
        kept = [*self.sources, *(rows for rows, _ in self.held_out)]
        return max(len(ids) for rows in kept for ids in rows.ids)

    @cached_property
    def columns(self) -> list[str]:
        """The columns that every row has: those passed to rewards."""
        return sorted(set.intersection(*(set(row) for row, _ in self.rows)))

    @cached_property
    def partial_columns(self) -> dict[str, str]:
        """The columns that only some rows have, each with how many lack it and the first that does."""
        some = sorted({column for row, _ in self.rows for column in row} - set(self.columns))
        lacking = {column: [where for row, where in self.rows if column not in row] for column in some}
        return {
            column: f"{len(where)} of {len(self.rows)} rows lack it, first {where[0]}"
            for column, where in lacking.items()
        }

    @cached_property
    def rows(self) -> list[tuple[Row, str]]:
        """Every row, held-out ones included, with where it is."""
        sources = {id(rows): rows for rows in [*self.sources, *(rows for rows, _ in self.held_out)]}.values()
        return [
            (row, f"{source.name} row {place}")
            for source in sources
            for place, row in zip(source.places, source.columns, strict=True)
        ]

    def epoch(self, step: int) -> float:
        """Return how often the prompts have been used before the step."""
        return self.inner.epoch(1) * step / self.passes.steps

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        pairs = zip(self.inner.samplings, self.sources, strict=True)
        return {"/".join(filter(None, (s.name, s.suffix))): rows.stats for s, rows in pairs}

    @property
    def fingerprint(self) -> str:
        return _digest([self.inner.fingerprint, dataclasses.astuple(self.passes)])

    @property
    def identity(self) -> str:
        """A short hash of all prompts, held-out ones included, which all processes must have in common."""
        return _digest([self.fingerprint, [(rows.fingerprint, place) for rows, place in self.held_out]])[:16]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def build_prompts(
    context: RunContext[GRPOTrainerConfig], tokenizer: Tokenizer | None, policy: SampledSettings, horizon: Horizon
) -> tuple[DataParts, Passes]:
    """Return the data of an online run, prompts in place of rows, and how its steps divide a rollout."""
    settings = context.settings
    mixture, held_out = read_prompts(context, tokenizer, longest_prompt(settings, policy))
    each = settings.group_size * settings.num_iterations
    batch_size, steps = horizon(sum(len(rows) for _, rows in mixture) * each)
    check_groups(batch_size, settings.group_size, policy, settings.mini_batches)
    passes = Passes(batch_size, settings.group_size, settings.mini_batches, settings.num_iterations, settings.seed)
    plan = PromptPlan(mixture, held_out, passes, settings.validation_steps)
    plan.curriculum = build_curriculum(settings, plan.sources, steps, passes.steps)
    fields = {name: ((settings.block_size,), dtype) for name, dtype in row_types(policy).items()}
    return DataParts(plan, None, batch_size, steps, [0], 0, fields, len(plan.held_out)), passes


def read_prompts(
    context: RunContext[GRPOTrainerConfig], tokenizer: Tokenizer | None, longest: int
) -> tuple[list[Any], list[Any]]:
    """Return the training and the held-out prompts of every source, without those over `longest` tokens."""
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
            parts = [dict(enumerate(part, 1)) for part in (given.dataset_train, given.dataset_eval or [])]
        else:
            parts = list(numbered_split(sampling, val_fraction if settings.validate else 0.0))
        for rows, into in zip(parts, (mixture, held_out), strict=True):
            made = PromptRows(
                list(rows.values()),
                sampling.name,
                tokenizer,
                settings.block_size,
                longest=longest,
                chat=settings.chat,
                number=number,
                environment=settings.environment is not None,
                numbers=list(rows),
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


def check_groups(batch_size: int, group_size: int, policy: SampledSettings, parts: int = 1) -> None:
    """Raise InputError unless groups are whole, and they and the rollout, of `parts` batches, are large enough for what
    is computed within them."""
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
    if policy.baseline == "rollout" and batch_size * parts == 1:
        raise InputError(
            "grpo.baseline=rollout takes the mean of the rollout off each reward, and this rollout is one completion: "
            "raise training.batch_size or grpo.mini_batches, or set grpo.baseline=none."
        )
    if policy.scale and not within:
        raise InputError(
            f"grpo.scale divides by the deviation within a group, which is 0 where all of its rewards are equal, and "
            f"with grpo.baseline={policy.baseline} such groups count: set grpo.scale=false."
        )


# --- stored completions in place of rollouts ---


class StoredGroups:
    """Groups of one source as rows of a DataPlan. groups: arrays (G, T) and rewards (G,) of each."""

    def __init__(self, name: str, groups: Sequence[tuple[Batch, np.ndarray]], block_size: int):
        if not groups:
            raise InputError(f"{name} holds no group of completions.")
        self.block_size, self.groups = block_size, groups
        self.rewards = np.stack([rewards for _, rewards in self.groups])  # (groups, G)
        digest = hashlib.sha256()
        for group, rewards in self.groups:
            digest.update(b"".join(group[name].tobytes() for name in sorted(group)) + rewards.tobytes())
        self.fingerprint = digest.hexdigest()
        self.stats: dict[str, Any] = {"prompts": len(self.groups), "completions": self.rewards.size}
        self.fields = fields_of(self.get(np.arange(1)))

    def __len__(self) -> int:
        return len(self.groups)

    def get(self, indices: np.ndarray) -> Batch:
        """Return arrays (n, G, T), and the rewards (n, G)."""
        chosen = [self.groups[int(index)][0] for index in indices]
        batch = {name: np.stack([group[name] for group in chosen]) for name in chosen[0]}
        return {**batch, "rewards": self.rewards[indices]}


class StoredPlan(DataPlan):
    """`batch(step)` returns the groups of the step, one row per completion."""

    def __init__(self, mixture: Sequence[tuple[Sampling, Rows]], passes: Passes, baseline: str, scale: bool):
        super().__init__([mixture], passes.prompts, passes.seed)
        self.baseline, self.scale = baseline, scale

    def groups(self, step: int) -> Batch:
        return super().batch(step)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        found = self.groups(step)
        advantages = group_advantages(found.pop("rewards"), self.baseline, self.scale)
        found["advantages"] = np.broadcast_to(advantages[..., None], found["loss_mask"].shape).astype(np.float32)
        return {name: array.reshape(-1, array.shape[-1])[rows or slice(None)] for name, array in found.items()}

    def metrics(self, step: int) -> dict[str, float]:
        found = self.groups(step)
        lengths = (found["target_ids"] >= 0).sum(axis=-1)
        return {"reward": float(found["rewards"].mean()), "completion_len": float(lengths.mean())}


def build_stored(
    settings: GRPOTrainerConfig,
    policy: GrpoSettings,
    tokenizer: Tokenizer,
    horizon: Horizon,
    say: Callable[[str], None],
) -> tuple[DataParts, Passes]:
    """Return the data of an offline run and how its steps divide it."""
    if len(settings.datasets) != 1:
        raise InputError("training.dataset has several stages; stored completions are one mixture.")
    mixture: list[tuple[Sampling, Rows]] = []
    for sampling in settings.datasets[0]:
        name = sampling.name
        groups = [
            group_of(row, f"{name} row {number}", settings, policy, tokenizer)
            for number, row in enumerate(read_rows(name), 1)
        ]
        mixture.append((Sampling(name, sampling.rate), StoredGroups(name, groups, settings.block_size)))
    count = sum(len(rows) for _, rows in mixture) * settings.group_size
    batch_size, steps = horizon(count)
    check_groups(batch_size, settings.group_size, policy)
    for name, value in (("num_iterations", settings.num_iterations), ("mini_batches", settings.mini_batches)):
        if value > 1:
            say(f"note: grpo.{name} has no effect on stored completions: training.epochs repeats them")
    passes = Passes(batch_size, settings.group_size, seed=settings.seed)
    plan = StoredPlan(mixture, passes, policy.baseline, policy.scale)
    names = [name for name in FIELDS if name != "old_logprobs" or policy.offline == "logprobs"]
    fields = {name: ((settings.block_size,), FIELDS[name]) for name in names}
    return DataParts(plan, None, batch_size, steps, [0], 2, fields), passes


def group_of(
    row: Row, where: str, settings: GRPOTrainerConfig, policy: GrpoSettings, tokenizer: Tokenizer
) -> tuple[Batch, np.ndarray]:
    """Return the arrays (G, T) and the rewards (G,) of one row."""
    prompt, row = prompt_of(row, where)
    size = settings.group_size
    for column in ("completions", "rewards"):
        if not isinstance(row.get(column), list) or len(row[column]) != size:
            found = f"{len(row[column])} of them" if isinstance(row.get(column), list) else "no such list"
            raise InputError(f"{where}: '{column}' needs grpo.group_size={size} entries, and there is {found}.")
    end = end_ids(tokenizer)[0]
    with named_row(where):
        ids = prompt_ids(prompt, tokenizer, settings.chat, tools_of(row))
        completions = [
            [*tokenizer.encode(one, after=ids), end] if isinstance(one, str) else one for one in row["completions"]
        ]
    if not all(isinstance(one, LISTS) and all(map(is_integer, one)) for one in completions):
        raise InputError(f"{where}: 'completions' are texts or lists of token ids, and one of them is neither.")
    if any(not 0 <= token < tokenizer.vocab_size for one in completions for token in one):
        raise InputError(f"{where}: 'completions' has ids outside the tokenizer's {tokenizer.vocab_size} tokens.")
    longest = max(map(len, completions))
    if len(ids) > longest_prompt(settings, policy) or not 0 < longest <= policy.max_completion_length:
        raise InputError(
            f"{where}: {len(ids)} tokens of prompt and up to {longest} of completion; grpo.max_prompt_length and "
            f"grpo.max_completion_length={policy.max_completion_length} allow less. Raise them, or shorten it."
        )
    if not all(is_finite(reward) for reward in row["rewards"]):
        raise InputError(f"{where}: 'rewards' are {row['rewards']!r:.80}; one finite number each.")
    rewards = np.asarray(row["rewards"], np.float64)
    masks = per_token(row, "masks", completions, where) or [[1.0] * len(one) for one in completions]
    if any(value not in (0, 1) for one in masks for value in one):
        raise InputError(f"{where}: 'masks' are 0 or 1 for each token, and one of them is another number.")
    block, pad = settings.block_size, tokenizer.pad_id
    rows = completion_rows([ids] * size, completions, masks, block, pad, TOKEN_FIELDS)
    stored = per_token(row, "logprobs", completions, where)
    if policy.offline == "logprobs":
        if stored is None:
            raise InputError(f"{where}: no 'logprobs', which grpo.offline=logprobs needs; use grpo.offline=reference.")
        rows["old_logprobs"] = spread(stored, rows)
    return rows, rewards


def per_token(row: Row, column: str, completions: Sequence[Sequence[int]], where: str) -> list[list[float]] | None:
    """Return a column with one number per token of each completion; None if the row lacks it."""
    values = row.get(column)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(one, LISTS) for one in values):
        raise InputError(f"{where}: '{column}' is {values!r:.80}; it must be a list of numbers per completion.")
    found = [len(one) for one in values]
    wanted = [len(one) for one in completions]
    if found != wanted:
        raise InputError(f"{where}: '{column}' has {found} values for completions of {wanted} tokens (end included).")
    if not all(is_finite(value) for one in values for value in one):
        raise InputError(f"{where}: '{column}' must be finite numbers, and one of them is not.")
    return [[float(value) for value in one] for one in values]


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number of a float's range; true and false are 1 and 0."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


@contextlib.contextmanager
def named_row(where: str) -> Iterator[None]:
    """Name the row in an InputError about its text."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
