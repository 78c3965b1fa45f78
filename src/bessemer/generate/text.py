"""Text in, text out: completing texts with a decoder, and decoding tokens to text as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.tokenize.chat import can_chat, render, stop_ids
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.decoder import Decoder
from bessemer.generate.load import LoadedModel, check_scores
from bessemer.generate.sampling import SamplingOptions
from bessemer.generate.speculate import Speculation, acceptance


@dataclass(frozen=True)
class Completion:
    """One prompt and its continuation. `finish`: "stop", "length" or "context"; `speculation`: what drafts saved."""

    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str
    speculation: dict[str, float] | None = None


def complete(
    decoder: Decoder,
    params: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
    ids: Sequence[Sequence[int]] | None = None,
) -> tuple[list[Completion], list[str]]:
    """Return (continuations, notices). A prompt is the beginning of a document (`Tokenizer.prompt`), or its `ids`.

    Special tokens in a prompt are read as text. Bytes of a character that was cut off show as U+FFFD.
    """
    ids = ids or [tokenizer.prompt(prompt) for prompt in prompts]
    result = decoder(params, ids, max_tokens=max_tokens, sampling=sampling, stop_ids=stop_ids)
    check_scores(result.logprobs)  # 0 where no token is
    completions = []
    for index, prompt in enumerate(prompts):
        tokens = result.row(index)
        logprobs = [float(value) for value in result.logprobs[index, : len(tokens)]]
        speculation = None
        if result.passes is not None and result.drafted is not None:
            counts = (int(result.lengths[index]), int(result.passes[index]), int(result.drafted[index]))
            speculation = acceptance(*counts)
        text = tokenizer.decode(tokens)
        completions.append(Completion(prompt, text, tokens, logprobs, result.reasons[index], speculation))
    return completions, result.notices


def sample(
    loaded: LoadedModel,
    prompts: Sequence[str],
    *,
    max_tokens: int = 100,
    sampling: SamplingOptions | None = None,
    stop_ids: Sequence[int] = (),
    speculate: Speculation | None = None,
) -> tuple[list[Completion], list[str]]:
    """Continue texts with a loaded model; greedy without `sampling`."""
    if loaded.tokenizer is None:
        raise InputError("this model was trained on token ids without a tokenizer, so it cannot read a text prompt.")
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "stop_ids": stop_ids}
    with loaded.scope():
        return complete(loaded.decoder_with(speculate), loaded.params, loaded.tokenizer, prompts, **options)


def prompt_ids(
    prompt: Any, tokenizer: Tokenizer, chat: bool = True, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the tokens that a completion follows. prompt: a text or a list of messages.

    A text is a user's message, or plain text if `chat` is off or the tokenizer has no tokens for conversations.
    """
    if not isinstance(prompt, str):
        return render(prompt, tokenizer, tools=tools)
    if chat and can_chat(tokenizer):
        return render([{"role": "user", "content": prompt}], tokenizer, tools=tools)
    if tools:
        raise InputError("a prompt of plain text has no place for 'tools': leave them out.")
    return tokenizer.prompt(prompt)


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end the assistant's turn; none if the tokenizer has no tokens for conversations."""
    return stop_ids(tokenizer) if can_chat(tokenizer) else ()


UNKNOWN = "\ufffd"


class StopDetector:
    """Finds the stop string that ends first (of those that end together, the longest) in text given in pieces.

    Unlike the one that starts first, it does not depend on where the pieces were cut.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = tuple(stops)
        if not all(self.stops):
            raise InputError("a stop string is empty; it would stop before the first character.")
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that is certain to precede any stop string."""
        if self.found is not None:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._held = ""
            return text[:at]
        held = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a proper prefix of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """Decodes tokens piece by piece: never part of a character or of a stop string. Joined, the pieces are the text of
    all tokens, cut before the stop string (`stop`) that ends first."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.detector = StopDetector(stop_strings)
        self._ids: list[int] = []
        # Only ids from `_context` on are decoded again. Those up to `_read` were already returned; they are context,
        # because some tokenizers drop the space before the first token they decode.
        self._context = self._read = 0
        self._shown = 0  # characters of the decoded ids already returned

    @property
    def stop(self) -> str | None:
        return self.detector.found

    def push(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain after these tokens."""
        self._ids += ids
        text = self.tokenizer.decode(self._ids[self._context :])
        whole = not text.endswith(UNKNOWN)  # else the last character may still get its missing bytes
        certain = len(text) - (not whole)
        piece, self._shown = text[self._shown : certain], max(self._shown, certain)
        if whole and len(self._ids) > self._read:
            self._context, self._read = self._read, len(self._ids)
            self._shown = len(self.tokenizer.decode(self._ids[self._context :]))
        return self.detector.push(piece)

    def push_until_stop(self, ids: Sequence[int]) -> tuple[str, int]:
        """Return (text, ids used): all of them, or up to the token that completed a stop string."""
        if not self.detector.stops:
            return self.push(ids), len(ids)
        pieces = []
        for taken, token in enumerate(ids, start=1):
            pieces.append(self.push([token]))
            if self.stop is not None:
                return "".join(pieces), taken
        return "".join(pieces), len(ids)

    def finish(self) -> str:
        """Return what was held back, after the last token."""
        text = self.tokenizer.decode(self._ids[self._context :])[self._shown :]
        self._shown += len(text)
        return self.detector.push(text) + self.detector.finish()
