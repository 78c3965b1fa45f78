"""Declare settings with `field` on the dataclass that uses them; `gather` unites classes into one schema."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bessemer.config import aliases
from bessemer.config.values import UNIONS, Mismatch, Range, ReadsText, canonical, convert, leaves, plain, type_hints
from bessemer.errors import InputError, nearest

KEY = "bessemer_key"
RESERVED = ("title", "description", "extends", "provenance")  # words of recipe and config files, never settings
_KEY_FORM = re.compile(r"[A-Za-z]\w*(/[A-Za-z]\w*)*")


def field(
    key: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    help: str = "",
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    also: tuple[float, ...] = (),
) -> Any:
    """Return a dataclass field that is also the setting `key` ("section/name").

    `batch_size: int = field("training/batch_size", default=512, help="sequences per optimizer step")`
    Ranges (see `Range`) and choices hold for each element of a list; None is always in range.
    """
    if not _KEY_FORM.fullmatch(key) or key.split("/")[0] in RESERVED:
        raise ValueError(f"'{key}' cannot be the key of a setting: write section/name, not one of {RESERVED}")
    limits = Range(minimum, maximum, above, below, also)
    metadata = {KEY: key, "help": help, "choices": choices, "range": limits}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def dotted(key: str) -> str:
    """Return the form in which people write a key: training.batch_size."""
    return key.replace("/", ".")


def slashed(key: str) -> str:
    """Return the form in which code declares a key: training/batch_size."""
    return key.replace(".", "/")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting and the class that owns it. `default` is dataclasses.MISSING if a value is required."""

    key: str
    type: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None
    range: Range
    owner: type

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def owner_name(self) -> str:
        return f"{self.owner.__module__}.{self.owner.__qualname__}"

    def check(self, value: Any, source: str) -> Any:
        """Return `value` as the setting's type, or raise an InputError that explains the setting."""
        try:
            converted = convert(value, self.type)
            for leaf in leaves(converted):
                self._check_leaf(leaf)
        except Mismatch as mismatch:
            meaning = f" It means: {self.help}." if self.help else ""
            problem = mismatch.problem if mismatch.problem[-1:] in ".?!" else f"{mismatch.problem}."
            if self.choices is not None and "one of" not in problem:
                problem += f" It is one of {', '.join(map(str, self.choices))}."
            raise InputError(f"setting '{dotted(self.key)}{mismatch.where}' ({source}): {problem}{meaning}") from None
        return converted

    def _check_leaf(self, leaf: Any) -> None:
        if leaf is None:
            return
        if self.choices is not None and leaf not in self.choices:
            known = [str(choice) for choice in self.choices]
            close = nearest(str(leaf), known)
            hint = f"; did you mean '{close}'?" if close else ""
            raise Mismatch(f"expected one of {', '.join(known)}, got {plain(leaf)!r}{hint}")
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            self.range.check(leaf)


def declared(cls: type) -> Mapping[str, Setting]:
    """Return attribute name → setting for every `field` of a dataclass or linen module, with inherited ones."""
    for base in cls.__mro__:
        stray = [name for name, value in vars(base).items() if isinstance(value, dataclasses.Field)]
        if stray:
            raise TypeError(f"{base.__module__}.{base.__qualname__} declares {stray[0]}: decorate it with @dataclass")
    if not dataclasses.is_dataclass(cls):
        return {}
    fields = {f.name: f for f in dataclasses.fields(cls) if KEY in f.metadata and f.init}
    hints = type_hints(cls, tuple(fields))
    return {name: _setting(cls, f, hints[name]) for name, f in fields.items()}


def _setting(cls: type, f: dataclasses.Field[Any], annotation: Any) -> Setting:
    owner = next(base for base in cls.__mro__ if f.name in inspect.get_annotations(base))
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    facts = {name: f.metadata[name] for name in ("help", "choices", "range")}
    setting = Setting(f.metadata[KEY], annotation, default, owner=owner, **facts)
    if setting.required:
        return setting
    checked = setting.check(default, f"default of {setting.owner_name}.{f.name}")
    return dataclasses.replace(setting, default=checked)


@dataclasses.dataclass(frozen=True)
class Schema:
    """Every setting of a run. `explain` may say more about a key that is not among them."""

    settings: dict[str, Setting]
    explain: Callable[[str], str | None] | None = None

    def __getitem__(self, key: str) -> Setting:
        try:
            return self.settings[aliases.current_name(slashed(key))]
        except KeyError:
            raise InputError(self.unknown(slashed(key)) + ".") from None

    def __contains__(self, key: str) -> bool:
        return aliases.current_name(slashed(key)) in self.settings

    def covering(self, key: str) -> str | None:
        """Return the setting at `key` or above it: a mapping below a setting is part of its value."""
        names = aliases.current_name(key).split("/")
        paths = ("/".join(names[:depth]) for depth in range(1, len(names) + 1))
        return next((path for path in paths if path in self.settings), None)

    def is_section(self, key: str) -> bool:
        return any(known.startswith(key + "/") for known in self.settings)

    def unknown(self, key: str, value: Any = aliases.VALUE) -> str:
        """Return the error for a `key` that is not a setting, with what to write instead if that is known. A suggestion
        is close in both section and name, or its name alone leaves no doubt."""
        message = f"unknown setting '{dotted(key)}'"
        because = self.explain(key) if self.explain else None
        if because:
            return f"{message}: it {because}"
        instead = self.instead(key, value)
        if instead:
            return f"{message}: {instead}"
        if self.is_section(key):
            return f"'{dotted(key)}' is a section, not a setting: write {dotted(key)}.NAME=value"
        close = self._nearest(key)
        if close:
            return f"{message}; did you mean '{dotted(close)}'?"
        section, _, name = key.rpartition("/")
        elsewhere = [dotted(known) for known in sorted(self.settings) if section and known.split("/")[1:] == [name]]
        if self.is_section(section) and 0 < len(elsewhere) <= 3:
            return f"{message}; that name is in another section: {', '.join(elsewhere)}"
        return message

    def instead(self, name: str, value: Any = aliases.VALUE) -> str | None:
        """Return what to write for another system's `name`: `write optimization.lr=0.001`, or None."""
        found = self.answer(name, value)
        return None if found is None else str(found)

    def answer(self, name: str, value: Any = aliases.VALUE) -> aliases.Answer | None:
        """Return the settings to write for another system's `name`, or None."""
        found = aliases.answer(name, value, self.__contains__)
        if found is None:
            return None
        lacking = [slashed(key) for word in found.words if (key := word.partition("=")[0]) not in self]
        because = [self.explain(key) if self.explain else None for key in lacking]
        if None in because:
            return None  # a schema of somebody's own, without our settings
        return found if found.selects or not lacking else found._replace(missing=because[0] or "")

    def _nearest(self, key: str) -> str | None:
        """Return the setting that `key` misspells, or None."""
        *section, name = key.split("/")
        if not section:
            same = [known for known in self.settings if known.split("/")[1:] == [name]]
            if len(same) == 1:
                return same[0]
            return self._elsewhere(name) or nearest(key, [k for k in self.settings if "/" not in k])
        near = [
            known
            for known in self.settings
            if (above := known.split("/")[:-1]) and (section[0] == above[0] or nearest(section[0], [above[0]], 0.75))
        ]
        names = {known.split("/")[-1]: known for known in reversed(near)}
        if name in names:
            return names[name]
        if "_" in name:
            same = [known for known in self.settings if known.split("/")[-1] == name]
            if len(same) == 1:
                return same[0]
        found = nearest(name, list(names), 0.75)
        return names[found] if found else self._elsewhere(name)

    def _elsewhere(self, name: str) -> str | None:
        """Return the only setting that `name` can mean in any section: lora_rank, blocksize, chekpoint_interval."""
        joined = [known for known in self.settings if "/" in known and known.replace("/", "_") == name]
        if joined or len(name) < 8:
            return joined[0] if len(joined) == 1 else None
        words: dict[str, list[str]] = {}
        for known in self.settings:
            words.setdefault(known.split("/")[-1].replace("_", ""), []).append(known)
        close = nearest(name.replace("_", ""), list(words), 0.9)
        return words[close][0] if close and len(words[close]) == 1 else None

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema (draft 2020-12) of a recipe with these settings, for editors that check and complete
        recipes. Sections are nested objects that allow nothing unknown."""
        root = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Bessemer recipe", **_section()}
        words = {"title": "one line", "description": "what it is for", "extends": "recipe that this one changes"}
        root["properties"] = {word: {"type": "string", "description": text} for word, text in words.items()}
        for key in sorted(self.settings):
            *sections, name = key.split("/")
            place = root
            for section in sections:
                place = place["properties"].setdefault(section, _section())
            place["properties"][name] = _setting_schema(self.settings[key])
        return root


def gather(*classes: type, explain: Callable[[str], str | None] | None = None) -> Schema:
    """Return the settings of all classes as one schema.

    A subclass's declaration replaces its base's. Unrelated classes may share a key only with the same type and default
    (their ranges intersect). Other duplicates, and a key that is also a section, are an InputError that names both.
    """
    declarations: dict[str, list[Setting]] = {}
    for cls in dict.fromkeys(classes):
        for setting in declared(cls).values():
            declarations.setdefault(setting.key, []).append(setting)
    settings = {key: functools.reduce(_unite, _most_derived(found)) for key, found in declarations.items()}
    for key, setting in settings.items():
        parts = key.split("/")
        for depth in range(1, len(parts)):
            above = settings.get("/".join(parts[:depth]))
            if above is not None:
                raise InputError(
                    f"'{dotted(above.key)}' is a setting of {above.owner_name} and also a section, because "
                    f"{setting.owner_name} declares '{dotted(key)}'. Rename one of them."
                )
    return Schema(settings, explain)


def _most_derived(found: list[Setting]) -> list[Setting]:
    owners = {setting.owner for setting in found}
    replaced = {base for base in owners for owner in owners if owner is not base and issubclass(owner, base)}
    return [setting for setting in found if setting.owner not in replaced]


def _unite(first: Setting, second: Setting) -> Setting:
    same_type = canonical(first.type) == canonical(second.type)
    if not same_type or type(first.default) is not type(second.default) or first.default != second.default:
        raise InputError(
            f"the setting '{dotted(first.key)}' is declared differently by {first.owner_name} "
            f"({_facts(first)}) and by {second.owner_name} ({_facts(second)}). Give one of them another key, "
            "make the declarations equal, or derive one class from the other."
        )
    choices = first.choices if second.choices is None else second.choices
    if first.choices is not None and second.choices is not None:
        choices = tuple(choice for choice in first.choices if choice in second.choices)
    united = first.range.intersect(second.range)
    return dataclasses.replace(first, help=first.help or second.help, choices=choices, range=united)


def _facts(setting: Setting) -> str:
    name = getattr(setting.type, "__name__", None) if isinstance(setting.type, type) else None
    default = "no default" if setting.required else f"default {plain(setting.default)!r}"
    return f"{name or setting.type}, {default}"


# --- JSON Schema ---
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
    """`limits` and `choices` hold for the scalars, however deep inside lists they are."""
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
    return {"anyOf": [{"type": "string"}, schema]} if isinstance(cls, ReadsText) else schema
