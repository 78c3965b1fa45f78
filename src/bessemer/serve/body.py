"""A request's JSON object, read field by field: types are exact, null is "not given", and a field nobody reads is an
error, so that no setting is dropped in silence."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from bessemer.errors import nearest
from bessemer.serve.errors import ApiError, wrong

# Fields that say who asks, not what is written.
ABOUT_THE_CALLER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields of the protocol that this server has not, with the values at which they ask for nothing.
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
    """The JSON object of a body; NaN and Infinity are not JSON."""
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
    """A value's type in JSON's words."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def text(value: Any, param: str) -> str:
    """A string that can be written as UTF-8 (half a surrogate pair cannot)."""
    if not isinstance(value, str):
        raise wrong(param, f"'{param}' must be a string, not {kind(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(param, f"'{param}' holds half a surrogate pair, which is no character.") from None
    return value


def unsupported(name: str, remedy: str) -> ApiError:
    """400: a field of the protocol that this server has not."""
    return wrong(name, f"'{name}' is not supported by this server. {remedy}", "unsupported_parameter")


class Fields:
    """The fields of one body. Each is taken once; `finish` complains about what is left."""

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
            raise wrong(name, f"'{name}' is between {low} and {high}; got {_short(value)}.")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, f"'{name}' must be a number, not {kind(value)}.")
        if not (low <= value <= high and math.isfinite(value)):
            raise wrong(name, f"'{name}' is between {low:g} and {high:g}; got {_short(value)}.")
        return float(value)

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or an array of up to `most`; none is empty."""
        value = self.take(name, [])
        values = value if isinstance(value, list) else [value]
        if len(values) > most:
            raise wrong(name, f"'{name}' holds at most {most} strings; got {len(values)}.")
        given = tuple(text(item, name) for item in values)
        if "" in given:
            raise wrong(name, f"'{name}' holds an empty string.")
        return given

    def finish(self) -> None:
        """What nobody took: fine if it asks for nothing, else an error."""
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
