"""Every read of a device value, whichever way it is made, and whether it went through `fetch`.

On a mesh of several devices numpy cannot look into an array's memory (the buffer protocol is for one device), so that
each read of a value passes `ArrayImpl._value`, and each read of a part `addressable_shards` or `addressable_data`.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest
from jax._src.array import ArrayImpl

from bessemer.training.feed import fetch

WAYS = ("_value", "addressable_shards")


@dataclass
class Reads:
    """`fetched`: values read by `fetch`; `elsewhere`: where another read was made, as lines of a traceback."""

    fetched: int = 0
    elsewhere: list[str] = field(default_factory=list)

    def note(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code is not fetch.__code__:
            frame = frame.f_back
        if frame is not None:
            self.fetched += 1
        else:
            self.elsewhere.append("".join(traceback.format_stack(sys._getframe(2), limit=6)))


@contextlib.contextmanager
def device_reads() -> Iterator[Reads]:
    """Count the reads of all threads, until the end of the block."""
    reads = Reads()

    def counting(way: property) -> property:
        assert way.fget is not None
        get = way.fget

        def counted(array: ArrayImpl) -> Any:
            reads.note()
            return get(array)

        return property(counted)

    data = ArrayImpl.addressable_data

    def counted_data(array: ArrayImpl, index: int) -> jax.Array:
        reads.note()
        return data(array, index)

    with pytest.MonkeyPatch.context() as patch:
        for name in WAYS:
            patch.setattr(ArrayImpl, name, counting(getattr(ArrayImpl, name)))
        patch.setattr(ArrayImpl, "addressable_data", counted_data)
        yield reads
