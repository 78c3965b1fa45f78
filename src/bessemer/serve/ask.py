"""A request body as what it asks of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.data.tokenizer import Tokenizer
from bessemer.generate import Request, SamplingOptions
from bessemer.generate.request import TOP
from bessemer.serve.body import Fields, kind, text
from bessemer.serve.conversation import ROLES, Template
from bessemer.serve.errors import wrong
from bessemer.serve.tools import message_fields, refuse_response_format, tools_of

SAMPLES = 128  # most of n
PROMPTS = 128  # most in one body
STOPS = 8
SEEDS = 2**32
RANKED, RANKED_IN_CHAT = 5, TOP  # most likely tokens that may be asked for beside each
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
    top_logprobs: int
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
                top_logprobs=options.top_logprobs,
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
    ranked = fields.integer("logprobs", None, 0, RANKED)
    most = fields.integer("max_tokens", COMPLETION_TOKENS, 1, 2**31 - 1)
    options = _options(fields, most, ranked)
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
    messages = _messages(fields.take("messages"), template.takes_tools)
    ranked = _ranked(fields)
    tools = tools_of(fields, template)
    refuse_response_format(fields)
    given = [fields.integer(name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    options = _options(fields, next((most for most in given if most is not None), None), ranked, template)
    fields.finish()
    room.check_text(
        "".join(map(str, (*(message["content"] for message in messages), *tools))), template.tokenizer
    )
    return room.check(Ask(options, [template.prompt(messages, tools)], [""], template.stop_ids))


def _ranked(fields: Fields) -> int | None:
    """How many tokens are ranked beside each log-probability; None: no log-probabilities."""
    logprobs = fields.flag("logprobs")
    ranked = fields.integer("top_logprobs", None, 0, RANKED_IN_CHAT)
    if ranked and not logprobs:
        raise wrong("top_logprobs", "'top_logprobs' is given together with \"logprobs\": true.")
    return (ranked or 0) if logprobs else None


def _messages(given: Any, tools: bool) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        problem = "is missing" if given is None else "must be an array of at least one message"
        raise wrong("messages", f"'messages' {problem}.")
    return [_message(item, f"messages[{number}]", tools) for number, item in enumerate(given)]


def _message(item: Any, where: str, tools: bool) -> dict[str, Any]:
    """A message as templates take it. `tools`: the template knows calls and what came of them."""
    if not isinstance(item, dict):
        raise wrong(where, f"'{where}' must be an object with role and content, not {kind(item)}.")
    role = "system" if item.get("role") == "developer" else item.get("role")
    roles = (*ROLES, "tool") if tools else ROLES
    if not isinstance(role, str) or role not in roles:
        raise wrong(f"{where}.role", f"'{where}.role' is one of {', '.join(roles)}.")
    beside = message_fields(item, role, where) if tools else {}
    for name, value in item.items():
        if name not in ("role", "content", *beside) and value not in (None, []):
            raise wrong(
                f"{where}.{name[:60]}", f"'{where}' has a field that is not supported: '{name[:60]}'."
            )
    content = item.get("content")
    if content is None and "tool_calls" in beside:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise wrong(f"{where}.content", f"'{where}.content' must be a string, or an array of text parts.")
    said = "".join(text(part.get("text"), f"{where}.content") for part in parts)
    return {"role": role, "content": said, **beside}


def _options(
    fields: Fields, most: int | None, ranked: int | None, template: Template | None = None
) -> Options:
    """`ranked`: how many tokens are ranked beside each log-probability; None: no log-probabilities."""
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
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
    )
    stop = fields.strings("stop", STOPS)
    return Options(
        model=None if model is None else text(model, "model"),
        n=fields.integer("n", 1, 1, SAMPLES) or 1,
        max_tokens=most,
        sampling=sampling,
        seed=fields.integer("seed", None, 0, SEEDS - 1),
        stop=tuple(dict.fromkeys((*stop, *(template.stop_strings if template else ())))),
        logprobs=ranked is not None,
        top_logprobs=ranked or 0,
        stream=stream,
        usage=usage,
    )


def _share(fields: Fields, name: str) -> float:
    value = fields.number(name, 1.0, 0, 1)
    if value == 0:
        raise wrong(name, f"'{name}' is above 0; for the most likely token set temperature to 0.")
    return value
