"""Declaring settings: `field` on the dataclass that uses them, `gather` to unite classes into one schema."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bessemer.config import aliases
from bessemer.config.values import Mismatch, Range, canonical, convert, leaves, plain, type_hints
from bessemer.errors import InputError, nearest

KEY = "bessemer_key"
RESERVED = (
    "title",
    "description",
    "extends",
    "provenance",
)  # words of recipe and config files, never settings
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
    """A dataclass field that is also the setting `key` ("section/name").

    `batch_size: int = field("training/batch_size", default=512, help="sequences per optimizer step")`
    Ranges (see `Range`) and choices hold for each element of a list; None, where the type allows it, is always in
    range.
    """
    if not _KEY_FORM.fullmatch(key) or key.split("/")[0] in RESERVED:
        raise ValueError(f"'{key}' cannot be the key of a setting: write section/name, not one of {RESERVED}")
    limits = Range(minimum, maximum, above, below, also)
    metadata = {KEY: key, "help": help, "choices": choices, "range": limits}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def dotted(key: str) -> str:
    """The form in which people write a key: training.batch_size."""
    return key.replace("/", ".")


def slashed(key: str) -> str:
    """The form in which code declares a key: training/batch_size."""
    return key.replace(".", "/")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting and the class that owns it. `default` is dataclasses.MISSING when a value must be given."""

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

    def fresh_default(self) -> Any:
        """A copy of the default: two runs never share a list."""
        return convert(self.default, self.type)

    def check(self, value: Any, source: str) -> Any:
        """`value` as the setting's type and found in range, or an InputError that says all about it."""
        try:
            converted = convert(value, self.type)
            for leaf in leaves(converted):
                self._check_leaf(leaf)
        except Mismatch as mismatch:
            meaning = f" It means: {self.help}." if self.help else ""
            problem = mismatch.problem if mismatch.problem[-1:] in ".?!" else f"{mismatch.problem}."
            if self.choices is not None and "one of" not in problem:
                problem += f" It is one of {', '.join(map(str, self.choices))}."
            raise InputError(
                f"setting '{dotted(self.key)}{mismatch.where}' ({source}): {problem}{meaning}"
            ) from None
        return converted

    def _check_leaf(self, leaf: Any) -> None:
        if leaf is None:
            return
        if self.choices is not None and leaf not in self.choices:
            known = [str(choice) for choice in self.choices]
            close = nearest(str(leaf), known)
            hint = f"; did you mean '{close}'?" if close else ""
            raise Mismatch(f"expected one of {', '.join(known)}, got {plain(leaf)!r}{hint}")
        if isinstance(leaf, bool) or not isinstance(leaf, int | float):
            return
        self.range.check(leaf)


def declared(cls: type) -> Mapping[str, Setting]:
    """Attribute name → setting, for every `field` of a dataclass or linen module, inherited ones included."""
    for base in cls.__mro__:
        stray = [name for name, value in vars(base).items() if isinstance(value, dataclasses.Field)]
        if stray:
            raise TypeError(
                f"{base.__module__}.{base.__qualname__} declares {stray[0]}: decorate it with @dataclass"
            )
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
    """Every setting that a run can be told. `explain` may say more about a key that is not among them."""

    settings: dict[str, Setting]
    explain: Callable[[str], str | None] | None = None

    def __getitem__(self, key: str) -> Setting:
        try:
            return self.settings[slashed(key)]
        except KeyError:
            raise InputError(self.unknown(slashed(key)) + ".") from None

    def __contains__(self, key: str) -> bool:
        return slashed(key) in self.settings

    def is_section(self, key: str) -> bool:
        return any(known.startswith(key + "/") for known in self.settings)

    def unknown(self, key: str, value: Any = aliases.VALUE) -> str:
        """Say that `key` is not a setting, and what to write instead where that is known.

        No suggestion is better than a wrong one: names of the field come from a table, and a misspelling must be
        close in both its section and its name.
        """
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
        return f"{message}; did you mean '{dotted(close)}'?" if close else message

    def instead(self, name: str, value: Any = aliases.VALUE) -> str | None:
        """Return what to write for another system's `name`: `write optimization.lr=0.001`, or None."""
        found = aliases.answer(name, value, self.__contains__)
        if found is None:
            return None
        lacking = [slashed(key) for word in found.words if (key := word.partition("=")[0]) not in self]
        because = [self.explain(key) if self.explain else None for key in lacking]
        if None in because:
            return None  # a schema of somebody's own, without our settings
        return str(found) if found.selects or not lacking else f"{found}; it {because[0]}"

    def _nearest(self, key: str) -> str | None:
        """The setting that `key` misspells, or None."""
        *section, name = key.split("/")
        if not section:
            same = [known for known in self.settings if known.split("/")[1:] == [name]]
            return same[0] if len(same) == 1 else nearest(key, [k for k in self.settings if "/" not in k])
        near = [
            known
            for known in self.settings
            if (above := known.split("/")[:-1])
            and (section[0] == above[0] or nearest(section[0], [above[0]], 0.75))
        ]
        names = {known.split("/")[-1]: known for known in reversed(near)}
        if name in names:
            return names[name]
        if "_" in name:
            same = [known for known in self.settings if known.split("/")[-1] == name]
            if len(same) == 1:
                return same[0]
        found = nearest(name, list(names), 0.75)
        return names[found] if found else None

    def json_schema(self) -> dict[str, Any]:
        """JSON Schema (draft 2020-12) of a recipe with these settings."""
        from bessemer.config.json_schema import recipe_schema

        return recipe_schema(self.settings)


def gather(*classes: type, explain: Callable[[str], str | None] | None = None) -> Schema:
    """Unite the settings of all classes.

    A subclass's declaration replaces its base's. Unrelated classes may share a key only with the same type
    and default (their ranges intersect); otherwise, and where a key is also a section, the error names both.
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


def _most_derived(found: Iterable[Setting]) -> list[Setting]:
    found = list(found)
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
