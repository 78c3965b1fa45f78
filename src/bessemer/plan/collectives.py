"""Collectives of a step, in one form for a compiled program and for the analytic model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """`count` exchanges per step among groups of `group` devices along mesh axes `axes`.

    payload: bytes of the whole array as one device has it before (reduce) or after (gather), of all exchanges together.
    nodes: how many nodes (or slices) a group spans.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    count: int
    payload: float
    nodes: int = 1

    @property
    def sent(self) -> float:
        """Return the bytes that leave one device, by rings and direct exchange: payload·(n−1)/n for gather, scatter and
        all-to-all among n devices, twice that for all-reduce, payload for permute."""
        if self.kind == "collective-permute":
            return self.payload
        share = (self.group - 1) / self.group
        return self.payload * share * (2 if self.kind == "all-reduce" else 1)

    def seconds(self, link: float, outside: float) -> float:
        """Return the time at full bandwidth (bytes/s of one device inside and outside its node), without latency.

        Outside, the members of a group on one node carry its part of the payload together.
        """
        inside = self.sent / link
        if self.nodes == 1:
            return inside
        twice = 2 if self.kind == "all-reduce" else 1
        members = max(1, self.group // self.nodes)
        return max(inside, twice * self.payload * (self.nodes - 1) / self.nodes / (members * outside))


def merged(found: Iterable[Collective]) -> list[Collective]:
    """Return equal exchanges with their counts and bytes added, the largest first."""
    table: dict[tuple[Any, ...], Collective] = {}
    for one in found:
        key = (one.kind, one.axes, one.group, one.nodes)
        before = table.get(key)
        if before is not None:
            one = replace(one, count=one.count + before.count, payload=one.payload + before.payload)
        table[key] = one
    return sorted(table.values(), key=lambda one: (-one.sent, one.kind, one.axes))


def describe(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return rows for JSON and tables."""
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
        """Return the group of device 0 along `axes`."""
        places = np.zeros(1, np.int64)
        for axis in axes:
            places = (places[:, None] + self.stride(axis) * np.arange(self.sizes[axis])).ravel()
        return places

    def nodes(self, members: Sequence[int] | np.ndarray) -> int:
        """Return how many nodes a group spans."""
        return len(np.unique(np.asarray(members) // self.node))

    def axes_of(self, members: Sequence[int]) -> tuple[str, ...]:
        """Return the mesh axes along which the members of a group differ."""
        first = members[0]
        found = []
        for axis, size in self.sizes.items():
            stride = self.stride(axis)
            if any((place // stride) % size != (first // stride) % size for place in members):
                found.append(axis)
        return tuple(found)


# --- collectives of a compiled program, read from its text ---
# A loop's body counts once per iteration, and of the branches of a conditional the one that sends most; the compiler's
# own cost analysis counts a scan over layers only once.
HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
NAMED = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = ")
OPERAND = re.compile(r"\(%?([\w.\-]+)")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")
EITHER = re.compile(r"\b(?:true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BOUND = re.compile(r"constant\((\d+)\)")
GROUPS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
WIDTHS = {"pred": 1, "bf16": 2, "token": 0, "opaque": 0}


@dataclass
class Computation:
    collectives: list[tuple[str, str, str]] = field(default_factory=list)  # kind, type of the result, rest of the line
    calls: list[tuple[str, str, str | None]] = field(default_factory=list)  # callee, rest of the line, condition
    choices: list[list[str]] = field(default_factory=list)  # of which one runs, such as the stages of a pipeline
    bounds: list[int] = field(default_factory=list)  # constants: a loop's bound is the largest of its condition
    types: dict[str, str] = field(default_factory=dict)  # instruction → its type


def collectives_of(text: str, layout: Layout) -> list[Collective]:
    """Return the exchanges of one execution of the program `text` (HLO after partitioning), merged."""
    parts, entry = parse(text)

    def visit(name: str, times: int) -> list[Collective]:
        part = parts.get(name)
        if part is None:
            return []
        found = [_collective(*one, times, layout) for one in part.collectives]
        for callee, rest, condition in part.calls:
            found += visit(callee, times * (1 if condition is None else _turns(rest, parts.get(condition))))
        for branches in part.choices:
            found += max((visit(branch, times) for branch in branches), key=lambda made: sum(one.sent for one in made))
        return found

    return merged(one for one in visit(entry, 1) if one.group > 1)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return (computations by name, the name of the entry)."""
    parts: dict[str, Computation] = {}
    current, entry = Computation(), ""
    chains: set[tuple[str, ...]] = set()
    for line in text.splitlines():
        if (head := HEAD.match(line)) and " = " not in line.split("(", 1)[0]:
            current = parts[head["name"]] = Computation()
            entry = head["name"] if head["entry"] else entry
        elif begun := NAMED.match(line):
            _read(begun["name"], line[begun.end() :], current, chains)
    return parts, entry


def _read(name: str, words: str, into: Computation, chains: set[tuple[str, ...]]) -> None:
    """Read one instruction, `TYPE OPCODE(OPERANDS), ATTRIBUTES`, into `into`. A TPU hides one exchange behind several
    operations and names it in each of them: a chain."""
    end = _type_end(words)
    kind, rest = words[:end], words[end:].lstrip()
    into.types[name] = kind
    opcode = rest.partition("(")[0]
    base = opcode.removesuffix("-start")
    if base in KINDS:
        chain = CHAIN.search(rest)
        if base == "ragged-all-to-all":  # one side has room for the worst case, the other the rows of an even load
            sides = [found[0] for found in ARRAY.finditer(kind)]
            if opcode == base and (
                sent := OPERAND.search(rest)
            ):  # of a start the type names its operands, the sent first
                sides.append(into.types.get(sent[1], kind))
            kind = min(sides[0], sides[-1], key=_type_bytes)
        if chain is None or chain.groups() not in chains:
            into.collectives.append((opcode, kind, rest))
        chains |= {chain.groups()} if chain else set()
        return
    if opcode == "constant" and (bound := BOUND.match(rest)):
        into.bounds.append(int(bound[1]))
        return
    if "=" not in rest:
        return
    condition = CONDITION.search(rest)
    into.calls += [
        (callee, rest, condition[1] if condition and opcode == "while" else None) for callee in CALLED.findall(rest)
    ]
    if either := EITHER.findall(rest):
        into.choices.append(either)
    if branches := BRANCHES.search(rest):
        into.choices.append([branch.strip().lstrip("%") for branch in branches[1].split(",")])


def _type_end(words: str) -> int:
    """Return where the type ends: at the first space outside of parentheses."""
    depth = 0
    for place, letter in enumerate(words):
        depth += (letter == "(") - (letter == ")")
        if letter == " " and depth == 0:
            return place
    return len(words)


def _turns(rest: str, condition: Computation | None) -> int:
    """Return a loop's iterations: as the compiler annotates, else the bound in its condition, else 1."""
    if known := TURNS.search(rest):
        return int(known[1])
    return max(condition.bounds, default=1) if condition else 1


def _collective(opcode: str, kind: str, rest: str, times: int, layout: Layout) -> Collective:
    base = opcode.removesuffix("-start")
    sizes = [_bytes(name, shape) for name, shape in ARRAY.findall(kind)]
    if opcode.endswith("-start") and base != "all-reduce":  # (operands, results, …): results alone
        arrays = [size for size in sizes if size > 4] or sizes
        sizes = arrays[len(arrays) // 2 :]
    members = _members(rest, layout)
    axes = layout.axes_of(members)
    group = math.prod(layout.sizes[axis] for axis in axes) if base == "collective-permute" else len(members)
    payload = sum(sizes) * (group if base == "reduce-scatter" else 1)
    return Collective(base, axes, group, times, float(payload * times), layout.nodes(members))


def _type_bytes(kind: str) -> int:
    return sum(_bytes(name, shape) for name, shape in ARRAY.findall(kind))


def _bytes(name: str, shape: str) -> int:
    bits = re.search(r"\d+", name)
    width = WIDTHS.get(name, int(bits[0]) / 8 if bits else 4)
    return int(math.prod(int(size) for size in shape.split(",") if size) * width)


def _members(rest: str, layout: Layout) -> list[int]:
    """Return the device positions of one group."""
    if pair := PAIRS.search(rest):
        return [int(pair[1]), int(pair[2])]
    if named := NAMED_GROUPS.search(rest):
        return _named_members(*named.groups())
    if iota := IOTA.search(rest):
        groups, sizes = (tuple(_numbers(text)) for text in iota.groups()[:2])
        places = np.arange(math.prod(sizes)).reshape(sizes)
        if iota[3]:
            places = places.transpose(tuple(_numbers(iota[3])))
        return [int(place) for place in places.reshape(groups)[0].ravel()]
    if listed := GROUPS.search(rest):
        first = listed[1].split("}")[0].strip("{")
        return list(_numbers(first)) or list(range(layout.devices))
    return list(range(layout.devices))


def _named_members(sizes: str, grid: str | None, turned: str | None, along: str) -> list[int]:
    """Return a group along named axes of the compiler's mesh: `'a'`, or `'a':(4)2`, the part of size 2 after 4."""
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    places = np.arange(math.prod(mesh.values()))
    if grid:
        places = places.reshape(tuple(_numbers(grid)))
        places = places.transpose(tuple(_numbers(turned))) if turned else places
    places = places.reshape(tuple(mesh.values()))
    for name, before, size in SUB_AXIS.findall(along):
        axis, whole = list(mesh).index(name), mesh[name]
        first, count = (int(before), int(size)) if size else (1, whole)
        after = whole // (first * count)
        split = (*places.shape[:axis], first, count, after, *places.shape[axis + 1 :])
        # the part goes to the end; what is left of the axis stays in its place
        left = np.moveaxis(places.reshape(split), axis + 1, -1)
        places = left.reshape(*places.shape[:axis], first * after, *places.shape[axis + 1 :], count)
        mesh[name] = first * after
    members = places[(0,) * len(mesh)]
    return [int(place) for place in members.ravel()]


def _numbers(text: str) -> Iterator[int]:
    return (int(word) for word in text.split(",") if word)
