"""metrics.jsonl: one JSON row per report, flushed as it is written, never duplicated by a resume."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.config.bounded import parse_json
from bessemer.errors import InputError, StorageError
from bessemer.storage.files import atomic_write, storage

MOST_BYTES = 1 << 30
"""About a million rows; a file from elsewhere may claim any length."""


class MetricsFile:
    """Rows of host values. `notes` collects, once each, what a report should mention about the file.

    JSON has no NaN: a non-finite value becomes null, and the row lists its name under `non_finite`. A last line
    cut off by a kill is dropped with a note; a damaged line anywhere else is an error.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.notes: list[str] = []
        self._whole = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; it is in the file, not only in a buffer, when this returns."""
        line = json.dumps(_host_row(row), allow_nan=False) + "\n"
        with storage(f"cannot write {self.path}"):
            if not self._whole:
                self._drop_torn_line()
                self._whole = True
            with open(self.path, "ab") as file:
                file.write(line.encode())

    def rows(self) -> list[dict[str, Any]]:
        """Return all complete rows, oldest first; [] if there is no file yet."""
        try:
            size = self.path.stat().st_size
            if size > MOST_BYTES:
                raise StorageError(f"{self.path} has {size:,} bytes; at most {MOST_BYTES:,} are read.")
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self.path} ({error.strerror}).") from error
        rows = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _parse(line)
            if row is not None:
                rows.append(row)
            elif number == len(lines):
                self._note_torn_line()
            else:
                raise StorageError(
                    f"{self.path}: line {number} is not a JSON object. Remove that line; the run's state "
                    "does not depend on it."
                )
        return rows

    def truncate_after(self, step: int) -> int:
        """Remove the rows after `step`, atomically, and return how many. Called on resume."""
        rows = self.rows()
        kept = [row for row in rows if not isinstance(row.get("step"), int | float) or row["step"] <= step]
        if self.path.exists():
            text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in kept)
            atomic_write(self.path, text, sync=True)
        return len(rows) - len(kept)

    def _drop_torn_line(self) -> None:
        """Before the first append, end the file with a newline."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return
        if _parse(data[whole:]) is not None:
            atomic_write(self.path, data + b"\n")
            return
        self._note_torn_line()
        atomic_write(self.path, data[:whole])

    def _note_torn_line(self) -> None:
        note = f"{self.path.name}: its last line was cut off by a kill and is dropped."
        if note not in self.notes:
            self.notes.append(note)


def _host_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON values, non-finite ones as null and named."""
    plain = {name: _host_value(name, value) for name, value in row.items()}
    lost = [name for name, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**plain, **dict.fromkeys(lost), "non_finite": lost} if lost else plain


def _host_value(name: str, value: Any) -> Any:
    """Return a JSON value. Raise InputError for a device array: reading it here would block."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise InputError(f"metric '{name}' is a {type(value).__name__}; write numbers, text, true, false or null.")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
