"""`--step`: which checkpoint, by its number or by the name of the stage it ended."""

from __future__ import annotations

import re
from typing import Any

import click


class Step(click.ParamType):
    """512, or stage-1 of a run that has stages."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int | str:
        if isinstance(value, int) or re.fullmatch(r"stage-\d+", value):
            return value
        if not re.fullmatch(r"\d+", value):
            self.fail(f"'{value}' is neither a step nor the end of a stage such as stage-1.", param, context)
        return int(value)


STEP = Step()
