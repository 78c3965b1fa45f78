"""`calculator`: arithmetic that the model may call; the answer is compared with the column `answer`.

With our tokens a call is what stands between <|python_start|> and <|python_end|>; under a template it is a call of the
function `calculate`. Expressions are read by generate/calculator.py: exact fractions, no names, no calls, bounded.
"""

from __future__ import annotations

from bessemer.data.tokenize.chat import EXPRESSION, PYTHON, ToolCall
from bessemer.registry import environments
from bessemer.rl.environments.tools import ToolEnvironment, ToolError, described

CALCULATE = "calculate"


def expression_of(call: ToolCall, name: str) -> str:
    """Return the expression of a call of the function `name`, which has no other argument."""
    if call.name not in (name, PYTHON):
        raise ToolError(f"there is no function {call.name}; there is {name}")
    if set(call.arguments) != {EXPRESSION} or not isinstance(call.arguments[EXPRESSION], str):
        raise ToolError(f"{name} takes one text, {EXPRESSION}")
    return str(call.arguments[EXPRESSION])


@environments.register("calculator")
class Calculator(ToolEnvironment):
    tools = (
        described(
            CALCULATE, "Return the value of an arithmetic expression.", {EXPRESSION: {"type": "string"}}, [EXPRESSION]
        ),
    )

    def __init__(self, match: str = "exact"):
        super().__init__(match)
        from bessemer.generate.calculator import NotArithmetic, calculate  # its package imports JAX

        self.calculate, self.refusal = calculate, NotArithmetic

    def call(self, call: ToolCall) -> str:
        try:
            return self.calculate(expression_of(call, CALCULATE))
        except self.refusal as error:
            raise ToolError(str(error)) from error
