"""The model of a run: which class, which vocabulary, and the one function that applies it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from bessemer.config import configure
from bessemer.data import Tokenizer
from bessemer.data.plan.batches import Mixture, sample_tokens
from bessemer.errors import InputError, StorageError
from bessemer.generate.load import tokenizer_of
from bessemer.kernels.fp8 import GPU_OPTIONS as FLOAT8_OPTIONS
from bessemer.models.allocation import FILE, Allocation, compute_lzw_allocation
from bessemer.models.lookup import choose_path
from bessemer.models.lora import LoraSettings, Split, make_split
from bessemer.models.shape import Shape, explain_flops
from bessemer.registry import models
from bessemer.training.setup.initial_weights import check_tokenizer
from bessemer.training.setup.schema import grant_wishes

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer


class ModelParts(NamedTuple):
    """`apply(params, *args, method=None, rngs=None)` is the model as objectives see it."""

    model: nn.Module
    tokenizer: Tokenizer | None
    apply: Callable[..., Any]
    counts: dict[str, int]
    flops_per_token: float
    flops_per_token_causal: float
    boxed: Any  # the parameters as shapes, with their axes
    split: Split  # which of them are trained
    idle: int  # parameters in matrix products that get no gradient


class Teacher(NamedTuple):
    """`apply(params, batch, method="projection")`; `place` is the directory the parameters are read from. The model is
    None if that is gone and the run trains on what was stored of it.

    top_k: tokens stored per position; 0: none, the teacher is in memory during training.
    """

    model: Any
    apply: Callable[..., Any]
    boxed: Any
    config: dict[str, Any]
    place: Path
    top_k: int

    @property
    def live(self) -> bool:
        return self.top_k == 0


def build_model(trainer: BaseTrainer, tokenizer: Tokenizer | None) -> ModelParts:
    grant_wishes(trainer)
    check_tokenizer(trainer.settings.init, tokenizer)
    model = trainer.given.model
    if model is None:
        fit_vocabulary(trainer, tokenizer)
        fit_attention(trainer)
        model = configure(trainer.model_class() or models.get(trainer.settings.family))
    if hasattr(model, "check"):
        model.check()
    note_shape(trainer, model)
    train_new_parameters(trainer, model)
    if precision_of(model) == "fp8":
        check_float8(trainer, model)
    chosen = trainer.topology.platform != "cpu" or trainer.topology.mesh.shape["context"] > 1
    if chosen and hasattr(model, "chosen_kernels"):
        for name, (kernel, why) in model.chosen_kernels().items():
            trainer.note_derived(f"architecture.{name}", kernel, why)
    return describe_model(trainer, model, tokenizer)


def with_model(trainer: BaseTrainer, model: nn.Module) -> ModelParts:
    """The trainer's parts with another module in place of its own, such as one that has learnt of the data."""
    return describe_model(trainer, model, trainer.tokenizer)


def describe_model(trainer: BaseTrainer, model: Any, tokenizer: Tokenizer | None) -> ModelParts:
    block = trainer.settings.block_size
    boxed = jax.eval_shape(lambda key: init_variables(model, block, key), jax.random.key(0))["params"]
    group_of = getattr(model, "group_of", None)
    split = make_split(boxed, trainer.settings.freeze, trainer.lora, group_of)
    idle = split.idle(boxed, group_of)
    return ModelParts(
        model,
        None if tokenizer is None else tokenizer_of(model, tokenizer),
        make_apply(model),
        model.count_parameters(),
        model.flops_per_token(block) - 2 * idle,
        model.flops_per_token(block, causal=True) - 2 * idle,
        boxed,
        split,
        idle,
    )


def note_shape(trainer: BaseTrainer, model: Any) -> None:
    """Width and heads that follow from the depth, with their reasons."""
    config, shape = trainer.config, getattr(model, "shape", None)
    if shape is None or "model/aspect" not in config or config["model/width"] != -1:
        return
    why = f"depth {model.depth} · aspect {model.aspect}, up to a multiple of head_dim {model.head_dim}"
    trainer.note_derived("model.width", shape.width, why)
    if config["model/heads"] == -1:
        trainer.note_derived("model.heads", shape.heads, f"width {shape.width:,} / head_dim {model.head_dim}")


def train_new_parameters(trainer: BaseTrainer, model: Any) -> None:
    """lora/whole: beside adapters, a head that begins at random (`new_parameters`) is trained, or it stays random."""
    new = [name for name in getattr(model, "new_parameters", ()) if name not in trainer.lora.whole]
    if not trainer.lora.rank or not new or trainer.config.is_set("lora/whole"):
        return
    trainer.config.set("lora/whole", new, f"{trainer.settings.family}: new parameters")
    trainer.lora = configure(LoraSettings)
    trainer.note_derived("lora.whole", new, "begins at random, so it is trained beside the adapters")


def init_variables(model: nn.Module, block_size: int, key: jax.Array) -> Any:
    """Boxed variables of the model, from a batch of one short row."""
    return model.init(key, short_row(block_size))


def short_row(block_size: int) -> jax.Array:
    """Tokens (1, T) that a model is initialized with: no parameter's shape depends on T."""
    return jax.numpy.zeros((1, min(8, block_size)), jax.numpy.int32)


def fit_vocabulary(trainer: BaseTrainer, tokenizer: Tokenizer | None) -> None:
    """model/vocab_size: -1 takes the tokenizer's; a smaller one would index out of the table."""
    if "model/vocab_size" not in trainer.config:
        return
    size = trainer.config["model/vocab_size"]
    if tokenizer is None:
        if size < 1:
            raise InputError(
                "model.vocab_size is not set and there is no tokenizer to take it from; give one of them."
            )
        return
    if size == -1:
        trainer.config.set("model/vocab_size", tokenizer.vocab_size, "the tokenizer's")
    elif size < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size={size}: ids would fall outside the "
            "embedding. Set model.vocab_size=-1 (the tokenizer's), or train a smaller tokenizer."
        )


def fit_attention(trainer: BaseTrainer) -> None:
    """`topology.deterministic` on a GPU: not cuDNN's attention, whose gradient is summed in no fixed order."""
    exact = trainer.topology.settings.deterministic and trainer.topology.platform == "gpu"
    if not exact or "architecture/attention" not in trainer.config:
        return
    if trainer.config["architecture/attention"] == "cudnn":
        raise InputError(
            "architecture.attention=cudnn is not repeatable, and topology.deterministic=true asks for a repeatable "
            "run. Set architecture.attention=auto, or topology.deterministic=false."
        )
    trainer.config.set("architecture/attention", "xla", "topology.deterministic")


def make_apply(model: nn.Module) -> Callable[..., Any]:
    def apply(params: Any, *args: Any, method: str | None = None, rngs: Any = None, **kwargs: Any) -> Any:
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply


def precision_of(model: nn.Module) -> str:
    """A model without the setting counts as bf16."""
    return getattr(model, "precision", "bf16")


def check_float8(trainer: BaseTrainer, model: Any) -> None:
    """An fp8 run needs units for it, or leave to emulate them; what is converted is printed with the reasons."""
    topology = trainer.topology
    if not model.fp8_emulate and not topology.float8:
        raise InputError(
            f"architecture.precision=fp8 needs float8 units (NVIDIA Ada, Hopper or newer), and this is a "
            f"{topology.device_kind}. Use architecture.precision=bf16 or auto; architecture.fp8.emulate=true gives the "
            "same numbers here, slowly, for tests."
        )
    units = "emulated" if model.fp8_emulate and not topology.float8 else "in float8 units"
    peak = mfu_peak(trainer, model)
    basis = f"; MFU is of {peak}" if peak else ""
    trainer.note_derived(
        "architecture.precision", "fp8", f"{model.fp8_conversion()}; {model.fp8_scaling}, {units}{basis}"
    )


def mfu_peak(trainer: BaseTrainer, model: nn.Module) -> str | None:
    """What MFU is a share of, in words; None on an unknown chip."""
    chip, precision = trainer.topology.chip, precision_of(model)
    if chip is None:
        return None
    peak = chip.peak_flops(precision)
    kind = "bf16" if peak == chip.bf16_flops else precision
    return f"the {kind} peak of the {chip.name}, {peak / 1e12:,.0f} TFLOP/s"


def compiler_options(trainer: BaseTrainer) -> dict[str, Any] | None:
    """What XLA is told for the training step: the topology's wishes and the precision's."""
    options = trainer.topology.compiler_options or {}
    if trainer.topology.platform == "gpu" and precision_of(trainer.model) == "fp8":
        options = {**options, **FLOAT8_OPTIONS}
    return options or None


def flops_share(trainer: BaseTrainer, causal: bool) -> float | None:
    """FLOPs of one token over the peak of all devices; None on a chip without a known peak."""
    chip = trainer.topology.chip
    if chip is None:
        return None
    parts = trainer.model_parts
    flops = parts.flops_per_token_causal if causal else parts.flops_per_token
    return flops / (chip.peak_flops(precision_of(parts.model)) * trainer.topology.device_count)


def flops_formula(trainer: BaseTrainer) -> str:
    """What FLOPs per token, and with them MFU, are made of: the formula with its numbers."""
    parts, block = trainer.model_parts, trainer.settings.block_size
    shape = getattr(parts.model, "shape", None)
    words = explain_flops(shape, block) if isinstance(shape, Shape) else "the model's own flops_per_token"
    return words + (f", less 2 · {parts.idle:,} frozen parameters without a gradient" if parts.idle else "")


def peak_memory() -> dict[str, float]:
    """mem/peak_gib of the busiest local device; empty where the backend does not say (a CPU)."""
    peaks = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return {"mem/peak_gib": max(peaks) / 2**30} if peaks else {}


# The lookup rows of a run: shared out once, at its first start, then carried by its checkpoints.


SECTION = "architecture/lookup"


def allocate(trainer: BaseTrainer, mixture: Mixture) -> None:
    """Give a model with lookup layers its allocation: of the run's own checkpoints, of `init`, or a new one."""
    model: Any = trainer.model
    if not getattr(model, "lookup_after_layers", ()):
        return
    allocation, origin = model.allocation, "the model's own allocation"
    if allocation is None:
        allocation, origin = saved_allocation(trainer) or (None, "")
    if allocation is None:
        allocation, origin = new_allocation(trainer, mixture)
    allocation.check(model, trainer.tokenizer.hash if trainer.tokenizer else None, origin)
    fix_settings(trainer, model)
    shape = model.shape.lookup
    trainer.model_parts = with_model(
        trainer, model.clone(allocation=allocation, lookup_rows=allocation.rows, lookup_d_up=shape.d_up)
    )
    note(trainer, allocation, origin)


def saved_allocation(trainer: BaseTrainer) -> tuple[Allocation, str] | None:
    """What this run, or the one it starts from, has saved; a resumed run never shares out anew."""
    manager = trainer.checkpoint_manager
    places = [manager.path(step) for step in reversed(manager.committed())]
    if not places and trainer.settings.init is not None:
        start = Path(trainer.settings.init)
        places = [start] if (start / FILE).is_file() else []
    problem: StorageError | None = None
    for place in places:
        try:
            return Allocation.read(place), str(place)
        except StorageError as error:  # a damaged checkpoint: the one before holds the same
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def new_allocation(trainer: BaseTrainer, mixture: Mixture) -> tuple[Allocation, str]:
    """LZW over a sample of the first stage's rows; a pure function of data and seed."""
    model: Any = trainer.model
    rows, size = model.shape.lookup.rows, model.vocab_size
    sample = sample_tokens(mixture, model.lookup_sample, trainer.settings.seed)
    largest = max((int(sequence.max()) for sequence in sample if len(sequence)), default=0)
    if largest >= size:
        raise InputError(f"the data holds token {largest}, outside the model's vocabulary of {size}.")
    k = compute_lzw_allocation(sample, size, rows, model.lookup_k_max)
    frequency = np.bincount(np.concatenate([np.empty(0, np.int64), *sample]), minlength=size)
    tokenizer = trainer.tokenizer.hash if trainer.tokenizer else None
    return Allocation.of(k, frequency, tokenizer), f"LZW over {int(frequency.sum()):,} training tokens"


def fix_settings(trainer: BaseTrainer, model: Any) -> None:
    """Numbers that were left to be derived are written to config.yaml: what is saved does not depend on a rule."""
    shape = model.shape.lookup
    chosen = {
        "rows": (shape.rows, "max(vocabulary, parameters // 1000), up to 64s"),
        "d_up": (shape.d_up, "4 × width"),
        "sample_tokens": (model.lookup_sample, "5 × (rows − vocabulary)"),
    }
    for name, (value, why) in chosen.items():
        key = f"{SECTION}/{name}"
        if key in trainer.config and trainer.config[key] == 0:
            trainer.config.set(key, value, why)


def note(trainer: BaseTrainer, allocation: Allocation, origin: str) -> None:
    """Shown at the start and kept in derived.json."""
    model: Any = trainer.model
    layers, plain = list(model.lookup_after_layers), allocation.rows / allocation.vocab_size
    trainer.note_derived("lookup layers", layers, f"after these blocks, of 0 to {model.depth - 1}")
    chosen = trainer.config.provenance.get(f"{SECTION}/rows")
    rule = "of the model" if chosen is None else chosen.reason
    trainer.note_derived("lookup rows", allocation.rows, f"{rule}; shared out by {origin}")
    trainer.note_derived("lookup k_max", model.lookup_k_max, f"the largest k is {allocation.longest}")
    trainer.note_derived("lookup mean k", round(plain, 3), "rows / vocabulary")
    trainer.note_derived(
        "lookup mean k, weighted", round(allocation.mean_k, 3), "by token frequency: what a token costs"
    )


def note_path(trainer: BaseTrainer, per_device: int) -> None:
    """Which way the lookup attention is computed in training."""
    model: Any = trainer.model
    allocation = getattr(model, "allocation", None)
    if allocation is None:
        return
    tokens = per_device * trainer.settings.block_size // trainer.topology.mesh.shape.get("context", 1)
    path = choose_path(model.lookup_path, tokens, allocation.longest)
    size = f"{tokens:,} tokens a device × up to {allocation.longest} rows"
    trainer.note_derived(
        "lookup path", path, size if model.lookup_path == "auto" else "architecture.lookup.path"
    )
