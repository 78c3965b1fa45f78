"""Request bodies, read field by field: types are exact, null means absent, and an unknown field is an error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import nearest
from bessemer.generate import Request, SamplingOptions
from bessemer.generate.request import TOP
from bessemer.serve.chat import ROLES, Template, Tool
from bessemer.serve.net import ApiError, wrong

# Fields about the caller, which do not change the answer.
ABOUT_THE_CALLER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Unsupported fields of the protocol, with the values at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "top_logprobs": (0,),
}


def parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; NaN and Infinity are not JSON."""
    try:
        tree = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise wrong(None, f"the body is not JSON: {reason}.", "invalid_json") from None
    if not isinstance(tree, dict):
        raise wrong(None, f"the body must be a JSON object, not {kind(tree)}.", "invalid_json")
    return tree


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def text(value: Any, param: str) -> str:
    """Return a string. Raise ApiError if it is not one or cannot be encoded as UTF-8 (half a surrogate pair)."""
    if not isinstance(value, str):
        raise wrong(param, f"'{param}' must be a string, not {kind(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(param, f"'{param}' has half a surrogate pair, which is not a character.") from None
    return value


def unsupported(name: str, remedy: str) -> ApiError:
    """Return status 400 for a field of the protocol that this server does not have."""
    return wrong(name, f"'{name}' is not supported by this server. {remedy}", "unsupported_parameter")


class Fields:
    """The fields of one body. Each is taken once; `finish` raises ApiError if any is left."""

    def __init__(self, tree: dict[str, Any]):
        self._left = {name: value for name, value in tree.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        self._known.append(name)
        return self._left.pop(name, default)

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise wrong(name, f"'{name}' must be true or false, not {kind(value)}.")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, f"'{name}' must be an integer, not {kind(value)}.")
        if not low <= value <= high:
            raise wrong(name, f"'{name}' must be between {low} and {high}; got {_short(value)}.")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, f"'{name}' must be a number, not {kind(value)}.")
        if not (low <= value <= high and math.isfinite(value)):
            raise wrong(name, f"'{name}' must be between {low:g} and {high:g}; got {_short(value)}.")
        return float(value)

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """Return a string or an array of up to `most`, none empty, as a tuple."""
        value = self.take(name, [])
        values = value if isinstance(value, list) else [value]
        if len(values) > most:
            raise wrong(name, f"'{name}' takes at most {most} strings; got {len(values)}.")
        given = tuple(text(item, name) for item in values)
        if "" in given:
            raise wrong(name, f"'{name}' has an empty string.")
        return given

    def finish(self) -> None:
        """Raise ApiError if a field is left that would have an effect."""
        for name, value in self._left.items():
            if name in ABOUT_THE_CALLER or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name in NEUTRAL:
                raise unsupported(name, "Leave it out.")
            close = nearest(name, self._known)
            hint = f" Did you mean '{close}'?" if close else ""
            raise wrong(name[:60], f"unknown field '{name[:60]}'.{hint}", "unknown_parameter")


def _short(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) or abs(value) < 2**63 else "a much larger number"


# Tools and response formats of /v1/chat/completions


TOOLS = 128  # maximum per body
DEEPEST = 32  # levels of a tool's description
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tools_of(fields: Fields, template: Template) -> list[Tool]:
    """Return the tools for the prompt. Raise ApiError if the template cannot describe any, rather than drop them."""
    given, choice = fields.take("tools", []), fields.take("tool_choice", "auto")
    fields.flag("parallel_tool_calls")  # the model decides how many calls it makes
    if not isinstance(given, list):
        raise wrong("tools", f"'tools' must be an array, not {kind(given)}.")
    if given and not template.takes_tools:
        raise unsupported(
            "tools",
            "The chat template of this model cannot describe them. Describe the tools in a system message instead, or "
            "serve a model whose template takes tools.",
        )
    if len(given) > TOOLS:
        raise wrong("tools", f"'tools' takes at most {TOOLS} tools; got {len(given)}.")
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", 'Calls cannot be forced: use "auto" or "none", and ask for one in the prompt.')
    tools = [_tool(item, f"tools[{number}]") for number, item in enumerate(given)]
    return [] if choice == "none" else tools


def _tool(item: Any, where: str) -> Tool:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or item.get("type") != "function":
        raise wrong(where, f'\'{where}\' must be an object {{"type": "function", "function": {{…}}}}.')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        where = f"{where}.function.name"
        raise wrong(where, f"'{where}' must be 1 to 64 letters, digits, underscores and dashes.")
    if not isinstance(function.get("parameters", {}), dict):
        where = f"{where}.function.parameters"
        raise wrong(where, f"'{where}' must be a JSON Schema object.")
    _check_tree(item, where)
    return item


def _check_tree(value: Any, where: str, depth: int = 0) -> None:
    """Raise ApiError for what a template could not render: text that is not Unicode, and deep nesting."""
    if depth > DEEPEST:
        raise wrong(where, f"'{where}' is nested more than {DEEPEST} levels deep.")
    if isinstance(value, str):
        text(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            text(key, where)
            _check_tree(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_tree(item, where, depth + 1)


def message_fields(item: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return a message's fields about tools: the assistant's calls, and which call a tool's result belongs to."""
    found: dict[str, Any] = {}
    if role == "assistant" and item.get("tool_calls"):
        calls = item["tool_calls"]
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", f"'{where}.tool_calls' must be an array, not {kind(calls)}.")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if item.get(name) is not None:
                found[name] = text(item[name], f"{where}.{name}")
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call as templates take it: its arguments, a string in the protocol, become an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, f"'{where}' must be an object with a function, its name and its arguments.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    found = {**call, "function": {**function, "arguments": arguments}}
    _check_tree(found, where)
    return found


def refuse_response_format(fields: Fields) -> None:
    """Raise ApiError for anything but text: JSON cannot be guaranteed without constrained decoding."""
    given = fields.take("response_format", {"type": "text"})
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise wrong("response_format", "'response_format' must be an object with a type.")
    if given["type"] != "text":
        raise unsupported(
            "response_format",
            f"Type '{given['type'][:40]}' cannot be enforced: ask for JSON in the prompt, and check the answer.",
        )


# Bodies as requests to the engine


SAMPLES = 128  # maximum of n
PROMPTS = 128  # maximum per body
STOPS = 8
SEEDS = 2**32
RANKED, RANKED_IN_CHAT = 5, TOP  # maximum of alternatives per token
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as in the protocol


@dataclass(frozen=True)
class Options:
    """Options of both endpoints."""

    model: str | None
    n: int
    max_tokens: int | None
    sampling: SamplingOptions
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    stream: bool
    usage: bool  # whether a stream ends with a chunk of token counts


@dataclass(frozen=True)
class Ask:
    """Prompts (token ids), how to continue each, and what is repeated before the answers (`echo`)."""

    options: Options
    prompts: list[list[int]]
    echo: list[str]
    stop_ids: tuple[int, ...] = ()

    def requests(self, adapter: int = 0) -> list[Request]:
        """Return one request per prompt. Prompt i has seed + i, so that equal prompts get different samples. adapter:
        `Request.adapter`."""
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
                fresh=options.seed is not None,  # who asks for a seed wants the same text again
                adapter=adapter,
            )
            for number, ids in enumerate(self.prompts)
        ]


@dataclass(frozen=True)
class Room:
    """What the engine can take: ids below `vocab_size`, `capacity` tokens per row, `queue` waiting rows."""

    vocab_size: int
    capacity: int
    queue: int | None

    def check_text(self, value: str, tokenizer: Tokenizer) -> str:
        """Raise ApiError for a text too long even in the longest tokens: tokenizing it would delay everyone."""
        if len(value) > self.capacity * int(tokenizer.token_bytes.max()):
            message = f"a text of {len(value)} characters cannot fit this model's context of {self.capacity} tokens."
            raise wrong(None, message, "context_length_exceeded")
        return value

    def check(self, ask: Ask) -> Ask:
        """Raise ApiError for what could never be served, rather than answer "try again"."""
        longest = max(len(ids) for ids in ask.prompts)
        if longest >= self.capacity:
            message = (
                f"the prompt has {longest} tokens and this model's context {self.capacity}, which must leave room for "
                "at least one more. Shorten the prompt."
            )
            raise wrong(None, message, "context_length_exceeded")
        wanted = len(ask.prompts) * ask.options.n
        if self.queue is not None and wanted > self.queue:
            raise wrong("n", f"{wanted} continuations at once are more than this server's queue of {self.queue} takes.")
        return ask


def completion_ask(tree: dict[str, Any], tokenizer: Tokenizer, room: Room) -> Ask:
    """Parse the body of /v1/completions. A prompt is the start of a document; an array of ids is taken as it is."""
    fields = Fields(tree)
    prompt = fields.take("prompt")
    echo = fields.flag("echo")
    ranked = fields.integer("logprobs", None, 0, RANKED)
    most = fields.integer("max_tokens", COMPLETION_TOKENS, 1, 2**31 - 1)
    options = _options(fields, most, ranked)
    fields.finish()
    if echo and options.logprobs:
        raise wrong("echo", "'echo' with 'logprobs' is not supported: those of the prompt are not computed.")
    prompts = _prompts(prompt, tokenizer, room)
    shown = [_shown(ids, tokenizer) for ids in prompts] if echo else [""] * len(prompts)
    return room.check(Ask(options, prompts, shown))


def _prompts(prompt: Any, tokenizer: Tokenizer, room: Room) -> list[list[int]]:
    """Parse a string, ids, or an array of either."""
    if prompt is None:
        raise wrong("prompt", "'prompt' is missing.")
    several = isinstance(prompt, list) and prompt and not all(_is_id(item) for item in prompt)
    given = prompt if several else [prompt]
    if len(given) > PROMPTS:
        raise wrong("prompt", f"'prompt' takes at most {PROMPTS} prompts; got {len(given)}.")
    return [_prompt(item, tokenizer, room) for item in given]


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prompt(item: Any, tokenizer: Tokenizer, room: Room) -> list[int]:
    if isinstance(item, str):
        return tokenizer.prompt(room.check_text(text(item, "prompt"), tokenizer))
    if not isinstance(item, list) or not item or not all(_is_id(token) for token in item):
        raise wrong("prompt", f"a prompt must be a string or an array of token ids, not {_named(item)}.")
    if not all(0 <= token < room.vocab_size for token in item):
        raise wrong("prompt", f"token ids must be between 0 and {room.vocab_size - 1}.")
    return item


def _named(item: Any) -> str:
    if item == []:
        return "an empty array"
    return "an array of other things" if isinstance(item, list) else kind(item)


def _shown(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a prompt as text, without the token that starts a document."""
    return tokenizer.decode(ids[1:] if ids[0] == tokenizer.bos_id else ids)


def chat_ask(tree: dict[str, Any], template: Template, room: Room) -> Ask:
    """Parse the body of /v1/chat/completions."""
    fields = Fields(tree)
    messages = _messages(fields.take("messages"), template)
    ranked = _ranked(fields)
    tools = tools_of(fields, template)
    refuse_response_format(fields)
    given = [fields.integer(name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    options = _options(fields, next((most for most in given if most is not None), None), ranked, template)
    fields.finish()
    room.check_text("".join(map(str, (*(message["content"] for message in messages), *tools))), template.tokenizer)
    return room.check(Ask(options, [template.prompt(messages, tools)], [""], template.stop_ids))


def _ranked(fields: Fields) -> int | None:
    """Return how many tokens are ranked beside each log-probability; None: no log-probabilities."""
    logprobs = fields.flag("logprobs")
    ranked = fields.integer("top_logprobs", None, 0, RANKED_IN_CHAT)
    if ranked and not logprobs:
        raise wrong("top_logprobs", "'top_logprobs' is given together with \"logprobs\": true.")
    return (ranked or 0) if logprobs else None


def _messages(given: Any, template: Template) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        problem = "is missing" if given is None else "must be an array of at least one message"
        raise wrong("messages", f"'messages' {problem}.")
    return [_message(item, f"messages[{number}]", template) for number, item in enumerate(given)]


def _message(item: Any, where: str, template: Template) -> dict[str, Any]:
    """A message as the template takes it, with calls and what came of them, or with reasoning, if it knows these."""
    if not isinstance(item, dict):
        raise wrong(where, f"'{where}' must be an object with role and content, not {kind(item)}.")
    role = "system" if item.get("role") == "developer" else item.get("role")
    roles = (*ROLES, "tool") if template.takes_tools else ROLES
    if not isinstance(role, str) or role not in roles:
        raise wrong(f"{where}.role", f"'{where}.role' must be one of {', '.join(roles)}.")
    beside = message_fields(item, role, where) if template.takes_tools else {}
    if role == "assistant" and item.get("reasoning_content") and template.takes_reasoning:
        beside["reasoning_content"] = text(item["reasoning_content"], f"{where}.reasoning_content")
    for name, value in item.items():
        if name not in ("role", "content", *beside) and value not in (None, []):
            raise wrong(f"{where}.{name[:60]}", f"'{where}' has a field that is not supported: '{name[:60]}'.")
    content = item.get("content")
    if content is None and "tool_calls" in beside:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise wrong(f"{where}.content", f"'{where}.content' must be a string, or an array of text parts.")
    content = "".join(text(part.get("text"), f"{where}.content") for part in parts)
    return {"role": role, "content": content, **beside}


def _options(fields: Fields, most: int | None, ranked: int | None, template: Template | None = None) -> Options:
    """Return the options. `ranked`: how many alternatives per token; None: no log-probabilities."""
    model = fields.take("model")
    stream = fields.flag("stream")
    about = fields.take("stream_options")
    if about is not None and not (stream and isinstance(about, dict)):
        raise wrong("stream_options", "'stream_options' must be an object and needs \"stream\": true.")
    shares = Fields(about or {})
    usage = shares.flag("include_usage")
    shares.flag("include_obfuscation")  # padding against eavesdroppers; there is none here
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
        raise wrong(name, f"'{name}' must be above 0; for the most likely token set temperature to 0.")
    return value
