"""Devices stand where their wires are: on the sides of a torus, slices outermost; and what does not fit so is said."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from bessemer.errors import InputError
from bessemer.topology import AXES, arrange


@dataclass(frozen=True)
class Device:
    """What a TPU tells of its place."""

    id: int
    coords: tuple[int, ...]
    slice_index: int = 0
    device_kind: str = "TPU v5"
    platform: str = "tpu"
    core_on_chip: int = 0
    process_index: int = 0


def torus(*sides: int, slices: int = 1, kind: str = "TPU v5") -> list[Device]:
    places = list(product(range(slices), *(range(side) for side in sides)))
    return [Device(n, tuple(coords), index, kind) for n, (index, *coords) in enumerate(places)]


def mesh(**sizes: int) -> tuple[int, ...]:
    return tuple((dict.fromkeys(AXES, 1) | sizes).values())


def sides_of(group: np.ndarray) -> list[int]:
    """The box that holds a group of devices."""
    return sorted(np.ptp(np.array([device.coords for device in group.flat]), axis=0) + 1)


def test_an_axis_takes_whole_sides_of_the_torus() -> None:
    placed, notes = arrange(mesh(data=8, fsdp=64), torus(8, 8, 8))
    assert placed.shape == mesh(data=8, fsdp=64) and notes == ()
    assert all(sides_of(placed[index]) == [1, 8, 8] for index in range(8))


def test_axes_that_share_a_side_are_neighbors_all_the_same_and_the_notes_say_so() -> None:
    devices = torus(16, 16, 1, kind="TPU v6 lite")
    placed, (note,) = arrange(mesh(data=8, fsdp=32), devices)
    assert set(placed.flat) == set(devices)
    assert all(sides_of(placed[index]) == [1, 2, 16] for index in range(8))
    assert "data 8 × fsdp 32" in note and "16x16x1" in note and "share a side" in note


def test_devices_that_are_no_whole_torus_are_in_plain_order_and_the_notes_say_so() -> None:
    devices = torus(2, 2, 2)[:6]
    placed, (note,) = arrange(mesh(data=3, fsdp=2), devices[::-1])
    assert list(placed.flat) == devices and "plain order" in note


def test_slices_are_on_the_outermost_axes() -> None:
    devices = torus(2, 2, 1, slices=4)
    for sizes, far in (
        (mesh(data=4, fsdp=4), []),
        (mesh(data=2, fsdp=8), ["fsdp spans 2"]),
        (mesh(fsdp=4, tensor=4), ["fsdp spans 4"]),
    ):
        placed, notes = arrange(sizes, devices)
        assert [device.slice_index for device in placed.flat] == [n // 4 for n in range(16)]
        assert len(notes) == len(far) and all(words in note for words, note in zip(far, notes, strict=True))
    with pytest.raises(InputError, match="differ in size"):
        arrange(mesh(data=15), devices[:15])


def test_gpus_of_several_nodes_are_neighbors_by_number() -> None:
    """Which `jax.make_mesh` refuses where the nodes tell their slices."""
    devices = [Device(n, (), n // 8, "NVIDIA H100", "gpu") for n in range(32)]
    placed, notes = arrange(mesh(data=4, fsdp=4, tensor=2), devices[::-1])
    assert list(placed.flat) == devices and notes == ()
