"""Every setting that is declared is also read, and declared once: no dead flags, no default in two places."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import bessemer
from bessemer.config import declared
from bessemer.config.declare import Setting
from bessemer.data import DataSettings
from bessemer.registry import SELECTORS, settings_classes
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


Scope = str  # the module of a variable; "" for attributes, methods and functions, which are reached from anywhere


class Receivers(ast.NodeVisitor):
    """What is read from what. An attribute `x.name` is a read of a setting only if `x` can be an object of the class
    that declares it: so variables, attributes and functions are followed to the classes in their annotations and
    assignments (`settings: GuardSettings`, `self.guard = configure(GuardSettings)`, `chosen = settings or …`)."""

    def __init__(self) -> None:
        self.held: dict[tuple[Scope, str], set[str]] = {}  # a name -> the classes it may hold
        self.assigned: list[tuple[tuple[Scope, str], tuple[Scope, str]]] = []  # a name -> a name it is set from
        self.reads: dict[str, set[tuple[Scope, str]]] = {}  # attribute -> what it was read from
        self.keys: set[str] = set()  # looked up: config["a/b"], config.get("a/b"), tables of keys
        self._module = ""
        self._classes: list[str] = []

    def module(self, path: Path) -> None:
        self._module = str(path)
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def spread(self) -> None:
        """Follow assignments until nothing new is found."""
        growing = True
        while growing:
            growing = False
            for target, source in self.assigned:
                more = self.held.get(source, set()) - self.held.setdefault(target, set())
                self.held[target] |= more
                growing |= bool(more)

    def _place(self, node: ast.expr) -> tuple[Scope, str] | None:
        if isinstance(node, ast.Name):
            if node.id == "self" and self._classes:
                return "self", self._classes[-1]
            return self._module, node.id
        if isinstance(node, ast.Attribute):
            return "", node.attr
        if isinstance(node, ast.Call):
            function = node.func
            return ("", function.id) if isinstance(function, ast.Name) else self._place(function)
        return self._place(node.value) if isinstance(node, ast.Subscript) else None

    def _hold(self, place: tuple[Scope, str] | None, annotation: ast.expr | None) -> None:
        if place is not None and annotation is not None:
            names = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(annotation) if isinstance(n, ast.Attribute)}
            self.held.setdefault(place, set()).update(names)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:  # class GRPOTrainer(BaseTrainer[GRPOTrainerConfig, M]): its `settings` are such
            if isinstance(base, ast.Subscript):
                self._hold(("", "settings"), base.slice)
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._hold(("", node.name), node.returns)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._hold((self._module, argument.arg), argument.annotation)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._hold(self._place(node.target), node.annotation)
        if self._classes and isinstance(node.target, ast.Name):  # a field: read as an attribute
            self._hold(("", node.target.id), node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._set(node.targets, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._set([node.target], node.value)
        self.generic_visit(node)

    def _set(self, targets: list[ast.expr], value: ast.expr) -> None:
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
            for target, one in zip(targets[0].elts, value.elts, strict=False):
                self._set([target], one)
            return
        for place in filter(None, map(self._place, targets)):
            for source in self._sources(value):
                if isinstance(source, ast.Call):  # configure(C), C(…), cast(C, …): the class is named in it
                    self._hold(place, ast.Tuple([source.func, *source.args], ast.Load()))
                if (other := self._place(source)) is not None:
                    self.assigned.append((place, other))

    def _sources(self, value: ast.expr) -> list[ast.expr]:
        if isinstance(value, ast.IfExp):
            return [*self._sources(value.body), *self._sources(value.orelse)]
        return [s for v in value.values for s in self._sources(v)] if isinstance(value, ast.BoolOp) else [value]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and (place := self._place(node.value)) is not None:
            self.reads.setdefault(node.attr, set()).add(place)
            if isinstance(node.value, ast.Call):  # configure(C).name
                made = ("made", ast.unparse(node.value))
                self._hold(made, ast.Tuple([node.value.func, *node.value.args], ast.Load()))
                self.reads[node.attr].add(made)
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

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self._keys(node.elts)
        self.generic_visit(node)

    def _keys(self, nodes: list[ast.expr]) -> None:
        self.keys |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}

    def is_read(self, attribute: str, setting: Setting, related: set[str]) -> bool:
        """From an object of its class, or of one `related` to it; or its key is looked up."""
        if setting.key in BY_NAME or setting.key in self.keys:
            return True
        return any(
            name in related if scope == "self" else bool(self.held.get((scope, name), set()) & related)
            for scope, name in self.reads.get(attribute, set())
        )


def receivers(root: Path = ROOT) -> Receivers:
    found = Receivers()
    for path in sorted(root.rglob("*.py")):
        found.module(path)
    found.spread()
    return found


def related(owner: type) -> set[str]:
    """Names of a class, of its bases in the package and of the classes derived from it."""
    classes = [*ALWAYS, *itertools.chain(*parts().values())]
    bases = {cls.__name__ for cls in owner.__mro__ if _is_ours(cls)}
    return bases | {cls.__name__ for cls in classes if issubclass(cls, owner)}


def test_every_setting_is_read_somewhere() -> None:
    found = receivers()
    dead = {s.key for attribute, s in fields() if not found.is_read(attribute, s, related(s.owner))}
    assert not dead, f"declared, and read by nobody: {sorted(dead)}"
    assert len(fields()) > 100


def test_a_read_of_another_object_is_no_read_of_a_setting(tmp_path: Path) -> None:
    """The search itself: the same attribute of something else does not count, that of a settings object does."""
    (tmp_path / "other.py").write_text("def f(path: Path):\n    return path.dedup, self.dedup, load().dedup\n")
    setting = declared(DataSettings)["dedup"]
    assert not receivers(tmp_path).is_read("dedup", setting, {"DataSettings"})
    for text in (
        "def f(s: DataSettings | None):\n    t = s or g()\n    return t.dedup\n",
        "def f(a):\n    a.data = configure(DataSettings)\n\ndef g(a):\n    return a.data.dedup\n",
        "def f():\n    return configure(DataSettings).dedup\n",
        "class DataSettings:\n    def f(self):\n        return self.dedup\n",
        "def f(config):\n    return config['data/dedup']\n",
    ):
        (tmp_path / "own.py").write_text(text)
        assert receivers(tmp_path).is_read("dedup", setting, {"DataSettings"}), text


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
