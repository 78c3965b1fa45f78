"""Strict conversion between plain values (YAML, command line) and the types that settings are annotated with.

`plain` is the inverse of `convert`, so that a saved configuration reads back as the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bessemer.errors import InputError, nearest


class Mismatch(ValueError):
    """A value does not fit its annotation; `where` is the place inside the value, as in `[1].rate`."""

    def __init__(self, problem: str, where: str = ""):
        super().__init__(problem)
        self.problem = problem
        self.where = where


def convert(value: Any, annotation: Any) -> Any:
    """Return `value` as `annotation`, or raise Mismatch. The result shares no container with the input."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return plain(value)
    if origin is typing.Annotated:
        return convert(value, typing.get_args(annotation)[0])
    if origin in UNIONS:
        return _union(value, annotation)
    if origin is typing.Literal:
        return _literal(value, annotation)
    if (origin or annotation) in (list, tuple):
        return _sequence(value, annotation)
    if (origin or annotation) is dict:
        return _mapping(value, annotation)
    if annotation in _SCALARS:
        return _scalar(value, annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enum(value, annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(value, annotation)
    raise Mismatch(f"{name_of(annotation)} cannot be the type of a setting")


def _refuse(value: Any, annotation: Any) -> Mismatch:
    expected = describe(annotation)
    if value is None:
        return Mismatch(f"expected {expected}, got nothing (null)")
    hint = ""
    if isinstance(value, bool | int | float) and ("text" in expected or "one of" in expected):
        hint = "; quote it if it is meant as text"
    return Mismatch(f"expected {expected}, got {value!r} ({name_of(type(value))}){hint}")


def _scalar(value: Any, annotation: Any) -> Any:
    """A float without a fraction is also an integer: people write a billion as 1e9."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if annotation in (None, type(None)) and value is None:
        return None
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is int and is_number:
        if isinstance(value, numbers.Integral):
            return int(value)
        if float(value).is_integer():
            return int(float(value))
    if annotation is float and is_number:
        with contextlib.suppress(OverflowError):
            if not math.isnan(value):
                return float(value)
    if annotation is str and isinstance(value, str) and not isinstance(value, enum.Enum):
        return str(value)
    if annotation is Path and isinstance(value, str | Path):
        return Path(value)
    raise _refuse(value, annotation)


_SCALARS = (None, type(None), bool, int, float, str, Path)


def _union(value: Any, annotation: Any) -> Any:
    """Try the member of the value's own type first (so `int | float` keeps 1.0), then each in the order written.

    The word `none` means None if None is allowed, because that is how the documentation prints it.
    """
    members = typing.get_args(annotation)
    if type(None) in members and isinstance(value, str) and value.lower() == "none":
        literals = [word for member in members for word in typing.get_args(member) if isinstance(word, str)]
        if value not in literals:
            return None
    refusals = []
    for member in sorted(members, key=lambda m: (typing.get_origin(m) or m) is not type(value)):
        try:
            return convert(value, member)
        except Mismatch as mismatch:
            refusals.append(mismatch)
    inside = [refusal for refusal in refusals if refusal.where]
    raise inside[0] if inside else _refuse(value, annotation)


def _literal(value: Any, annotation: Any) -> Any:
    for word in typing.get_args(annotation):
        if type(word) is type(value) and word == value:
            return word
    raise _refuse(value, annotation)


def _enum(value: Any, annotation: type[enum.Enum]) -> enum.Enum:
    if isinstance(value, annotation):
        return value
    if isinstance(value, str):
        if value in annotation.__members__:
            return annotation[value]
        for name, member in annotation.__members__.items():
            if name.lower() == value.lower():
                return member
    raise _refuse(value, annotation)


def _sequence(value: Any, annotation: Any) -> Any:
    """Return a list or tuple. A flat value is wrapped: x → [x]; for lists of lists x → [[x]], [x, y] → [[x, y]]."""
    kind = typing.get_origin(annotation) or annotation
    args = typing.get_args(annotation) or (Any,)
    if value is None:
        raise _refuse(value, annotation)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if kind is tuple and not (len(args) == 2 and args[1] is Ellipsis) and args != (Any,):
        if len(items) != len(args):
            raise Mismatch(f"expected {describe(annotation)}, got {len(items)} values")
        return tuple(_at(f"[{i}]", convert, *pair) for i, pair in enumerate(zip(items, args, strict=True)))
    item_type = args[0]
    is_nested = (typing.get_origin(item_type) or item_type) in (list, tuple)
    if is_nested and items and not isinstance(value, str | Mapping):
        nested = [isinstance(item, list | tuple) for item in items]
        if not any(nested):
            items = [items]
        elif not all(nested):
            raise Mismatch(f"expected {describe(annotation)}, got a mix of lists and single values; wrap each in [ ]")
    return kind(_at(f"[{i}]", convert, item, item_type) for i, item in enumerate(items))


def _mapping(value: Any, annotation: Any) -> dict[str, Any]:
    key_type, item_type = typing.get_args(annotation) or (str, Any)
    if key_type is not str:
        raise Mismatch(f"{name_of(annotation)} cannot be the type of a setting: its keys are not text")
    if not isinstance(value, Mapping):
        raise _refuse(value, annotation)
    for key in value:
        if not isinstance(key, str):
            raise Mismatch(f"the key {key!r} is not text; quote it")
    return {key: _at(f".{key}", convert, item, item_type) for key, item in value.items()}


@runtime_checkable
class ReadsText(Protocol):
    """A dataclass whose values can also be written as one word, such as `chats.jsonl:PACKED`."""

    def from_string(self, text: str) -> Any: ...


def _dataclass(value: Any, annotation: type) -> Any:
    """Convert a mapping of its fields, an instance, or text if the class has `from_string`."""
    if isinstance(value, str) and isinstance(annotation, ReadsText):
        try:
            return annotation.from_string(value)
        except (ValueError, InputError) as error:
            raise Mismatch(str(error)) from error
    known = {f.name: f for f in dataclasses.fields(annotation) if f.init}
    if type(value) is annotation:
        value = {name: getattr(value, name) for name in known}
    if not isinstance(value, Mapping):
        raise _refuse(value, annotation)
    for name in value:
        if name not in known:
            close = nearest(str(name), list(known))
            hint = f"; did you mean '{close}'?" if close else f" (it has {', '.join(known)})"
            raise Mismatch(f"{annotation.__name__} has no field '{name}'{hint}")
    missing = [name for name, f in known.items() if name not in value and _required(f)]
    if missing:
        raise Mismatch(f"{annotation.__name__} needs {', '.join(missing)}")
    hints = type_hints(annotation, tuple(known))
    arguments = {name: _at(f".{name}", convert, item, hints[name]) for name, item in value.items()}
    try:
        return annotation(**arguments)
    except (ValueError, InputError) as error:
        raise Mismatch(str(error)) from error


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _at(place: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Mismatch as mismatch:
        raise Mismatch(mismatch.problem, place + mismatch.where) from None


_CASTS: tuple[tuple[type, Any], ...] = ((str, str), (Path, str), (numbers.Integral, int), (numbers.Real, float))


def plain(value: Any) -> Any:
    """Return the YAML form: dataclasses become mappings, enums their names, tuples lists, paths text."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind, cast in _CASTS:
        if isinstance(value, kind):
            return cast(value)
    raise Mismatch(f"{value!r} ({name_of(type(value))}) is not a value that a setting can hold")


def leaves(value: Any) -> Iterable[Any]:
    """Yield the scalars inside lists and mappings; ranges and choices hold for each of them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


# --- annotations of settings ---
UNIONS = (typing.Union, types.UnionType)


@functools.cache
def type_hints(cls: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the resolved annotations of these attributes only; others may exist for type checkers alone."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = {name: hint for name, hint in inspect.get_annotations(base).items() if name in names}
        if not own:
            continue
        module = sys.modules.get(base.__module__)
        holder = types.SimpleNamespace(__annotations__=own)
        try:
            hints.update(typing.get_type_hints(holder, vars(module) if module else {}, dict(vars(base))))
        except NameError as error:
            raise InputError(
                f"{base.__module__}.{base.__qualname__}: the annotation of a setting cannot be resolved "
                f"({error}). Import that name at the top of the module, not under TYPE_CHECKING."
            ) from error
    return hints


def canonical(annotation: Any) -> Any:
    """Return a form in which equal types compare equal: List[int] and list[int], Optional[X] and None | X."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return canonical(args[0])
    if origin is typing.Literal:
        return ("literal", args)
    if origin in UNIONS:
        return ("union", frozenset(canonical(arg) for arg in args))
    if origin is None:
        return type(None) if annotation is None else annotation
    return (origin, tuple(canonical(arg) for arg in args))


def takes_mapping(annotation: Any) -> bool:
    """Return whether the type is written as a mapping, so that two layers of it merge."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in UNIONS or origin is typing.Annotated:
        return any(takes_mapping(arg) for arg in args)
    return (origin or annotation) in (dict, Any) or dataclasses.is_dataclass(annotation)


def describe(annotation: Any) -> str:
    """Return the type in words, for errors and tables."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe(args[0])
    if origin in UNIONS:
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"({', '.join(describe(arg) for arg in args)})"
    if origin in (list, tuple):
        return f"list of {describe(args[0])}"
    if origin is dict:
        return f"mapping from text to {describe(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(annotation.__members__)
    return _WORDS.get(annotation, name_of(annotation))


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    None: "null",
    type(None): "null",
    Path: "a path",
    list: "a list",
    dict: "a mapping",
    Any: "any value",
}


def name_of(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation))


# --- ranges of numbers ---
@dataclass(frozen=True)
class Range:
    """minimum ≤ x ≤ maximum and above < x < below, or one of `also`, such as -1 for "derive it"."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()

    @property
    def is_free(self) -> bool:
        return all(limit is None for limit in (self.minimum, self.maximum, self.above, self.below))

    def holds(self, number: float) -> bool:
        return number in self.also or not (
            (self.minimum is not None and number < self.minimum)
            or (self.maximum is not None and number > self.maximum)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        )

    def check(self, number: float) -> None:
        """Raise Mismatch for a number outside. A setting with a range is a quantity, so it must be finite."""
        if not self.holds(number):
            raise Mismatch(f"expected {self.describe()}, got {number}")
        if self.is_free:
            return
        if math.isinf(number) if isinstance(number, float) else abs(number) >= 2**63:
            raise Mismatch(f"expected a number that 64 bits can hold, got {number}")

    def describe(self) -> str:
        """`at least 0 and below 1`; `at least 1, or -1`."""
        words = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        limits = " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)
        return ", or ".join([limits, *map(str, self.also)])

    def intersect(self, other: Range) -> Range:
        """Return the range of the numbers in both."""

        def tightest(choose: Any, *limits: float | None) -> float | None:
            return choose((limit for limit in limits if limit is not None), default=None)

        return Range(
            minimum=tightest(max, self.minimum, other.minimum),
            maximum=tightest(min, self.maximum, other.maximum),
            above=tightest(max, self.above, other.above),
            below=tightest(min, self.below, other.below),
            also=tuple(word for word in self.also + other.also if self.holds(word) and other.holds(word)),
        )

    def json_schema(self, scalar: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema `scalar` of a number, with these limits."""
        names = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
        }
        limited = scalar | {name: limit for name, limit in names.items() if limit is not None}
        return {"anyOf": [limited, {"enum": list(self.also)}]} if self.also else limited


# --- durations: 2h30m, 1d, 90 (seconds) ---
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
_FORM = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS))


def parse_duration(text: str | int | float) -> float:
    """Return the seconds in `text`: days, hours, minutes and seconds in this order, or a bare number. `2h30` is an
    error, not two hours."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        word = str(text).strip().lower()
        match = _FORM.fullmatch(word)
        if re.fullmatch(_NUMBER, word):
            seconds = float(word)
        elif word and match:
            parts = zip(match.groups(), _UNITS.values(), strict=True)
            seconds = sum(float(number) * unit for number, unit in parts if number)
        else:
            raise InputError(f"'{text}' is not a duration. Write 2h30m, 1d, 45s, or a number of seconds.")
    if not math.isfinite(seconds) or seconds <= 0:
        raise InputError(f"a duration must be more than 0 seconds, got '{text}'. Write 2h30m, 1d or 90.")
    return seconds
