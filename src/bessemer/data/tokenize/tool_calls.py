"""Tool calls in what a model wrote, in the format of its chat template.

With our tokens a call is the expression between <|python_start|> and <|python_end|>. Of a template, one call is
rendered to see what stands before its JSON:

    <tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>      Hermes, Qwen
    [TOOL_CALLS][{"name": …, "arguments": {…}}]                 Mistral
    {"name": …, "parameters": {…}}                              Llama 3: the whole answer is the call

Templates that do not write calls as JSON are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.data.sources.readers import DEEPEST, deeper_than
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.data.tokenize.turns import FIRST, rendered_call
from bessemer.errors import InputError

PYTHON = "python"
EXPRESSION = "expression"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """One call. `error` says why it could not be read; the name is then empty."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class CallParser:
    """Reads the calls of a tokenizer's format; without tools there are none. Raise InputError if its template writes
    calls that cannot be read."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools):
        self.end_id: int | None = None  # a token that ends a call and with it the completion, beside the ends of turns
        self.opening: str | None = None
        if tools and tokenizer.chat_template is not None:
            self.opening = _opening(tokenizer, tools)
        elif tools:
            self.end_id = tokenizer.specials.get(PYTHON_END)

    def parse(self, text: str, stop: int | str | None) -> tuple[ToolCall, ...]:
        """Return the calls in a completion. stop: the token that ended it."""
        if self.opening is None:
            if self.end_id is None or stop != self.end_id:
                return ()
            _, start, expression = text.rpartition(PYTHON_START)
            if not start:
                return (ToolCall("", error=f"{PYTHON_END} without {PYTHON_START}"),)
            return (ToolCall(PYTHON, {EXPRESSION: expression}),)
        if not self.opening:
            text = text.strip()
            return tuple(_calls(text)) if text[:1] in ("{", "[") else ()
        return tuple(call for part in text.split(self.opening)[1:] for call in _calls(part.strip()))


def _opening(tokenizer: Tokenizer, tools: Tools) -> str:
    """Return what the template writes before the JSON of a call; "" if nothing."""
    text = rendered_call(tokenizer, tools)
    for place, letter in enumerate(text or ""):
        if letter in "{[":
            found = _decoded(text[place:])
            if found is not None and FIRST in json.dumps(found, ensure_ascii=False):
                return text[:place].strip()
    raise InputError(
        f"the chat template of {tokenizer.origin} does not write tool calls as JSON, so they cannot be read from what "
        "the model writes: use a template that does, or an environment without tools."
    )


def _decoded(text: str) -> Any:
    """Return the JSON value that a text begins with; None if it begins with none, or with one nested too deeply."""
    try:
        value = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
    return None if deeper_than(value, DEEPEST) else value


def _calls(text: str) -> Iterator[ToolCall]:
    value = _decoded(text)
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            yield ToolCall("", error="not a JSON object with a name and arguments")
            continue
        given = function.get("arguments", function.get("parameters", {}))
        arguments = _decoded(given) if isinstance(given, str) else given
        if isinstance(arguments, dict):
            yield ToolCall(name, arguments)
        else:
            yield ToolCall("", error=f"the arguments of {name} are not a JSON object")
