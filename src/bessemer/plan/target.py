"""Names of hardware that is not here: `v5e:4x4`, `v5p:2x2x4`, `2xv6e:16x16`, `h200:8`, `h100:64`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bessemer.errors import InputError
from bessemer.topology import CHIPS, Chip, chip_of

NAME = re.compile(r"(?:(?P<slices>\d+)x(?=[a-z]))?(?P<chip>[a-z][a-z0-9 _-]*?):(?P<grid>\d+(?:x\d+)*)")
FLAT = ("TPU v5e", "TPU v6e")  # a torus of two dimensions; the other TPUs have three
TWO_DEVICES = ("TPU v7x",)  # JAX shows two devices a chip
LARGEST = {"TPU v4": 4096, "TPU v5e": 256, "TPU v5p": 8960, "TPU v6e": 256, "TPU v7x": 9216}
"""Chips of one slice, at most; more are several slices, joined by the data centre's network."""


@dataclass(frozen=True)
class Target:
    """Chips of one kind: `slices` times a `grid` of them. A GPU's grid is a plain count, in nodes of prices.yaml."""

    name: str
    chip: Chip
    slices: int
    grid: tuple[int, ...]

    @property
    def platform(self) -> str:
        return "tpu" if self.chip.name.startswith("TPU") else "gpu"

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.chips * (2 if self.chip.name in TWO_DEVICES else 1)

    @property
    def compiler_name(self) -> str:
        """One slice, as libtpu calls it."""
        kind = self.chip.name.removeprefix("TPU ")
        return f"{'tpu7x' if kind == 'v7x' else kind}:{'x'.join(map(str, self.grid))}"


def parse_target(name: str) -> Target:
    """The hardware a name stands for, or an InputError that says how names are made."""
    found = NAME.fullmatch(name.strip().lower())
    if found is None:
        raise InputError(f"--topology '{name}' is not understood. {_forms()}")
    chip = chip_of(found["chip"]) or chip_of(f"tpu {found['chip']}")
    if chip is None:
        raise InputError(f"--topology '{name}': the chip '{found['chip']}' is not in the table. {_forms()}")
    slices, grid = int(found["slices"] or 1), tuple(int(size) for size in found["grid"].split("x"))
    target = Target(name, chip, slices, grid)
    if target.chips < 1:
        raise InputError(f"--topology '{name}' has no chips.")
    return _torus(target) if target.platform == "tpu" else _count(target)


def _torus(target: Target) -> Target:
    dimensions = 2 if target.chip.name in FLAT else 3
    chips, most = math.prod(target.grid), LARGEST[target.chip.name]
    if chips > most:
        raise InputError(
            f"--topology '{target.name}': a slice of {target.chip.name} has at most {most} chips, not {chips}. Name "
            f"several slices, for example {-(-chips // most)}x{_short(target)}:{most}."
        )
    if len(target.grid) == 1:
        return Target(target.name, target.chip, target.slices, balanced(chips, dimensions))
    if len(target.grid) != dimensions:
        shape = "x".join(map(str, balanced(chips, dimensions)))
        raise InputError(
            f"--topology '{target.name}': {target.chip.name} has a torus of {dimensions} dimensions, for example "
            f"{_short(target)}:{shape}."
        )
    return target


def _count(target: Target) -> Target:
    if len(target.grid) > 1 or target.slices > 1:
        raise InputError(
            f"--topology '{target.name}': GPUs are counted, for example {_short(target)}:{target.chips}; how many "
            "share a node is in prices.yaml."
        )
    return target


def _short(target: Target) -> str:
    return target.chip.name.removeprefix("TPU ").lower().replace(" ", "-")


def balanced(count: int, dimensions: int) -> tuple[int, ...]:
    """`count` chips as the most cubic torus there is, smallest side first: 16 → (4, 4), 32 → (2, 4, 4)."""
    if dimensions == 1:
        return (count,)
    sides = [side for side in range(1, count + 1) if count % side == 0 and side**dimensions <= count]
    rest = balanced(count // sides[-1], dimensions - 1)
    return (sides[-1], *rest)


def _forms() -> str:
    known = ", ".join(chip.lower().removeprefix("tpu ").replace(" ", "-") for chip in CHIPS)
    return (
        "A name is CHIP:COUNT or, for a TPU, CHIP:AxB or CHIP:AxBxC with the number of slices in front: h200:8, "
        f"v5e:4x4, v5p:2x2x4, 2xv6e:16x16. Chips: {known}."
    )
