"""Exact rollouts (grpo.exact): tokens drawn from the very log-probabilities that training reads.

The engine decodes with a cache, in other shapes than training, so its log-probabilities differ by rounding. Here its
completions are drafts. A pass over whole rows, the same that scores and trains (`losses/exact_scores.py`), draws every
token of a draft again with the noise of its place: token t is argmax(log π + Gumbel(seed, sample, t)). Where a draft
has another token, the row takes that of the pass and is read again, until a pass changes nothing. What is left is what
token-by-token sampling with that pass would have written, since a token depends on those before it alone; it takes one
pass if no draft is wrong, and each further pass settles at least one more token of every row that is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.data import Tokenizer
from bessemer.errors import InputError, TrainingError
from bessemer.generate import Result, Sample, SamplingOptions
from bessemer.generate.sampling import Filters, draw, keep, row_keys
from bessemer.generate.text import TextStream
from bessemer.losses.exact_scores import Hidden, read_rows, score_rows, tiles_of
from bessemer.models.moe import ExpertSettings
from bessemer.models.protocol import HasPrecision
from bessemer.models.transformer import Transformer
from bessemer.objectives.grpo import GrpoSettings
from bessemer.rl.rollout import TOKEN_FIELDS, GRPOTrainerConfig, completion_rows
from bessemer.topology import CompiledTogether, Topology, process_count
from bessemer.training.feed import device_batch, fetch
from bessemer.training.setup.model import ModelParts

FIELDS: dict[str, Any] = {**TOKEN_FIELDS, "numbers": np.int32, "seed": np.uint32, "sample": np.uint32}
BLANK = -1  # number of a place where no token is drawn


@dataclass
class Draft:
    """A completion that is being checked. limit: the most tokens it may have."""

    prompt: tuple[int, ...]
    sample: Sample
    seed: int
    limit: int
    ids: list[int]
    logprobs: tuple[float, ...] = ()  # of the model, at temperature 1
    drawn: tuple[float, ...] = ()  # of the distribution drawn from

    def check(self, choices: Sequence[int], ends: Sequence[int]) -> bool:
        """Return whether the pass drew the draft, to its end; otherwise take its tokens from the first other one on.

        choices: the token that the pass draws at each place of the completion, up to the limit.
        """
        wrong = next((at for at, token in enumerate(self.ids) if choices[at] != token), len(self.ids))
        if wrong == self.limit or (wrong == len(self.ids) and self.ids[-1] in ends):
            return True
        taken = [*self.ids[:wrong], *choices[wrong : self.limit]]
        end = next((at for at in range(wrong, len(taken)) if taken[at] in ends), len(taken) - 1)
        self.ids = taken[: end + 1]
        return False


@dataclass
class ExactRollouts:
    """Checks and corrects the engine's completions, micro rows at a time."""

    apply: Callable[..., Any]
    temperature: float
    sampling: SamplingOptions
    topology: Topology
    tokenizer: Tokenizer
    micro: int
    block_size: int
    longest: int  # tokens of a completion
    capacity: int  # tokens of prompt and completion
    pad_id: int
    ends: Sequence[int]
    redrawn: int = field(default=0, init=False)  # completions of this rollout in which a draft was wrong
    checked: int = field(default=0, init=False)

    def verified(self, params: Any, results: Sequence[Result]) -> list[Result]:
        """Return the results with the completions that the pass draws, and its log-probabilities."""
        drafts = [
            Draft(tuple(result.prompt_ids), sample, result.seed, self._limit(result.prompt_ids), list(sample.ids))
            for result in results
            for sample in result.samples
        ]
        left = drafts
        for _ in range(self.longest + 1):  # each pass settles a token of every row that is left
            wrong = []
            for first in range(0, len(left), self.micro):
                wrong += self._pass(params, left[first : first + self.micro])
            left = wrong
            if not left:
                break
        if left:
            raise TrainingError(
                "grpo.exact: the same row got other log-probabilities in another pass, so its completion cannot be "
                "settled. On this device the compiler does not keep the bits of a row: set grpo.exact=false."
            )
        self.checked += len(drafts)
        self.redrawn += sum(tuple(draft.ids) != draft.sample.ids for draft in drafts)
        made = iter(drafts)
        return [replace(result, samples=tuple(self._sample(next(made)) for _ in result.samples)) for result in results]

    def report(self) -> dict[str, float]:
        """Return the share of completions that were corrected since the last call."""
        share = self.redrawn / max(1, self.checked)
        self.redrawn = self.checked = 0
        return {"redrawn": share}

    def _limit(self, prompt: Sequence[int]) -> int:
        return min(self.longest, self.capacity - len(prompt) + 1)

    def _pass(self, params: Any, drafts: Sequence[Draft]) -> list[Draft]:
        """Read up to `micro` drafts once; return those that were wrong, corrected as far as one pass can."""
        rows = completion_rows(
            [draft.prompt for draft in drafts],
            [draft.ids for draft in drafts],
            [[1.0] * len(draft.ids) for draft in drafts],
            self.block_size,
            self.pad_id,
            TOKEN_FIELDS,
        )
        rows["numbers"] = np.full(rows["input_ids"].shape, BLANK, np.int32)
        for row, draft in enumerate(drafts):
            first = len(draft.prompt) - 1
            rows["numbers"][row, first : first + draft.limit] = np.arange(draft.limit)
        rows["seed"] = np.array([draft.seed for draft in drafts], np.uint32)
        rows["sample"] = np.array([draft.sample.index for draft in drafts], np.uint32)
        missing = self.micro - len(drafts)
        blank = {"target_ids": -1, "numbers": BLANK}
        rows = {
            name: np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)), constant_values=blank.get(name, 0))
            for name, array in rows.items()
        }
        fields = {name: (array.shape[1:], FIELDS[name]) for name, array in rows.items()}
        batch = device_batch(
            lambda begin, end: {name: array[begin:end] for name, array in rows.items()},
            fields,
            self.micro,
            1,
            self.topology.batch_sharding(1),
        )
        policy, plain, choices, kept = fetch(self._program(params, batch))
        wrong = []
        for row, draft in enumerate(drafts):
            first = len(draft.prompt) - 1
            places = slice(first, first + len(draft.ids))
            if draft.check(choices[row, first : first + draft.limit].tolist(), self.ends):
                draft.logprobs = tuple(plain[row, places].tolist())
                draft.drawn = tuple((policy[row, places] - kept[row, places]).tolist())
            else:
                wrong.append(draft)
        return wrong

    @functools.cached_property
    def _program(self) -> CompiledTogether:
        program = jax.jit(
            functools.partial(_read_and_draw, self.apply, self.temperature, self.sampling),
            out_shardings=self.topology.replicated,
            compiler_options=self.topology.compiler_options,
        )
        return CompiledTogether(program, "exact rollouts")

    def _sample(self, draft: Draft) -> Sample:
        sample, ids = draft.sample, tuple(draft.ids)
        if ids != sample.ids:
            stopped = ids[-1] in self.ends
            text = TextStream(self.tokenizer)
            words = text.push(ids[:-1] if stopped else ids) + text.finish()
            full = "length" if draft.limit == self.longest else "context"
            finish, stop = ("stop", ids[-1]) if stopped else (full, None)
            sample = replace(sample, ids=ids, text=words, finish=finish, stop=stop)
        return replace(sample, logprobs=draft.logprobs, policy_logprobs=draft.drawn)


def _read_and_draw(
    apply: Callable[..., Any], temperature: float, sampling: SamplingOptions, params: Any, batch: Any
) -> tuple[Array, Array, Array, Array]:
    """Return log π and log p of the targets, the token drawn at each place with a number, and the log of the share of
    π that top-k and top-p keep there; (B, T) each. batch: (1, B, …)."""
    rows = jax.tree.map(lambda array: array[0], batch)
    hidden = read_rows(apply, params, rows)
    policy, _, plain = score_rows(hidden, rows["target_ids"], temperature)
    drawn = _draw(hidden, rows, temperature, sampling)
    return policy, plain, drawn[0].astype(jnp.int32), drawn[1]


def _draw(hidden: Hidden, rows: Any, temperature: float, sampling: SamplingOptions) -> Array:
    """Return (choice, log of the share kept), (2, B, T) float32, which holds any token id below 2²⁴ exactly."""
    size = hidden.projection.vocab_size
    filters, filtered = Filters.of(sampling, size), sampling.top_k > 0 or sampling.top_p < 1

    def choose(z: Array, lse: Array, logits: Array, numbers: Array, seed: Array, sample: Array) -> Array:
        scores, shape = z[..., :size].reshape(-1, size), numbers.shape
        streams = jnp.stack([jnp.broadcast_to(part[:, None], shape) for part in (seed, sample)], axis=-1)
        if filtered:
            scores = keep(scores, filters)
        kept = jax.nn.logsumexp(scores, axis=-1).reshape(shape) - lse if filtered else jnp.zeros(shape)
        keys = row_keys(streams.reshape(-1, 2), jnp.maximum(numbers, 0).reshape(-1))
        choice = draw(scores, keys, filters).reshape(shape)
        return jnp.stack([choice.astype(jnp.float32), kept])

    return tiles_of(hidden, rows["numbers"], choose, 2, temperature, (rows["seed"], rows["sample"]))


def check_exact(settings: GRPOTrainerConfig, policy: GrpoSettings, parts: ModelParts, topology: Topology) -> None:
    """Raise InputError, with the remedy, for what exact rollouts do not support."""
    model = parts.model
    precision = model.precision if isinstance(model, HasPrecision) else "float32"
    halves = isinstance(model, Transformer) and model.compute_dtype != jnp.float32
    axes = [name for name in ("expert", "context", "pipeline") if topology.mesh.shape.get(name, 1) > 1]
    for refused, what, remedy in (
        (policy.offline != "no", f"grpo.offline={policy.offline}: nothing is sampled", "Use grpo.offline=no"),
        (settings.environment is not None, "environments (grpo.environment)", "Leave grpo.environment out"),
        (
            precision == "fp8" or halves,
            f"architecture.precision={precision}: products in half precision or float8 round by their shape",
            "Set architecture.precision=float32",
        ),
        (
            settings.param_dtype != "float32",
            f"training.param_dtype={settings.param_dtype}",
            "Set training.param_dtype=float32",
        ),
        (
            settings.sampling_weights != "auto",
            f"generate.weights={settings.sampling_weights}: its drafts are often wrong, and wrong ones are read again",
            "Set generate.weights=auto",
        ),
        (bool(parts.split.quantized), "a quantized base (lora.quantize)", "Set lora.quantize=none"),
        (
            isinstance(model, ExpertSettings) and bool(model.experts),
            "mixtures of experts",
            "Use a model without experts",
        ),
        (bool(axes), f"topology.{axes[0]}" if axes else "", "Use topology.data, topology.fsdp or topology.tensor"),
        (process_count() > 1, "several processes", "Run one process"),
    ):
        if refused:
            raise InputError(f"grpo.exact=true does not support {what}. {remedy}, or set grpo.exact=false.")
