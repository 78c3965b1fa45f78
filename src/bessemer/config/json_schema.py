"""JSON Schema of the settings, for editors that check and complete recipes while they are typed."""

from __future__ import annotations

import dataclasses
import enum
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.config.declare import Setting
from bessemer.config.values import UNIONS, Range, plain, type_hints

_SIMPLE: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    Any: {},
}


def recipe_schema(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Draft 2020-12: sections are nested objects that allow nothing unknown, as when a run starts."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    root = {"$schema": draft, "title": "Bessemer recipe", **_section()}
    words = {"title": "one line", "description": "what it is for", "extends": "recipe that this one changes"}
    root["properties"] = {word: {"type": "string", "description": text} for word, text in words.items()}
    for key in sorted(settings):
        *sections, name = key.split("/")
        place = root
        for section in sections:
            place = place["properties"].setdefault(section, _section())
        place["properties"][name] = _setting_schema(settings[key])
    return root


def _section() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _setting_schema(setting: Setting) -> dict[str, Any]:
    schema = dict(_type_schema(setting.type, setting.range, setting.choices))
    if setting.help:
        schema["description"] = setting.help
    if not setting.required:
        default = plain(setting.default)
        if not (isinstance(default, float) and math.isinf(default)):  # JSON has no infinity
            schema["default"] = default
    return schema


def _type_schema(annotation: Any, limits: Range, choices: tuple[Any, ...] | None) -> dict[str, Any]:
    """`limits` and `choices` belong to the scalars, however deep inside lists they are."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_schema(args[0], limits, choices)
    if origin in UNIONS:
        return {"anyOf": [_type_schema(arg, limits, choices) for arg in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if (origin or annotation) in (list, tuple):
        return _list_schema(annotation, limits, choices)
    if (origin or annotation) is dict:
        values = _type_schema(args[1], limits, choices) if args else {}
        return {"type": "object", "additionalProperties": values}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": list(annotation.__members__)}
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _dataclass_schema(annotation)
    schema = dict(_SIMPLE[annotation])
    if choices is not None and annotation not in (None, type(None)):
        schema["enum"] = [plain(choice) for choice in choices]
    if annotation in (int, float):
        return limits.json_schema(schema)
    return schema


def _list_schema(annotation: Any, limits: Range, choices: tuple[Any, ...] | None) -> dict[str, Any]:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and args[-1] is not Ellipsis:
        items = [_type_schema(arg, limits, choices) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    item = _type_schema(args[0], limits, choices) if args else {}
    array = {"type": "array", "items": item}
    return {"anyOf": [array, *item["anyOf"]]} if "anyOf" in item else {"anyOf": [array, item]}


def _dataclass_schema(cls: type) -> dict[str, Any]:
    fields = [f for f in dataclasses.fields(cls) if f.init]
    hints = type_hints(cls, tuple(f.name for f in fields))
    schema = _section()
    schema["properties"] = {f.name: _type_schema(hints[f.name], Range(), None) for f in fields}
    missing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    if required:
        schema["required"] = required
    return {"anyOf": [{"type": "string"}, schema]} if hasattr(cls, "from_string") else schema
