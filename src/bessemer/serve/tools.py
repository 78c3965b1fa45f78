"""Tools and formats of /v1/chat/completions: what a model's template can be told, and what nobody here can enforce."""

from __future__ import annotations

import json
import re
from typing import Any

from bessemer.serve.body import Fields, kind, text, unsupported
from bessemer.serve.conversation import Template, Tool
from bessemer.serve.errors import wrong

TOOLS = 128  # most in one body
DEEPEST = 32  # levels of a tool's description
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tools_of(fields: Fields, template: Template) -> list[Tool]:
    """The tools to tell the model of. A template without a place for them is an error: dropped in silence they would be
    answered as if nobody had given them."""
    given, choice = fields.take("tools", []), fields.take("tool_choice", "auto")
    fields.flag("parallel_tool_calls")  # how many calls a model writes is its own affair
    if not isinstance(given, list):
        raise wrong("tools", f"'tools' must be an array, not {kind(given)}.")
    if given and not template.takes_tools:
        raise unsupported(
            "tools",
            "The chat template of this model has no place for them. Describe the tools in a system message instead, or "
            "serve a model whose template takes tools.",
        )
    if len(given) > TOOLS:
        raise wrong("tools", f"'tools' holds at most {TOOLS} tools; got {len(given)}.")
    if choice not in ("auto", "none"):
        raise unsupported(
            "tool_choice",
            'Nothing here can force a call: give "auto" or "none", and ask for the call in the prompt.',
        )
    tools = [_tool(item, f"tools[{number}]") for number, item in enumerate(given)]
    return [] if choice == "none" else tools


def _tool(item: Any, where: str) -> Tool:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or item.get("type") != "function":
        raise wrong(where, f'\'{where}\' must be an object {{"type": "function", "function": {{…}}}}.')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            f"{where}.function.name",
            f"'{where}.function.name' is 1 to 64 letters, digits, underscores and dashes.",
        )
    if not isinstance(function.get("parameters", {}), dict):
        raise wrong(
            f"{where}.function.parameters", f"'{where}.function.parameters' must be a JSON Schema object."
        )
    _check_tree(item, where)
    return item


def _check_tree(value: Any, where: str, depth: int = 0) -> None:
    """Refuse what a template could not write: text that is not Unicode, and nesting without end."""
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
    """What a message has beside its text where there are tools: the assistant's calls, and whose result a tool's is."""
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
    """A call as templates take it: its arguments, which the protocol writes as text, are an object."""
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
    """Text is what a model writes; that it is JSON cannot be promised without deciding which tokens may follow."""
    given = fields.take("response_format", {"type": "text"})
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise wrong("response_format", "'response_format' must be an object with a type.")
    if given["type"] != "text":
        raise unsupported(
            "response_format",
            f"Type '{given['type'][:40]}' cannot be enforced here: ask for JSON in the prompt, and check the answer.",
        )
