"""The compiled side of a run: `RunPlan`, optimizer, abstract state with its shardings, and the jitted steps.

`RunPlan` is what setup resolves a recipe into; the compiled functions are built from it and from `StepHooks`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from bessemer.config import dotted
from bessemer.data import data_root
from bessemer.errors import InputError, TrainingError
from bessemer.models.lora import group_of_adapted, is_stack_of_experts
from bessemer.models.moe import balancer
from bessemer.models.pipeline import check_branches, check_stages
from bessemer.models.protocol import SilentAtStart, group_of
from bessemer.models.transformer import Transformer
from bessemer.objectives import FollowsProgress
from bessemer.optim import Optimizer, build_optimizer, mesh_spread, state_shardings
from bessemer.registry import objectives
from bessemer.topology import broadcast, shardings, unbox, validate_divisible
from bessemer.topology.mesh import quick_draws
from bessemer.training.feed import abstract_batch, device_batch
from bessemer.training.settings import RunContext
from bessemer.training.setup import microbatch
from bessemer.training.setup.data import DataParts, batch_fields
from bessemer.training.setup.microbatch import StepMemory
from bessemer.training.setup.model import (
    ModelParts,
    Teacher,
    compiler_options,
    note_path,
    objective_settings,
    short_row,
)
from bessemer.training.stages import Stage
from bessemer.training.state import (
    WEIGHTS_FINITE,
    StepRules,
    TrainState,
    added_fields,
    all_finite,
    create_state,
    spike_rule,
)
from bessemer.training.tied_head import untying_step

# --- what compiled functions are built from ---


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before the first array is made."""

    context: RunContext[Any]
    model: ModelParts
    data: DataParts
    teacher: Teacher | None
    stages: tuple[Stage, ...]

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * int(self.context.settings.block_size)

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.data.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """FLOPs of the run by the model's own formula."""
        return self.model.flops_per_token * self.tokens_per_step * self.data.steps


@dataclass(frozen=True)
class StepHooks:
    """The members of a trainer that the compiled side calls and that a subclass may override."""

    batch: Callable[..., Mapping[str, Any]]
    train_step: Callable[..., Any]
    val_step: Callable[..., Any]
    sharded_init: Callable[..., tuple[Any, Any]]
    optimizer: Callable[[], Any]
    schedule: Callable[[], Any]
    wants_reference: Callable[[], bool]
    state_class: type[TrainState]
    rolls_out: bool
    owner: str  # the class, named in errors


# --- compiled functions ---


WEIGHTS = "generate/weights"
MAX_VALIDATION_BATCHES = 8
"""Micro-batches in one call of val_step: bounds what is on the device at once."""


class Functions(NamedTuple):
    """What the loop calls. A batch is accumulate_steps · micro sequences; micro is training.per_device_batch_size on
    every data-parallel device."""

    optimizer: Optimizer
    abstract_state: TrainState
    state_shardings: TrainState
    key: jax.Array
    train_step: Any  # jitted, or the executable once compiled
    val_step: Any
    accumulate_steps: int
    micro: int
    validation_batches: int
    compiled: bool = False
    init: Any = None  # the executable of a state that is drawn from the seed alone

    @property
    def validation_rows(self) -> int:
        """Rows in one call of val_step."""
        return self.micro * self.validation_batches


def check_mesh(plan: RunPlan) -> None:
    """Raise InputError for what the mesh cannot train, before anything is compiled or written."""
    context, parts = plan.context, plan.model
    sizes = context.topology.mesh.shape
    check_sequence(context.settings.block_size, sizes["context"])
    if sizes["pipeline"] > 1:
        if not isinstance(parts.model, Transformer):
            raise InputError(
                f"topology.pipeline={sizes['pipeline']}, but {type(parts.model).__name__} does not divide its layers "
                "into stages. Use topology.fsdp for these devices."
            )
        params = unbox(parts.boxed)
        layers = [(params[f"blocks_{n}"], params.get(f"lookups_{n}")) for n in range(parts.model.depth)]
        check_stages(parts.model.kinds, layers, sizes["pipeline"], sizes["context"])
    if sizes["expert"] > 1:
        check_whole_experts(plan, sizes["expert"])


def check_whole_experts(plan: RunPlan, devices: int) -> None:
    """Raise InputError if stacks of experts are to be quantized, whose blocks of weights no mesh axis splits."""
    parts, settings = plan.model, []
    flat = flatten_dict(parts.boxed)
    if any(is_stack_of_experts(flat[path]) for path in parts.split.quantized):
        settings.append(f"lora.quantize={parts.split.lora.quantize}")
    sampled = plan.context.config.get(WEIGHTS) or "auto"
    if sampled != "auto":
        settings.append(f"generate.weights={sampled}")
    if settings:
        raise InputError(
            f"topology.expert={devices} with {' and '.join(settings)}: quantized experts are not split over devices. "
            "Set topology.expert=1 and use topology.data or topology.fsdp for these devices, or do not quantize."
        )


def build_functions(plan: RunPlan, hooks: StepHooks) -> Functions:
    """Make the optimizer, the state's shapes and shardings, and the jitted steps."""
    settings, topology, batch_size = plan.context.settings, plan.context.topology, plan.data.batch_size
    check_mesh(plan)
    optimizer = make_optimizer(plan, hooks)
    abstract, placed = abstract_state(plan, hooks, optimizer)
    per_device = derive_micro_batch(plan, hooks, abstract, placed)
    note_path(plan.context, plan.model.model, per_device)
    micro = per_device * topology.data_parallel
    accumulate = microbatch.accumulation(batch_size, per_device, topology.data_parallel)
    validation_batches = min(MAX_VALIDATION_BATCHES, -(-plan.data.validation_count // micro))
    key = jax.random.fold_in(jax.random.key(settings.seed), DROPOUT)
    return Functions(
        optimizer,
        abstract,
        placed,
        jax.device_put(key, topology.replicated),
        jit_train_step(plan, hooks, placed, accumulate),
        jit_val_step(plan, hooks),
        accumulate,
        micro,
        max(1, validation_batches),
    )


# --- the micro-batch: its size is in the configuration from here on ---
def derive_micro_batch(plan: RunPlan, hooks: StepHooks, abstract: Any, placed: Any) -> int:
    """Return the sequences of a pass on one device: as the caller set; as a recipe set, or fewer where that does not
    divide the batch over this mesh; or the most that fit."""
    config, batch, parallel = plan.context.config, plan.data.batch_size, plan.context.topology.data_parallel
    per_device = int(config[microbatch.KEY])
    if per_device == -1:
        per_device, why = largest_that_fits(plan, hooks, abstract, placed)
        per_device = int(broadcast("per-device batch size", lambda: str(per_device)))  # process 0 decides
    elif per_device > 0 and batch % (per_device * parallel) and not config.asked(microbatch.KEY):
        per_device, why = microbatch.lowered(per_device, batch, parallel)
    else:
        return per_device
    record_micro_batch(plan.context, per_device, why)
    return per_device


def record_micro_batch(context: RunContext[Any], per_device: int, why: str) -> None:
    """Write a derived micro-batch to the configuration."""
    context.config.set(microbatch.KEY, per_device, why)
    context.notes.derive(dotted(microbatch.KEY), per_device, why)


def largest_that_fits(plan: RunPlan, hooks: StepHooks, abstract: Any, placed: Any) -> tuple[int, str]:
    """Return (sequences per device, why)."""
    context = plan.context
    sizes = microbatch.candidates(plan.data.batch_size, context.topology.data_parallel)
    device = context.topology.mesh.local_devices[0]
    limit = microbatch.memory_limit(device)
    if limit is None:
        size = microbatch.within_tokens(sizes, context.settings.block_size)
        return size, f"at most {microbatch.CPU_TOKENS} tokens a pass on a {device.platform}"
    for size in sizes:
        needed = planned_memory(plan, hooks, abstract, placed, size)
        if needed is not None and needed <= microbatch.SPARE * limit:
            return size, f"largest that fits: {needed / 2**30:.1f} of {limit / 2**30:.1f} GiB planned"
    state = microbatch.state_bytes(abstract, placed)
    raise InputError(microbatch.without_a_fit(context.config, state, needed, limit))


def planned_memory(plan: RunPlan, hooks: StepHooks, abstract: Any, placed: Any, per_device: int) -> int | None:
    """Bytes of the compiled step: arguments + outputs - aliased + temporaries. None: it did not even compile."""
    memory = step_memory(plan, hooks, abstract, placed, per_device)
    return None if memory is None else memory.total


def step_memory(plan: RunPlan, hooks: StepHooks, abstract: Any, placed: Any, per_device: int) -> StepMemory | None:
    """Compile the step with that micro-batch, from shapes alone."""
    topology = plan.context.topology
    steps = microbatch.accumulation(plan.data.batch_size, per_device, topology.data_parallel)
    micro = per_device * topology.data_parallel
    batch = abstract_batch(plan.data.fields, micro, steps, topology.batch_sharding(1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        step = jit_train_step(plan, hooks, placed, steps).lower(abstract, batch, key).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    return microbatch.step_bytes(step)


def check_step(plan: RunPlan, hooks: StepHooks, functions: Functions) -> None:
    """Raise TrainingError if the compiled step plans for more memory than the device has."""
    limit = microbatch.device_limit(plan.context.topology)
    needed = None if limit is None else microbatch.step_total(functions.train_step)
    if limit is not None and needed is not None and needed > limit:
        raise TrainingError(
            f"out of memory before the first step: it takes {microbatch.gib(needed)}, and a device has "
            f"{microbatch.gib(limit)}. {memory_remedy(plan, hooks, functions)}"
        )


def memory_remedy(plan: RunPlan, hooks: StepHooks, functions: Functions) -> str:
    """Name the micro-batch that fits, found by compiling smaller ones; if none does, what else to change."""
    context, topology = plan.context, plan.context.topology
    limit = microbatch.device_limit(topology)
    abstract, placed = functions.abstract_state, functions.state_shardings
    sizes = microbatch.candidates(plan.data.batch_size, topology.data_parallel)
    sizes = [size for size in sizes if size < context.config[microbatch.KEY]]
    planned: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        with topology.scope():
            planned[size] = planned_memory(plan, hooks, abstract, placed, size)
        return limit is None or (planned[size] or limit + 1) <= limit

    best = microbatch.largest_fitting(sizes, fits)
    if best is not None:
        needed = f", which takes {microbatch.gib(planned[best] or 0)}" if limit is not None else ""
        return (
            f"Continue with: bessemer resume {context.directory.word} training.per_device_batch_size={best} "
            f"(the update stays the same{needed})."
        )
    smallest = planned[sizes[-1]] if sizes else microbatch.step_total(functions.train_step)
    state = microbatch.state_bytes(abstract, placed)
    return microbatch.without_a_fit(context.config, state, smallest, limit)


# --- the jitted steps ---
INIT, DROPOUT, ADAPTERS = 0, 1, 2
"""Purposes folded into the seed: every random key is (seed, purpose, step, …) and nothing is carried."""


def jit_train_step(plan: RunPlan, hooks: StepHooks, placed: TrainState, accumulate: int) -> Any:
    """State donated, results where they were: the step never moves what it does not have to.

    Whichever class wrote the step, its meta reports whether the weights it left are finite (`weights_finite`).
    """
    topology = plan.context.topology
    step = functools.partial(hooks.train_step, accumulate_steps=accumulate)

    @functools.wraps(hooks.train_step)  # programs are named after it
    def train_step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, jax.Array, Any]:
        state, loss, meta = step(state, batch, key)
        return state, loss, {**meta, WEIGHTS_FINITE: all_finite((state.params, state.ema))}

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(placed, topology.replicated, topology.replicated),
        compiler_options=compiler_options(topology, plan.model.model),
    )


def jit_val_step(plan: RunPlan, hooks: StepHooks) -> Any:
    return jax.jit(hooks.val_step, compiler_options=plan.context.topology.compiler_options)


def without_reference(plan: RunPlan, hooks: StepHooks, functions: Functions) -> Functions:
    """Return the same steps over a state without reference weights, not compiled yet."""
    placed = functions.state_shardings.replace(reference=None)
    return functions._replace(
        abstract_state=functions.abstract_state.replace(reference=None),
        state_shardings=placed,
        train_step=jit_train_step(plan, hooks, placed, functions.accumulate_steps),
        val_step=jit_val_step(plan, hooks),
        compiled=False,
    )


def check_sequence(block_size: int, context: int) -> None:
    """Raise InputError unless every device of the context axis holds an equal piece of each sequence."""
    if block_size % context:
        raise InputError(
            f"topology.context={context} does not divide architecture.block_size={block_size}: every device holds an "
            "equal piece of a sequence. Use a divisor of the block size."
        )


def make_optimizer(plan: RunPlan, hooks: StepHooks) -> Optimizer:
    """Build the optimizer of the settings, else of the class; Muon's polar steps are spread over the mesh."""
    settings, model = plan.context.settings, plan.model.model
    groups = group_of(model)
    return build_optimizer(
        settings.optimizer or hooks.optimizer(),
        plan.context.config.make,
        plan.data.steps,
        None if groups is None else functools.partial(group_of_adapted, groups),
        schedule=settings.schedule or hooks.schedule(),
        boundaries=plan.data.stage_starts,
        width=model.shape.width if isinstance(model, Transformer) else None,
        spread=mesh_spread(plan.context.topology.mesh),
        silent=model.silent_at_start if starts_fresh(plan) and isinstance(model, SilentAtStart) else (),
        seed=settings.seed,
    )


def starts_fresh(plan: RunPlan) -> bool:
    """Return whether the run draws its weights."""
    return plan.context.settings.init is None and plan.context.given.model_state is None


def abstract_state(plan: RunPlan, hooks: StepHooks, optimizer: Optimizer) -> tuple[TrainState, TrainState]:
    """Return the state as shapes with shardings, and the shardings alone. No array is made."""
    topology, settings, teacher, split = (plan.context.topology, plan.context.settings, plan.teacher, plan.model.split)
    validate_divisible(plan.model.boxed, topology)
    boxed, kept = split.shapes(plan.model.boxed)  # trained, frozen
    param_shardings = shardings(boxed, topology.mesh, topology.rest_rules)
    rules = StepRules(
        max_grad_norm=settings.max_grad_norm,
        ema_decay=settings.ema,
        place_gradients=functools.partial(jax.lax.with_sharding_constraint, shardings=param_shardings),
        rates=optimizer.rates,
        spikes=spike_rule(plan.context.guard, plan.data.stage_starts[1:]),
        split=None if split.everything else split,
        teacher=teacher is not None,
        rebalance=balancer(plan.model.model),
        own_validation=bool(objectives.entry(settings.objective).traits.get("own_validation")),
        untied_from=untying_step(
            settings.tied_head, plan.data.steps, plan.model.model, starts_fresh(plan), split.everything
        ),
        steps=plan.data.steps if follows_progress(plan) else 0,
    )
    loss_fn, kind = objective_function(plan, hooks.rolls_out), hooks.state_class
    create = functools.partial(create_state, plan.model.apply, loss_fn, tx=optimizer.tx, rules=rules, kind=kind)
    state = jax.eval_shape(create, unbox(boxed))
    placed = state.replace(
        step=topology.replicated,
        data_step=topology.replicated,
        params=param_shardings,
        opt_state=state_shardings(optimizer.tx, unbox(boxed), param_shardings, topology.replicated),
        ema=None if state.ema is None else param_shardings,
        guard=jax.tree.map(lambda _: topology.replicated, state.guard),
        tied=None if state.tied is None else topology.replicated,
        **dict.fromkeys(added_fields(kind), topology.replicated),
    )
    if kept is not None:
        placed = placed.replace(frozen=shardings(kept, topology.mesh, topology.rest_rules))
        state = state.replace(frozen=unbox(kept))
    if hooks.wants_reference():
        state, placed = state.replace(reference=unbox(boxed)), placed.replace(reference=param_shardings)
    if teacher is not None and teacher.live:
        there = shardings(teacher.boxed, topology.mesh, topology.rest_rules)
        state, placed = state.replace(reference=unbox(teacher.boxed)), placed.replace(reference=there)
    located = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, placed
    )
    return located, placed


def follows_progress(plan: RunPlan) -> bool:
    """Return whether the objective reads the share of the steps made so far."""
    settings = objective_settings(plan.context)
    return isinstance(settings, FollowsProgress) and settings.follows_progress


def objective_function(plan: RunPlan, rolls_out: bool) -> Callable[..., Any]:
    """Return (apply, params, batch, key) -> (loss sum, weight, metric sums), its settings bound."""
    entry = objectives.entry(plan.context.settings.objective)
    if entry.traits.get("rollouts") and not rolls_out:
        raise InputError(
            f"objective={entry.name} trains on completions that the model writes on the way: add job=GRPOTrainer."
        )
    settings = objective_settings(plan.context)
    live = {"teacher": plan.teacher.apply} if plan.teacher is not None and plan.teacher.live else {}
    try:
        inspect.signature(entry.value).bind_partial(None, None, None, None, settings=settings, **live)
    except TypeError as error:
        raise InputError(
            f"objective={entry.name} cannot be called as f(apply, params, batch, key, settings=…): {error}. "
            "docs/extending.md has an example."
        ) from None
    return functools.partial(entry.value, settings=settings, **live)


# --- the state of step 0 ---
def jit_init(plan: RunPlan, hooks: StepHooks, functions: Functions) -> Any:
    """Return (seed key, parameters that are given, adapters that are given) -> the state of step 0, every array made in
    the pieces its devices hold. Given parameters are never drawn: beside them there is no second model in memory."""
    abstract, split = functions.abstract_state, plan.model.split

    def create(key: jax.Array, given: Any, adapters: Any = None) -> TrainState:
        complete = given.keys() >= unbox(plan.model.boxed).keys()
        whole = given if complete else {**drawn_params(plan, hooks, jax.random.fold_in(key, INIT)), **given}
        params, frozen = split.divide(whole, jax.random.fold_in(key, ADAPTERS))
        params = unflatten_dict({**flatten_dict(params), **flatten_dict(adapters)}) if adapters else params
        fixed = (abstract.tx, abstract.rules, hooks.state_class, frozen)
        return create_state(abstract.apply_fn, abstract.loss_fn, params, *fixed)

    born = functions.state_shardings.replace(reference=None)  # taken when the run begins
    return jax.jit(create, out_shardings=born, donate_argnums=1)


def drawn_params(plan: RunPlan, hooks: StepHooks, key: jax.Array) -> Any:
    """Return the parameters of `sharded_init`, checked against the shapes that the steps are compiled for."""
    tokens, mesh = short_row(plan.context.settings.block_size), plan.context.topology.mesh
    variables, _ = hooks.sharded_init(plan.model.model, key, tokens, mesh=mesh)
    params = unbox(variables)["params"]
    found, expected = shapes_by_path(params), shapes_by_path(unbox(plan.model.boxed))
    if found != expected:
        path = min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))
        raise InputError(
            f"{hooks.owner}.sharded_init: parameter {path} must be {expected.get(path, 'left out')} and is "
            f"{found.get(path, 'missing')}. Return the parameters of the model, or override configure_model."
        )
    return params


def shapes_by_path(params: Any) -> dict[str, str]:
    """Parameter path -> dtype and shape, such as float32[64, 256]."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {path: f"{jax.numpy.result_type(leaf)}{list(leaf.shape)}" for path, leaf in named.items()}


def initial_state(
    plan: RunPlan, hooks: StepHooks, functions: Functions, given: Any, adapters: Any = None
) -> TrainState:
    """Return the state of step 0, made on its devices: the parameters and adapters given, the others from the seed."""
    topology, init = plan.context.topology, functions.init or jit_init(plan, hooks, functions)
    with topology.scope(), quick_draws(topology.mesh):
        given = (given, adapters) if adapters else (given,)
        return init(jax.random.key(plan.context.settings.seed), *given)


# --- batches and ahead-of-time compilation ---
def step_batch(
    plan: RunPlan, batch: Callable[..., Mapping[str, Any]], functions: Functions, position: int
) -> dict[str, Any]:
    """Return batch `position` on the devices, (S, B, T); this process reads only its own rows."""
    return device_batch(
        lambda first, end: batch("train", step=position, rows=slice(first, end)),
        plan.data.fields,
        functions.micro,
        functions.accumulate_steps,
        plan.context.topology.batch_sharding(1),
    )


def compile_steps(
    plan: RunPlan, hooks: StepHooks, functions: Functions, draws: bool, meanwhile: Callable[[], None] = lambda: None
) -> Functions:
    """Return `functions` with both steps as executables, from shapes alone, and if `draws` the first state's program.

    Traced one after the other, compiled side by side: the compiler needs no Python. `meanwhile` is called here as soon
    as it has begun.
    """
    topology, data = plan.context.topology, plan.data
    sharding = topology.batch_sharding(1)
    batch = abstract_batch(data.fields, functions.micro, functions.accumulate_steps, sharding)
    lowered = {"train_step": functions.train_step.lower(functions.abstract_state, batch, functions.key)}
    if data.validation is not None:
        fields = batch_fields(hooks.batch, "validation")
        batch = abstract_batch(fields, functions.micro, functions.validation_batches, sharding)
        lowered["val_step"] = functions.val_step.lower(functions.abstract_state, batch)
    if draws:
        init, seed = jit_init(plan, hooks, functions), plan.context.settings.seed
        with quick_draws(topology.mesh):
            lowered["init"] = init.lower(jax.random.key(seed), {})
    with ThreadPoolExecutor(len(lowered)) as pool:
        compiling = [pool.submit(program.compile) for program in lowered.values()]
        meanwhile()
        done = [program.result() for program in compiling]
    if topology.mesh.shape["pipeline"] > 1:
        for program in done:
            check_branches(program.as_text())
    return functions._replace(**dict(zip(lowered, done, strict=True)), compiled=True)


# --- compiled programs are cached on disk, so that the second start of a run skips the compiler ---
REQUESTED, FOUND = ("/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits")


@dataclass(frozen=True)
class Programs:
    """How many programs were asked of the compiler with the cache in use, and how many the cache had."""

    requested: int = 0
    found: int = 0

    def __sub__(self, earlier: Programs) -> Programs:
        return Programs(self.requested - earlier.requested, self.found - earlier.found)

    @property
    def all_found(self) -> bool:
        return 0 < self.requested == self.found

    @property
    def words(self) -> str:
        if self.requested == 0:
            return "no cache"
        if self.found in (0, self.requested):
            return "cache hit" if self.found else "cache miss"
        return f"cache had {self.found} of {self.requested}"


_seen: dict[str, int] = {}


def _count(event: str, **_: Any) -> None:
    if event in _seen:
        _seen[event] += 1


def programs_so_far() -> Programs:
    """Of this process, since the cache was first asked for."""
    return Programs(_seen.get(REQUESTED, 0), _seen.get(FOUND, 0))


def keep_compiled_programs(root: str | None) -> None:
    """Point JAX at a cache beside the prepared data, unless the user has chosen one. Bits do not depend on it."""
    if not _seen:
        _seen.update({REQUESTED: 0, FOUND: 0})
        jax.monitoring.register_event_listener(_count)
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(data_root(root) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
