"""Resolve a recipe and overrides into a checked configuration: defaults < recipe < command line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from bessemer.config.aliases import choices, current_name, together
from bessemer.config.declare import Schema, Setting, declared, dotted, slashed
from bessemer.config.recipes import (
    COMMAND_LINE,
    DEFAULT,
    Layer,
    Origin,
    OriginKind,
    escape,
    flatten,
    merge,
    nest,
    override_layer,
    raw_values,
    read_recipe,
    read_yaml,
)
from bessemer.config.values import convert, plain, takes_mapping
from bessemer.errors import InputError

SchemaOf = Callable[[Mapping[str, Any]], Schema]
Overrides = Sequence[str] | Mapping[str, Any]
T = TypeVar("T")


class Config:
    """Typed values of every setting of a schema, by flat key; `a.b` and `a/b` name the same one.

    `set` records what the program derives, until `freeze`; `replace` returns a changed copy. `notes` are lines to show,
    such as the settings of a recipe that were left out because another part was selected.
    """

    def __init__(
        self, schema: Schema, values: Mapping[str, Any], provenance: Mapping[str, Origin], notes: Iterable[str] = ()
    ):
        self.schema = schema
        self.notes = list(notes)
        self._values, self._provenance = dict(values), dict(provenance)
        self._frozen = False

    @property
    def values(self) -> Mapping[str, Any]:
        """Return a read-only view, by flat key."""
        return MappingProxyType(self._values)

    @property
    def provenance(self) -> Mapping[str, Origin]:
        """Return the origin of each value, as a read-only view."""
        return MappingProxyType(self._provenance)

    def __getitem__(self, key: str) -> Any:
        return self.values[self.schema[key].key]

    def __contains__(self, key: str) -> bool:
        return key in self.schema

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(current_name(slashed(key)), default)

    def set(self, key: str, value: Any, why: str | Origin) -> None:
        """Record what the program chose by itself, with its reason; checked like any other value."""
        setting = self.schema[key]
        origin = why if isinstance(why, Origin) else Origin(OriginKind.DERIVED, why)
        value = setting.check(value, str(origin))
        if self._frozen:
            if value == self._values[setting.key]:
                return  # a part of the run that is built once more derives the same
            raise TypeError(
                f"{dotted(setting.key)} cannot be set: the configuration is frozen once a run is built. Use "
                "config.replace({key: value}, why), which returns a changed copy."
            )
        self._values[setting.key], self._provenance[setting.key] = value, origin

    def freeze(self) -> Config:
        """Return this configuration; from now on `set` raises TypeError for another value."""
        self._frozen = True
        return self

    def copy(self) -> Config:
        """Return a copy that is not frozen."""
        return Config(self.schema, self._values, self._provenance, self.notes)

    def replace(self, changes: Mapping[str, Any], why: str | Origin | None = None) -> Config:
        """Return a copy with other values, frozen if this one is. Without `why` each keeps its origin."""
        changed = self.copy()
        for key, value in changes.items():
            changed.set(key, value, self.provenance[slashed(key)] if why is None else why)
        changed._frozen = self._frozen
        return changed

    def is_set(self, key: str) -> bool:
        """Return whether a recipe, the caller or the program set the value; False for a default."""
        return not self.provenance[self.schema[key].key].is_default

    def asked(self, *keys: str) -> list[str]:
        """Return those of `keys` that the caller set, as opposed to a recipe or a default."""
        return [key for key in keys if self.provenance[key].is_caller and self.values[key] is not None]

    def make(self, cls: type[T], **overrides: Any) -> T:
        """Return an instance of `cls` with each declared field taken from here; `overrides` win. A key that is not a
        setting here has the class's own default."""
        arguments: dict[str, Any] = {}
        for name, setting in declared(cls).items():
            if name not in overrides and setting.key in self:
                arguments[name] = setting.check(self[setting.key], str(self.provenance[setting.key]))
        return cls(**arguments, **overrides)

    def given(self) -> dict[str, Any]:
        """Return the values that are not defaults, by flat key."""
        return {key: value for key, value in self.values.items() if self.is_set(key)}

    def tree(self) -> dict[str, Any]:
        """Return nested plain values, ready for YAML or JSON."""
        return _nested((key, plain(value)) for key, value in self.values.items())

    def to_yaml(self) -> str:
        """Return every setting, and under `provenance` the origin of those that are not defaults."""
        from omegaconf import OmegaConf

        given = {dotted(key): str(origin) for key, origin in self.provenance.items() if not origin.is_default}
        return OmegaConf.to_yaml(OmegaConf.create(escape({**self.tree(), "provenance": given})))


def resolve(
    schema_of: SchemaOf,
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    source: Origin = COMMAND_LINE,
    allow_open: bool = False,
    between: Sequence[Layer] = (),
) -> Config:
    """Return the configuration of a run.

    schema_of: returns the schema that the raw values (flat keys such as "model/family") select. recipe: a shipped name,
    a path or a mapping. source: the origin of `overrides`. allow_open: keep what the recipe leaves open as ???; such a
    configuration cannot be run. between: layers over the recipe and under `overrides`.
    """
    layers = [] if recipe is None else read_recipe(recipe).layers
    return _build(schema_of, [*layers, *between, override_layer(overrides, source)], allow_open)


def select_schema(schema_of: SchemaOf, recipe: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> Schema:
    """Return the schema that a recipe and overrides select; their values are not checked."""
    return schema_of(raw_values([*read_recipe(recipe).layers, override_layer(overrides, COMMAND_LINE)]))


def load_saved(path: str | Path, schema_of: SchemaOf, overrides: Overrides = ()) -> Config:
    """Return a run's config.yaml as the same Config, with origins; `overrides` are applied over it."""
    origin = Origin(OriginKind.SAVED, str(path))
    tree = nest(read_yaml(Path(path), "saved configuration", saved=True), origin)
    origins = tree.pop("provenance", {})
    if not isinstance(origins, Mapping):
        raise InputError(f"{origin}: 'provenance' must be a mapping from settings to their origin.")
    origins = merge([Layer(origin, dict(origins))], resolve=True, is_section=lambda key: False)
    layer = Layer(
        origin, tree, origins={current_name(slashed(key)): Origin.parse(str(word)) for key, word in origins.items()}
    )
    return _build(schema_of, [layer, override_layer(overrides, COMMAND_LINE)])


def _build(schema_of: SchemaOf, layers: list[Layer], allow_open: bool = False) -> Config:
    schema = schema_of(raw_values(layers))
    layers, notes = _without_replaced(schema_of, schema, layers)
    givers = _givers(schema_of, schema, layers)
    given = _resolve_values(schema, layers, [schema[key] for key in schema.settings if key not in givers])
    values: dict[str, Any] = {}
    provenance: dict[str, Origin] = {}
    for key, setting in schema.settings.items():
        if key not in givers:
            if setting.required:
                raise InputError(f"'{dotted(key)}' has no default: give {dotted(key)}=… ({setting.help}).")
            values[key], provenance[key] = convert(setting.default, setting.type), DEFAULT
            continue
        if allow_open and _dig(given, key) == "???":
            values[key], provenance[key] = "???", Origin(OriginKind.OPEN, str(givers[key].origin))
            continue
        values[key] = _checked(setting, _dig(given, key), givers[key])
        origin = givers[key].origin_of(key)
        changed = origin.is_default and values[key] != setting.default  # saved by a version with another default
        provenance[key] = givers[key].origin if changed else origin
    return Config(schema, values, provenance, notes)


def _without_replaced(schema_of: SchemaOf, schema: Schema, layers: list[Layer]) -> tuple[list[Layer], list[str]]:
    """Return the layers without settings of a part that a later layer replaced, and a note for each such layer.

    With `model.family=mine` over a recipe for GPTs, the recipe's model.window is no longer a setting. A key that
    never was one stays and is rejected later.
    """
    kept, notes = [], []
    for number, layer in enumerate(layers, 1):
        leaves = {"/".join(path): value for path, value in flatten(layer.tree, layer.origin)}
        strange = [key for key in leaves if schema.covering(key) is None]
        gone: list[str] = []
        if strange and number < len(layers):
            with contextlib.suppress(InputError):  # a layer that is wrong by itself is refused as a whole
                then = schema_of(raw_values(layers[:number]))
                gone = [key for key in strange if then.covering(key) is not None]
        if gone:
            names = ", ".join(map(dotted, gone))
            notes.append(f"{layer.origin}: {names} left out, because another part was selected")
            tree = _nested((key, value) for key, value in leaves.items() if key not in gone)
            layer = dataclasses.replace(layer, tree=tree)
        kept.append(layer)
    return kept, notes


def _givers(schema_of: SchemaOf, schema: Schema, layers: list[Layer]) -> dict[str, Layer]:
    """Return key → the last layer that sets it; one InputError names all keys that are not settings."""
    found: dict[str, Layer] = {}
    unknown: list[tuple[str, Any, Layer]] = []
    for layer in layers:
        for path, value in flatten(layer.tree, layer.origin):
            whole = "/".join(path)
            key = schema.covering(whole)
            if key is not None:
                found[key] = layer
            elif value not in (None, {}) or not schema.is_section(whole):
                unknown.append((whole, layer.texts.get(whole, value), layer))
    if unknown:
        raise InputError(_about_unknown(schema_of, schema, layers, unknown))
    return found


def _about_unknown(
    schema_of: SchemaOf, schema: Schema, layers: list[Layer], unknown: list[tuple[str, Any, Layer]]
) -> str:
    """Return what to write instead of all unknown (key, value, layer)."""
    chosen = {slashed(key): value for key, value in choices((key, value) for key, value, _ in unknown).items()}
    with contextlib.suppress(InputError):  # `optim=lion` selects the optimizer whose rate `lr=1e-4` then is
        schema = schema_of({**raw_values(layers[:-1]), **chosen, **raw_values(layers[-1:])})
    problems = [
        schema.unknown(key, value) + (f" (in {layer.origin})" if layer is not layers[-1] else "")
        for key, value, layer in unknown
    ]
    answers = [found for key, value, _ in unknown if (found := schema.answer(key, value))]
    written = together(answers)
    return "; ".join(dict.fromkeys(problems)) + (f". Together: {written}" if written else "")


def _resolve_values(schema: Schema, layers: list[Layer], defaults: Iterable[Setting]) -> dict[str, Any]:
    """Return all layers over the defaults, so that `${...}` may refer to any setting."""
    usable = [setting for setting in defaults if not setting.required]
    known = _nested((setting.key, escape(plain(setting.default))) for setting in usable)

    def is_mapping(key: str) -> bool:
        setting = schema.covering(key)
        return setting is None or takes_mapping(schema[setting].type)

    layers = [Layer(DEFAULT, known), *layers]
    return merge(layers, resolve=True, is_section=schema.is_section, is_mapping=is_mapping)


def _checked(setting: Setting, value: Any, layer: Layer) -> Any:
    """Return the value as the setting's type. Text settings keep what was typed: name=2024, name=on."""
    if value == "???" and layer.origins is None:
        raise InputError(f"{layer.origin} leaves '{dotted(setting.key)}' open: give {dotted(setting.key)}=… .")
    try:
        return setting.check(value, str(layer.origin))
    except InputError:
        text = layer.texts.get(setting.key, "${").strip()
        if not text.startswith(("[", "{", '"', "'")) and "${" not in text:
            with contextlib.suppress(InputError):
                return setting.check(text, str(layer.origin))
        raise


def _nested(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in items:
        *sections, name = key.split("/")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def _dig(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("/"):
        value = value[name]
    return value


# --- the configuration in force: a context variable, so that threads and tasks never see each other's ---
_current: ContextVar[Config | None] = ContextVar("bessemer_configuration", default=None)


@contextmanager
def configuration(config: Config) -> Iterator[Config]:
    """Put `config` in force: `with configuration(config): configure(Model)`. Blocks nest."""
    token = _current.set(config)
    try:
        yield config
    finally:
        _current.reset(token)


def current() -> Config | None:
    """Return the configuration of the innermost `configuration` block of this thread or task."""
    return _current.get()


def configure(cls: type[T], **overrides: Any) -> T:
    """Return `Config.make` of the configuration in force; without one the class has its own defaults."""
    config = _current.get()
    return cls(**overrides) if config is None else config.make(cls, **overrides)
