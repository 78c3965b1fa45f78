"""Read small text, JSON and YAML files from untrusted sources, within bounds on size, depth and expansion.

A device, a pipe, gigabytes, a million nested brackets or YAML aliases that expand without bound are a ValueError.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
MOST_DEPTH = 100
MOST_NODES = 200_000
_LIVE = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{[A-Za-z0-9_.\[\]-]+\}")


def read_text(path: Path, limit: int = MOST_BYTES) -> str:
    """Return the text of a regular file of at most `limit` bytes. OSError and ValueError say what is wrong with it."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait for its writer
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > limit:
            raise ValueError(f"it has {found.st_size:,} bytes; at most {limit:,} are read")
        return file.read(limit).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return the parsed JSON. Too much nesting and numbers of thousands of digits are a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, limit: int = MOST_BYTES) -> Any:
    """Return the JSON of a file, read as `read_text` does."""
    return parse_json(read_text(path, limit))


def check_yaml(text: str, *, aliases: bool = True) -> None:
    """Raise ValueError if the YAML is nested too deeply or too large once its aliases are expanded; PyYAML's own errors
    pass through. `aliases=False` refuses any alias: files that we write have none."""
    import yaml

    sizes: dict[str, int] = {}  # anchor → nodes below it, aliases expanded
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, nodes so far)

    def close(anchor: str | None, size: int) -> None:
        if size > MOST_NODES:
            raise ValueError("it is too large, or grows too large when its aliases are expanded")
        if anchor is not None:
            sizes[anchor] = size
        if open_nodes:
            above, count = open_nodes[-1]
            open_nodes[-1] = (above, count + size)

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError("it holds a YAML alias")
            close(None, sizes.get(event.anchor, 1))
        elif isinstance(event, yaml.ScalarEvent):
            close(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > MOST_DEPTH:
                raise ValueError("it is nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            close(*open_nodes.pop())


def check_references(tree: Mapping[Any, Any]) -> None:
    """Raise ValueError for a `${…}` that is more than the name of another setting, such as ${oc.env:HOME}. In
    configurations that we save, a `${` in a value is written as \\${, which is text."""
    for where, text in texts_in(tree):
        for found in _LIVE.finditer(text):
            live = len(found[1]) % 2 == 0
            if live and not _REFERENCE.match(text, found.end() - 2):
                raise ValueError(
                    f"'{where}' holds {text[found.end() - 2 :][:60]!r}; a saved configuration may refer to its own "
                    "settings only, as ${section.name}"
                )


def texts_in(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every string of a nested value; items of a list have the key of the list."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from texts_in(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item, where)
    elif isinstance(value, str):
        yield where, value
