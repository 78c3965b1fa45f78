"""The rooms of src/bessemer import only from rooms above them: what DESIGN's layout table promises."""

import ast
from pathlib import Path

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


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of our own package, at any depth: lazy imports count too."""
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
        parts = [name.split(".") for name in names if name.startswith("bessemer.")]
        found += [(node.lineno, name[1]) for name in parts if not name[1].startswith("__")]
    return found


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
