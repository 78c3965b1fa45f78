"""`python`: a tool that evaluates Python expressions without running Python: no names but a few functions, no
attributes, no statements, and bounds on the size of everything.

    numbers, texts, True, False, None, lists, tuples       + - * / // % **    == != < <= > >= in    and or not
    x if c else y    a[i]    a[i:j]                        abs min max sum len round sorted range int float str
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sized
from typing import Any

from bessemer.data.tokenize.chat import EXPRESSION, ToolCall
from bessemer.registry import environments
from bessemer.rl.environments.calculator import expression_of
from bessemer.rl.environments.tools import ToolEnvironment, ToolError, described

EVALUATE = "evaluate"
LONGEST = 400  # characters of an expression
NODES = 200
DEEPEST = 40
BITS = 512  # of an integer
SIZE = 1000  # items of a list, characters of a text
DIGITS = 100  # of an integer as text: reading and writing longer ones takes long

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "sum": sum,
    "len": len,
    "round": lambda number, digits=0: _rounded(number, digits),
    "sorted": sorted,
    "range": lambda *bounds: _range(*bounds),
    "int": lambda value=0: int(_number_text(value)),
    "float": lambda value=0: float(_number_text(value)),
    "str": lambda value="": shown(value) if not isinstance(value, str) else value,
}


def evaluate(text: str) -> str:
    """Return the value of an expression as text; raise ToolError if it is not one that is evaluated."""
    if len(text) > LONGEST:
        raise ToolError(f"longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"not a Python expression ({type(error).__name__})") from error
    if sum(1 for _ in ast.walk(tree)) > NODES:
        raise ToolError(f"more than {NODES} parts")
    try:
        return shown(_value(tree.body, 0))
    except ToolError:
        raise
    except (ArithmeticError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


def shown(value: Any) -> str:
    return repr(value) if not isinstance(value, str) else value


def _value(node: ast.AST, depth: int) -> Any:
    if depth > DEEPEST:
        raise ToolError(f"nested deeper than {DEEPEST}")

    def of(part: ast.AST) -> Any:
        return _value(part, depth + 1)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return _bounded(value)
        case ast.List(elts=items):
            return _bounded([of(item) for item in items])
        case ast.Tuple(elts=items):
            return _bounded(tuple(of(item) for item in items))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return _bounded(UNARY[type(op)](of(operand)))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return _computed(op, of(left), of(right))
        case ast.BoolOp(op=op, values=values):
            result: Any = None
            for part in values:
                result = of(part)
                if bool(result) is isinstance(op, ast.Or):
                    break
            return result
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(one) in OPERATORS for one in ops):
            here = of(left)
            for compared, other in zip(ops, others, strict=True):
                following = of(other)
                if not OPERATORS[type(compared)](here, following):
                    return False
                here = following
            return True
        case ast.IfExp(test=test, body=body, orelse=other):
            return of(body) if of(test) else of(other)
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=step)):
            bounds = [None if part is None else of(part) for part in (lower, upper, step)]
            return of(value)[slice(*bounds)]
        case ast.Subscript(value=value, slice=index):
            return of(value)[of(index)]
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*[of(part) for part in given]))
    raise ToolError(f"{type(node).__name__} is not allowed: arithmetic, lists and {', '.join(FUNCTIONS)} are")


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    """Return left op right; what would be huge is refused before it is computed."""
    if isinstance(op, ast.Mod) and isinstance(left, str):
        raise ToolError("formatting is not allowed")
    if isinstance(op, ast.Mult) and not (_is_number(left) and _is_number(right)):
        size = max((len(side) for side in (left, right) if isinstance(side, Sized)), default=0)
        times = max((side for side in (left, right) if isinstance(side, int)), default=0)
        if size * times > SIZE:
            raise ToolError("too large")
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and whole and left.bit_length() * abs(right) > 2 * BITS:
        raise ToolError("too large")
    return _bounded(OPERATORS[type(op)](left, right))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _range(*bounds: Any) -> list[int]:
    found = range(*bounds)
    if len(found) > SIZE:
        raise ToolError("too large")
    return list(found)


def _rounded(number: Any, digits: Any) -> Any:
    if not isinstance(digits, int) or abs(digits) > DIGITS:  # it computes 10 ** digits
        raise ToolError("too large")
    return round(number, digits) if digits else round(number)


def _number_text(value: Any) -> Any:
    if isinstance(value, str) and len(value) > DIGITS:
        raise ToolError("too large")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ToolError("complex numbers are not allowed")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("not a finite number")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ToolError("too large")
    if isinstance(value, str | list | tuple) and _count(value) > SIZE:
        raise ToolError("too large")
    return value


def _count(value: Any) -> int:
    """The characters and items in a value, however deep."""
    if isinstance(value, str):
        return len(value)
    return sum(1 + _count(item) for item in value) if isinstance(value, list | tuple) else 0


@environments.register("python")
class PythonExpression(ToolEnvironment):
    tools = (
        described(EVALUATE, "Return the value of a Python expression.", {EXPRESSION: {"type": "string"}}, [EXPRESSION]),
    )

    def call(self, call: ToolCall) -> str:
        return evaluate(expression_of(call, EVALUATE))
