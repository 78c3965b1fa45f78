"""Settings: declared once, on the dataclass that uses them; gathered into one strict, typed tree."""

from bessemer.config.declare import Schema, Setting, declared, dotted, field, gather, slashed
from bessemer.config.recipes import (
    COMMAND_LINE,
    PYTHON,
    Origin,
    OriginKind,
    is_shipped_recipe,
    read_recipe,
    recipe_names,
)
from bessemer.config.resolve import Config, configuration, configure, current, load_saved, resolve
from bessemer.config.values import parse_duration

__all__ = [
    "COMMAND_LINE",
    "PYTHON",
    "Config",
    "Origin",
    "OriginKind",
    "Schema",
    "Setting",
    "configuration",
    "configure",
    "current",
    "declared",
    "dotted",
    "field",
    "gather",
    "is_shipped_recipe",
    "load_saved",
    "parse_duration",
    "read_recipe",
    "recipe_names",
    "resolve",
    "slashed",
]
