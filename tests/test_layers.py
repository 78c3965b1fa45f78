"""Packages import only from packages above them, and the modules of a package do not import each other in a cycle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bessemer

ROOT = Path(bessemer.__file__).parent
ORDER = [
    ["errors"],
    ["config"],
    ["user_code"],
    ["registry"],
    ["console"],
    ["storage"],
    ["topology"],
    ["job"],
    ["data"],
    ["kernels"],
    ["losses"],
    ["models"],
    ["optim"],
    ["objectives"],
    ["scaling"],
    ["checkpoint"],
    ["interop"],
    ["generate"],
    ["evaluate"],
    ["report"],
    ["training"],
    ["rl"],
    ["doctor", "plan", "serve", "launch"],
    ["dash"],  # the page lets one talk to a model through the server
    ["cli"],
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
# The package's face offers names of every room, and __main__ starts the command line.
FACE = {"__init__", "__main__"}


# Packages whose modules have no import cycle, counting imports for types and those inside functions.
WITHOUT_CYCLES = [
    "config",
    "job",
    "data",
    "storage",
    "checkpoint",
    "interop",
    "topology",
    "generate",
    "evaluate",
    "training",
    "rl",
    "plan",
    "models",
    "kernels",
    "losses",
    "optim",
    "objectives",
    "report",
    "serve",
    "launch",
    "dash",
    "cli",
]
# Imports for types that may close a cycle, with the reason in CONTRIBUTING.md.
CALLBACKS_TAKE_THE_TRAINER = {
    ("bessemer.training.callbacks.base", "bessemer.training.loop"),
    ("bessemer.training.callbacks.base", "bessemer.training.trainer"),
}
# The order inside a package; what is imported must come before.
INSIDE = {"data": ["sources", "tokenize", "rows", "plan", "stores"]}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_names(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of our own package, at any depth: lazy imports count too."""
    found = []
    package = ["bessemer", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        found += [(node.lineno, name) for name in names if name.startswith("bessemer.")]
    return found


def imported_rooms(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of our own package."""
    found = [(line, name.split(".")[1]) for line, name in imported_names(path)]
    return [(line, room) for line, room in found if not room.startswith("__")]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["bessemer", *parts]).removesuffix(".__init__")


def test_every_room_has_its_place():
    rooms = {room_of(path) for path in ROOT.rglob("*.py")} - FACE
    assert rooms <= set(LEVEL), f"not in the order of rooms: {sorted(rooms - set(LEVEL))}"


def test_a_room_imports_only_from_rooms_above():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = room_of(path)
        if room in FACE:
            continue
        for line, other in imported_rooms(path):
            allowed = other == room or (other in LEVEL and LEVEL[other] < LEVEL[room])
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", WITHOUT_CYCLES)
def test_modules_of_a_package_do_not_import_each_other_in_a_cycle(package):
    modules = {module_of(path): path for path in (ROOT / package).rglob("*.py")}
    assert modules, f"no module in {package}"
    graph = {}
    for module, path in modules.items():
        names = [name for _, name in imported_names(path)]
        # `from package import name` imports the module `name` where there is one, else the package itself
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (graph[module] & set(modules)) - {module}
        graph[module] -= {other for importer, other in CALLBACKS_TAKE_THE_TRAINER if importer == module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", INSIDE)
def test_parts_of_a_package_import_only_what_comes_before_them(package):
    order = INSIDE[package]
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        part = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in order, f"{path.relative_to(ROOT)} has no place in INSIDE"
        for line, name in imported_names(path):
            parts = name.split(".")
            if parts[1] == package and parts[2] in order and order.index(parts[2]) > order.index(part):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


# Who may take the whole trainer: the trainer's own file, and callbacks, whose hooks are passed it.
MAY_TAKE_THE_TRAINER = ("training/trainer.py", "training/callbacks/")
TRAINER = re.compile(r"\b\w*Trainer\b")  # BaseTrainer and its subclasses, not their configuration


def test_only_the_trainer_and_callbacks_take_the_whole_trainer():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).as_posix().startswith(MAY_TAKE_THE_TRAINER):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            arguments = node.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                annotation = ast.unparse(argument.annotation) if argument.annotation is not None else ""
                if argument.arg == "trainer" or TRAINER.search(annotation):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} takes {argument.arg}: {annotation}")
    assert not wrong, "\n".join(wrong)


# Probing an object for an attribute, per file. A capability that a part of ours may have is a protocol instead
# (`models/protocol.py`, `optim/build.py`); what is left asks about objects of Python, jax, numpy or the user.
PROBES = {
    "data/rows/build.py": 2,  # a user's sequence: len and [i]
    "data/stores/catalog.py": 4,
    "data/stores/prepare.py": 3,
    "data/tokenize/documents.py": 1,  # os.sched_getaffinity, which macOS lacks
    "storage/weights.py": 2,  # an array of any library: dtype and shape
    "topology/distributed.py": 1,
    "topology/mesh.py": 1,
    "training/display.py": 1,  # a number of any library: tolist
    "training/setup/data.py": 2,
    "training/setup/microbatch.py": 1,  # a step that is compiled, or not yet
}


def test_parts_are_asked_for_protocols_not_for_attributes():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        lines = [node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == "hasattr"]
        name = path.relative_to(ROOT).as_posix()
        if len(lines) > PROBES.get(name, 0):
            wrong.append(f"{name}, lines {lines}: state a protocol and use isinstance")
    assert not wrong, "\n".join(wrong)
