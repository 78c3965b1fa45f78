"""Walking a traced program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CALLS = ("jit", "pjit")  # a call's name in one version of JAX and another


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The programs inside one operation: of calls, loops, branches and custom rules."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)  # closed or open
            if hasattr(inner, "eqns"):
                yield inner


@dataclass(frozen=True, eq=False)
class Variable:
    """A result, or an argument of the whole program."""

    aval: Any


@dataclass(frozen=True)
class Equation:
    """An operation as in a jaxpr; a constant among `invars` is JAX's literal, which has a `val`."""

    primitive: Any
    params: dict[str, Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]


@dataclass(frozen=True)
class Program:
    """A jaxpr whose calls are replaced by what they call; `invars` are arguments and constants."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    eqns: Sequence[Equation]


def inlined(closed: Any) -> Program:
    """Layers of one kind are calls of one program: here each call has variables of its own."""
    equations: list[Equation] = []

    def walk(jaxpr: Any, names: dict[Any, Any]) -> list[Any]:
        def named(variable: Any) -> Any:
            if hasattr(variable, "val"):
                return variable
            return names.setdefault(variable, Variable(variable.aval))

        for equation in jaxpr.eqns:
            invars = [named(v) for v in equation.invars]
            if equation.primitive.name in CALLS:
                called = equation.params["jaxpr"].jaxpr
                results = walk(called, dict(zip(called.invars, invars, strict=True)))
                names.update(zip(equation.outvars, results, strict=True))
            else:
                outvars = [named(v) for v in equation.outvars]
                equations.append(Equation(equation.primitive, equation.params, invars, outvars))
        return [named(v) for v in jaxpr.outvars]

    given = {v: Variable(v.aval) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars)}
    return Program(list(given.values()), walk(closed.jaxpr, dict(given)), equations)
