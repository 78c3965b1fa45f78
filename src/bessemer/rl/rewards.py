"""Rewards: `(prompts, completions, **columns) -> list[float]`, one number per completion; registered by name, or
`file.py:function` or `module:function`.

They receive every column of the dataset, repeated for each completion of its row, so a reward can know the answer:

    def my_reward(prompts, completions, answer, **columns):
        return [float(text == right) for text, right in zip(completions, answer)]

A reward that raises, takes longer than grpo.reward_timeout, or does not return one finite number per completion, ends
the run with an error that names it.

The soft penalty of long completions (DAPO, arXiv 2503.14476) is a reward of its own beside those of grpo.rewards.
"""

from __future__ import annotations

import copy
import inspect
import math
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import Any

import numpy as np

from bessemer.errors import BessemerError, InputError, TrainingError
from bessemer.objectives.grpo import GrpoSettings, SampledSettings
from bessemer.registry import rewards
from bessemer.user_code import label, line_of

Reward = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class RewardSpec:
    """One entry of grpo/rewards. `options` are passed to the function."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = plain_field(default_factory=dict)

    @classmethod
    def from_string(cls, text: str) -> RewardSpec:
        return cls(text)

    @property
    def label(self) -> str:
        """Its name in metrics and messages: the name, or `file:function`."""
        return label(self.name)


class Rewards:
    """The rewards of a run, weighted and summed."""

    def __init__(self, specs: Sequence[RewardSpec], timeout: float = 0.0):
        if not specs:
            raise InputError(f"grpo.rewards is empty: name at least one of {', '.join(rewards.names())}.")
        if len({spec.label for spec in specs}) < len(specs):
            raise InputError("grpo.rewards names one reward twice; add their weights up.")
        self.specs, self.timeout = list(specs), timeout
        self.functions: list[Reward] = [function_of(spec) for spec in specs]

    def check_columns(self, columns: Sequence[str], partial: Mapping[str, str] | None = None) -> None:
        """Raise InputError if a reward needs a column that is not in the data, or only in a part of it (`partial`)."""
        for spec, function in zip(self.specs, self.functions, strict=True):
            given = {"prompts", "completions", *columns, *spec.options}
            missing = [
                name
                for name, one in inspect.signature(function).parameters.items()
                if one.default is one.empty
                and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
                and name not in given
            ]
            if missing and (lacking := (partial or {}).get(missing[0])):
                raise InputError(
                    f"the reward '{spec.label}' needs the column '{missing[0]}', and {lacking}. Complete those rows, "
                    "or remove them."
                )
            if missing:
                raise InputError(
                    f"the reward '{spec.label}' needs {', '.join(missing)}, and the data has the columns "
                    f"{', '.join(sorted(columns)) or '(none)'}. Rename a column, or give it under the reward's "
                    "options."
                )
            if taken := sorted({"prompts", "completions"} & spec.options.keys()):
                raise InputError(
                    f"the reward '{spec.label}' has an option '{taken[0]}', which is passed to every reward."
                )
            kept = accepted(function, {name: () for name in columns if name not in spec.options})
            try:
                inspect.signature(function).bind(prompts=(), completions=(), **kept, **spec.options)
            except TypeError as error:
                raise InputError(
                    f"the reward '{spec.label}' cannot be called with prompts=…, completions=… and its options "
                    f"({', '.join(sorted(spec.options)) or 'none'}): {error}. Correct grpo.rewards, or its parameters."
                ) from None

    def check_rows(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Raise InputError for options and rows of the data that a reward cannot be computed with. rows: each with
        where it is."""
        for spec in self.specs:
            check = rewards.entry(spec.name).traits.get("check")
            if check is not None:
                check(spec.options, rows)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return Σ weight · reward, and each reward unweighted, float64 (n,)."""
        each = {
            spec.label: self._score(spec, function, prompts, completions, columns)
            for spec, function in zip(self.specs, self.functions, strict=True)
        }
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum((spec.weight * each[spec.label] for spec in self.specs), np.zeros(len(completions)))
        if not np.isfinite(total).all():
            raise TrainingError(
                f"the rewards sum to {total[~np.isfinite(total)][0]} for a completion: their weights or values are too "
                "large, or a weight is not a number."
            )
        return total, each

    def _score(
        self,
        spec: RewardSpec,
        function: Reward,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> np.ndarray:
        kept = accepted(function, {name: value for name, value in columns.items() if name not in spec.options})
        given = {"prompts": own_copies(prompts), "completions": list(completions)}
        given |= {name: own_copies(column) for name, column in kept.items()}
        try:
            found = self._called(spec, lambda: function(**given, **copy.deepcopy(spec.options)))
        except BessemerError:
            raise
        except (Exception, SystemExit) as error:  # any code of the user's; test runners end with SystemExit
            line, _ = line_of(error)
            where = "" if line is None else f" ({line})"
            raise TrainingError(
                f"the reward '{spec.label}' failed: {type(error).__name__}: {error}{where}. It was called with "
                f"{len(completions)} completions and the columns {', '.join(sorted(kept)) or '(none)'}."
            ) from error
        return checked(spec.label, found, completions)

    def _called(self, spec: RewardSpec, call: Callable[[], Any]) -> Any:
        """Return what the reward returns. With a time-out it runs in a thread of its own, which is left behind."""
        if not self.timeout:
            return call()
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((call(), None))
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                outcome.put((None, error))

        threading.Thread(target=run, name="reward", daemon=True).start()
        try:
            found, error = outcome.get(timeout=self.timeout)
        except queue.Empty:
            raise TrainingError(
                f"the reward '{spec.label}' did not return within grpo.reward_timeout={self.timeout:g} seconds."
            ) from None
        if error is not None:
            raise error
        return found


def function_of(spec: RewardSpec) -> Reward:
    """Return the function of an entry of grpo.rewards; raise InputError if no run can call it."""
    function = rewards.get(spec.name)
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise InputError(
            f"the reward '{spec.label}' is {type(function).__name__}, not a function (prompts, completions, **columns) "
            "-> list of numbers."
        ) from None
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InputError(f"the reward '{spec.label}' is asynchronous, and nothing awaits it: define it without async.")
    if not math.isfinite(spec.weight):
        raise InputError(f"the weight of the reward '{spec.label}' is {spec.weight}: it must be finite.")
    return function


def accepted(function: Reward, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return all columns, or for a function without **columns those that it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: list(column) for name, column in columns.items() if takes_all or name in parameters}


def own_copies(column: Sequence[Any]) -> list[Any]:
    """Return the values, lists and mappings copied: a reward that changes its arguments would change later rollouts,
    and a resumed run would not know."""
    return [copy.deepcopy(value) if isinstance(value, list | dict) else value for value in column]


def checked(name: str, found: Any, completions: Sequence[str]) -> np.ndarray:
    """Return the result as float64 (n,); raise TrainingError unless it is one finite number per completion."""
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"the reward '{name}' did not return a list of numbers ({error}).") from error
    if values.shape != (len(completions),):
        raise TrainingError(
            f"the reward '{name}' returned values of shape {values.shape} for {len(completions)} completions: it must "
            "return one number each."
        )
    for text, value in zip(completions, values.tolist(), strict=True):
        if not math.isfinite(value):
            raise TrainingError(
                f"the reward '{name}' returned {value} for the completion {text!r:.200}: rewards must be finite."
            )
    return values


@rewards.register("exact_match")
def exact_match(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float]:
    """1 if the completion is the answer, ignoring surrounding white space."""
    return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
CALCULATION = re.compile(r"<<[^<>]*>>|<\|python_start\|>.*?<\|python_end\|>|<\|output_start\|>.*?<\|output_end\|>")
MARK = "####"


def gsm8k_number(text: str) -> float | None:
    """Return the number after the last ####, or None. Calculations in << >> or calculator tokens are ignored."""
    _, mark, after = CALCULATION.sub("", text).rpartition(MARK)
    found = NUMBER.search(after.replace("$", "")) if mark else None
    return float(found.group().replace(",", "")) if found else None


def gsm8k_answer(answer: Any) -> float | None:
    """Return the number of a row's answer, which may be just the number; None if there is none."""
    return gsm8k_number(str(answer) if MARK in str(answer) else f"{MARK} {answer}")


def check_gsm8k(options: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """Raise InputError unless every row has an answer with a number."""
    if "answer" in options:
        return
    for row, where in rows:
        if gsm8k_answer(row["answer"]) is None:
            raise InputError(
                f"{where}: the gsm8k reward found no number in the answer {row['answer']!r:.200}. Correct the row, or "
                "remove it."
            )


@rewards.register("gsm8k", check=check_gsm8k)
def gsm8k(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 if the number after #### is that of the answer (1,000 is 1000.0), which may be just the number."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        wanted = gsm8k_answer(right)
        if wanted is None:
            raise InputError(f"the gsm8k reward found no number in the answer {right!r:.200}.")
        scores.append(float(gsm8k_number(text) == wanted))
    return scores


def check_regex(options: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """Raise InputError unless the option `pattern` is a regular expression."""
    if "pattern" not in options:
        raise InputError("the reward regex: pattern is an option of it, not a column: {name: regex, options: {…}}.")
    pattern_of(options["pattern"])


def pattern_of(pattern: Any) -> re.Pattern[str]:
    """Return the compiled pattern; raise InputError if it is none."""
    if not isinstance(pattern, str):
        raise InputError(f"the reward regex: its option 'pattern' is {pattern!r:.40}; it must be a text.")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(f"the reward regex: {pattern!r} is not a regular expression ({error}).") from error


@rewards.register("regex", aliases=("format",), check=check_regex)
def regex(prompts: Sequence[Any], completions: Sequence[str], pattern: str, **columns: Any) -> list[float]:
    """1 if the whole completion matches `pattern` (Python's re; dots match line ends)."""
    form = pattern_of(pattern)
    return [float(form.fullmatch(text.strip()) is not None) for text in completions]


def check_length_penalty(options: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """Raise InputError unless `free` and `scale` are numbers that a length can be compared with."""
    for name, least in (("free", "at least 0"), ("scale", "above 0")):
        value = options.get(name, 1)
        known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not known or value < 0 or (name == "scale" and value == 0):
            raise InputError(f"the reward length_penalty: its option '{name}' is {value!r}; it must be {least}.")


@rewards.register("length_penalty", check=check_length_penalty)
def length_penalty(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_tokens: Sequence[int],
    free: int = 0,
    scale: float = 100.0,
    **columns: Any,
) -> list[float]:
    """−(tokens beyond `free`) / `scale`, never below −1."""
    return [-min(1.0, max(0, tokens - free) / scale) for tokens in completion_tokens]


# --- the soft penalty of long completions ---


OVERLONG = "overlong_penalty"
"""Its name among the rewards."""


def overlong_penalty(lengths: Sequence[int], longest: int, buffer: int) -> np.ndarray:
    """Return 0 up to longest − buffer tokens, −1 at `longest`, and a straight line between; float64 (n,)."""
    return np.clip((longest - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def check_penalty(policy: SampledSettings, rewards: Sequence[str], has_environment: bool) -> None:
    """Raise InputError where the penalty cannot be applied. rewards: the labels of grpo.rewards."""
    if not isinstance(policy, GrpoSettings):
        return
    longest = policy.max_completion_length
    if policy.overlong_penalty == 0:
        if policy.overlong_buffer is not None:
            raise InputError("grpo.overlong_buffer is where grpo.overlong_penalty begins: set that too, such as 1.")
        return
    if policy.buffer > longest:
        raise InputError(
            f"grpo.overlong_buffer={policy.buffer} is more than grpo.max_completion_length={longest}: lower it."
        )
    if policy.offline != "no":
        raise InputError(
            f"grpo.overlong_penalty shapes rewards of sampled completions, and with grpo.offline={policy.offline} "
            "rewards are stored: leave it out, or store shaped rewards."
        )
    if has_environment:
        raise InputError(
            "grpo.overlong_penalty is about one completion, and an episode has several: leave it out, and add "
            "length_penalty to grpo.rewards, which counts all sampled tokens, or a reward of the environment's own."
        )
    if OVERLONG in rewards:
        raise InputError(f"a reward is named {OVERLONG}, as that of grpo.overlong_penalty is: rename yours.")
