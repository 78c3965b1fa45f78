"""Environments in which the model calls functions: `ToolEnvironment`, and `tools` for functions of your own.

A completion with calls is answered with one tool message per call, in the model's own template; a call that cannot be
read or made is answered with "error: …", and counted (env/tool_errors of env/tool_calls). The first completion without
a call is the answer and ends the episode.

    grpo.environment='{name: tools, options: {target: my_tools.py:TOOLS}}'

`target` names a list of functions, or of OpenAI's descriptions with the function under `call`:

    def weather(city: str) -> str:
        "Return the weather of a city."
        ...
    TOOLS = [weather, {"type": "function", "function": {"name": …, "parameters": {…}}, "call": other}]
"""

from __future__ import annotations

import inspect
import re
import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bessemer.data.tokenize.chat import ToolCall
from bessemer.errors import InputError
from bessemer.registry import environments
from bessemer.rl.environments.base import Completion, Content, Environment, Row, prompt_of
from bessemer.user_code import load_attribute

LONGEST = 2000  # characters of a result
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
ACCEPTED: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(ValueError):
    """A call that cannot be made; the message is the tool's answer."""


def described(name: str, about: str, parameters: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Return the description of a function as chat templates and OpenAI's interface have it."""
    schema = {"type": "object", "properties": dict(parameters), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


class ToolEnvironment(Environment):
    """Answers calls with `call`. match: how the answer is compared with the row's `answer`, for a reward of 1 or 0:
    `exact` but for surrounding white space, `number` (its last number), or `none` (0; see grpo.rewards)."""

    def __init__(self, match: str = "exact"):
        if match not in ("exact", "number", "none"):
            raise InputError(f"match is exact, number or none; got {match!r}.")
        self.match = match
        self.row: dict[str, Any] = {}
        self.counts: dict[str, int] = {"tool_calls": 0, "tool_errors": 0}

    @abstractmethod
    def call(self, call: ToolCall) -> str:
        """Return the result of a call; raise ToolError if it cannot be made."""

    def reset(self, row: Row, seed: int) -> Content:
        prompt, columns = prompt_of(row, "this row")
        self.row = dict(columns)
        if self.match != "none" and "answer" not in self.row:
            raise InputError("the row has no column 'answer' to compare with; set match=none, and grpo.rewards.")
        return typing.cast(Content, prompt)

    def step(self, completion: Completion) -> tuple[Content | None, float, bool]:
        if not completion.calls:
            return None, float(self.match != "none" and self.right(completion.text)), True
        results = [
            {"role": "tool", "content": self.result(one), "name": one.name or "none"} for one in completion.calls
        ]
        return results, 0.0, False

    def result(self, call: ToolCall) -> str:
        self.counts["tool_calls"] += 1
        try:
            if call.error:
                raise ToolError(call.error)
            return self.call(call)[:LONGEST] or "(nothing)"
        except ToolError as error:
            self.counts["tool_errors"] += 1
            return f"error: {error}"[:LONGEST]

    def right(self, text: str) -> bool:
        wanted = str(self.row["answer"]).strip()
        if self.match == "exact":
            return text.strip() == wanted
        found, answer = ([float(one.replace(",", "")) for one in NUMBER.findall(said)] for said in (text, wanted))
        return bool(found and answer and found[-1] == answer[-1])


@environments.register("tools")
class FunctionTools(ToolEnvironment):
    """Functions of the user's. target: `file.py:NAME` or `module:NAME` of the list; what a function raises is the
    tool's answer."""

    def __init__(self, target: str, match: str = "exact"):
        super().__init__(match)
        listed = load_attribute(target, "tools")
        if not isinstance(listed, list | tuple) or not listed:
            raise InputError(f"'{target}' is not a list of functions.")
        pairs = [tool_of(item, target) for item in listed]
        self.functions = {tool["function"]["name"]: (tool, function) for tool, function in pairs}
        self.tools = [tool for tool, _ in pairs]

    def call(self, call: ToolCall) -> str:
        if call.name not in self.functions:
            raise ToolError(f"there is no function {call.name}; there are {', '.join(self.functions)}")
        tool, function = self.functions[call.name]
        check_arguments(call.arguments, tool["function"].get("parameters") or {})
        try:
            return str(function(**call.arguments))
        except Exception as error:  # the model sees it, and may do better
            raise ToolError(f"{type(error).__name__}: {error}") from error


def tool_of(item: Any, where: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return the description and the function of an entry of a list of tools."""
    if isinstance(item, Mapping) and callable(item.get("call")) and isinstance(item.get("function"), Mapping):
        return {"type": "function", "function": dict(item["function"])}, item["call"]
    if not inspect.isroutine(item):
        raise InputError(f"'{where}': {item!r:.100} is not a function, and not a description with one under 'call'.")
    hints = typing.get_type_hints(item)
    parameters, required = {}, []
    for name, one in inspect.signature(item).parameters.items():
        kind = TYPES.get(typing.get_origin(hints.get(name)) or hints.get(name))
        if kind is None or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise InputError(
                f"'{where}': the parameter '{name}' of {item.__name__} needs a type of {', '.join(TYPES.values())}; or "
                "describe the function yourself."
            )
        parameters[name] = {"type": kind}
        required += [name] if one.default is one.empty else []
    return described(item.__name__, inspect.getdoc(item) or "", parameters, required), item


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise ToolError unless the arguments have the names and plain types of a JSON schema."""
    known: Mapping[str, Any] = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in arguments:
            raise ToolError(f"the argument {name} is missing")
    for name, value in arguments.items():
        if name not in known:
            raise ToolError(f"there is no argument {name}; there are {', '.join(known) or 'none'}")
        kinds = known[name].get("type", list(ACCEPTED)) if isinstance(known[name], Mapping) else list(ACCEPTED)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        fits = (isinstance(value, ACCEPTED.get(kind, (object,))) for kind in kinds)
        if not any(fits) or (isinstance(value, bool) and "boolean" not in kinds):
            raise ToolError(f"the argument {name} is {value!r:.50}, not of type {' or '.join(kinds)}")
