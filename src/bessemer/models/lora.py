"""Low-rank adapters: W' = W + (α/r)·A·B, with W (…, m, n) as it was, A (…, m, r) random and B (…, r, n) zero at first.

So training begins at W exactly, and r·(m + n) numbers are trained in place of m·n. Source: Hu et al. 2021 (LoRA); with
`rank_stabilised` the factor is α/√r (Kalajdzievski 2023).

W' is made inside the step, in float32, before the model casts it: the model knows nothing of it, and float8,
rematerialisation, scans and every kernel work as they do without.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from bessemer.config import declared, field
from bessemer.errors import InputError, nearest

A, B = "lora_a", "lora_b"
Path = tuple[str, ...]


@dataclass(frozen=True)
class LoraSettings:
    rank: int = field("lora/rank", default=0, minimum=0, help="r of the low-rank adapters; 0 = no adapters")
    alpha: float = field("lora/alpha", default=16.0, above=0, help="adapters count α/r times")
    rank_stabilised: bool = field(
        "lora/rank_stabilised", default=False, help="α/√r in place of α/r, for large ranks"
    )
    targets: tuple[str, ...] = field(
        "lora/targets",
        default=(),
        help="patterns (* and ?) over the paths of matrices to adapt; none: those of attention and feed-forward",
    )
    whole: tuple[str, ...] = field(
        "lora/whole",
        default=(),
        help="patterns of parameters trained whole beside the adapters, such as a new head",
    )
    init: str = field(
        "lora/init",
        default="kaiming",
        choices=("kaiming", "gaussian"),
        help="A at first: U(±1/√fan_in), or normal with deviation 1/r; B is 0",
    )

    @property
    def scale(self) -> float:
        return (
            self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank) if self.rank else 0.0
        )


def merged(w: Array, a: Array, b: Array, scale: float) -> Array:
    """W + scale·A·B in the dtype of W. The product is made with all bits of float32: it is small beside W' x."""
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (w + scale * product).astype(w.dtype)


def group_of_adapted(group_of: Callable[[Path], str], path: Path) -> str:
    """An adapter is of the kind of its matrix: what the optimizer does with that one, it does with A and with B."""
    return group_of(path[:-1] if path[-1] in (A, B) else path)


def adapter_shapes(path: Path, box: Any, rank: int) -> dict[str, Any]:
    """Abstract A and B of a kernel, boxed with the kernel's own axes: A takes the input's, B the output's."""
    names, leaf = (box.names, box.value) if isinstance(box, nn.Partitioned) else (None, box)
    shape = tuple(leaf.shape)
    stacked = names is not None and all(name == "layers" for name in names[:-2])
    if len(shape) < 2 or (len(shape) > 2 and not stacked):
        raise InputError(
            f"lora.targets: '{'/'.join(path)}' has shape {shape}; an adapter needs a matrix, or a stack of "
            "matrices whose leading axis is named 'layers'."
        )
    *lead, m, n = shape
    if rank > min(m, n):
        raise InputError(
            f"lora.rank={rank} is more than the {min(m, n)} that '{'/'.join(path)}' {shape} can use; take less."
        )
    sizes = {A: (*lead, m, rank), B: (*lead, rank, n)}
    made = {name: jax.ShapeDtypeStruct(size, leaf.dtype) for name, size in sizes.items()}
    if names is None:
        return made
    axes = {A: (*names[:-1], None), B: (*names[:-2], None, names[-1])}
    return {name: nn.LogicallyPartitioned(made[name], axes[name]) for name in made}


def fresh_adapter(key: Array, path: Path, w: Array, rank: int, init: str) -> dict[str, Array]:
    """A drawn from (key, the path's name), so that it is the same whatever else is adapted; B zero."""
    *lead, m, n = w.shape
    own, size = jax.random.fold_in(key, zlib.crc32("/".join(path).encode())), (*lead, m, rank)
    if init == "gaussian":
        drawn = jax.random.normal(own, size, w.dtype) / rank
    else:
        drawn = jax.random.uniform(own, size, w.dtype, -1 / math.sqrt(m), 1 / math.sqrt(m))
    return {A: drawn, B: jnp.zeros((*lead, rank, n), w.dtype)}


# Which parameters of a model are trained, and how trained and frozen ones make the whole again.
#
#     training.freeze     patterns of parameters that stay as they are
#     lora.rank           low-rank adapters are trained in place of the matrices they adapt; everything else is frozen
#
# The trained part is a tree of its own, and the only one with gradients and optimizer state. Frozen
# parameters are arguments of the step like any other, so they are sharded alike and never copied.


GroupOf = Callable[[Path], str]


@dataclass(frozen=True)
class Split:
    """Paths by what happens to them: trained whole, frozen with an adapter, frozen."""

    trained: tuple[Path, ...]
    adapted: tuple[Path, ...]
    frozen: tuple[Path, ...]  # without those in `adapted`
    lora: LoraSettings

    @property
    def everything(self) -> bool:
        """Whether all parameters are trained as they are: there is nothing to complete."""
        return not self.adapted and not self.frozen

    def shapes(self, boxed: Any) -> tuple[Any, Any]:
        """(trained part, frozen part) of the model's abstract, boxed parameters; (all, None) when all are trained."""
        if self.everything:
            return boxed, None
        flat = flatten_dict(boxed)
        params = {path: flat[path] for path in self.trained}
        for path in self.adapted:
            made = adapter_shapes(path, flat[path], self.lora.rank)
            params |= {(*path, name): leaf for name, leaf in made.items()}
        kept = {path: flat[path] for path in (*self.frozen, *self.adapted)}
        return unflatten_dict(params), unflatten_dict(kept)

    def divide(self, whole: Any, key: jax.Array) -> tuple[Any, Any]:
        """The same of arrays. Adapters are new, drawn from `key`, and add nothing yet."""
        if self.everything:
            return whole, None
        flat = flatten_dict(whole)
        params = {path: flat[path] for path in self.trained}
        for path in self.adapted:
            made = fresh_adapter(key, path, flat[path], self.lora.rank, self.lora.init)
            params |= {(*path, name): array for name, array in made.items()}
        kept = {path: flat[path] for path in (*self.frozen, *self.adapted)}
        return unflatten_dict(params), unflatten_dict(kept)

    def complete(self, params: Any, frozen: Any) -> Any:
        """The model's parameters, from what `divide` gave: adapters are merged into their matrices."""
        if self.everything:
            return params
        given, flat = flatten_dict(params), flatten_dict(frozen)
        for path in self.trained:
            flat[path] = given[path]
        for path in self.adapted:
            flat[path] = merged(flat[path], given[(*path, A)], given[(*path, B)], self.lora.scale)
        return unflatten_dict(flat)

    def idle(self, boxed: Any, group_of: GroupOf | None) -> int:
        """Parameters in matrix products whose gradient is never made; that of an adapted matrix is, on the way."""
        flat = flatten_dict(boxed)
        return sum(
            math.prod(_shape(flat[path])) for path in self.frozen if _multiplies(path, flat[path], group_of)
        )

    def count(self, boxed: Any) -> tuple[int, int]:
        """(parameters that are trained, parameters of the model)."""
        return _size(self.shapes(boxed)[0]), _size(boxed)


def make_split(
    boxed: Any, freeze: Sequence[str] = (), lora: LoraSettings | None = None, group_of: GroupOf | None = None
) -> Split:
    """The split that the settings ask for. boxed: the model's abstract parameters; group_of: the model's own.

    A pattern that matches nothing, and a run without anything to train, are errors.
    """
    lora = lora or LoraSettings()
    flat: dict[Path, Any] = flatten_dict(boxed)
    if not lora.rank:
        held = _matching(flat, freeze, "training.freeze")
        trained = tuple(path for path in flat if path not in held)
        if not trained:
            raise InputError(
                "training.freeze leaves nothing to train: every parameter matches. Freeze fewer."
            )
        return Split(trained, (), tuple(held), lora)
    if freeze:
        raise InputError(
            "training.freeze and lora.rank do not go together: with adapters everything else is frozen already. Leave "
            "training.freeze out; lora.targets says what is adapted and lora.whole what is trained whole."
        )
    whole = _matching(flat, lora.whole, "lora.whole")
    targets = _matching(flat, lora.targets, "lora.targets") if lora.targets else _matrices(flat, group_of)
    adapted = tuple(path for path in targets if path not in whole)
    if not adapted:
        raise InputError(
            "lora.rank: no matrix is left to adapt. Name some with lora.targets, or set lora.rank=0."
        )
    rest = tuple(path for path in flat if path not in whole and path not in adapted)
    return Split(tuple(whole), adapted, rest, lora)


def split_of(config: Mapping[str, Any], boxed: Any, group_of: GroupOf | None = None) -> Split:
    """The split of a saved configuration (flat: section/name → value); one without these settings trains all."""
    settings = declared(LoraSettings)
    given = {
        name: s.check(config[s.key], "the saved config") for name, s in settings.items() if s.key in config
    }
    return make_split(boxed, config.get("training/freeze") or (), LoraSettings(**given), group_of)


def _matching(flat: Mapping[Path, Any], patterns: Sequence[str], setting: str) -> dict[Path, None]:
    """Paths that match one of the patterns, in the tree's order; a pattern without any names the nearest."""
    names = {"/".join(path): path for path in flat}
    found: set[Path] = set()
    for pattern in patterns:
        hits = [path for name, path in names.items() if fnmatchcase(name, pattern)]
        if not hits:
            raise InputError(
                f"{setting}: '{pattern}' matches no parameter. {_suggestion(pattern, list(names))}"
            )
        found.update(hits)
    return {path: None for path in flat if path in found}


def _suggestion(pattern: str, names: list[str]) -> str:
    """The nearest name, and how paths look; a bare name is often the end of one."""
    inside = [name for name in names if pattern.strip("*/") in name]
    close = nearest(pattern, names, cutoff=0.4)
    if inside:
        return f"Did you mean '*{pattern.strip('*/')}*', as in {inside[0]}?"
    hint = f"Did you mean '{close}'? " if close else ""
    return f"{hint}Paths are like {', '.join(names[:3])}."


def _matrices(flat: Mapping[Path, Any], group_of: GroupOf | None) -> dict[Path, None]:
    """What is adapted when nothing is named: matrices inside the layers, so no table of tokens and no head."""

    def is_matrix(path: Path, leaf: Any) -> bool:
        if len(_shape(leaf)) < 2:
            return False
        if group_of is not None:
            return group_of(path) == "matrix"
        words = [name.lower() for name in path]
        return not any(
            "embed" in word or word.endswith("head") or word in ("wte", "logits") for word in words
        )

    return {path: None for path, leaf in flat.items() if is_matrix(path, leaf)}


def _multiplies(path: Path, leaf: Any, group_of: GroupOf | None) -> bool:
    """Whether a parameter is in a matrix product, as a model's count of FLOPs sees it."""
    if group_of is not None:
        return group_of(path) in ("matrix", "gate", "head")
    return len(_shape(leaf)) > 1 and not any("embed" in name.lower() for name in path)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple((leaf.value if isinstance(leaf, nn.Partitioned) else leaf).shape)


def _size(boxed: Any) -> int:
    return sum(math.prod(_shape(leaf)) for leaf in flatten_dict(boxed).values())
