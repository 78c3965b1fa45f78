"""Compare two golden records: which cases are equal, and the first thing that differs in each that is not."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
PARTS = ("tokenizer", "config", "provenance", "metrics", "weights")
"""What is compared, causes before their effects."""


@dataclass(frozen=True)
class Outcome:
    """difference: None where a case is equal, else where and how it first differs."""

    case: str
    difference: str | None


def compare(
    a: Record, b: Record, renamed: Mapping[str, str] | None = None, ignored: Collection[str] = ()
) -> list[Outcome]:
    """Compare the cases of `a` with those of `b`. renamed: setting of `a` -> its name in `b`; ignored: PARTS left out.
    A case that one of them lacks is a difference."""
    outcomes = []
    for name in dict.fromkeys([*a["cases"], *b["cases"]]):
        if name not in a["cases"] or name not in b["cases"]:
            outcomes.append(Outcome(name, f"only in the {'first' if name in a['cases'] else 'second'} record"))
            continue
        left, right = (record["cases"][name] for record in (a, b))
        found = differences(with_names(left, renamed or {}), right, ignored)
        outcomes.append(Outcome(name, next(found, None)))
    return outcomes


def with_names(case: Record, renamed: Mapping[str, str]) -> Record:
    """Return the record of a case with its settings under their new names."""

    def new(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {renamed.get(key, key): value for key, value in settings.items()}

    named = [part for part in ("config", "provenance") if part in case]
    return {**case, **{part: {file: new(found) for file, found in case[part].items()} for part in named}}


def differences(a: Record, b: Record, ignored: Collection[str] = ()) -> Iterator[str]:
    """Yield what differs between the records of one case, part by part."""
    for part in PARTS:
        if part in ignored or (part not in a and part not in b):
            continue
        for file in sorted(a[part].keys() | b[part].keys()):
            if file not in a[part] or file not in b[part]:
                yield f"{file}: only in the {'first' if file in a[part] else 'second'}"
            elif isinstance(a[part][file], list):
                yield from row_differences(file, a[part][file], b[part][file])
            else:
                yield from value_differences(file, a[part][file], b[part][file])


def row_differences(file: str, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[str]:
    for number, (left, right) in enumerate(zip(a, b, strict=False), start=1):
        yield from value_differences(f"{file} row {number} (step {left.get('step')})", left, right)
    if len(a) != len(b):
        yield f"{file}: {len(a)} rows, {len(b)} rows"


def value_differences(where: str, a: Any, b: Any) -> Iterator[str]:
    """Yield the keys whose values differ. Values are compared as JSON text: NaN equals NaN, 1 is not 1.0."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        a, b = {"as a whole": a}, {"as a whole": b}
    for key in sorted(a.keys() | b.keys(), key=lambda key: (key == "file", key)):  # a tensor before the whole file
        left, right = (json.dumps(side[key], sort_keys=True) if key in side else "absent" for side in (a, b))
        if left != right:
            yield f"{where} {key}: {left[:60]} | {right[:60]}"


def table(outcomes: list[Outcome]) -> str:
    """Return one line per case and a last one that counts."""
    width = max((len(one.case) for one in outcomes), default=0)
    lines = [
        f"{one.case:<{width}}  {'equal' if one.difference is None else f'DIFFERENT  {one.difference}'}"
        for one in outcomes
    ]
    different = sum(one.difference is not None for one in outcomes)
    return "\n".join([*lines, f"{len(outcomes) - different} of {len(outcomes)} cases equal"])
