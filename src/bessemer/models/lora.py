"""Low-rank adapters: y = x·W + (α/r)·(x·A)·B, W (…, m, n) frozen, A (…, m, r) random and B (…, r, n) zero at first.

So training begins at W exactly, and r·(m + n) numbers are trained in place of m·n. Source: Hu et al. 2021 (LoRA); with
`rank_stabilized` the factor is α/√r (Kalajdzievski 2023).

`Split.complete` puts an `Adapted` node where the matrix was, and the model's products add the adapter's product to
that with W. No gradient of W is computed and no merged copy exists. W is stored in `lora.base_dtype`; A and B are
float32 and cast to the compute dtype at use. In training `lora.dropout` drops entries of the x that A reads. With
`lora.dora` the result counts m / ‖W + (α/r)·A·B‖ times per column, m trained from ‖W‖ on and the norm a constant in
the gradient (Liu et al. 2024, DoRA). Matrices that the model does not use in a plain product (tables, the head,
the layers of a user's own model) are merged inside the step instead: W' = W + (α/r)·A·B in float32. With
`lora.quantize` the frozen matrices of plain products are kept in 4 or 8 bits (kernels/quantized.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from bessemer.config import declared, field
from bessemer.config.aliases import current_name
from bessemer.errors import InputError, nearest
from bessemer.kernels.ops import Axes, dropout, fold_in, linear
from bessemer.kernels.quantized import KINDS, Quantized, dense, quantized_linear, size_of
from bessemer.models.protocol import Adaptable, GroupOf, group_of
from bessemer.topology.chips import backend

A, B, M = "lora_a", "lora_b", "lora_m"
EXPERTS = "expert"
STACKED = ("layers", EXPERTS)
"""Names of an axis along which matrices are stacked."""
ALL_LINEAR = ("all-linear",)
PARAM_DTYPES = ("float32", "bfloat16")
"""Of trained parameters at rest (training.param_dtype); those of fewer than two axes, and adapters, are float32."""
JOINED = 2**25
"""Bytes of x up to which XLA joins products with it on a GPU (xla_gpu_dot_merger_threshold_mb)."""
Path = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class LoraSettings:
    rank: int = field("lora/rank", default=0, minimum=0, help="r of the low-rank adapters; 0 = no adapters")
    alpha: float = field("lora/alpha", default=16.0, above=0, help="adapters are scaled by α/r")
    rank_stabilized: bool = field("lora/rank_stabilized", default=False, help="α/√r in place of α/r, for large ranks")
    targets: tuple[str, ...] = field(
        "lora/targets",
        default=(),
        help="patterns (* and ?) over the paths of matrices to adapt; none, or all-linear: those of attention and "
        "feed-forward",
    )
    rank_pattern: dict[str, int] = field(
        "lora/rank_pattern",
        default_factory=dict,
        minimum=1,
        help="pattern → rank of the matrices it matches, in place of lora.rank; the longest pattern wins",
    )
    alpha_pattern: dict[str, float] = field(
        "lora/alpha_pattern",
        default_factory=dict,
        above=0,
        help="pattern → α of the matrices it matches, in place of lora.alpha; the longest pattern wins",
    )
    dropout: float = field(
        "lora/dropout", default=0.0, minimum=0.0, below=1.0, help="dropout of the input of the adapters, in training"
    )
    dora: bool = field("lora/dora", default=False, help="train the length of each column apart from its direction")
    whole: tuple[str, ...] = field(
        "lora/whole", default=(), help="patterns of parameters trained whole beside the adapters, such as a new head"
    )
    init: str = field(
        "lora/init",
        default="kaiming",
        choices=("kaiming", "gaussian"),
        help="A at first: U(±1/√fan_in), or normal with deviation 1/r; B is 0",
    )
    base_dtype: str = field(
        "lora/base_dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype in memory of frozen matrices and tables; auto = the compute dtype, so bfloat16 on accelerators",
    )
    quantize: str = field(
        "lora/quantize",
        default="none",
        choices=("none", *KINDS),
        help="frozen matrices in memory: nf4 takes 0.52 bytes per weight, int8 1; none = lora.base_dtype",
    )
    keep_base: bool = field(
        "lora/keep_base",
        default=False,
        help="copy the base model into the run, in its own dtype; default: the run names it by path and sha256",
    )

    def __hash__(self) -> int:  # a mapping has none
        return hash(repr(self))

    @property
    def scale(self) -> float:
        """The factor of adapters that no pattern matches."""
        return self._scale(self.alpha, self.rank)

    def scale_of(self, path: Path) -> float:
        """The factor of the adapter at `path`: α/r, or α/√r, with its own α and r."""
        return self._scale(self.alpha_of(path), self.rank_of(path))

    def alpha_of(self, path: Path) -> float:
        """α of the adapter at `path`."""
        return _matched(self.alpha_pattern, path, self.alpha)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank) if rank else 0.0

    def rank_of(self, path: Path) -> int:
        """The rank of the adapter at `path`."""
        return _matched(self.rank_pattern, path, self.rank)


def _matched(patterns: Mapping[str, T], path: Path, default: T) -> T:
    """The value of the longest pattern that matches `path`."""
    matching = [pattern for pattern in patterns if fnmatchcase("/".join(path), pattern)]
    return patterns[max(matching, key=lambda p: (len(p), p))] if matching else default


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("w", "a", "b", "m", "keys", "factors"),
    meta_fields=("scale", "dropout"),
)
@dataclass(frozen=True)
class Adapted:
    """A frozen matrix with its adapter, in the place of the matrix in a tree of parameters.

    w: (…, m, n) in its stored dtype or quantized; a: (…, m, r) and b: (…, r, n) float32; m: (…, n) float32, the lengths
    of DoRA, or None; keys: (B,), random keys of the rows where dropout is applied, or None. `w` must stay the first
    field: flax compares the shape of a parameter's first leaf with the declared one.

    Of several adapters over one matrix (`stack_adapters`) a and b have the adapters, or with `for_rows` the rows of the
    batch, as their first axis; factors: (N, n) or (B, n) float32, what `factor` is for each, or None.
    """

    w: Array | Quantized
    a: Array
    b: Array
    scale: float
    m: Array | None = None
    keys: Array | None = None
    dropout: float = 0.0
    factors: Array | None = None

    @property
    def several(self) -> bool:
        """Whether there is an adapter for each row."""
        return self.a.ndim > len(self.w.shape)

    @property
    def scales_columns(self) -> bool:
        return self.m is not None or self.factors is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    def __getitem__(self, rows: slice) -> Adapted:
        """The adapted matrix of some rows of W."""
        if self.m is not None:
            raise InputError(
                "lora.dora needs whole columns, which lookup layers split over topology.tensor: set it to 1."
            )
        return replace(self, w=self.w[rows], a=self.a[rows])

    def add(self, base: Array, x: Array, axes: Axes, dtype: Any) -> Array:
        """The adapted product, from base = x W. x: (B, T, m); axes: those of W."""
        return self.scaled(base + self.update(x, axes, dtype))

    @property
    def shares_input(self) -> bool:
        """Whether A reads x as it is, the same for all rows."""
        return not self.several and (self.dropout == 0 or self.keys is None)

    def update(self, x: Array, axes: Axes, dtype: Any) -> Array:
        """scale·(x A) B in `dtype`."""
        if self.several:
            return (x @ self.a.astype(dtype)) @ (self.scale * self.b).astype(dtype)
        return self.raised(_lowered(dropout(x, self.dropout, self.keys), self.a, axes, dtype), axes, dtype)

    def raised(self, low: Array, axes: Axes, dtype: Any) -> Array:
        """scale·low B in `dtype`, low = x A."""
        return linear(low, self.scale * self.b, (None, axes[1]), dtype)

    def scaled(self, y: Array) -> Array:
        """y as it is; with DoRA its columns times `factor`, in float32: bf16 would round a factor near 1 to it."""
        return (y.astype(jnp.float32) * self.factor()).astype(y.dtype) if self.scales_columns else y

    def in_use(self, dtype: Any) -> Adapted:
        """Return the adapter as products read it, cast and scaled; with DoRA as it is, whose norms are float32."""
        if self.m is not None or self.b.dtype == dtype:
            return self
        return replace(self, a=self.a.astype(dtype), b=(self.scale * self.b).astype(dtype), scale=1.0)

    def factor(self) -> Array:
        """m / ‖W + scale·A·B‖ by column, (…, n), or (B, 1, n) of several; 1 without DoRA. The norm has no gradient."""
        if self.factors is not None:
            return self.factors[:, None]
        if self.m is None:
            return jnp.ones((*self.w.shape[:-2], self.w.shape[-1]), jnp.float32)
        return self.m / jax.lax.stop_gradient(column_norms(self.w, self.a, self.b, self.scale))

    def merged(self) -> Array:
        """The matrix that gives the same product, in float32."""
        whole = merged(self.w, self.a, self.b, self.scale)
        return whole if self.m is None else whole * self.factor()[..., None, :]


def column_norms(w: Array | Quantized, a: Array, b: Array, scale: float) -> Array:
    """‖W + s·A·B‖ by column, (…, n) float32, without forming the sum:

    ‖w + s·A b‖² = ‖w‖² + 2s·(Aᵀw)·b + s²·bᵀ(AᵀA)b  for a column w of W and b of B.
    """
    w = dense(w)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    across = jnp.einsum("...mr,...mn->...rn", a.astype(w.dtype), w, **exact)
    within = jnp.einsum("...rq,...qn->...rn", jnp.einsum("...mr,...mq->...rq", a, a, **exact), b, **exact)
    square = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=-2)
    return jnp.sqrt(square + jnp.sum(b * (2 * scale * across + scale**2 * within), axis=-2))


def project(x: Array, kernel: Array | Quantized | Adapted, axes: Axes, dtype: Any) -> Array:
    """x W in `dtype`, with the product of the adapter if `kernel` has one. x: (B, T, m)."""
    if isinstance(kernel, Adapted):
        return kernel.add(project(x, kernel.w, axes, dtype), x, axes, dtype)
    if isinstance(kernel, Quantized):
        return quantized_linear(x, kernel, axes, dtype)
    return linear(x, kernel, axes, dtype)


def _lowered(x: Array, a: Array, axes: Axes, dtype: Any) -> Array:
    """x A, (B, T, m) → (B, T, r).

    The barrier keeps XLA from joining this with the product of x and W: on a GPU it would copy W and A into one matrix
    first. In a decode step of a Llama of 8.03B, 10 GB of weights were copied for that.
    """
    if backend() == "gpu" and x.size * x.dtype.itemsize <= JOINED:
        x = jax.lax.optimization_barrier(x)
    return checkpoint_name(linear(x, a, (axes[0], None), dtype), "adapter")


def project_all(
    x: Array, kernels: Sequence[Array | Quantized | Adapted], axes: Sequence[Axes], dtype: Any
) -> list[Array]:
    """Return x W of each kernel in `dtype`, with the products of their adapters. x: (B, T, m)."""
    made = []
    for kernel, one, update in zip(kernels, axes, updates(x, kernels, axes, dtype), strict=True):
        if isinstance(kernel, Adapted) and update is not None:
            made.append(kernel.scaled(project(x, kernel.w, one, dtype) + update))
        else:
            made.append(project(x, kernel, one, dtype))
    return made


def updates(
    x: Array, kernels: Sequence[Array | Quantized | Adapted], axes: Sequence[Axes], dtype: Any
) -> list[Array | None]:
    """Return scale·(x A) B of each kernel that has an adapter, else None. x: (B, T, m).

    Adapters that read the same x share one product with all of their A's, and so in the backward pass one for the
    gradients of the A's and one for that of x: each takes as long as reading or writing x.
    """
    joint = {n: k.a for n, k in enumerate(kernels) if isinstance(k, Adapted) and k.shares_input}
    low: dict[int, Array] = {}
    if len(joint) > 1:
        matrices = list(joint.values())
        together = _lowered(x, jnp.concatenate(matrices, axis=-1), axes[0], dtype)
        ends = np.cumsum([a.shape[-1] for a in matrices])
        low = dict(zip(joint, jnp.split(together, ends[:-1], axis=-1), strict=True))
    return [
        (kernel.raised(low[n], axes[n], dtype) if n in low else kernel.update(x, axes[n], dtype))
        if isinstance(kernel, Adapted)
        else None
        for n, kernel in enumerate(kernels)
    ]


def with_keys(params: dict[str, Any], keys: Array | None) -> dict[str, Any]:
    """A layer's parameters with random keys for the dropout of each adapter, from those of the rows: (B,)."""
    if keys is None:
        return params
    return {
        name: replace(leaf, keys=fold_in(keys, zlib.crc32(name.encode()) >> 1)) if _is_adapted(leaf) else leaf
        for name, leaf in params.items()
    }


def drops(params: Any) -> bool:
    """Whether an adapter of `params` has dropout."""
    leaves = jax.tree.leaves(params, is_leaf=_is_adapted)
    return any(isinstance(leaf, Adapted) and leaf.dropout > 0 for leaf in leaves)


def merge_adapters(params: Any) -> Any:
    """Return `params` with plain arrays in place of `Adapted` and `Quantized` nodes."""
    return jax.tree.map(lambda leaf: leaf.merged() if _is_adapted(leaf) else dense(leaf), params, is_leaf=is_node)


def is_node(leaf: Any) -> bool:
    """Whether a part of a tree of parameters stands for one matrix."""
    return isinstance(leaf, Adapted | Quantized)


def stack_adapters(base: Any, adapters: Sequence[Mapping[Path, Adapted]]) -> Any:
    """Return the parameters `base` with several adapters over the same matrices, for `for_rows` to choose from.

    Number 0 is no adapter at all, number n + 1 is `adapters[n]`: path → its node, without W. Smaller ranks are filled
    up with zeros, and the scale is part of B, so adapters may differ in rank, scale and targets.
    """
    flat = flatten_dict(base)
    for path in {path: None for held in adapters for path in held}:
        w = flat[path]
        if len(w.shape) > 2:
            raise InputError(
                f"several adapters at once are for dense matrices, and '{'/'.join(path)}' is a stack of experts. Merge "
                "such an adapter into its model (bessemer export), and serve that."
            )
        nodes = [None, *(replace(held[path], w=w) if path in held else None for held in adapters)]
        rank = max(node.a.shape[-1] for node in nodes if node is not None)
        # on the host: adapters are small, and every shape would be a program
        a, b = np.zeros((len(nodes), w.shape[0], rank), "f4"), np.zeros((len(nodes), rank, w.shape[1]), "f4")
        factors = np.ones((len(nodes), w.shape[1]), "f4")
        for number, node in enumerate(nodes):
            if node is not None:
                own = node.a.shape[-1]
                a[number, :, :own], b[number, :own] = node.a, node.scale * np.asarray(node.b)
                factors[number] = node.factor() if node.scales_columns else 1
        scaled = any(node is not None and node.scales_columns for node in nodes)
        flat[path] = Adapted(w, jnp.asarray(a), jnp.asarray(b), 1.0, factors=jnp.asarray(factors) if scaled else None)
    return unflatten_dict(flat)


def holds_several(params: Any) -> bool:
    """Whether `params` come from `stack_adapters`."""
    leaves = jax.tree.leaves(params, is_leaf=_is_adapted)
    return any(isinstance(leaf, Adapted) and leaf.several for leaf in leaves)


def for_rows(params: Any, adapter: Array | None) -> Any:
    """Return `params` with the adapter of each row of a batch; adapter: (B,) numbers of `stack_adapters`, or None."""
    if adapter is None:
        return params

    def chosen(leaf: Any) -> Any:
        if not _is_adapted(leaf):
            return leaf
        factors = None if leaf.factors is None else leaf.factors[adapter]
        return replace(leaf, a=leaf.a[adapter], b=leaf.b[adapter], factors=factors)

    return jax.tree.map(chosen, params, is_leaf=_is_adapted)


def _is_adapted(leaf: Any) -> bool:
    return isinstance(leaf, Adapted)


def merged(w: Array | Quantized, a: Array, b: Array, scale: float) -> Array:
    """W + scale·A·B in float32. The product is made with all bits of float32: it is small beside W' x."""
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return dense(w).astype(product.dtype) + scale * product


def group_of_adapted(group_of: Callable[[Path], str], path: Path) -> str:
    """An adapter is of the kind of its matrix: what the optimizer does with that one, it does with A and with B. The
    lengths of DoRA are scalars."""
    if path[-1] == M:
        return "scalar"
    return group_of(path[:-1] if path[-1] in (A, B) else path)


def adapter_shapes(path: Path, box: Any, lora: LoraSettings) -> dict[str, Any]:
    """Abstract A and B of a kernel, and m with DoRA, boxed with the kernel's own axes: A takes the input's, B and m the
    output's."""
    rank = lora.rank_of(path)
    names, leaf = (box.names, box.value) if isinstance(box, nn.Partitioned) else (None, box)
    shape = tuple(leaf.shape)
    stacked = names is not None and all(name in STACKED for name in names[:-2])
    if len(shape) < 2 or (len(shape) > 2 and not stacked):
        raise InputError(
            f"lora.targets: '{'/'.join(path)}' has shape {shape}; an adapter needs a matrix, or a stack of "
            f"matrices whose leading axis is named {' or '.join(map(repr, STACKED))}."
        )
    *lead, m, n = shape
    if rank > min(m, n):
        raise InputError(
            f"lora.rank={rank} is more than the {min(m, n)} that '{'/'.join(path)}' {shape} can use; take less."
        )
    sizes = {A: (*lead, m, rank), B: (*lead, rank, n)} | ({M: (*lead, n)} if lora.dora else {})
    made = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    if names is None:
        return made
    axes = {A: (*names[:-1], None), B: (*names[:-2], None, names[-1]), M: (*names[:-2], names[-1])}
    return {name: nn.LogicallyPartitioned(made[name], axes[name]) for name in made}


def fresh_adapter(key: Array, path: Path, w: Array | Quantized, lora: LoraSettings) -> dict[str, Array]:
    """A drawn from (key, the path's name), so that it is the same whatever else is adapted; B zero; m = ‖W‖."""
    *lead, m, n = w.shape
    rank = lora.rank_of(path)
    own, size = jax.random.fold_in(key, zlib.crc32("/".join(path).encode())), (*lead, m, rank)
    if lora.init == "gaussian":
        drawn = jax.random.normal(own, size, jnp.float32) / rank
    else:
        drawn = jax.random.uniform(own, size, jnp.float32, -1 / math.sqrt(m), 1 / math.sqrt(m))
    made = {A: drawn, B: jnp.zeros((*lead, rank, n), jnp.float32)}
    return made | ({M: column_norms(w, made[A], made[B], 0.0)} if lora.dora else {})


# Which parameters of a model are trained, and how trained and frozen ones make the whole again.
#
#     training.freeze     patterns of parameters that stay as they are
#     lora.rank           low-rank adapters are trained in place of the matrices they adapt; everything else is frozen
#
# The trained part is a tree of its own, and the only one with gradients and optimizer state. Frozen
# parameters are arguments of the step like any other, so they are sharded alike and never copied.


@dataclass(frozen=True)
class Split:
    """Paths by what happens to them: trained whole, frozen with an adapter, frozen."""

    trained: tuple[Path, ...]
    adapted: tuple[Path, ...]
    frozen: tuple[Path, ...]  # without those in `adapted`
    lora: LoraSettings
    tables: frozenset[Path] = frozenset()  # those of `adapted` that are merged inside the step
    narrow: frozenset[Path] = frozenset()  # those that are stored in `dtype`; with adapters, frozen ones alone
    dtype: str = "float32"
    quantized: frozenset[Path] = frozenset()  # those of `frozen` and `adapted` that are kept as lora.quantize says

    @property
    def unquantized(self) -> Split:
        """The same split over the base as it is stored."""
        return replace(self, quantized=frozenset())

    @property
    def everything(self) -> bool:
        """Whether all parameters are trained as they are: there is nothing to complete."""
        return not self.adapted and not self.frozen

    def shapes(self, boxed: Any) -> tuple[Any, Any]:
        """(trained part, frozen part) of the model's abstract, boxed parameters; (all, None) when all are trained."""
        stored = self.stored(boxed)
        if self.everything:
            return stored, None
        flat, plain = flatten_dict(stored), flatten_dict(boxed)
        params = {path: flat[path] for path in self.trained}
        for path in self.adapted:
            made = adapter_shapes(path, plain[path], self.lora)
            params |= {(*path, name): leaf for name, leaf in made.items()}
        kept = {path: flat[path] for path in (*self.frozen, *self.adapted)}
        return unflatten_dict(params), unflatten_dict(kept)

    def stored(self, boxed: Any) -> Any:
        """The model's abstract, boxed parameters in the dtypes they are kept in: what to read a base model as."""
        flat = flatten_dict(boxed)
        return unflatten_dict({path: self._narrowed(path, leaf) for path, leaf in flat.items()})

    def _narrowed(self, path: Path, box: Any) -> Any:
        if path in self.quantized:
            return KINDS[self.lora.quantize].boxed(_shape(box), box.names if isinstance(box, nn.Partitioned) else None)
        if path not in self.narrow:
            return box
        if isinstance(box, nn.Partitioned):
            return box.replace_boxed(self._narrowed(path, box.value))
        return jax.ShapeDtypeStruct(box.shape, jnp.dtype(self.dtype))

    def divide(self, whole: Any, key: jax.Array) -> tuple[Any, Any]:
        """The same of arrays, in their stored dtypes. Adapters are new, drawn from `key`, and add nothing yet."""
        if self.everything and not self.narrow:
            return whole, None
        flat = {path: self._kept(path, leaf) for path, leaf in flatten_dict(whole).items()}
        if self.everything:
            return unflatten_dict(flat), None
        params = {path: flat[path] for path in self.trained}
        kept = {path: flat[path] for path in (*self.frozen, *self.adapted)}
        for path in self.adapted:
            made = fresh_adapter(key, path, kept[path], self.lora)
            params |= {(*path, name): array for name, array in made.items()}
        return unflatten_dict(params), unflatten_dict(kept)

    def _kept(self, path: Path, leaf: Any) -> Any:
        if path in self.quantized:
            return leaf if isinstance(leaf, Quantized) else KINDS[self.lora.quantize].of(leaf)
        return leaf.astype(self.dtype) if path in self.narrow else leaf

    def complete(self, params: Any, frozen: Any) -> Any:
        """The model's parameters, from what `divide` gave, with an `Adapted` node in the place of each adapted matrix;
        tables are merged with their adapters. `merge_adapters` makes plain arrays of the nodes."""
        if self.everything:
            return params
        given, flat = flatten_dict(params), flatten_dict(frozen)
        for path in self.trained:
            flat[path] = given[path]
        for path in self.adapted:
            a, b, scale = given[(*path, A)], given[(*path, B)], self.lora.scale_of(path)
            node = Adapted(flat[path], a, b, scale, given.get((*path, M)), dropout=self.lora.dropout)
            flat[path] = node.merged() if path in self.tables else node
        return unflatten_dict(flat)

    def idle(self, boxed: Any, group_of: GroupOf | None, active: float = 1.0) -> int:
        """Parameters in a token's matrix products whose gradient is never made; that of a table with an adapter is.

        active: share of the experts that a token uses.
        """
        flat = flatten_dict(boxed)
        paths = (*self.frozen, *(path for path in self.adapted if path not in self.tables))
        return sum(_used(flat[path], active) for path in paths if _multiplies(path, flat[path], group_of))

    def adapter_parameters(self, boxed: Any, active: float = 1.0) -> int:
        """Parameters of the adapters that stand beside their matrices, in a token's products."""
        flat = flatten_dict(self.shapes(boxed)[0])
        return sum(
            _used(leaf, active) for path, leaf in flat.items() if path[-1] in (A, B) and path[:-1] not in self.tables
        )

    def quantized_parameters(self, boxed: Any) -> int:
        """Weights of the quantized matrices."""
        flat = flatten_dict(boxed)
        return sum(math.prod(_shape(flat[path])) for path in self.quantized)

    def quantized_bytes(self, boxed: Any) -> int:
        """Bytes of the quantized matrices in memory, all devices together."""
        flat, kind = flatten_dict(boxed), KINDS.get(self.lora.quantize)
        return sum(size_of(kind.boxed(_shape(flat[path]), None)) for path in self.quantized) if kind else 0

    def count(self, boxed: Any) -> tuple[int, int]:
        """(parameters that are trained, parameters of the model)."""
        return _size(self.shapes(boxed)[0]), _size(boxed)


def make_split(
    boxed: Any,
    freeze: Sequence[str] = (),
    lora: LoraSettings | None = None,
    model: Any = None,
    param_dtype: str = "float32",
) -> Split:
    """The split that the settings ask for. boxed: the abstract parameters of `model`; param_dtype: that of matrices and
    tables without adapters, trained or not.

    A pattern that matches nothing, and a run without anything to train, are errors.
    """
    lora, groups = lora or LoraSettings(), group_of(model)
    flat: dict[Path, Any] = flatten_dict(boxed)
    if not lora.rank:
        held = _matching(flat, freeze, "training.freeze")
        trained = tuple(path for path in flat if path not in held)
        if not trained:
            raise InputError("training.freeze leaves nothing to train: every parameter matches. Freeze fewer.")
        wide = param_dtype == "float32"
        narrow = frozenset[Path]() if wide else frozenset(path for path, box in flat.items() if _rank(box) > 1)
        return Split(trained, (), tuple(held), lora, narrow=narrow, dtype=param_dtype)
    if param_dtype != "float32":
        raise InputError(
            f"training.param_dtype={param_dtype} is for runs that train the parameters themselves: adapters are "
            "float32, and the frozen matrices beside them are in lora.base_dtype. Leave out training.param_dtype, or "
            "set lora.rank=0."
        )
    if freeze:
        raise InputError(
            "training.freeze and lora.rank do not go together: with adapters everything else is frozen already. Leave "
            "training.freeze out; lora.targets says what is adapted and lora.whole what is trained whole."
        )
    whole = _matching(flat, lora.whole, "lora.whole")
    named = lora.targets and lora.targets != ALL_LINEAR
    targets = _matching(flat, lora.targets, "lora.targets") if named else _matrices(flat, groups)
    adapted = tuple(path for path in targets if path not in whole)
    if not adapted:
        raise InputError("lora.rank: no matrix is left to adapt. Name some with lora.targets, or set lora.rank=0.")
    for setting, patterns in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        _matching(dict.fromkeys(adapted), list(patterns), setting)
    rest = tuple(path for path in flat if path not in whole and path not in adapted)
    tables, narrow, dtype = frozenset(adapted), frozenset[Path](), "float32"
    if isinstance(model, Adaptable):
        tables = frozenset(path for path in adapted if model.group_of(path) not in model.projected_groups)
        dtype = jnp.dtype(model.compute_dtype).name if lora.base_dtype == "auto" else lora.base_dtype
        kept = (path for path in (*rest, *adapted) if path not in tables)
        narrow = frozenset(path for path in kept if model.group_of(path) in model.cast_groups)
    if tables and (lora.dora or lora.dropout):
        raise InputError(
            f"lora.{'dora' if lora.dora else 'dropout'} is for matrices of plain products, and "
            f"'{'/'.join(min(tables))}' is not one in this model. Leave it out of lora.targets, or switch the setting "
            "off."
        )
    stacks = [path for path in adapted if is_stack_of_experts(flat[path])]
    if stacks and (lora.dora or lora.dropout):
        raise InputError(
            f"lora.{'dora' if lora.dora else 'dropout'} is for dense matrices, and '{'/'.join(stacks[0])}' is a stack "
            "of experts. Leave experts out of lora.targets, or switch the setting off."
        )
    quantized = _quantized(flat, (*rest, *adapted), tables, model) if lora.quantize != "none" else frozenset()
    narrow = narrow - quantized if dtype != "float32" else frozenset()
    return Split(tuple(whole), adapted, rest, lora, tables, narrow, dtype, quantized)


def _quantized(flat: Mapping[Path, Any], kept: Sequence[Path], tables: frozenset[Path], model: Any) -> frozenset[Path]:
    """The frozen matrices of plain products, with an adapter or without."""
    if not isinstance(model, Adaptable):
        raise InputError(
            f"lora.quantize needs a model that multiplies by its matrices through the package, as gpt and llama do; "
            f"{type(model).__name__} is not one. Leave it out."
        )
    inside = (path for path in kept if path not in tables and len(_shape(flat[path])) > 1)
    return frozenset(path for path in inside if model.group_of(path) in model.projected_groups)


def split_of(config: Mapping[str, Any], boxed: Any, model: Any = None) -> Split:
    """The split of a saved configuration (flat: section/name → value, mappings too); one without these settings trains
    all."""
    kind = str(config.get("training/param_dtype") or "float32")
    if kind not in PARAM_DTYPES:
        raise InputError(
            f"the saved config: training.param_dtype is '{kind}'; it must be one of {', '.join(PARAM_DTYPES)}."
        )
    return make_split(boxed, config.get("training/freeze") or (), saved_settings(config), model, kind)


def saved_settings(config: Mapping[str, Any]) -> LoraSettings:
    """The settings of adapters in a saved configuration (flat); what it leaves out has its default."""
    settings = declared(LoraSettings)
    config = {current_name(key): value for key, value in config.items()}
    for name in ("rank_pattern", "alpha_pattern"):
        above = settings[name].key
        below = {k.removeprefix(f"{above}/"): v for k, v in config.items() if k.startswith(f"{above}/")}
        config = {**config, above: {**(config.get(above) or {}), **below}}
    given = {name: s.check(config[s.key], "the saved config") for name, s in settings.items() if s.key in config}
    return LoraSettings(**given)


def _matching(flat: Mapping[Path, Any], patterns: Sequence[str], setting: str) -> dict[Path, None]:
    """Paths that match one of the patterns, in the tree's order; a pattern without any names the nearest."""
    names = {"/".join(path): path for path in flat}
    found: set[Path] = set()
    for pattern in patterns:
        hits = [path for name, path in names.items() if fnmatchcase(name, pattern)]
        if not hits:
            raise InputError(f"{setting}: '{pattern}' matches no parameter. {_suggestion(pattern, list(names))}")
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
        return not any("embed" in word or word.endswith("head") or word in ("wte", "logits") for word in words)

    return {path: None for path, leaf in flat.items() if is_matrix(path, leaf)}


def _multiplies(path: Path, leaf: Any, group_of: GroupOf | None) -> bool:
    """Whether a parameter is in a matrix product, as a model's count of FLOPs sees it."""
    if group_of is not None:
        return group_of(path) in ("matrix", "gate", "head")
    return len(_shape(leaf)) > 1 and not any("embed" in name.lower() for name in path)


def _rank(box: Any) -> int:
    """The number of axes, without that of stacked layers."""
    stacked = isinstance(box, nn.Partitioned) and box.names[:1] == ("layers",)
    return len(_shape(box)) - stacked


def is_stack_of_experts(box: Any) -> bool:
    """Whether a boxed parameter is (E, m, n), a matrix per expert."""
    return isinstance(box, nn.Partitioned) and EXPERTS in box.names[:-2]


def _used(box: Any, active: float) -> int:
    """The parameters that a token is multiplied with: of experts a share."""
    return round(math.prod(_shape(box)) * (active if is_stack_of_experts(box) else 1))


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple((leaf.value if isinstance(leaf, nn.Partitioned) else leaf).shape)


def _size(boxed: Any) -> int:
    return sum(math.prod(_shape(leaf)) for leaf in flatten_dict(boxed).values())
