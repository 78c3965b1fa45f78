"""What devices send each other in a step: one form for what a compiler planned and for what a formula says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """`count` exchanges a step among groups of `group` devices along mesh axes `axes`.

    `payload` is the whole array as one device has it before (reduce) or after (gather), bytes of all together.
    `nodes` is over how many nodes (or slices) a group is spread.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    count: int
    payload: float
    nodes: int = 1

    @property
    def sent(self) -> float:
        """Bytes that leave one device, by the algorithms that send least (rings and direct exchange).

        With n devices: gather, scatter and all-to-all payload·(n−1)/n, all-reduce twice that, permute payload.
        """
        if self.kind == "collective-permute":
            return self.payload
        share = (self.group - 1) / self.group
        return self.payload * share * (2 if self.kind == "all-reduce" else 1)

    def seconds(self, link: float, outside: float) -> float:
        """Time at full bandwidth, bytes/s of one device inside and outside its node. No latency is counted.

        Beyond the node the k members of a group that share one carry its part of the payload together.
        """
        inside = self.sent / link
        if self.nodes == 1:
            return inside
        twice = 2 if self.kind == "all-reduce" else 1
        members = max(1, self.group // self.nodes)
        return max(inside, twice * self.payload * (self.nodes - 1) / self.nodes / (members * outside))


def merged(found: Iterable[Collective]) -> list[Collective]:
    """Counts and bytes of alike exchanges added up, the largest first."""
    table: dict[tuple[Any, ...], Collective] = {}
    for one in found:
        key = (one.kind, one.axes, one.group, one.nodes)
        before = table.get(key)
        if before is not None:
            one = replace(one, count=one.count + before.count, payload=one.payload + before.payload)
        table[key] = one
    return sorted(table.values(), key=lambda one: (-one.sent, one.kind, one.axes))


def describe(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Rows for JSON and tables."""
    return [
        {
            "kind": one.kind,
            "axes": list(one.axes),
            "devices": one.group,
            "nodes": one.nodes,
            "count": one.count,
            "bytes_sent": round(one.sent),
        }
        for one in found
    ]


class Layout:
    """Positions of a mesh's devices, the last axis fastest, and which of them share a node."""

    def __init__(self, sizes: Mapping[str, int], node: int | None):
        self.sizes = dict(sizes)
        self.devices = math.prod(sizes.values())
        self.node = node or self.devices

    def stride(self, axis: str) -> int:
        names = list(self.sizes)
        return math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])

    def members(self, axes: Sequence[str]) -> np.ndarray:
        """The group of device 0 along `axes`."""
        places = np.zeros(1, np.int64)
        for axis in axes:
            places = (places[:, None] + self.stride(axis) * np.arange(self.sizes[axis])).ravel()
        return places

    def nodes(self, members: Sequence[int] | np.ndarray) -> int:
        """Over how many nodes a group is spread."""
        return len(np.unique(np.asarray(members) // self.node))

    def axes_of(self, members: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes along which the members of a group differ."""
        first = members[0]
        found = []
        for axis, size in self.sizes.items():
            stride = self.stride(axis)
            if any((place // stride) % size != (first // stride) % size for place in members):
                found.append(axis)
        return tuple(found)
