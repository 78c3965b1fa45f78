"""A rollout: completions sampled from the live parameters, their rewards and advantages, as rows to train on.

A row is a prompt with one completion:

    input_ids      prompt … completion … pad        loss_mask   1 where the target is a completion token or its end
    target_ids     the next token, −1 in the prompt and the padding
    old_logprobs   log π of each target under the policy that sampled        advantages   of the row, on every token,
                                                                             times the token's importance weight
    expert_ids     with grpo.router_replay, the experts that the sampler chose for each input, (T, layers, k)

Only reinforcement has the last three. A rollout is used for `iterations × parts` steps: each pass shuffles the groups
and splits them into parts.

With grpo.pack several completions share a row, each in its own segment, so that padding is neither scored nor trained.
A rollout is stored one completion per row. What a pass reads is packed: rows with completions come first, blank ones
follow, so the shapes stay those of unpacked rows and one program serves all lengths. The field COMPLETIONS counts the
completions of each row; a pass ends after the last micro-batch that has one (training/step.py). Packing is a pure
function of the rows, so nothing of it is saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import Any

import numpy as np

from bessemer.config import field
from bessemer.config.bounded import parse_json
from bessemer.data import key_of, permute
from bessemer.data.rows.build import best_fit
from bessemer.data.rows.rows import COMPLETIONS, Fields
from bessemer.errors import InputError, StorageError, TrainingError
from bessemer.generate.speculate import DRAFT, NGRAM, Speculation
from bessemer.kernels.quantized import SAMPLING_KINDS
from bessemer.models.moe import EXPERT_IDS, ExpertSettings, recorded_shape
from bessemer.models.transformer import Transformer
from bessemer.objectives.grpo import GrpoSettings, SampledSettings, needs_reference
from bessemer.rl.environments.base import EpisodeSettings
from bessemer.rl.rewards import RewardSpec
from bessemer.storage.weights import WeightFile, to_bytes
from bessemer.training.settings import BaseTrainerConfig

# --- settings of the sampler ---


SPECULATE = ("none", "ngram")
WEIGHTS = ("auto", *SAMPLING_KINDS)


@dataclass
class DecodingSettings:
    """Of rollouts: each changes how fast text is made; `sampling_weights` also changes the sampler's distribution."""

    speculate: str = field(
        "generate/speculate",
        default="none",
        choices=SPECULATE,
        help="ngram: drafts from the text itself, several tokens verified in one pass; the text is the same",
    )
    draft: int = field("generate/draft", default=DRAFT, minimum=1, maximum=64, help="tokens of a draft")
    ngram: int = field(
        "generate/ngram",
        default=NGRAM,
        minimum=1,
        maximum=16,
        help="a draft follows the latest place with the most last tokens in common, at most so many",
    )
    sampling_weights: str = field(
        "generate/weights",
        default="auto",
        choices=WEIGHTS,
        help="matrices that sampling reads: auto = in the compute dtype; fp8 (e4m3) or int8 with a scale per output "
        "column: 1 byte per weight",
    )

    @property
    def speculation(self) -> Speculation | None:
        return Speculation.of(self.speculate, self.draft, self.ngram)


# --- rollouts ---


TOKEN_FIELDS: dict[str, Any] = {
    "input_ids": np.int32,
    "target_ids": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "loss_mask": np.float32,
}
FIELDS: dict[str, Any] = {**TOKEN_FIELDS, "advantages": np.float32, "old_logprobs": np.float32}


def routes_fields(config: GRPOTrainerConfig, policy: SampledSettings, model: Any) -> Fields:
    """Return the field of recorded experts, if the run replays them."""
    shape = recorded_shape(model)
    replays = isinstance(policy, GrpoSettings) and policy.offline == "no" and config.router_replay
    return {EXPERT_IDS: ((config.block_size, *shape), np.dtype(np.int16))} if shape and replays else {}


def route_rows(routes: Sequence[np.ndarray | None], fields: Fields) -> dict[str, np.ndarray]:
    """Return EXPERT_IDS of the rows, -1 where nothing is recorded. routes: (tokens, layers, k) each, or None."""
    rows = {}
    for name, (shape, dtype) in fields.items():
        rows[name] = np.full((len(routes), *shape), -1, dtype)
        for row, found in zip(rows[name], routes, strict=True):
            if found is not None:
                row[: len(found)] = found
    return rows


def fit_routes(rows: dict[str, np.ndarray], fields: Fields) -> None:
    """Make saved rows fit whether the run replays experts. fields: `routes_fields` of the run. Where none are recorded
    the routers choose, and recorded ones that are not replayed are dropped: scoring would replay them."""
    if EXPERT_IDS in fields and EXPERT_IDS not in rows:
        rows |= route_rows([None] * len(rows["input_ids"]), fields)
    if EXPERT_IDS not in fields:
        rows.pop(EXPERT_IDS, None)


def row_types(policy: SampledSettings) -> dict[str, Any]:
    """Return the dtype of every field of a row; only reinforcement has the last two."""
    return FIELDS if isinstance(policy, GrpoSettings) else TOKEN_FIELDS


@dataclass
class GRPOTrainerConfig(EpisodeSettings, DecodingSettings, BaseTrainerConfig):
    """Settings of rollouts; those of the loss and the advantages are the objective's (grpo, dapo, …)."""

    group_size: int = field("grpo/group_size", default=4, minimum=1, help="completions of one prompt")
    num_iterations: int = field("grpo/num_iterations", default=1, minimum=1, help="passes over one rollout")
    mini_batches: int = field(
        "grpo/mini_batches", default=1, minimum=1, help="optimizer steps in one pass, batch_size completions each"
    )
    sync_interval: int = field(
        "grpo/sync_interval",
        default=200,
        minimum=0,
        help="steps after which the policy becomes the reference; 0 = never",
    )
    sync_moments: bool = field(
        "grpo/sync_moments", default=False, help="reset the optimizer's moments when the reference is replaced (ProRL)"
    )
    max_prompt_length: int | None = field(
        "grpo/max_prompt_length",
        default=None,
        minimum=1,
        help="longer prompts are left out, counted; none: what the block leaves beside a completion",
    )
    top_p: float = field("grpo/top_p", default=1.0, above=0, maximum=1, help="top-p of sampling; 1 = off")
    top_k: int = field("grpo/top_k", default=0, minimum=0, help="top-k of sampling; 0 = off")
    old_logprobs: str = field(
        "grpo/old_logprobs",
        default="forward",
        choices=("forward", "sampler"),
        help="log-probabilities of the policy that sampled: from a training pass over the rollout, or the sampler's",
    )
    importance: str = field(
        "grpo/importance",
        default="truncated",
        choices=("truncated", "sequence", "none"),
        help="weights π_old / sampler that correct their mismatch: of each token, of whole completions, or none",
    )
    importance_cap: float = field(
        "grpo/importance_cap", default=2.0, minimum=1, help="importance weights are cut off at it"
    )
    resample: int = field(
        "grpo/resample",
        default=0,
        minimum=0,
        help="rounds in which groups of equal rewards are replaced by groups of other prompts (DAPO); 0 = never",
    )
    curriculum: str = field(
        "grpo/curriculum",
        default="none",
        help="which prompts are drawn: none (all), pass_rate (those neither solved nor hopeless when last sampled), or "
        "a column of numbers (the easiest first; smaller is easier)",
    )
    curriculum_start: float = field(
        "grpo/curriculum_start",
        default=0.25,
        above=0,
        maximum=1,
        help="the easiest share of the prompts that a curriculum by a column begins with",
    )
    curriculum_steps: int | None = field(
        "grpo/curriculum_steps",
        default=None,
        minimum=1,
        help="steps until a curriculum by a column draws from all prompts; none: half of the run",
    )
    pass_rate_low: float = field(
        "grpo/pass_rate_low",
        default=0.0,
        minimum=-1e6,
        maximum=1e6,
        help="grpo.curriculum=pass_rate leaves out prompts whose mean reward is at most this",
    )
    pass_rate_high: float = field(
        "grpo/pass_rate_high",
        default=1.0,
        minimum=-1e6,
        maximum=1e6,
        help="grpo.curriculum=pass_rate leaves out prompts whose mean reward is at least this",
    )
    pass_rate_rest: int = field(
        "grpo/pass_rate_rest",
        default=50,
        minimum=1,
        help="rollouts after which a prompt that was left out may be drawn again",
    )
    staleness: int = field(
        "grpo/staleness",
        default=0,
        minimum=0,
        maximum=1,
        help="1: a rollout is sampled one rollout ahead, and its rewards are computed while the device trains and "
        "samples; 0: from the weights it is trained on first",
    )
    rewards: list[RewardSpec] | None = field(
        "grpo/rewards",
        default=None,
        help="names or {name, weight, options}, summed by weight; none: exact_match, or with a teacher no reward",
    )
    reward_timeout: float = field(
        "grpo/reward_timeout",
        default=0.0,
        minimum=0,
        maximum=1e6,
        help="seconds that a reward may take, after which the run ends; 0 = any time, in the caller's own thread",
    )
    chat: bool = field("grpo/chat", default=True, help="a text prompt is a user's message; false: plain text")
    router_replay: bool = field(
        "grpo/router_replay",
        default=True,
        help="models with experts: train each token with the experts that the sampler chose for it",
    )
    pack: bool = field(
        "grpo/pack",
        default=False,
        help="score and train several completions per row, which pays where they are short for the block",
    )
    slots: int = field("grpo/slots", default=64, minimum=1, help="completions written at the same time")


@dataclass
class Rollout:
    """`rows`: arrays (N, T), group by group. `rewards`: (N,) by name. `metrics`: what its steps report.

    Until a rollout is scored, `drawn` has the sampler's log-probabilities of the targets, (N, T): of the model itself
    ("model") and of the distribution drawn from ("policy"); with grpo.staleness also "source" and "prompt" of each
    group. `step`: the optimizer step whose weights sampled it.
    """

    number: int
    rows: dict[str, np.ndarray]
    rewards: dict[str, np.ndarray] = plain_field(default_factory=dict)
    metrics: dict[str, float] = plain_field(default_factory=dict)
    drawn: dict[str, np.ndarray] = plain_field(default_factory=dict)
    step: int | None = None  # known with grpo.staleness only

    def to_bytes(self) -> bytes:
        """Return the rollout as safetensors."""
        arrays = {f"rows/{name}": array for name, array in self.rows.items()}
        arrays |= {f"rewards/{name}": array for name, array in self.rewards.items()}
        arrays |= {f"drawn/{name}": array for name, array in self.drawn.items()}
        about = {"number": str(self.number), "metrics": json.dumps(self.metrics)}
        about |= {} if self.step is None else {"step": str(self.step)}
        return to_bytes(arrays, about)

    @classmethod
    def load(cls, path: Any) -> Rollout:
        try:
            file = WeightFile(path)
            parts: dict[str, dict[str, np.ndarray]] = {"rows": {}, "rewards": {}, "drawn": {}}
            for name in file.entries:
                part, _, rest = name.partition("/")
                parts[part][rest] = file.read(name)
            about = file.metadata
            step = int(about["step"]) if "step" in about else None
            metrics = {str(name): float(value) for name, value in dict(parse_json(about["metrics"])).items()}
            return cls(int(about["number"]), metrics=metrics, step=step, **parts)
        except (InputError, StorageError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(f"the rollout {path} cannot be read ({error}).") from error


def check_rollout(rollout: Rollout, path: Any, count: int, fields: Fields, model: Any) -> None:
    """Raise StorageError unless a rollout that was read has `count` rows with the fields of the run, and tokens and
    experts that the model has. Experts to replay may be missing; other fields are not used."""
    experts = model.experts if isinstance(model, ExpertSettings) else 0
    ranges = {"input_ids": (0, model.vocab_size), "target_ids": (-1, model.vocab_size), EXPERT_IDS: (-1, experts)}
    for name, (shape, dtype) in fields.items():
        array = rollout.rows.get(name)
        if array is None and name == EXPERT_IDS:
            continue
        if array is None or array.shape != (count, *shape) or array.dtype != dtype:
            found = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise StorageError(f"the rollout {path}: '{name}' is {found}; this run has {dtype} {(count, *shape)}.")
        least, end = ranges.get(name, (0, 0))
        if name in ranges and array.size and (array.min() < least or array.max() >= end):
            raise StorageError(
                f"the rollout {path}: '{name}' has ids from {array.min()} to {array.max()}, and the model those below "
                f"{end}."
            )


@dataclass(frozen=True)
class Passes:
    """How steps divide a rollout: `parts` parts of `batch_size` rows, `iterations` times."""

    batch_size: int
    group_size: int
    parts: int = 1
    iterations: int = 1
    seed: int = 0

    @property
    def steps(self) -> int:
        """The optimizer steps per rollout."""
        return self.parts * self.iterations

    @property
    def prompts(self) -> int:
        """The prompts per rollout."""
        return self.batch_size * self.parts // self.group_size

    @property
    def rows(self) -> int:
        return self.batch_size * self.parts

    def place(self, position: int) -> tuple[int, int]:
        """Return (rollout, step within it) of a data position."""
        return divmod(position, self.steps)

    def indices(self, number: int, within: int) -> np.ndarray:
        """Return (batch_size,) rows of rollout `number` for its step `within`, in whole groups."""
        turn, part = divmod(within, self.parts)
        groups = permute(range(self.prompts), self.prompts, key_of(self.seed, "pass", number, turn))
        each = self.batch_size // self.group_size
        chosen = groups[part * each : (part + 1) * each]
        return (chosen[:, None] * self.group_size + np.arange(self.group_size)).ravel()

    def take(self, rollout: Rollout, within: int) -> dict[str, np.ndarray]:
        """Return the rows of one step, (batch_size, T). If all of their tokens are masked (all completions were cut),
        they are trained with advantage 0: only the KL counts, and the step has a denominator."""
        chosen = self.indices(rollout.number, within)
        rows = {name: array[chosen] for name, array in rollout.rows.items()}
        if not rows["loss_mask"].any():
            rows["loss_mask"] = (rows["target_ids"] >= 0).astype(np.float32)
            rows["advantages"] = np.zeros_like(rows["advantages"])
        if not rows["loss_mask"].any():
            raise TrainingError(
                f"rollout {rollout.number}: all episodes of one step were skipped, so there is nothing to train on. "
                "The metrics env/failures and env/timeouts count them; larger groups or batches make this less likely."
            )
        return rows


def completion_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    masks: Sequence[Sequence[float]],
    block_size: int,
    pad_id: int,
    fields: Mapping[str, Any] = FIELDS,
) -> dict[str, np.ndarray]:
    """Return rows (N, T) of prompts with completions (end tokens included); masks: one value per completion token."""
    rows = {name: np.zeros((len(prompts), block_size), dtype) for name, dtype in fields.items()}
    rows["input_ids"][:] = pad_id
    rows["target_ids"][:] = -1
    for row, (prompt, completion, mask) in enumerate(zip(prompts, completions, masks, strict=True)):
        tokens = np.asarray([*prompt, *completion], np.int32)
        length, first = len(tokens) - 1, len(prompt) - 1
        rows["input_ids"][row, :length] = tokens[:-1]
        rows["target_ids"][row, first:length] = completion
        rows["positions"][row, :length] = np.arange(length)
        rows["segment_ids"][row, :length] = 1
        rows["loss_mask"][row, first:length] = mask
    return rows


def spread(values: Sequence[Sequence[float]], rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return one value per completion token as (N, T), at the targets of `rows`; 0 elsewhere."""
    out = np.zeros(rows["target_ids"].shape, np.float32)
    for row, given in enumerate(values):
        out[row, rows["target_ids"][row] >= 0] = given
    return out


# --- packing ---


BLANK = {"target_ids": -1, EXPERT_IDS: -1}
"""What stands where no token is; 0 in other fields, and input_ids keep their own padding."""


@dataclass(frozen=True)
class Packed:
    """`rows`: arrays (n, T) and COMPLETIONS (n, 1); `used`: how many of them hold completions. Completion i of the
    unpacked rows is at columns starts[i] … starts[i] + lengths[i] − 1 of row places[i]; −1: it was left out."""

    rows: dict[str, np.ndarray]
    used: int
    places: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def unpacked(self, values: np.ndarray) -> np.ndarray:
        """Return one value per position of the unpacked rows, (N, T), from those of the packed ones, (n, T)."""
        out = np.zeros((len(self.places), values.shape[1]), values.dtype)
        for completion, (row, start, length) in enumerate(zip(self.places, self.starts, self.lengths, strict=True)):
            if row >= 0:
                out[completion, :length] = values[row, start : start + length]
        return out


def pack_rows(rows: Mapping[str, np.ndarray], wanted: np.ndarray) -> Packed:
    """Return the completions with a `wanted` token, (N, T) bool, in as few of the N rows as best fit finds.

    A completion that is left out is still counted, in the first row: the denominator `fixed` is over all of them.
    """
    count, block = rows["input_ids"].shape
    lengths = (rows["segment_ids"] > 0).sum(axis=1)
    chosen = np.flatnonzero(np.any(wanted, axis=1) & (lengths > 0))
    order, widths = best_fit(lengths[chosen], block)
    pad = rows["input_ids"][np.arange(count), np.minimum(lengths, block - 1)][lengths < block]
    fill = BLANK | {"input_ids": int(pad[0]) if len(pad) else 0}
    out = {name: np.full_like(array, fill.get(name, 0)) for name, array in rows.items()}
    out[COMPLETIONS] = np.zeros((count, 1), np.float32)
    out[COMPLETIONS][: len(widths), 0] = widths
    out[COMPLETIONS][0] += count - len(chosen)
    places, starts = np.full(count, -1), np.zeros(count, np.int64)
    left = iter(chosen[order].tolist())
    for row, width in enumerate(widths.tolist()):
        start = 0
        for segment in range(1, width + 1):
            completion = next(left)
            length = int(lengths[completion])
            for name, array in rows.items():
                out[name][row, start : start + length] = array[completion, :length]
            out["segment_ids"][row, start : start + length] = segment
            places[completion], starts[completion] = row, start
            start += length
    return Packed(out, len(widths), places, starts, lengths)


def pack_fields(settings: GRPOTrainerConfig) -> Fields:
    """Return the field that packed rows have beside those of a rollout."""
    return {COMPLETIONS: ((1,), np.dtype(np.float32))} if settings.pack else {}


def check_packing(settings: GRPOTrainerConfig, policy: SampledSettings, model: object) -> None:
    """Raise InputError where completions cannot share a row."""
    if not settings.pack:
        return
    if not isinstance(policy, GrpoSettings):
        raise InputError(
            "grpo.pack puts completions side by side, which a teacher without a document mask would read as one text: "
            "leave it out."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.pack packs sampled completions, and with grpo.offline={policy.offline} they are stored one per row: "
            "leave it out."
        )
    if policy.exact:
        raise InputError(
            "grpo.pack puts a completion anywhere in a row, and grpo.exact=true promises bits that depend on its place "
            "at the row's beginning: use one of them."
        )
    if not isinstance(model, Transformer):
        raise InputError(
            f"grpo.pack needs completions of one row that do not see each other, and {type(model).__name__} has no "
            "document mask (architecture.document_mask): set grpo.pack=false."
        )
    if not model.document_mask:
        raise InputError(
            "grpo.pack needs completions of one row that do not see each other: set architecture.document_mask=true, "
            "or grpo.pack=false."
        )


# --- settings that have no effect beside others ---


DRAFTS = ("generate/draft", "generate/ngram")
OF_EPISODES = (
    "grpo/max_turns",
    "grpo/on_environment_error",
    "grpo/environment_timeout",
    "grpo/environment_retries",
    "grpo/environment_workers",
    "grpo/environment_overlap",
)
OF_SAMPLING = (
    "generate/speculate",
    *DRAFTS,
    "generate/weights",
    "grpo/top_k",
    "grpo/top_p",
    "grpo/overlong",
    "grpo/old_logprobs",
    "grpo/importance",
    "grpo/importance_cap",
    "grpo/curriculum_start",
    "grpo/curriculum_steps",
    "grpo/pass_rate_low",
    "grpo/pass_rate_high",
    "grpo/pass_rate_rest",
    *OF_EPISODES,
)
"""What has no effect on stored completions. Settings of the sampler's speed that recipes choose are not listed."""


def unused_settings(settings: GRPOTrainerConfig, policy: SampledSettings, vocab_size: int) -> dict[str, str]:
    """Return the settings (a/b) that have no effect in a run, each with the reason."""
    offline = isinstance(policy, GrpoSettings) and policy.offline != "no"
    found: dict[str, str] = {}

    def add(keys: Iterable[str], why: str) -> None:
        for key in keys:
            found.setdefault(key, why)

    if offline:
        add(OF_SAMPLING, "with grpo.offline: nothing is sampled")
        add(("grpo/rewards", "grpo/reward_timeout"), "with grpo.offline: rewards are stored beside the completions")
    if settings.speculation is None:
        add(DRAFTS, "without generate.speculate=ngram")
    if settings.environment is None:
        add(OF_EPISODES, "without grpo.environment")
    exact_match = isinstance(policy, GrpoSettings) and settings.environment is None and settings.rewards is None
    if not settings.rewards and not exact_match:
        add(("grpo/reward_timeout",), "without grpo.rewards")
    if settings.top_k >= vocab_size:
        add(("grpo/top_k",), f"from {vocab_size} on: the model has no more tokens")
    if isinstance(policy, GrpoSettings):
        if policy.clip_eps == 0:
            add(("grpo/clip_eps_high",), "with grpo.clip_eps=0: ratios are not clipped")
        if not needs_reference(policy):
            add(("grpo/kl_estimator", "grpo/sync_interval"), "with grpo.kl_coef=0: no reference is kept")
    return found
