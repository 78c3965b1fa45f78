"""Recipes: YAML files of settings, shipped ones by name and anyone's by path; `extends: NAME` inherits."""

from __future__ import annotations

import enum
import functools
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from importlib import resources
from pathlib import Path
from typing import Any

from bessemer.config.aliases import RENAMED, RENAMED_VALUES, current_name, current_recipe, current_value
from bessemer.config.bounded import check_references, check_yaml, read_text
from bessemer.config.declare import RESERVED, dotted
from bessemer.config.values import Mismatch, plain
from bessemer.errors import InputError, did_you_mean


# --- where the value of a setting came from ---
class OriginKind(enum.Enum):
    """Each value is how such origins begin in config.yaml. Specific kinds come before general ones."""

    DEFAULT = "default"
    COMMAND_LINE = "command line"
    PYTHON = "python"
    RECIPE = "recipe "
    INHERITED = "inherited from "
    SAVED = "saved configuration "
    OPEN = "left open by "
    DEPTH_DIAL = "chosen: the depth dial"
    BASE_RUN = "chosen: the run of recipe:"  # `init` or a teacher: the run of a recipe that was trained first
    UNTRAINED = "chosen: not trained for a plan"
    DERIVED = "chosen: "
    OTHER = ""


_DERIVED = (OriginKind.DEPTH_DIAL, OriginKind.BASE_RUN, OriginKind.UNTRAINED, OriginKind.DERIVED)
_OPEN_ENDED = (" ", ":")  # kinds that end so take a detail


@dataclass(frozen=True)
class Origin:
    """`str(origin)` is the text that config.yaml and `bessemer config` show."""

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        return self.kind.value + self.detail

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Return the origin that config.yaml holds as `text`."""
        for kind in OriginKind:
            if text == kind.value or (kind.value.endswith(_OPEN_ENDED) and text.startswith(kind.value)):
                return cls(kind, text[len(kind.value) :])
        return cls(OriginKind.OTHER, text)

    @property
    def is_default(self) -> bool:
        return self.kind is OriginKind.DEFAULT

    @property
    def is_recipe(self) -> bool:
        return self.kind is OriginKind.RECIPE

    @property
    def is_caller(self) -> bool:
        """Return whether the value is from the command line or from Python."""
        return self.kind in (OriginKind.COMMAND_LINE, OriginKind.PYTHON)

    @property
    def is_derived(self) -> bool:
        """Return whether the program chose the value."""
        return self.kind in _DERIVED

    @property
    def reason(self) -> str:
        """Return the text without the word for a derived value."""
        return str(self).removeprefix(OriginKind.DERIVED.value)


DEFAULT = Origin(OriginKind.DEFAULT)
COMMAND_LINE = Origin(OriginKind.COMMAND_LINE)
PYTHON = Origin(OriginKind.PYTHON)


# --- layers of values before any schema: nested plain dictionaries, each with its origin ---
#
# OmegaConf reads the YAML, parses the values of the command line, merges the layers and resolves `${...}`.
Keys = tuple[str, ...]

_NULLS = ("", "~", "null", "Null", "NULL")
_NOT_DECIMAL = re.compile(r"[+-]?0[0-9]|.*:")  # YAML reads 010 as 8 and 1:30 as 90; people do not
_STARRED = re.compile(r"([\[,{:]\s*)([*&][^,\]}\s]*)")  # an item such as */q, which YAML takes for an alias


@dataclass
class Layer:
    """`tree` is nested by section; `texts` are the values as typed, for settings that turn out to be text.

    `origins` of a saved configuration are those of each value; keys that it leaves out are defaults.
    """

    origin: Origin
    tree: dict[str, Any]
    texts: dict[str, str] = attribute(default_factory=dict)
    origins: dict[str, Origin] | None = None

    def origin_of(self, key: str) -> Origin:
        return self.origin if self.origins is None else self.origins.get(key, DEFAULT)


def nest(mapping: Mapping[Any, Any], origin: Origin | str) -> dict[str, Any]:
    """Return the nested form: {"a": {"b": 1}}, {"a.b": 1} and {"a/b": 1} are the same, and so are old names of
    settings and their new ones."""
    tree: dict[str, Any] = {}
    for name, value in mapping.items():
        if not isinstance(name, str):
            raise InputError(f"{origin}: the key {name!r} is not text. Settings have names like training.steps.")
        _insert(tree, tuple(re.split(r"[./]", name)), value, origin)
    return _with_current_names(tree, origin)


def _with_current_names(tree: dict[str, Any], origin: Origin | str) -> dict[str, Any]:
    """Return the nested settings under their present names and with present values."""
    for key in (*RENAMED, *RENAMED_VALUES):
        section, _, name = key.rpartition("/")
        held = tree.get(section)
        if isinstance(held, Mapping) and name in held:
            tree[section] = {other: value for other, value in held.items() if other != name}
            now = current_name(key)
            _insert(tree, tuple(now.split("/")), current_value(now, held[name]), origin)
    return tree


def _insert(tree: dict[str, Any], keys: Keys, value: Any, origin: Origin | str) -> None:
    for depth, name in enumerate(keys[:-1]):
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise InputError(f"{origin}: '{'.'.join(keys[: depth + 1])}' has a value and also settings below it.")
    if keys[-1] not in tree:
        tree[keys[-1]] = value
    elif isinstance(tree[keys[-1]], dict) and isinstance(value, Mapping):
        for name, item in value.items():
            _insert(tree[keys[-1]], (name,), item, origin)
    elif tree[keys[-1]] != value:
        raise InputError(f"{origin}: '{'.'.join(keys)}' is given twice, as {tree[keys[-1]]!r} and as {value!r}.")


def flatten(tree: Mapping[Any, Any], origin: Origin | str, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of a nested mapping with their paths; an empty mapping is a leaf."""
    for name, value in tree.items():
        if not isinstance(name, str):
            place = ".".join((*above, str(name)))
            raise InputError(f"{origin}: the key {name!r} in '{place}' is not text. Quote it.")
        if isinstance(value, Mapping) and value:
            yield from flatten(value, origin, (*above, name))
        else:
            yield (*above, name), value


def flat_values(tree: Mapping[str, Any], origin: str = "saved configuration") -> dict[str, Any]:
    """Return nested settings by section/name."""
    return {"/".join(keys): value for keys, value in flatten(tree, origin)}


def merge(
    layers: Sequence[Layer],
    *,
    resolve: bool,
    is_section: Callable[[str], bool],
    is_mapping: Callable[[str], bool] = lambda key: True,
) -> dict[str, Any]:
    """Return the layers merged; later ones win. `resolve` replaces `${...}` by what it refers to.

    Sections and settings that are mappings merge; any other value is replaced as a whole. An empty section
    (`training:`) changes nothing.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree: dict[str, Any] = {}
    for layer in layers:
        _overlay(tree, layer.tree, is_section, is_mapping)
    try:
        merged = OmegaConf.to_container(OmegaConf.create(tree), resolve=resolve)
    except OmegaConfBaseException as error:
        key, problem = getattr(error, "full_key", None), str(error).splitlines()[0]
        place = f"setting '{key}'" if key else "the settings"
        raise InputError(
            f"{place}: {problem}. A value may refer to another setting as ${{section.name}}; "
            "write \\${ for a plain ${."
        ) from error
    assert isinstance(merged, dict)
    return {str(name): value for name, value in merged.items()}


def _overlay(
    tree: dict[str, Any],
    above: Mapping[str, Any],
    is_section: Callable[[str], bool],
    is_mapping: Callable[[str], bool],
    prefix: str = "",
) -> None:
    for name, value in above.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and is_mapping(key):
            below = tree.get(name)
            tree[name] = below if isinstance(below, dict) else {}
            _overlay(tree[name], value, is_section, is_mapping, key + "/")
        elif value not in (None, {}) or not is_section(key):
            tree[name] = value


def override_layer(overrides: Sequence[str] | Mapping[str, Any], origin: Origin) -> Layer:
    """Return a layer of `a.b=c` words or of a mapping, in which `${...}` is text. A setting with two values is an
    InputError."""
    if isinstance(overrides, Mapping):
        try:
            return Layer(origin, nest(escape(plain(overrides)), origin))
        except Mismatch as mismatch:
            raise InputError(f"{origin}: {mismatch.problem}.") from mismatch
    if isinstance(overrides, str):
        raise TypeError("overrides is a sequence of 'key=value' strings, not one string")
    layer = Layer(origin, {})
    for word in overrides:
        name, equals, text = word.partition("=")
        key = current_name(name.strip().replace(".", "/"))
        if not equals or not key:
            raise InputError(f"'{word}' ({origin}) is not a setting: write key=value, as in training.batch_size=64.")
        if key in layer.texts and layer.texts[key] != text:
            raise InputError(
                f"'{dotted(key)}' is given twice ({origin}): {dotted(key)}={layer.texts[key]} and "
                f"{dotted(key)}={text}. Keep one of them."
            )
        if key not in layer.texts:
            layer.texts[key] = text
            value = current_value(key, parse_value(text, dotted(key), origin))
            _insert(layer.tree, tuple(key.split("/")), value, origin)
    return layer


def parse_value(text: str, key: str, origin: Origin) -> Any:
    """Return a value of the command line, read as YAML but without its surprises for plain words."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    word = text.strip()
    structured = word.startswith(("[", "{", '"', "'")) or "${" in word
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={word}"]), resolve=False)
        value = parsed["value"]
    except (YAMLError, OmegaConfBaseException) as error:
        if structured and (quoted := _STARRED.sub(r'\1"\2"', word)) != word:
            return parse_value(quoted, key, origin)
        if structured:
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise InputError(f"the value of '{key}' ({origin}) cannot be read: {text} ({problem}).") from error
        return word  # a glob such as *.txt, or @name: special to YAML, plain text here
    if structured:
        return value
    is_text = isinstance(value, str) or (value is None and word not in _NULLS)
    looks_odd = isinstance(value, int | float) and not isinstance(value, bool) and _NOT_DECIMAL.match(word)
    return word if is_text or looks_odd else value


def read_yaml(path: Path, what: str, *, saved: bool = False) -> dict[str, Any]:
    """Return a YAML file as a nested mapping; syntax errors name the file, line and column.

    saved: a run's configuration, which may be untrusted: no aliases, and it refers to nothing but its own settings.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{what} '{path}' cannot be read: {error}.") from error
    return parse_yaml(text, f"{what} '{path}'", saved=saved)


def parse_yaml(text: str, what: str, *, saved: bool = False) -> dict[str, Any]:
    """Return the same from text; `what` begins the error."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        check_yaml(text, aliases=not saved)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        if saved and isinstance(tree, dict):
            check_references(tree)
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{what}{place}: {problem or error}. Correct the YAML there.") from error
    except (OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise InputError(f"{what}: {(str(error).splitlines() or ['unreadable'])[0]}.") from error
    if not isinstance(tree, dict):
        raise InputError(f"{what} must hold a mapping of settings (training: {{steps: 100}}).")
    return tree  # type: ignore[return-value]


def saved_tree(path: Path) -> dict[str, Any]:
    """Return a saved config.yaml as a nested tree with references resolved; nothing it names is imported."""
    return _resolved(read_yaml(path, "saved configuration", saved=True), Origin(OriginKind.SAVED, str(path)))


def parse_saved(text: str, where: str) -> dict[str, Any]:
    """Return the same from the text of a config.yaml; `where` is named in errors."""
    return _resolved(parse_yaml(text, f"the config.yaml of {where}", saved=True), Origin(OriginKind.OTHER, where))


def _resolved(tree: dict[str, Any], origin: Origin) -> dict[str, Any]:
    return merge([Layer(origin, nest(tree, origin))], resolve=True, is_section=lambda key: False)


def escape(value: Any) -> Any:
    """Return the value with `${` escaped, so that it stays text when the file is read back."""
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value


YAML = (".yaml", ".yml")


@dataclass
class Recipe:
    """A recipe with its ancestors: `layers` from the oldest ancestor to the recipe itself."""

    name: str
    title: str
    description: str
    layers: list[Layer]


def recipe_directory() -> Path:
    return Path(str(resources.files("bessemer") / "recipes"))


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in recipe_directory().glob("*.yaml"))


def is_shipped_recipe(name: str) -> bool:
    """Return whether a shipped recipe has or had this name."""
    return current_recipe(name) in recipe_names()


@functools.cache
def note_new_name(old: str, new: str) -> None:
    """Print once per process, on stderr, that a recipe has another name now."""
    print(f"note: the recipe '{old}' is now called '{new}'; the old name still works.", file=sys.stderr)


def find_recipe(name: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a shipped name or of a path, relative to the recipe that extends it if one does."""
    word = current_recipe(str(name))
    if word != str(name):
        note_new_name(str(name), word)
    if word in recipe_names():
        return recipe_directory() / f"{word}.yaml"
    path = Path(word).expanduser()
    path = beside / path if beside else path
    if path.is_file() and path.suffix.lower() in YAML:
        return path
    if path.exists():
        folder = f"; to begin from weights in it: init={word}" if path.is_dir() else ""
        raise InputError(
            f"'{word}' is not a recipe, which is a .yaml file. To train on it: training.dataset={word}{folder}; to go "
            "on with a run: bessemer resume RUN."
        )
    if path.suffix.lower() in YAML or len(Path(word).parts) > 1:
        raise InputError(f"recipe file '{path}' does not exist.")
    hint = did_you_mean(word, recipe_names())
    raise InputError(
        f"unknown recipe '{word}'.{hint} Shipped: {', '.join(recipe_names())}; or the path of a YAML file."
    )


def read_recipe(recipe: str | Path | Mapping[str, Any]) -> Recipe:
    """Read a recipe and its ancestors. A mapping is a recipe written in Python."""
    if isinstance(recipe, Mapping):
        layer = override_layer(recipe, PYTHON)
        return _assemble("python", layer.tree, layer, beside=None, below=())
    return _read_file(current_recipe(str(recipe)), find_recipe(recipe), ())


def _read_file(name: str, path: Path, below: tuple[Path, ...]) -> Recipe:
    identity = path.resolve()
    if identity in below:
        chain = " extends ".join(place.name for place in (*below[below.index(identity) :], identity))
        raise InputError(f"recipes extend each other in a cycle: {chain}. Remove one `extends`.")
    origin = Origin(OriginKind.RECIPE, name)
    tree = nest(read_yaml(path, "recipe"), origin)
    layer = Layer(origin, tree)
    return _assemble(name, tree, layer, beside=path.parent, below=(*below, identity))


def _assemble(name: str, tree: dict[str, Any], layer: Layer, *, beside: Path | None, below: tuple[Path, ...]) -> Recipe:
    """Return the recipe without reserved words in its tree, with the layers of its ancestors."""
    reserved = {word: tree.pop(word, None) for word in RESERVED}
    saved = reserved.pop("provenance")
    for word, value in reserved.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{layer.origin}: '{word}' must be text, got {value!r}.")
    if saved is not None:
        _forget_choices(layer, saved)
    title, description, extends = reserved["title"] or "", reserved["description"] or "", reserved["extends"]
    if not extends:
        return Recipe(name, title, description, [layer])
    parent = _read_file(current_recipe(extends), find_recipe(extends, beside), below)
    return Recipe(name, title or parent.title, description or parent.description, [*parent.layers, layer])


def _forget_choices(layer: Layer, saved: Any) -> None:
    """Drop what the program derived from a run's config.yaml that is used as a recipe: it is derived again here."""
    if not isinstance(saved, Mapping):
        raise InputError(f"{layer.origin}: 'provenance' must be a mapping from settings to their origin.")
    layer.origins = {}
    for key, origin in saved.items():
        path = current_name(str(key).replace(".", "/")).split("/")
        if not Origin.parse(str(origin)).is_derived:
            layer.origins["/".join(path)] = layer.origin
            continue
        place: Any = layer.tree
        for section in path[:-1]:
            place = place.get(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place.pop(path[-1], None)


def sections_of(layers: Iterable[Layer]) -> set[str]:
    """Return the keys that hold a mapping in some layer: the sections, before there is a schema."""
    found: set[str] = set()
    for layer in layers:
        for path, _ in flatten(layer.tree, layer.origin):
            found.update("/".join(path[:depth]) for depth in range(1, len(path)))
    return found


def raw_values(layers: list[Layer]) -> dict[str, Any]:
    """Return the merged layers by flat key, unchecked, with `${...}` as written."""
    return flat_values(merge(layers, resolve=False, is_section=sections_of(layers).__contains__), "settings")
