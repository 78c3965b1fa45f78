"""What an environment provides: `reset(row, seed) -> prompt`, `step(completion) -> observation, reward, done`.

One instance plays one episode, in a worker process. It is made from `grpo.environment`'s options:

    class Maze(Environment):
        def __init__(self, size: int = 4): ...
        def reset(self, row, seed): return "You are in a maze."
        def step(self, completion): return "A wall.", 0.0, False

A prompt or an observation is a text, a list of messages, or a list of token ids. A text is a user's message, or the
tool's if the completion called one; token ids are used as they are. The observation of the last step is not used.
The reward of an episode is the sum over its steps.

Given the same row, seed and completions, an environment must answer the same: a lost worker is replaced by replaying
the episode, and a resumed run by playing it again. Draw random numbers from `seed`, which is a function of (run's seed,
rollout, prompt, sample).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from types import MappingProxyType
from typing import Any

from bessemer.config import field
from bessemer.data.tokenize.chat import ToolCall, is_messages
from bessemer.errors import InputError

Row = Mapping[str, Any]
"""A row of RL data: its prompt, and the columns that rewards and environments get."""
Content = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, messages, or token ids."""


@dataclass(frozen=True)
class Completion:
    """What the model wrote in one turn. `text` is without the token that ended the turn; special tokens appear by name.

    calls: the tool calls in it, in the format of the model's template. finish: "stop", or "length" and "context" if it
    was cut.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"


class Environment(ABC):
    """One episode."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions the model may call, for templates that describe tools; none: it calls nothing."""
    counts: Mapping[str, int] = MappingProxyType({})
    """What it has counted in this episode, by name: logged as env/NAME, summed over the episodes of a rollout."""

    @abstractmethod
    def reset(self, row: Row, seed: int) -> Content:
        """Begin the episode of a row of the dataset; return the prompt."""

    @abstractmethod
    def step(self, completion: Completion) -> tuple[Content | None, float, bool]:
        """Return (observation, reward, whether the episode is over)."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """`grpo.environment`. `options` are passed to the class."""

    name: str
    options: dict[str, Any] = plain_field(default_factory=dict)

    @classmethod
    def from_string(cls, text: str) -> EnvironmentSpec:
        return cls(text)


@dataclass(kw_only=True)
class EpisodeSettings:
    """Settings of multi-turn rollouts."""

    environment: EnvironmentSpec | None = field(
        "grpo/environment",
        default=None,
        help="name or {name, options}: who answers the model; none: one turn, no answer",
    )
    max_turns: int = field("grpo/max_turns", default=8, minimum=1, help="completions of an episode at most")
    on_environment_error: str = field(
        "grpo/on_environment_error",
        default="fail",
        choices=("fail", "skip"),
        help="an environment that raises, hangs or returns a wrong value: end the run, or leave the episode out",
    )
    environment_timeout: float = field(
        "grpo/environment_timeout",
        default=60.0,
        above=0,
        maximum=1e6,
        help="seconds of one call, after which its worker is killed",
    )
    environment_retries: int = field(
        "grpo/environment_retries", default=1, minimum=0, help="how often a failed call is repeated in a new instance"
    )
    environment_workers: int = field(
        "grpo/environment_workers", default=2, minimum=1, help="processes that environments run in, one call at a time"
    )
    environment_overlap: int = field(
        "grpo/environment_overlap",
        default=1,
        minimum=0,
        help="decode rounds that a call may overlap; then the sampler waits for it, so that runs are repeatable",
    )


# --- the row of the dataset that an episode is about ---


def prompt_of(row: Row, where: str) -> tuple[Any, Row]:
    """Return the prompt of a row (a text or messages), and the row, with the answer that its messages end with."""
    column = next((name for name in ("prompt", "messages", "question") if name in row), None)
    if column is None:
        raise InputError(
            f"{where}: a row needs a prompt under 'prompt', 'messages' or 'question'; it has "
            f"{', '.join(row) or 'nothing'}."
        )
    prompt = row[column]
    if column == "messages":
        if not is_messages(prompt):
            raise InputError(f"{where}: 'messages' is not a list of messages.")
        if prompt[-1].get("role") == "assistant":
            row = {"answer": prompt[-1].get("content"), **row}
            prompt = prompt[:-1]
    if (isinstance(prompt, str) and prompt.strip()) or is_messages(prompt):
        return prompt, row
    raise InputError(f"{where}: a prompt is a text or a list of messages, and not empty; got {prompt!r:.100}.")


def question_of(row: Row) -> str | None:
    """Return the text that a row begins with, if it has one: an environment's row needs none."""
    messages: Any = row.get("messages")
    first = messages[0].get("content") if is_messages(messages) else None
    found = next((text for text in (row.get("prompt"), row.get("question"), first) if isinstance(text, str)), None)
    return found if found and found.strip() else None
