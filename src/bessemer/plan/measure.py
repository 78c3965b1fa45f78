"""How long a run will take on the chip at hand: measured here and now, never looked up.

    time = (model FLOPs + the optimizer's) / (matrix rate · share · devices)

The matrix rate is that of a plain square product in the model's precision. The share is what a forward and backward
pass of this very model, cut to two layers, reaches of it in turn with the products. Not counted: communication
between devices, validation, checkpoints.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.console import counted
from bessemer.topology import unbox
from bessemer.training.setup.compiled import Functions
from bessemer.training.setup.model import compiler_options, flops_share, make_apply
from bessemer.training.setup.plan import RunPlan

LAYERS = 2
"""Layers of the pass that is timed; the rest of a deep model is more of the same."""

PASS_SECONDS = 1.0
"""The timed pass takes about as many rows as fill this time at the matrix rate, and at least one."""

LONGEST = 10.0
"""Seconds that one row may take at the matrix rate; beyond them the share is left unmeasured."""

REPEATS = 5


class Rate(NamedTuple):
    """FLOP/s of one device. `share` is None where it was not measured; `how` says what was done."""

    matrix: float
    share: float | None
    how: str


def matrix_product(dtype: Any, platform: str) -> tuple[Callable[[], float], int]:
    """(a callable that returns the seconds of one product, its side). Ten in a row on an accelerator."""
    side, count = (2048, 1) if platform == "cpu" else (8192, 10)
    a, b = (jax.random.normal(key, (side, side), dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(jnp.matmul)
    product(a, b).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        for _ in range(count):
            last = product(a, b)
        last.block_until_ready()
        return (time.perf_counter() - start) / count

    return once, side


def measure_rate(plan: RunPlan, functions: Functions, with_pass: bool = True) -> Rate:
    """The matrix rate of the first device and, unless told otherwise, the share that the model's pass reaches."""
    dtype = getattr(plan.model.model, "compute_dtype", jnp.float32)
    product, side = matrix_product(dtype, plan.context.topology.platform)
    seconds = [product() for _ in range(REPEATS)]
    how = f"a {side}³ product in {jnp.dtype(dtype).name}, median of {REPEATS}"
    matrix = 2 * side**3 / statistics.median(seconds)
    if not with_pass:
        return Rate(matrix, None, how)
    made = model_pass(plan, functions, matrix)
    if made is None:
        return Rate(matrix, None, f"{how}; one row of this model would take too long to time")
    run, flops, words = made
    run()
    passes: list[float] = []
    begun = time.perf_counter()
    while len(passes) < REPEATS and (not passes or time.perf_counter() - begun < 2 * PASS_SECONDS):
        passes.append(run())
        seconds.append(product())
    matrix = 2 * side**3 / statistics.median(seconds)
    share = flops / statistics.median(passes) / matrix
    return Rate(matrix, share, f"{how}, in turn with {words}, timed {counted(len(passes), 'time')}")


def model_pass(
    plan: RunPlan, functions: Functions, matrix: float
) -> tuple[Callable[[], float], float, str] | None:
    """(a callable that returns the seconds of one pass, its FLOPs, what it is); None when it would take too long."""
    model: Any = plan.model.model
    depth = getattr(model, "depth", None)
    plain = {"lookup_after_layers": ()} if hasattr(model, "lookup_after_layers") else {}
    cut = model.clone(depth=LAYERS, **plain) if isinstance(depth, int) and depth > LAYERS else model
    block = plan.context.settings.block_size
    row_flops = cut.flops_per_token(block) * block
    if row_flops / matrix > LONGEST:
        return None
    rows = int(min(functions.per_device, max(1, PASS_SECONDS * matrix // row_flops)))
    batch = some_rows(plan, rows)
    apply, state = make_apply(cut), functions.abstract_state

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        against = {} if state.reference is None else {"reference": params}
        return state.loss_fn(apply, params, batch, key, **against)[0]

    key = jax.random.key(0)
    params = jax.jit(lambda k: unbox(cut.init(k, batch["input_ids"][:1]))["params"])(key)
    gradient = jax.jit(jax.grad(loss), compiler_options=compiler_options(plan.context.topology, model))

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(gradient(params, batch, key))
        return time.perf_counter() - start

    layers = "the whole model" if cut is model else f"{LAYERS} of its {depth} layers"
    return once, row_flops * rows, f"a forward and backward pass of {layers} over {rows} × {block} tokens"


def some_rows(plan: RunPlan, rows: int) -> dict[str, jax.Array]:
    """Random tokens in the form of a training batch, (rows, T)."""
    block, size = plan.context.settings.block_size, getattr(plan.model.model, "vocab_size", 256)
    ids = np.random.default_rng(0).integers(0, size, (rows, block + 1), dtype=np.int32)
    fields: dict[str, np.ndarray] = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}
    fields["positions"] = np.broadcast_to(np.arange(block, dtype=np.int32), (rows, block))
    for name, (shape, dtype) in plan.data.fields.items():
        fields.setdefault(name, np.ones((rows, *shape), dtype))
    return {name: jnp.asarray(array) for name, array in fields.items()}


def predict(plan: RunPlan, functions: Functions, rate: Rate) -> dict[str, Any]:
    """Seconds of the whole run, and what they rest on. Virtual devices of one CPU share its cores and count once."""
    topology = plan.context.topology
    devices = jax.process_count() if topology.platform == "cpu" else topology.device_count
    update = functions.optimizer.update_flops(functions.abstract_state.params) * plan.data.steps
    share = 1.0 if rate.share is None else rate.share
    seconds = (plan.flops + update) / (rate.matrix * share * devices)
    speed = plan.tokens / seconds
    per_token = flops_share(topology, plan.model, causal=False)
    return {
        "seconds": seconds,
        "tokens_per_s": speed,
        "matrix_flops_per_s": rate.matrix,
        "share_of_matrix_rate": rate.share,
        "measured": rate.how,
        "optimizer_flops": update,
        "devices": devices,
        "mfu": None if per_token is None or rate.share is None else speed * per_token,
        "bound": rate.share is None,
    }
