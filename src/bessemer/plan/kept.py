"""What a micro-batch keeps between its forward and backward pass: the tensors themselves, from the traced step.

`jax.vjp` returns what it will need as leaves; tracing it, for the chip that is planned, gives their shapes without an
array or a compiler. So the list follows from the model's own code: kernels, precision, remat, objective and all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bessemer.plan.jaxprs import inner_jaxprs
from bessemer.training.model_parts import make_apply
from bessemer.training.trainer import BaseTrainer

MADE = ("dot_general", "pallas_call", "scatter-add", "conv_general_dilated", "ragged_dot_general")
"""Whose results surely lie in memory; elementwise work is fused into them or into what follows."""

FORMS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type", "copy", "name")
"""Operations whose result is their operand in another form."""


@dataclass(frozen=True)
class Tensor:
    """`count` arrays of one shape that are kept. `rows`: it grows with the micro-batch."""

    shape: tuple[int, ...]
    dtype: str
    count: int
    rows: bool

    @property
    def bytes(self) -> int:
        return self.count * math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Kept:
    """Of a micro-batch of `rows` sequences on one device; `largest`: the biggest result of a product or kernel."""

    rows: int
    tensors: tuple[Tensor, ...]
    largest: int
    width: int  # of the residual stream, which is not split over `tensor`

    def activations(self, rows: int, tensor: int = 1, context: int = 1) -> float:
        """Bytes for another micro-batch or mesh: all but the residual stream is split over heads, mlp, vocabulary."""
        total = 0.0
        for one in self.tensors:
            split = tensor if one.rows and one.shape[-1] != self.width else 1
            total += one.bytes / split * (rows / self.rows / context if one.rows else 1.0)
        return total

    def workspace(self, rows: int, tensor: int = 1, context: int = 1) -> float:
        """The largest result and what is being made of it."""
        return 2.0 * self.largest * min(1.0, rows / self.rows) / tensor / context


def kept_tensors(trainer: BaseTrainer, rows: int, remat: tuple[str, ...] | None = None) -> Kept:
    """Trace one micro-batch of `rows` sequences on one device; `remat` replaces the model's own setting."""
    state, model = trainer.functions.abstract_state, trainer.model
    if remat is not None and hasattr(model, "remat"):
        state = state.replace(apply_fn=make_apply(model.clone(remat=list(remat))))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    fields = trainer.data.fields.items()
    batch = {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (shape, dtype) in fields}
    key = jax.eval_shape(lambda: jax.random.key(0))

    def residuals(params: Any, state: Any, batch: Any, key: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: state.objective(p, batch, key)[0], params)[1])

    kept = jax.make_jaxpr(residuals)(state.params, state, batch, key)
    width = getattr(getattr(model, "shape", None), "width", 0)
    weights = {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(state.params)}
    found = tuple(_tensors(kept.jaxpr, weights, rows, trainer.settings.block_size))
    return Kept(rows, found, max(_results(kept.jaxpr), default=0), width)


def _tensors(jaxpr: Any, weights: set[tuple[int, ...]], rows: int, block: int) -> Iterator[Tensor]:
    """Results that are no arguments, each once: a tensor that two operations need is one tensor."""
    source = _sources(jaxpr)
    kept = {id(root): root for v in jaxpr.outvars if not hasattr(v, "val") for root in [source(v)]}
    given = {id(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    shapes = Counter(
        (tuple(v.aval.shape), str(v.aval.dtype))
        for name, v in kept.items()
        if name not in given and not hasattr(v, "val") and _is_number(v.aval.dtype)
    )
    for (shape, dtype), count in shapes.items():
        of_tokens = rows * block in shape or (rows, block) in zip(shape, shape[1:], strict=False)
        if math.prod(shape):
            yield Tensor(shape, dtype, count, of_tokens and tuple(sorted(shape)) not in weights)


def _sources(jaxpr: Any) -> Callable[[Any], Any]:
    """From a variable to the one that lies in memory for it: other forms and wider copies are made again when used."""
    makers = {id(v): equation for equation in jaxpr.eqns for v in equation.outvars}

    def source(variable: Any) -> Any:
        maker = makers.get(id(variable))
        if maker is None or maker.primitive.name not in FORMS:
            return variable
        before = maker.invars[0]
        if hasattr(before, "val") or _size(before.aval) > _size(variable.aval):
            return variable
        return source(before)

    return source


def _is_number(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


def _results(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in MADE:
            yield max(_size(v.aval) for v in equation.outvars)
        elif equation.primitive.name != "pallas_call":
            for inner in inner_jaxprs(equation):
                yield from _results(inner)


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * jnp.dtype(aval.dtype).itemsize
