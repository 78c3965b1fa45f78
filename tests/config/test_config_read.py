"""Every setting that is declared is also read, and declared once: no dead flags, no default in two places."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import bessemer
from bessemer.config import declared
from bessemer.config.declare import Setting
from bessemer.data import DataSettings
from bessemer.selectors import SELECTORS, settings_classes
from bessemer.topology import AXES, TopologySettings
from bessemer.training.settings import BaseTrainerConfig, GuardSettings, LoggingSettings

ROOT = Path(bessemer.__file__).parent
ALWAYS: list[type] = [BaseTrainerConfig, LoggingSettings, GuardSettings, DataSettings, TopologySettings]
SHARED = {"architecture/block_size", "optimization/preset"}
"""Keys that two parts of one run declare (`gather` refuses unequal declarations); anything else has one owner."""
BY_NAME = {f"topology/{axis}" for axis in AXES}
"""Read by getattr, over AXES."""


def parts() -> dict[str, list[type]]:
    """Selector -> the classes of its alternatives; of each selector but `callbacks` a run has one.

    Ours alone: other tests of the same process may have registered plugins.
    """
    return {
        name: list(dict.fromkeys(c for entry in table for c in settings_classes(entry) if _is_ours(c)))
        for name, table in SELECTORS.items()
    }


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "bessemer"


def fields() -> list[tuple[str, Setting]]:
    """(attribute, setting) of every declaration."""
    classes = dict.fromkeys([*ALWAYS, *itertools.chain(*parts().values())])
    return [pair for cls in classes for pair in declared(cls).items()]


class Reads(ast.NodeVisitor):
    """Names of attributes that are read, and keys that are looked up: `config["a/b"]`, `config.get("a/b")`, or
    the keys of a table {"a/b": …}."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.keys: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._keys([node.slice])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id == "field"):
            self._keys(node.args)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._keys([key for key in node.keys if key is not None])
        self.generic_visit(node)

    def _keys(self, nodes: list[ast.expr]) -> None:
        self.keys |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def reads() -> dict[str, Reads]:
    """Room -> what its modules read."""
    found: dict[str, Reads] = {}
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        found.setdefault(room, Reads()).visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def is_read(attribute: str, setting: Setting, rooms: dict[str, Reads]) -> bool:
    """By its own room, or by the one that puts a run together; a key may be looked up anywhere."""
    own = setting.owner.__module__.split(".")[1]
    if any(attribute in rooms[room].attributes for room in {own, "training"}):
        return True
    return setting.key in BY_NAME or any(setting.key in room.keys for room in rooms.values())


def test_every_setting_is_read_somewhere() -> None:
    rooms = reads()
    dead = [setting.key for attribute, setting in fields() if not is_read(attribute, setting, rooms)]
    assert not dead, f"declared, and read by nobody: {sorted(dead)}"
    assert len(fields()) > 100
    example = declared(DataSettings)["dedup"]
    assert not is_read("an_attribute_nobody_reads", example, rooms), "the search can find nothing"


def replaces(cls: type, key: str) -> bool:
    """Whether `cls` redeclares a setting of a base that every run has: then it stands in the base's place."""
    bases = [base for base in ALWAYS if issubclass(cls, base) and cls is not base]
    return any(setting.key == key for base in bases for setting in declared(base).values())


def test_every_setting_has_one_owner() -> None:
    """Alternatives (two optimizers) may use one key each in its own way, since a run has one of them."""
    owners: dict[str, set[tuple[str, str]]] = {}
    for group, classes in {"always": ALWAYS, **parts()}.items():
        for cls in classes:
            if group == "job" and not issubclass(cls, BaseTrainerConfig):
                continue  # no run with a model: its settings are all of that job's configuration
            for setting in declared(cls).values():
                group_of = setting.owner_name if group in ("always", "callbacks") else group
                if group == "always" or not (setting.owner in ALWAYS or replaces(cls, setting.key)):
                    owners.setdefault(setting.key, set()).add((group_of, group))
    assert {key for key, found in owners.items() if len(found) > 1} == SHARED
