"""A request body as what it asks of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.generate import Request, SamplingOptions
from bessemer.serve.body import Fields, kind, text
from bessemer.serve.conversation import ROLES, Template
from bessemer.serve.errors import wrong

SAMPLES = 128  # most of n
PROMPTS = 128  # most in one body
STOPS = 8
SEEDS = 2**32
COMPLETION_TOKENS = 16  # of /v1/completions when max_tokens is not given, as the protocol has it


@dataclass(frozen=True)
class Options:
    """What both endpoints share."""

    model: str | None
    n: int
    max_tokens: int | None
    sampling: SamplingOptions
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    usage: bool  # a last chunk with the counts, when streaming


@dataclass(frozen=True)
class Ask:
    """Prompts (ids), how to continue each, and what is repeated before the answers (`echo`)."""

    options: Options
    prompts: list[list[int]]
    echo: list[str]
    stop_ids: tuple[int, ...] = ()

    def requests(self) -> list[Request]:
        """One for each prompt. Prompt i draws from seed + i, so that equal prompts get different samples."""
        options = self.options
        return [
            Request(
                ids,
                max_tokens=options.max_tokens,
                sampling=options.sampling,
                n=options.n,
                stop_ids=self.stop_ids,
                stop_strings=options.stop,
                seed=None if options.seed is None else (options.seed + number) % SEEDS,
                logprobs=options.logprobs,
                stream=options.stream,
            )
            for number, ids in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class Room:
    """What the engine can hold: ids below `vocab_size`, `capacity` tokens a row, `queue` rows waiting."""

    vocab_size: int
    capacity: int
    queue: int | None

    def check_text(self, value: str, tokenizer: Tokenizer) -> str:
        """A text too long even in the longest tokens is refused unread: tokenizing it would hold up everyone."""
        most = self.capacity * int(tokenizer.token_bytes.max())
        if len(value) > most:
            raise wrong(
                None,
                f"a text of {len(value)} characters cannot fit this model's context of {self.capacity} tokens.",
                "context_length_exceeded",
            )
        return value

    def check(self, ask: Ask) -> Ask:
        """What could never be served is refused at once, rather than answered with "try again"."""
        longest = max(len(ids) for ids in ask.prompts)
        if longest >= self.capacity:
            raise wrong(
                None,
                f"the prompt has {longest} tokens and this model's context {self.capacity}, which must hold at least "
                "one more. Shorten the prompt.",
                "context_length_exceeded",
            )
        wanted = len(ask.prompts) * ask.options.n
        if self.queue is not None and wanted > self.queue:
            message = f"{wanted} continuations at once are more than this server's queue holds, {self.queue}."
            raise wrong("n", message)
        return ask


def completion_ask(tree: dict[str, Any], tokenizer: Tokenizer, room: Room) -> Ask:
    """Body of /v1/completions. A prompt is the beginning of a document; an array of ids is taken as it is."""
    fields = Fields(tree)
    prompt = fields.take("prompt")
    echo = fields.flag("echo")
    alternatives = fields.integer("logprobs", None, 0, 5)
    if alternatives:
        raise wrong("logprobs", "the chosen tokens' log-probabilities only: 'logprobs' is 0 or not given.")
    most = fields.integer("max_tokens", COMPLETION_TOKENS, 1, 2**31 - 1)
    options = _options(fields, most, alternatives is not None)
    fields.finish()
    if echo and options.logprobs:
        raise wrong("echo", "'echo' with 'logprobs' is not supported: the prompt's are not computed.")
    prompts = _prompts(prompt, tokenizer, room)
    shown = [_shown(ids, tokenizer) for ids in prompts] if echo else [""] * len(prompts)
    return room.check(Ask(options, prompts, shown))


def _prompts(prompt: Any, tokenizer: Tokenizer, room: Room) -> list[list[int]]:
    """A string, ids, or an array of either."""
    if prompt is None:
        raise wrong("prompt", "'prompt' is missing.")
    several = isinstance(prompt, list) and prompt and not all(_is_id(item) for item in prompt)
    given = prompt if several else [prompt]
    if len(given) > PROMPTS:
        raise wrong("prompt", f"'prompt' holds at most {PROMPTS} prompts; got {len(given)}.")
    return [_prompt(item, tokenizer, room) for item in given]


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prompt(item: Any, tokenizer: Tokenizer, room: Room) -> list[int]:
    if isinstance(item, str):
        return tokenizer.prompt(room.check_text(text(item, "prompt"), tokenizer))
    if not isinstance(item, list) or not item or not all(_is_id(token) for token in item):
        raise wrong("prompt", f"a prompt is a string or an array of token ids, not {_named(item)}.")
    if not all(0 <= token < room.vocab_size for token in item):
        raise wrong("prompt", f"token ids are between 0 and {room.vocab_size - 1}.")
    return item


def _named(item: Any) -> str:
    return (
        "an empty array"
        if item == []
        else "an array of other things"
        if isinstance(item, list)
        else kind(item)
    )


def _shown(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt as text, without the token that begins a document."""
    return tokenizer.decode(ids[1:] if ids[0] == tokenizer.bos_id else ids)


def chat_ask(tree: dict[str, Any], template: Template, room: Room) -> Ask:
    """Body of /v1/chat/completions."""
    fields = Fields(tree)
    messages = _messages(fields.take("messages"))
    logprobs = fields.flag("logprobs")
    given = [fields.integer(name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    options = _options(fields, next((most for most in given if most is not None), None), logprobs, template)
    fields.finish()
    room.check_text("".join(message["content"] for message in messages), template.tokenizer)
    return room.check(Ask(options, [template.prompt(messages)], [""], template.stop_ids))


def _messages(given: Any) -> list[dict[str, str]]:
    if not isinstance(given, list) or not given:
        problem = "is missing" if given is None else "is to be an array of at least one message"
        raise wrong("messages", f"'messages' {problem}.")
    return [_message(item, f"messages[{number}]") for number, item in enumerate(given)]


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise wrong(where, f"'{where}' is to be an object with role and content, not {kind(item)}.")
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"'{where}.role' is one of {', '.join(ROLES)}.")
    more = [
        name for name, value in item.items() if name not in ("role", "content") and value not in (None, [])
    ]
    if more:
        raise wrong(
            f"{where}.{more[0][:60]}", f"'{where}' has a field that is not supported: '{more[0][:60]}'."
        )
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise wrong(
                f"{where}.content", f"'{where}.content' is to be a string, or an array of text parts."
            )
    return {"role": role, "content": "".join(text(part.get("text"), f"{where}.content") for part in parts)}


def _options(fields: Fields, most: int | None, logprobs: bool, template: Template | None = None) -> Options:
    model = fields.take("model")
    stream = fields.flag("stream")
    about = fields.take("stream_options")
    if about is not None and not (stream and isinstance(about, dict)):
        raise wrong("stream_options", "'stream_options' is an object, given together with \"stream\": true.")
    shares = Fields(about or {})
    usage = shares.flag("include_usage")
    shares.flag("include_obfuscation")  # padding against listeners of encrypted lines; there is none here
    shares.finish()
    sampling = SamplingOptions(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=_share(fields, "top_p"),
        top_k=fields.integer("top_k", 0, 0, 2**31 - 1) or 0,
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
    )
    stop = fields.strings("stop", STOPS)
    return Options(
        model=None if model is None else text(model, "model"),
        n=fields.integer("n", 1, 1, SAMPLES) or 1,
        max_tokens=most,
        sampling=sampling,
        seed=fields.integer("seed", None, 0, SEEDS - 1),
        stop=tuple(dict.fromkeys((*stop, *(template.stop_strings if template else ())))),
        logprobs=logprobs,
        stream=stream,
        usage=usage,
    )


def _share(fields: Fields, name: str) -> float:
    value = fields.number(name, 1.0, 0, 1)
    if value == 0:
        raise wrong(name, f"'{name}' is above 0; for the most likely token set temperature to 0.")
    return value
