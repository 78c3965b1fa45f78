"""The compiled side of a run: optimizer, abstract state with its shardings, and the jitted steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from bessemer.config import configure, dotted
from bessemer.data import data_root
from bessemer.errors import InputError
from bessemer.models.lora import group_of_adapted
from bessemer.optim import Optimizer, build_optimizer, mesh_spread, state_shardings
from bessemer.registry import objectives
from bessemer.topology import shardings, share, unbox, validate_divisible
from bessemer.topology.mesh import quick_draws
from bessemer.training.feed import abstract_batch
from bessemer.training.setup import microbatch
from bessemer.training.setup.horizon import asked
from bessemer.training.setup.model import compiler_options, note_path, short_row
from bessemer.training.state import (
    WEIGHTS_FINITE,
    StepRules,
    TrainState,
    added_fields,
    all_finite,
    create_state,
    spike_rule,
)
from bessemer.training.validation import validation_fields

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


MAX_VALIDATION_BATCHES = 8
"""Micro-batches in one call of val_step: bounds what is on the device at once."""


class Functions(NamedTuple):
    """What the loop calls. `micro` is the global micro-batch; batch_size = accumulate_steps · micro."""

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
        """Rows in one call of `val_step`."""
        return self.micro * self.validation_batches


def micro_batch(trainer: BaseTrainer, abstract: Any, placed: Any) -> int:
    """Sequences of a pass on one device: as the caller says; as a recipe says, or fewer where that does not divide the
    batch over this mesh; or the most that fit."""
    key = "training/per_device_batch_size"
    per_device, batch, parallel = trainer.config[key], trainer.data.batch_size, trainer.topology.data_parallel
    if per_device == -1:
        per_device, why = microbatch.choose(trainer, abstract, placed)
        per_device = int(share("per-device batch size", lambda: str(per_device)))  # process 0 decides
    elif per_device > 0 and batch % (per_device * parallel) and not asked(trainer.config, [key]):
        per_device, why = microbatch.lowered(per_device, batch, parallel)
    else:
        return int(per_device)
    trainer.config.set(key, per_device, why)
    trainer.note_derived(dotted(key), per_device, why)
    return per_device


def build_functions(trainer: BaseTrainer) -> Functions:
    check_sequence(trainer.settings.block_size, trainer.topology.mesh.shape["context"])
    optimizer = make_optimizer(trainer)
    abstract, placed = abstract_state(trainer, optimizer)
    per_device = micro_batch(trainer, abstract, placed)
    note_path(trainer, per_device)
    micro = per_device * trainer.topology.data_parallel
    accumulate = microbatch.accumulation(trainer.data.batch_size, per_device, trainer.topology.data_parallel)
    validation_batches = min(MAX_VALIDATION_BATCHES, -(-trainer.data.validation_count // micro))
    key = jax.device_put(
        jax.random.fold_in(jax.random.key(trainer.settings.seed), DROPOUT), trainer.topology.replicated
    )
    return Functions(
        optimizer,
        abstract,
        placed,
        key,
        jit_train_step(trainer, placed, accumulate),
        jit_val_step(trainer),
        accumulate,
        micro,
        max(1, validation_batches),
    )


INIT, DROPOUT, ADAPTERS = 0, 1, 2
"""Purposes folded into the seed: every random key is (seed, purpose, step, …) and nothing is carried."""


def jit_train_step(trainer: BaseTrainer, placed: TrainState, accumulate: int) -> Any:
    """State donated, results where they were: the step never moves what it does not have to.

    Whatever class wrote the step, its meta says whether the weights it left are finite (`weights_finite`).
    """
    replicated = trainer.topology.replicated
    step = functools.partial(trainer.train_step, accumulate_steps=accumulate)

    @functools.wraps(trainer.train_step)  # programs are named after it
    def train_step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, jax.Array, Any]:
        state, loss, meta = step(state, batch, key)
        return state, loss, {**meta, WEIGHTS_FINITE: all_finite((state.params, state.ema))}

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(placed, replicated, replicated),
        compiler_options=compiler_options(trainer),
    )


def jit_val_step(trainer: BaseTrainer) -> Any:
    return jax.jit(trainer.val_step, compiler_options=trainer.topology.compiler_options)


def without_reference(trainer: BaseTrainer, functions: Functions) -> Functions:
    """Return the same steps over a state without a reference."""
    placed = functions.state_shardings.replace(reference=None)
    return functions._replace(
        abstract_state=functions.abstract_state.replace(reference=None),
        state_shardings=placed,
        train_step=jit_train_step(trainer, placed, functions.accumulate_steps),
        val_step=jit_val_step(trainer),
        compiled=False,
    )


def check_sequence(block_size: int, context: int) -> None:
    """Every device of the context axis holds an equal piece of each sequence."""
    if block_size % context:
        raise InputError(
            f"topology.context={context} does not divide architecture.block_size={block_size}: every device holds an "
            "equal piece of a sequence. Use a divisor of the block size."
        )


def make_optimizer(trainer: BaseTrainer) -> Optimizer:
    """By setting, else by the class; Muon's polar steps are spread over the mesh."""
    model = trainer.model
    shape = getattr(model, "shape", None)
    group_of = getattr(model, "group_of", None)
    return build_optimizer(
        trainer.settings.optimizer or trainer.optimizer(),
        configure,
        trainer.data.steps,
        None if group_of is None else functools.partial(group_of_adapted, group_of),
        schedule=trainer.settings.schedule or trainer.schedule(),
        boundaries=trainer.data.stage_starts,
        width=getattr(shape, "width", None),
        spread=mesh_spread(trainer.topology.mesh),
    )


def abstract_state(trainer: BaseTrainer, optimizer: Optimizer) -> tuple[TrainState, TrainState]:
    """The state as shapes with shardings, and the shardings alone. No array is made."""
    topology = trainer.topology
    split = trainer.model_parts.split
    validate_divisible(trainer.model_parts.boxed, topology)
    boxed, kept = split.shapes(trainer.model_parts.boxed)  # trained, frozen
    param_shardings = shardings(boxed, topology.mesh, topology.rest_rules)
    rules = StepRules(
        max_grad_norm=trainer.settings.max_grad_norm,
        ema_decay=trainer.settings.ema,
        place_gradients=functools.partial(jax.lax.with_sharding_constraint, shardings=param_shardings),
        rates=optimizer.rates,
        spikes=spike_rule(trainer.guard, trainer.data.stage_starts[1:]),
        split=None if split.everything else split,
        teacher=trainer.teacher is not None,
        own_validation=bool(objectives.entry(trainer.settings.objective).traits.get("own_validation")),
    )
    loss_fn = objective_function(trainer)
    kind = trainer.state_class
    create = functools.partial(
        create_state, trainer.model_parts.apply, loss_fn, tx=optimizer.tx, rules=rules, kind=kind
    )
    state = jax.eval_shape(create, unbox(boxed))
    placed = state.replace(
        step=topology.replicated,
        data_step=topology.replicated,
        params=param_shardings,
        opt_state=state_shardings(optimizer.tx, unbox(boxed), param_shardings, topology.replicated),
        ema=None if state.ema is None else param_shardings,
        guard=jax.tree.map(lambda _: topology.replicated, state.guard),
        **dict.fromkeys(added_fields(kind), topology.replicated),
    )
    if kept is not None:
        placed = placed.replace(frozen=shardings(kept, topology.mesh, topology.rest_rules))
        state = state.replace(frozen=unbox(kept))
    if trainer.wants_reference():
        state, placed = state.replace(reference=unbox(boxed)), placed.replace(reference=param_shardings)
    if trainer.teacher is not None and trainer.teacher.live:
        there = shardings(trainer.teacher.boxed, topology.mesh, topology.rest_rules)
        state, placed = state.replace(reference=unbox(trainer.teacher.boxed)), placed.replace(reference=there)
    located = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, placed
    )
    return located, placed


def objective_function(trainer: BaseTrainer) -> Callable[..., Any]:
    """(apply, params, batch, key) -> (loss sum, weight, metric sums), its settings bound."""
    entry = objectives.entry(trainer.settings.objective)
    if len(entry.settings) > 1:
        raise InputError(f"objective '{entry.name}' registers several settings classes; join them into one.")
    if entry.traits.get("rollouts") and not trainer.rolls_out:
        raise InputError(
            f"objective={entry.name} trains on completions that the model writes on the way: add job=GRPOTrainer."
        )
    settings = configure(entry.settings[0]) if entry.settings else None
    taught = (
        {"teacher": trainer.teacher.apply} if trainer.teacher is not None and trainer.teacher.live else {}
    )
    return functools.partial(entry.value, settings=settings, **taught)


def jit_init(trainer: BaseTrainer) -> Any:
    """(seed key, parameters that are given) -> the state of step 0, every array made in the pieces its devices hold.

    What is given is never drawn: beside it there is no second model in memory.
    """
    functions = trainer.functions
    abstract, split = functions.abstract_state, trainer.model_parts.split

    def create(key: jax.Array, given: Any) -> TrainState:
        whole = {**drawn_params(trainer, jax.random.fold_in(key, INIT)), **given}
        params, frozen = split.divide(whole, jax.random.fold_in(key, ADAPTERS))
        fixed = (abstract.tx, abstract.rules, trainer.state_class, frozen)
        return create_state(abstract.apply_fn, abstract.loss_fn, params, *fixed)

    born = functions.state_shardings.replace(reference=None)  # taken when the run begins
    return jax.jit(create, out_shardings=born, donate_argnums=1)


def drawn_params(trainer: BaseTrainer, key: jax.Array) -> Any:
    """Parameters from the trainer's `sharded_init`, checked against the shapes that the steps are compiled for."""
    tokens = short_row(trainer.settings.block_size)
    variables, _ = trainer.sharded_init(trainer.model, key, tokens, mesh=trainer.topology.mesh)
    params = unbox(variables)["params"]
    found, expected = shapes_by_path(params), shapes_by_path(unbox(trainer.model_parts.boxed))
    if found != expected:
        path = min(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))
        raise InputError(
            f"{type(trainer).__name__}.sharded_init: parameter {path} must be {expected.get(path, 'left out')} and is "
            f"{found.get(path, 'missing')}. Return the parameters of the model, or override configure_model."
        )
    return params


def shapes_by_path(params: Any) -> dict[str, str]:
    """Parameter path -> dtype and shape, such as float32[64, 256]."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return {path: f"{jax.numpy.result_type(leaf)}{list(leaf.shape)}" for path, leaf in named.items()}


def initial_state(trainer: BaseTrainer) -> TrainState:
    """Step 0: parameters from the seed (or `init`, or given), born on their devices."""
    given = trainer.given_params()
    init = trainer.functions.init or jit_init(trainer)
    with trainer.topology.scope(), quick_draws(trainer.topology.mesh):
        return init(jax.random.key(trainer.settings.seed), given)


def compile_steps(trainer: BaseTrainer) -> tuple[Functions, bool]:
    """Both steps as executables, from shapes alone, and the first state's program; already compiled ones stay.

    Traced one after the other, compiled side by side: the compiler needs no Python.
    """
    functions = trainer.functions
    if functions.compiled:
        return functions, False
    data, sharding = trainer.data, trainer.topology.batch_sharding(1)
    batch = abstract_batch(data.fields, functions.micro, functions.accumulate_steps, sharding)
    lowered = {"train_step": functions.train_step.lower(functions.abstract_state, batch, functions.key)}
    if data.validation is not None:
        fields = validation_fields(trainer.batch)
        batch = abstract_batch(fields, functions.micro, functions.validation_batches, sharding)
        lowered["val_step"] = functions.val_step.lower(functions.abstract_state, batch)
    if trainer.draws_state:
        with quick_draws(trainer.topology.mesh):
            lowered["init"] = jit_init(trainer).lower(jax.random.key(trainer.settings.seed), {})
    with ThreadPoolExecutor(len(lowered)) as pool:
        done = list(pool.map(lambda program: program.compile(), lowered.values()))
    return functions._replace(**dict(zip(lowered, done, strict=True)), compiled=True), True


# Compiled programs are kept on disk, so that the second start of a run skips the compiler.


REQUESTED, FOUND = (
    "/jax/compilation_cache/compile_requests_use_cache",
    "/jax/compilation_cache/cache_hits",
)


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
