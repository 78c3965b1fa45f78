"""Which device takes which place of the mesh: neighbours on a TPU's torus, slices on the outermost axes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.topology.settings import AXES


def arrange(sizes: Sequence[int], devices: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """(devices in the shape of the mesh, notes on what that costs), for devices that are here or only compiled for.

    Not `jax.make_mesh`: it refuses several slices, and most meshes whose sizes are no products of a torus's sides.
    The innermost axes send most, so they are neighbours: on a GPU, devices of one node are.
    """
    platform = str(devices[0].platform)
    if platform != "tpu":
        ordered = sorted(devices, key=lambda device: device.id) if platform == "gpu" else list(devices)
        return _shaped(ordered, sizes), ()
    slices: dict[int, list[Any]] = defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", 0)].append(device)
    if len({len(members) for members in slices.values()}) > 1:
        raise InputError(
            f"the {len(slices)} slices here differ in size: a mesh takes as many devices of each."
        )
    across = across_slices(sizes, len(slices))
    inside = [size // count for size, count in zip(sizes, across, strict=True)]
    placed, notes = zip(*(_on_torus(inside, slices[index]) for index in sorted(slices)), strict=True)
    blocks = np.empty(len(slices), object)
    blocks[:] = placed
    joined = np.block(blocks.reshape(across).tolist())
    return joined, (*_far(across), *dict.fromkeys(note for note in notes if note))


def across_slices(sizes: Sequence[int], slices: int) -> list[int]:
    """How many slices each axis spans: as many as divide it, from the outermost on, which sends least."""
    across = []
    for size in sizes:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return across


def _far(across: Sequence[int]) -> list[str]:
    return [
        f"topology.{axis} spans {count} slices: what it exchanges goes over the data centre's network. "
        "A topology.data that is a multiple of the slices keeps it inside of them."
        for axis, count in zip(AXES, across, strict=True)
        if count > 1 and axis != "data"
    ]


def _on_torus(sizes: Sequence[int], devices: list[Any]) -> tuple[np.ndarray, str]:
    """One slice: mesh axes on whole sides of the torus, else on parts of sides, else in plain order; and a note."""
    from jax.experimental import mesh_utils

    for split in (False, True):
        try:
            placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=split)
        except (NotImplementedError, ValueError, AssertionError):
            continue
        return placed, _note(sizes, devices, "two mesh axes share a side of it") if split else ""
    ordered = sorted(devices, key=lambda device: device.id)
    return _shaped(ordered, sizes), _note(sizes, devices, "devices are in plain order, neighbours or not")


def _note(sizes: Sequence[int], devices: list[Any], how: str) -> str:
    sides = np.array([device.coords for device in devices])
    torus = "x".join(str(side) for side in np.ptp(sides, axis=0) + 1)
    mesh = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
    return (
        f"{mesh} does not fall on whole sides of the torus {torus}: {how}, so exchanges have fewer links to "
        "themselves than the sides have. Mesh sizes that are products of sides have them all."
    )


def _shaped(devices: list[Any], sizes: Sequence[int]) -> np.ndarray:
    placed = np.empty(len(devices), object)
    placed[:] = devices
    return placed.reshape(tuple(sizes))
