"""prices.yaml: what an hour of a chip costs, and how chips are joined beyond their own links. The user edits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.config.layers import read_yaml
from bessemer.errors import InputError, nearest
from bessemer.job.home import home
from bessemer.topology import CHIPS

SHIPPED = Path(__file__).with_name("prices.yaml")
KEYS = ("dollars_hour", "node", "outside_gb_s")


@dataclass(frozen=True)
class Terms:
    """One chip's line. `source` is the file that was read last for it."""

    dollars_hour: float | None
    node: int | None
    outside_gb_s: float
    source: str


def terms_of(chip: str, given: Path | None = None) -> Terms:
    """The shipped line of a chip, with the user's values (--prices, else BESSEMER_HOME/prices.yaml) in its place."""
    line, source = dict(_read(SHIPPED)[chip]), "the shipped prices.yaml, to be edited"
    own = given or home() / "prices.yaml"
    if given is not None or own.is_file():
        replaced = _read(own).get(chip)
        if replaced:
            line, source = line | replaced, str(own)
    return Terms(line["dollars_hour"], line["node"], float(line["outside_gb_s"]), source)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    table = read_yaml(path, "price table")
    for chip, line in table.items():
        if chip not in CHIPS:
            raise InputError(f"price table '{path}': unknown chip '{chip}'{_hint(chip)}.")
        if not isinstance(line, dict):
            raise InputError(f"price table '{path}': '{chip}' must hold a mapping of {', '.join(KEYS)}.")
        for key, value in line.items():
            _check(path, chip, key, value)
    return table


def _check(path: Path, chip: str, key: str, value: Any) -> None:
    if key not in KEYS:
        raise InputError(f"price table '{path}', {chip}: unknown key '{key}'; known: {', '.join(KEYS)}.")
    empty = value is None and key != "outside_gb_s"
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not empty and not (number and (key != "node" or isinstance(value, int))):
        raise InputError(f"price table '{path}', {chip}: {key}={value!r} must be a number above 0.")


def _hint(chip: str) -> str:
    close = nearest(chip, list(CHIPS))
    return f"; did you mean '{close}'?" if close else ""
