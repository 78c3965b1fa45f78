"""Annotations of settings: resolved, compared, and put in words."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

from bessemer.errors import InputError

UNIONS = (typing.Union, types.UnionType)


@functools.cache
def type_hints(cls: type, names: tuple[str, ...]) -> dict[str, Any]:
    """Resolved annotations of these attributes only: others may name what exists for type checkers alone."""
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
    """A form in which equal types compare equal: List[int] and list[int], Optional[X] and None | X."""
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
    """True for types written as a mapping, so that two layers of it merge instead of replacing each other."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in UNIONS or origin is typing.Annotated:
        return any(takes_mapping(arg) for arg in args)
    return (origin or annotation) in (dict, Any) or dataclasses.is_dataclass(annotation)


def describe(annotation: Any) -> str:
    """The type in words, for errors and tables."""
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
