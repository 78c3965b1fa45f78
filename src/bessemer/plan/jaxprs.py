"""Walking a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The programs inside one operation: of calls, loops, branches and custom rules."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)  # closed or open
            if hasattr(inner, "eqns"):
                yield inner
