"""Values as words for a report; what was never recorded says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bessemer.report.summary import is_number
from bessemer.report.table import compact, duration

MISSING = "not recorded"


def statistic(key: str, value: Any) -> str:
    if is_number(value) and key.endswith("_share"):
        return f"{value:.2%}"
    return count(value) if is_number(value) or value is None else show(value)


def show(value: Any) -> str:
    """As one would type it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def show_or_missing(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    return MISSING if value is None else show(value)


def decimal(value: Any) -> str:
    return f"{value:.4f}" if is_number(value) else MISSING


def count(value: Any) -> str:
    if not is_number(value):
        return MISSING
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.4g}"


def short(value: Any) -> str:
    return compact(value) if is_number(value) else MISSING


def percent(value: Any) -> str:
    return f"{value:.1%}" if is_number(value) else MISSING


def share_of_100(value: Any) -> str:
    return percent(value / 100) if is_number(value) else MISSING


def clock(value: Any) -> str:
    return duration(value) if is_number(value) else MISSING


def gib(value: Any) -> str:
    return f"{value:.2f} GiB" if is_number(value) else MISSING


def longest_run(text: str) -> int:
    """Length of the longest run of backticks, so that a fence can be longer."""
    longest = current = 0
    for character in text:
        current = current + 1 if character == "`" else 0
        longest = max(longest, current)
    return longest
