"""Which matrices of a model an fp8 run converts, which not, and why: said at the start, never left to guess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from bessemer.models import fp8
from bessemer.models.layers import AXES
from bessemer.models.lookup import AXES as LOOKUP_AXES
from bessemer.topology import unbox

if TYPE_CHECKING:
    from bessemer.models.gpt import GPT

TABLES = ("embedding", "value_embedding")  # looked up, not multiplied


@dataclass(frozen=True)
class Conversion:
    """Paths of converted matrices, and what is left in the compute dtype: (path, shape, reason)."""

    converted: tuple[str, ...]
    skipped: tuple[tuple[str, tuple[int, ...], str], ...]

    def __str__(self) -> str:
        """converted 12 of 15 matrices, skipped 3: 2 × value_gate 12 × 2 (a side below 128), head 256 × 320 (…)"""
        total = len(self.converted) + len(self.skipped)
        line = f"converted {len(self.converted)} of {total} matrices, skipped {len(self.skipped)}"
        kinds = Counter((path.rsplit("/", 1)[-1], shape, why) for path, shape, why in self.skipped)
        parts = [
            f"{f'{count} × ' if count > 1 else ''}{name} {' × '.join(map(str, shape))} ({why})"
            for (name, shape, why), count in kinds.items()
        ]
        return f"{line}: {', '.join(parts)}" if parts else line


def conversion_of(model: GPT) -> Conversion:
    """From the shapes of the model's parameters; no array is made."""
    ids = jax.ShapeDtypeStruct((1, min(8, model.block_size)), jnp.int32)
    tree = unbox(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
    leaves = [(tuple(k.key for k in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    matrices = [
        (path, leaf.shape) for path, leaf in leaves if leaf.ndim == 2 and model.group_of(path) not in TABLES
    ]
    return plan_conversion(matrices, model.fp8_head)


def plan_conversion(matrices: Iterable[tuple[tuple[str, ...], tuple[int, ...]]], head: bool) -> Conversion:
    """`matrices`: (path, shape) of every matrix that multiplies; `head`: whether the head is wanted."""
    converted, skipped = [], []
    for path, shape in matrices:
        in_block = path[0].startswith("blocks_") and path[-1] in AXES
        of_lookup = path[0].startswith("lookups_") and path[-1] in LOOKUP_AXES
        # W_mix reads W_up's output beside h, and may be used in these two parts
        sides = (shape[0] - shape[1], shape[1]) if of_lookup and path[-1] == "mix" else shape
        reason = None
        if min(sides) < fp8.SMALLEST:
            reason = f"a side below {fp8.SMALLEST}"
        elif not fp8.fits(sides):
            reason = f"a side not divisible by {fp8.MULTIPLE}"
        elif path[-1] == "head" and not head:
            reason = "architecture.fp8.head is false"
        elif path[-1] != "head" and not in_block and not of_lookup:
            reason = "not a matrix of a block or lookup layer"
        if reason is None:
            converted.append("/".join(path))
        else:
            skipped.append(("/".join(path), shape, reason))
    return Conversion(tuple(converted), tuple(skipped))
