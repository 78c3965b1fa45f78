"""Durations as people write them: 2h30m, 1d, 90 (seconds)."""

from __future__ import annotations

import math
import re

from bessemer.errors import InputError

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
_FORM = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS))


def parse_duration(text: str | int | float) -> float:
    """Seconds in `text`: days, hours, minutes and seconds in this order, each at most once, or a bare number.

    All of the text counts: `2h30` is an error, not two hours.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        word = str(text).strip().lower()
        match = _FORM.fullmatch(word)
        if re.fullmatch(_NUMBER, word):
            seconds = float(word)
        elif word and match:
            parts = zip(match.groups(), _UNITS.values(), strict=True)
            seconds = sum(float(number) * unit for number, unit in parts if number)
        else:
            raise InputError(f"'{text}' is not a duration. Write 2h30m, 1d, 45s, or a number of seconds.")
    if not math.isfinite(seconds) or seconds <= 0:
        raise InputError(f"a duration must be more than 0 seconds, got '{text}'. Write 2h30m, 1d or 90.")
    return seconds
