"""A saved config.yaml as flat settings, read without trust: no references, no tags, no trees that grow when read."""

from __future__ import annotations

from typing import Any

from bessemer.report.summary import flatten_settings

DEEPEST = 20
MOST = 20_000


def flat_settings(data: bytes) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """({"training.steps": 10, …}, origins of the same keys, what is wrong or None)."""
    import yaml

    try:
        text = data.decode("utf-8")
        _check(yaml.parse(text, Loader=yaml.CSafeLoader))
        tree = yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, {}, f"config.yaml could not be read ({str(error).splitlines()[0][:200]})."
    if not isinstance(tree, dict):
        return {}, {}, "config.yaml holds no settings."
    origins = tree.pop("provenance", None)
    known = {str(key): value for key, value in origins.items()} if isinstance(origins, dict) else {}
    return flatten_settings(tree), known, None


def _check(events: Any) -> None:
    """Ours hold no aliases; nine lines of them can describe a billion values."""
    import yaml

    depth = 0
    for number, event in enumerate(events):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it holds a YAML alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST or number > MOST:
            raise ValueError("it is nested too deeply or too long")
