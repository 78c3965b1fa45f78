"""Packages import only from packages above them, and the modules of a package do not import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bessemer

ROOT = Path(bessemer.__file__).parent
ORDER = [
    ["errors"],
    ["recipes"],
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
WITHOUT_CYCLES = ["data", "storage", "checkpoint"]
# The order inside a package; what is imported must come before.
INSIDE = {
    "data": ["progress", "sources", "tokenize", "rows", "plan", "settings", "stores", "inspect"],
}


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
def test_modules_of_a_package_do_not_import_each_other_in_a_circle(package):
    modules = {module_of(path): path for path in (ROOT / package).rglob("*.py")}
    assert modules, f"no module in {package}"
    graph = {}
    for module, path in modules.items():
        names = [name for _, name in imported_names(path)]
        # `from package import name` imports the module `name` where there is one, else the package itself
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (graph[module] & set(modules)) - {module}
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
