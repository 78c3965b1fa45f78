"""Recipes: YAML files of settings, shipped ones by name and anyone's by path; `extends: NAME` inherits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from bessemer.config.declare import RESERVED
from bessemer.config.layers import Layer, flatten, merge, nest, override_layer, read_yaml
from bessemer.errors import InputError, nearest

YAML = (".yaml", ".yml")


@dataclass
class Recipe:
    """A recipe with what it inherits: `layers` from the oldest ancestor to the recipe itself."""

    name: str
    title: str
    description: str
    layers: list[Layer]


def recipe_directory() -> Path:
    return Path(str(resources.files("bessemer.recipes")))


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_directory().glob("*.yaml"))


def find_recipe(name: str | Path, beside: Path | None = None) -> Path:
    """The file of a shipped name, or of a path (relative to the recipe that extends it, if one does)."""
    word = str(name)
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
    close = nearest(word, recipe_names())
    hint = f" Did you mean '{close}'?" if close else ""
    raise InputError(
        f"unknown recipe '{word}'.{hint} Shipped: {', '.join(recipe_names())}; or the path of a YAML file."
    )


def read_recipe(recipe: str | Path | Mapping[str, Any]) -> Recipe:
    """Read a recipe and its ancestors. A mapping is a recipe written in Python."""
    if isinstance(recipe, Mapping):
        layer = override_layer(recipe, "python")
        return _assemble("python", layer.tree, layer, beside=None, below=())
    return _read_file(str(recipe), find_recipe(recipe), ())


def _read_file(name: str, path: Path, below: tuple[Path, ...]) -> Recipe:
    identity = path.resolve()
    if identity in below:
        chain = " extends ".join(place.name for place in (*below[below.index(identity) :], identity))
        raise InputError(f"recipes extend each other in a circle: {chain}. Remove one `extends`.")
    origin = f"recipe {name}"
    tree = nest(read_yaml(path, "recipe"), origin)
    layer = Layer(origin, tree)
    return _assemble(name, tree, layer, beside=path.parent, below=(*below, identity))


def _assemble(
    name: str, tree: dict[str, Any], layer: Layer, *, beside: Path | None, below: tuple[Path, ...]
) -> Recipe:
    """Take the reserved words out of the tree and put the ancestors before it."""
    reserved = {word: tree.pop(word, None) for word in RESERVED}
    saved = reserved.pop("provenance")
    for word, value in reserved.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{layer.origin}: '{word}' must be text, got {value!r}.")
    if saved is not None:
        _forget_choices(layer, saved)
    parent = Recipe("", "", "", [])
    if reserved["extends"]:
        parent_path = find_recipe(reserved["extends"], beside)
        parent = _read_file(reserved["extends"], parent_path, below)
    return Recipe(
        name,
        reserved["title"] or parent.title,
        reserved["description"] or parent.description,
        [*parent.layers, layer],
    )


def _forget_choices(layer: Layer, saved: Any) -> None:
    """A run's config.yaml as a recipe: what the program chose for that machine is chosen anew on this one."""
    if not isinstance(saved, Mapping):
        raise InputError(f"{layer.origin}: 'provenance' must be a mapping from settings to their origin.")
    layer.origins = {}
    for key, origin in saved.items():
        path = str(key).replace(".", "/").split("/")
        if not str(origin).startswith("chosen"):
            layer.origins["/".join(path)] = layer.origin
            continue
        place: Any = layer.tree
        for section in path[:-1]:
            place = place.get(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place.pop(path[-1], None)


def sections_of(layers: Iterable[Layer]) -> set[str]:
    """Keys that hold a mapping in some layer: what can be told about sections before there is a schema."""
    found: set[str] = set()
    for layer in layers:
        for path, _ in flatten(layer.tree, layer.origin):
            found.update("/".join(path[:depth]) for depth in range(1, len(path)))
    return found


def raw_values(layers: list[Layer]) -> dict[str, Any]:
    """The layers merged into one flat mapping "a/b" → value, unchecked, `${...}` left as written."""
    tree = merge(layers, resolve=False, is_section=sections_of(layers).__contains__)
    return {"/".join(path): value for path, value in flatten(tree, "settings")}


def load_recipe(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    """Title and flat, unchecked values of a recipe, `extends` included."""
    recipe = read_recipe(name_or_path)
    return recipe.title, raw_values(recipe.layers)
