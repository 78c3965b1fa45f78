"""A plan as one document: what a recipe derives, and what it will take on the devices at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.console import counted
from bessemer.losses.further_tokens import PROGRESS
from bessemer.models.lookup import without_lookup
from bessemer.models.pipeline import bubble, micro_batches
from bessemer.models.protocol import Model
from bessemer.models.transformer import Transformer
from bessemer.plan.show import sample_curves
from bessemer.plan.trainer import planned_trainer
from bessemer.topology import unbox
from bessemer.training.launch import Overrides
from bessemer.training.output import optimizer_groups
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import Functions, RunPlan, StepHooks, step_memory
from bessemer.training.setup.model import compiler_options, flops_formula, flops_share, make_apply

Say = Callable[[str], None]


def make_plan(
    recipe: Any = "quickstart", overrides: Overrides = (), *, compiles: bool = True, say: Say = lambda text: None
) -> dict[str, Any]:
    """Return everything known before the first step, as plain values; without `compiles` memory and share are None."""
    trainer = planned_trainer(recipe, overrides, compiles=compiles)
    plan, functions, context = trainer.plan, trainer.functions, trainer.context
    with context.topology.scope():
        memory = plan_memory(plan, trainer.hooks, functions, say) if compiles else None
    if compiles:
        say("timing a pass of the model beside a matrix product")
    rate = measure_rate(plan, functions, with_pass=compiles)
    name = context.settings.optimizer or trainer.hooks.optimizer()
    return {
        "recipe": str(recipe) if isinstance(recipe, str | Path) else "given",
        "model": plan_model(plan),
        "derived": context.notes.derived,
        "horizon": plan_horizon(plan, functions, trainer.epochs),
        "flops": plan_flops(plan),
        "optimizer": {
            "name": name if isinstance(name, str) else type(name).__name__,
            "groups": optimizer_groups(functions),
        },
        "devices": context.topology.describe(),
        "pipeline": plan_pipeline(plan),
        "memory": memory,
        "time": predict(plan, functions, rate),
        "schedules": sample_curves(functions.optimizer, plan.data.steps),
        "notes": [*context.topology.notes, *context.config.notes, *trainer.lines],
    }


def plan_model(plan: RunPlan) -> dict[str, Any]:
    """Return family, sizes, and parameters by group; "total" is all of them, "scaling" is N."""
    model, settings = plan.model.model, plan.context.settings
    sizes: dict[str, Any] = {}
    if isinstance(model, Transformer):
        sizes = {name: getattr(model.shape, name) for name in ("depth", "width", "heads", "kv_heads", "head_dim")}
    return {
        "family": settings.family,
        **sizes,
        "vocab_size": model.vocab_size if isinstance(model, Model) else None,
        "block_size": settings.block_size,
        "parameters": plan.model.counts,
    }


def plan_horizon(plan: RunPlan, functions: Functions, epochs: float | None) -> dict[str, Any]:
    scaling = plan.model.counts.get("scaling")
    return {
        "steps": plan.data.steps,
        "tokens": plan.tokens,
        "epochs": epochs,
        "tokens_per_scaling_parameter": plan.tokens / scaling if scaling else None,
        "batch_size": plan.data.batch_size,
        "batch_tokens": plan.tokens_per_step,
        "per_device_batch_size": plan.context.config[microbatch.KEY],
        "accumulate_steps": functions.accumulate_steps,
    }


def plan_pipeline(plan: RunPlan) -> dict[str, Any] | None:
    """Return the stages of a pass, its micro-batches, and the share that a stage idles; None without stages."""
    stages, rows = int(plan.context.topology.mesh.shape["pipeline"]), int(plan.context.config[microbatch.KEY])
    if stages == 1:
        return None
    return {"stages": stages, "micro_batches": micro_batches(stages, rows), "bubble": bubble(stages, rows)}


def plan_flops(plan: RunPlan) -> dict[str, Any]:
    return {
        "per_token": plan.model.flops_per_token,
        "per_token_causal": plan.model.flops_per_token_causal,
        "total": plan.flops,
        "formula": flops_formula(plan.model, plan.context.settings.block_size),
    }


def plan_memory(plan: RunPlan, hooks: StepHooks, functions: Functions, say: Say) -> dict[str, Any]:
    """Return the bytes of one device for the compiled step; `fits` is None if the backend reports no memory."""
    say("compiling the step, which is what memory is read from (--no-compile skips it)")
    begun = time.monotonic()
    abstract, placed = functions.abstract_state, functions.state_shardings
    memory = step_memory(plan, hooks, abstract, placed, plan.context.config[microbatch.KEY])
    limit = microbatch.memory_limit(jax.local_devices()[0]) or microbatch.machine_memory()
    seconds = time.monotonic() - begun
    say(f"compiled in {seconds:.1f} s")
    facts: dict[str, Any] = {"limit": limit, "compile_seconds": round(seconds, 2)}
    if memory is None:
        return {**facts, "total": None, "fits": False}
    fits = None if limit is None else memory.total <= limit
    return {**facts, **memory._asdict(), "total": memory.total, "fits": fits}


# --- how long a run takes on the chip at hand, measured ---
#
#     time = (model FLOPs + the optimizer's) / (matrix rate · share · devices)
#
# The matrix rate is that of a plain square product in the model's precision. The share is what a forward and backward
# pass of this model, cut to two layers, reaches of it in turn with the products. Communication between devices,
# validation and checkpoints are not counted.
LAYERS = 2  # layers of the pass that is timed; the rest of a deep model is more of the same
PASS_SECONDS = 1.0  # the timed pass takes about as many rows as fill this time at the matrix rate, and at least one
LONGEST = 10.0  # seconds that one row may take at the matrix rate; beyond them the share is left unmeasured
REPEATS = 5


class Rate(NamedTuple):
    """FLOP/s of one device. `share` is None if it was not measured; `how` says what was measured."""

    matrix: float
    share: float | None
    how: str


def matrix_product(dtype: Any, platform: str) -> tuple[Callable[[], float], int]:
    """Return (a callable that times one product, its side). On an accelerator it times ten in a row."""
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
    """Return the matrix rate of the first device and, with `with_pass`, the share that the model's pass reaches."""
    model = plan.model.model
    dtype = model.compute_dtype if isinstance(model, Transformer) else jnp.float32
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


def model_pass(plan: RunPlan, functions: Functions, matrix: float) -> tuple[Callable[[], float], float, str] | None:
    """Return (a callable that times one pass, its FLOPs, a description); None if it would take too long."""
    model: Any = plan.model.model
    deep = isinstance(model, Transformer) and model.depth > LAYERS
    cut = without_lookup(model).clone(depth=LAYERS) if deep else model
    block = plan.context.settings.block_size
    row_flops = (cut.flops_per_token(block) + 6 * plan.model.further) * block
    if row_flops / matrix > LONGEST:
        return None
    rows = int(min(plan.context.config[microbatch.KEY], max(1, PASS_SECONDS * matrix // row_flops)))
    batch = some_rows(plan, rows)
    apply, state = make_apply(cut), functions.abstract_state
    if state.rules.steps:
        batch[PROGRESS] = jnp.zeros(())

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

    layers = "the whole model" if cut is model else f"{LAYERS} of its {model.depth} layers"
    return once, row_flops * rows, f"a forward and backward pass of {layers} over {rows} × {block} tokens"


def some_rows(plan: RunPlan, rows: int) -> dict[str, jax.Array]:
    """Return random tokens as a training batch, (rows, T)."""
    block, model = plan.context.settings.block_size, plan.model.model
    size = model.vocab_size if isinstance(model, Model) else 256
    ids = np.random.default_rng(0).integers(0, size, (rows, block + 1), dtype=np.int32)
    fields: dict[str, np.ndarray] = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}
    fields["positions"] = np.broadcast_to(np.arange(block, dtype=np.int32), (rows, block))
    for name, (shape, dtype) in plan.data.fields.items():
        fields.setdefault(name, np.ones((rows, *shape), dtype))
    return {name: jnp.asarray(array) for name, array in fields.items()}


def predict(plan: RunPlan, functions: Functions, rate: Rate) -> dict[str, Any]:
    """Return the seconds of the run and their basis. Virtual devices of one CPU share its cores and count once."""
    topology = plan.context.topology
    devices = jax.process_count() if topology.platform == "cpu" else topology.device_count
    update = functions.optimizer.update_flops(functions.abstract_state.params) * plan.data.steps
    share = 1.0 if rate.share is None else rate.share
    pipeline = plan_pipeline(plan)
    flops = plan.flops * (4 / 3) / (1 - pipeline["bubble"]) if pipeline else plan.flops  # layers are recomputed
    seconds = (flops + update) / (rate.matrix * share * devices)
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
