"""A plan as one document, and as text: what a recipe derives, and what it will take on the devices at hand.

As text it is tables that fit a terminal, and the schedules as lines of blocks.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bessemer.config import dotted
from bessemer.console import compact, counted, duration, figure, in_parts, table
from bessemer.errors import InputError
from bessemer.losses.cross_entropy import PROGRESS
from bessemer.models.lookup import without_lookup
from bessemer.models.pipeline import bubble, micro_batches
from bessemer.models.protocol import Model
from bessemer.models.transformer import Transformer
from bessemer.optim import Optimizer
from bessemer.plan.trainer import planned_trainer
from bessemer.report.plots import INK, finish, new_figure, save
from bessemer.topology import unbox
from bessemer.training.launch import Overrides
from bessemer.training.output import optimizer_groups
from bessemer.training.setup import microbatch
from bessemer.training.setup.compiled import Functions, RunPlan, StepHooks, step_memory
from bessemer.training.setup.model import compiler_options, flops_formula, flops_share, make_apply

# --- as text ---


POINTS = 201
BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 48  # characters
TITLES = {
    "lrm": "learning rate, as a share of its peak",
    "lr": "learning rate",
    "momentum": "momentum of Muon",
    "weight_decay": "weight decay",
}


def sample_curves(optimizer: Optimizer, steps: int, points: int = POINTS) -> dict[str, list[float]]:
    """Return `steps` (the first, the last, the schedule's corners and others) and every curve's values there."""
    at = set(np.linspace(0, steps - 1, min(points, steps)).round().astype(int).tolist())
    if optimizer.schedule is not None:
        at |= {corner for corner in optimizer.schedule.corners if corner < steps}
    where = sorted(at)
    traced = jnp.asarray(where, jnp.int32)
    curves = {name: np.asarray(jax.jit(curve)(traced)).tolist() for name, curve in optimizer.curves.items()}
    return {"steps": where, **curves}


def sparkline(steps: list[float], values: list[float]) -> str:
    """Return a line of blocks over the steps. Their height is from 0, or from the least value if all are close."""
    at = np.interp(np.linspace(steps[0], steps[-1], min(SPARKLINE, len(steps))), steps, values)
    low, high = (0.0 if at.min() < 0.5 * at.max() else float(at.min())), float(at.max())
    if high <= low:
        return BLOCKS[len(BLOCKS) // 2] * len(at)
    levels = ((at - low) / (high - low) * (len(BLOCKS) - 1)).round().astype(int)
    return "".join(BLOCKS[level] for level in levels)


def check_picture(path: Path) -> Path:
    """Return `path`, or raise InputError before anything is compiled."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot writes a PNG, but '{path}' does not end in .png.")
    return path


def write_curves(curves: dict[str, list[float]], path: Path) -> Path | None:
    """Draw one panel per curve. None: there is no curve, as an optax transformation does not show its rate."""
    names = [name for name in curves if name != "steps"]
    if not names:
        return None
    figure, panels = new_figure(panels=len(names))
    for name, axes in zip(names, np.atleast_1d(np.asarray(panels, dtype=object)), strict=True):
        values = curves[name]
        axes.plot(curves["steps"], values, color=INK, linewidth=1.6)
        if min(values) >= 0 and min(values) < 0.5 * max(values):
            axes.set_ylim(bottom=0)
        finish(axes, TITLES.get(name, name))
    return save(figure, check_picture(path))


def render(plan: dict[str, Any]) -> str:
    parts = [
        _head(plan),
        _derived(plan["derived"]),
        _parameters(plan["model"]["parameters"]),
        _optimizer(plan["optimizer"]),
        _cost(plan),
        _schedules(plan["schedules"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(plan: dict[str, Any]) -> str:
    devices, names = plan["devices"], ("depth", "width", "heads", "kv_heads", "head_dim", "vocab_size", "block_size")
    lines = [
        f"plan       {plan['recipe']}",
        _model(plan["model"], names),
        f"devices    {devices['devices']} × {devices['chip'] or devices['device_kind']}",
    ]
    return "\n".join([*lines, *_pipeline(plan), *(f"note       {note}" for note in plan["notes"])])


def _pipeline(plan: dict[str, Any]) -> list[str]:
    """Return the line of the stages, if there are several."""
    found = plan["pipeline"]
    if found is None:
        return []
    stages, count = found["stages"], found["micro_batches"]
    return [
        f"pipeline   {stages} stages, {counted(count, 'micro-batch')} per pass: a stage idles "
        f"{found['bubble']:.1%} of it, (S − 1) / (M + S − 1)"
    ]


def _model(model: dict[str, Any], names: tuple[str, ...]) -> str:
    sizes = (f"{name.replace('_', ' ')} {model[name]:,}" for name in names if model.get(name) is not None)
    return f"model      {model['family']}: {', '.join(sizes)}"


def _derived(derived: dict[str, Any]) -> str:
    rows = [(dotted(name), figure(entry["value"]), entry["reason"]) for name, entry in derived.items()]
    return table(("derived", "value", "why"), rows) if rows else ""


def _parameters(counts: dict[str, int]) -> str:
    total = counts["total"]
    rows = [
        (name.replace("_", " "), f"{count:,}", f"{count / total:.1%}")
        for name, count in counts.items()
        if name not in ("total", "scaling") and count
    ]
    rows += [("in all", f"{total:,}", "")]
    if "scaling" in counts:
        rows.append(("scaling parameters N (matrices in blocks + head)", f"{counts['scaling']:,}", ""))
    return table(("parameters", "count", "share"), rows)


def _optimizer(optimizer: dict[str, Any]) -> str:
    rows = [
        (
            row["group"],
            str(row["tensors"]),
            f"{row['parameters']:,}",
            "-" if row["lr"] is None else f"{row['lr']:.4g}",
            f"{row['weight_decay']:.4g}",
            " ".join(f"{beta:g}" for beta in row["betas"]) or "-",
        )
        for row in optimizer["groups"]
    ]
    head = (f"groups of {optimizer['name']}", "tensors", "parameters", "peak rate", "decay", "betas")
    return table(head, rows)


def _cost(plan: dict[str, Any]) -> str:
    flops, horizon, spent = plan["flops"], plan["horizon"], plan["time"]
    ratio = horizon["tokens_per_scaling_parameter"]
    epochs = "" if horizon["epochs"] is None else f", {horizon['epochs']:.2f} epochs"
    rows = [
        (
            "batch",
            f"{horizon['batch_tokens']:,} tokens",
            f"{horizon['batch_size']:,} × {plan['model']['block_size']:,}{in_parts(horizon['accumulate_steps'])}",
        ),
        ("horizon", f"{horizon['steps']:,} steps", f"{horizon['tokens']:,} tokens{epochs}"),
        ("tokens : N", "-" if ratio is None else f"{ratio:.2f}", "tokens : scaling parameters"),
        ("FLOPs per token", f"{flops['per_token']:.4g}", flops["formula"]),
        ("", f"{flops['per_token_causal']:.4g}", "with the keys that causal attention really reads"),
        ("total FLOPs", f"{flops['total']:.4g}", "FLOPs per token · tokens"),
        _memory(plan["memory"]),
        _time(spent),
    ]
    return table(("", "value", "how"), [row for row in rows if row])


def _memory(memory: dict[str, Any] | None) -> tuple[str, str, str]:
    name = "memory per device"
    if memory is None:
        return name, "-", "not compiled (--no-compile)"
    if memory["total"] is None:
        return name, "too much", "the compiler found no room; lower training.per_device_batch_size"
    kept, passing = gib(memory["arguments"]), gib(memory["temporaries"])
    parts = f"compiled step: state and batch {kept}, temporaries {passing}"
    if memory["fits"] is None:
        return name, gib(memory["total"]), parts
    room, advice = gib(memory["limit"]), "lower training.per_device_batch_size"
    verdict = f"fits into {room}" if memory["fits"] else f"DOES NOT FIT into {room}, {advice}"
    return name, gib(memory["total"]), f"{verdict}: {parts}"


def _time(spent: dict[str, Any]) -> tuple[str, str, str]:
    rate = f"{spent['matrix_flops_per_s'] / 1e12:.3g} TFLOP/s ({spent['measured']})"
    if spent["bound"]:
        return "time", f"> {duration(spent['seconds'])}", f"if all ran at the matrix rate, {rate}"
    share = spent["share_of_matrix_rate"]
    words = f"{compact(spent['tokens_per_s'])} tokens/s: {share:.0%} of the matrix rate, {rate}"
    if spent["mfu"] is not None:
        words = f"MFU {spent['mfu']:.1%}, {words}"
    if spent["devices"] > 1:
        words += f"; {spent['devices']} devices, no communication counted"
    return "time", f"≈ {duration(spent['seconds'])}", words


def _schedules(curves: dict[str, list[float]]) -> str:
    rows = []
    for name, values in curves.items():
        if name != "steps":
            marks = f"{values[0]:.3g} → {max(values):.3g} → {values[-1]:.3g}"
            rows.append((TITLES.get(name, name), sparkline(curves["steps"], values), marks))
    return table((f"schedules, {curves['steps'][-1] + 1:,} steps", "", "first, largest, last"), rows) if rows else ""


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


# --- a plan for absent hardware ---
PARTS = {
    "parameters": "trained, as they rest",
    "optimizer": "moments",
    "frozen": "weights that are not trained, in their stored dtype",
    "other": "averages, reference weights, counters",
    "batch": "the rows of a step",
    "gradients": "float32, as they rest, when memory is fullest",
    "activations": "kept for the backward pass of a micro-batch",
    "workspace": "the largest results, gathered weights, gradients of a recomputed block",
    "attention": "cuDNN's own, while attention with documents runs backward",
    "rollout": "KV caches and decoding weights while completions are sampled, in place of the three above",
    "temporaries": "gradients, activations and workspace together, of the compiled step",
}


def render_absent(plan: dict[str, Any], with_placement: bool = False) -> str:
    parts = [
        _absent_head(plan),
        _derived(plan["derived"]),
        _absent_memory(plan),
        _collectives(plan),
        _absent_time(plan),
    ]
    if with_placement:
        parts.append(_placement(plan["placement"], plan["devices"]["axes"]))
    if "sweep" in plan:
        parts += [_sweep(plan["sweep"]), f"best       {plan['command']}"]
    return "\n\n".join(part for part in parts if part)


def _absent_head(plan: dict[str, Any]) -> str:
    model, devices, horizon = plan["model"], plan["devices"], plan["horizon"]
    words = _model(model, ("depth", "width", "heads", "vocab_size", "block_size"))
    slices = f" in {devices['slices']} slices" if devices["slices"] > 1 else ""
    mesh = " × ".join(f"{axis} {size}" for axis, size in devices["axes"].items())
    how = "the analytic model"
    if plan["method"] == "compiled":
        how = (
            f"the step compiled with {plan['compiler']} in {plan['compile_seconds']:.0f} s; time by the analytic model"
        )
    lines = [
        f"plan       {plan['recipe']}, not run: {how}",
        f"{words}; {compact(model['parameters']['total'])} parameters",
        f"devices    {devices['devices']:,} × {devices['chip']}{slices}, mesh {mesh}",
        f"step       {horizon['batch_size']:,} sequences: {horizon['per_device_batch_size']:,} per device × "
        f"{counted(horizon['accumulate_steps'], 'pass')}; {horizon['steps']:,} steps, "
        f"{compact(horizon['tokens'])} tokens",
    ]
    return "\n".join([*lines, *_pipeline(plan), *(f"note       {note}" for note in plan["notes"])])


def _absent_memory(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    rows = [(name, gib(memory[name]), words) for name, words in PARTS.items() if memory.get(name)]
    limit = gib(memory["limit"])
    verdict = f"fits into {limit}" if memory["fits"] else f"DOES NOT FIT into {limit}"
    peak = "-" if memory["peak"] is None else gib(memory["peak"])
    if plan["method"] == "compiled":
        verdict += f"; the analytic model estimated {gib(memory['estimated_peak'])}"
    lines = [table(("memory per device", "size", "what"), [*rows, ("peak", peak, verdict)])]
    lines += [f"to fit     {' '.join(one['settings'])}   ({gib(one['peak'])})" for one in memory["remedies"]]
    if not memory["fits"] and not memory["remedies"]:
        lines.append(
            "to fit     no mesh, micro-batch or remat of this model suffices here: use more devices or a smaller model"
        )
    return "\n".join(lines)


def _collectives(plan: dict[str, Any]) -> str:
    rows = [
        (one["kind"], " × ".join(one["axes"]), f"{one['devices']:,}", f"{one['count']:,}", gib(one["bytes_sent"]))
        for one in plan["collectives"]
    ]
    if not rows:
        return ""
    head = ("collectives per step", "mesh axes", "devices", "times", "sent per device")
    return table(head, [*rows, ("in all", "", "", "", gib(plan["bytes_sent_per_step"]))])


def _absent_time(plan: dict[str, Any]) -> str:
    spent, cost = plan["time"], plan["cost"]
    roofline = spent["roofline"]
    rows = [
        (
            "compute",
            seconds(roofline["compute"]),
            f"{plan['flops']['per_device_step']:.4g} FLOPs per device at its peak",
        ),
        ("memory", seconds(roofline["memory"]), "elementwise work, weights, gradients, update at full bandwidth"),
        ("network", seconds(roofline["network"]), "collectives at full link speed"),
        ("step at best", seconds(spent["step_seconds_at_best"]), f"bound by {spent['bound_by']}"),
        (
            "step, likely",
            seconds(spent["step_seconds"]),
            f"{compact(spent['tokens_per_s'])} tokens/s, MFU {spent['mfu_causal']:.1%} (causal)",
        ),
        ("run", duration(spent["seconds"]), f"{spent['days']:.3g} days, {cost['chip_hours']:,.0f} chip-hours"),
        ("cost", *_cost_words(cost)),
    ]
    return table(("time", "value", "how"), rows)


def _cost_words(cost: dict[str, Any]) -> tuple[str, str]:
    dollars, price = cost["dollars"], cost["dollars_per_chip_hour"]
    if price is None:
        return "unknown", "no price for this chip: --prices FILE"
    return f"${dollars:,.{0 if dollars >= 10 else 2}f}", f"${price:,.2f} per chip-hour ({cost['source']})"


def seconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def _placement(rows: list[dict[str, Any]], sizes: dict[str, int]) -> str:
    """Return the table of placements, with equal parameters of all layers in one line."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        name = re.sub(r"\d+", "*", row["name"])
        axes = ", ".join(_split_over(axis, sizes) for axis in row["spec"])
        shape = " × ".join(map(str, row["shape"])) or "1"
        count = lines.setdefault((name, shape, axes), [0, 0])
        count[0] += 1
        count[1] += row["bytes_per_device"]
    cells = [(*key, f"{count:,}", gib(size)) for key, (count, size) in lines.items()]
    return table(("parameter", "shape", "split over", "arrays", "bytes per device"), cells)


def _split_over(axes: Any, sizes: dict[str, int]) -> str:
    """Return the mesh axes of one dimension; of several, those with more than one device."""
    if isinstance(axes, list):
        return "+".join([axis for axis in axes if sizes[axis] > 1] or axes[:1])
    return axes or "-"


def _sweep(sweep: dict[str, Any]) -> str:
    rows = [
        (
            " × ".join(f"{axis} {size}" for axis, size in row["axes"].items() if size > 1) or "one device",
            f"{row['per_device_batch_size']:,}",
            row["remat"],
            gib(row["peak"]),
            seconds(row["step_seconds"]),
            row["bound_by"],
        )
        for row in sweep["best"]
    ]
    head = (f"{sweep['fit']:,} of {sweep['tried']:,} fit; the best", "a device", "remat", "peak", "step", "bound by")
    return table(head, rows)


# --- the document ---


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
    row_flops = cut.flops_per_token(block) * block
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
