"""The model of a run: which class, which vocabulary, and the one function that applies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config
from bessemer.data import Tokenizer
from bessemer.data.plan.batches import Mixture, sample_tokens
from bessemer.data.rows.build import PieceRows
from bessemer.errors import InputError, StorageError
from bessemer.generate.load import tokenizer_of
from bessemer.kernels.fp8 import GPU_OPTIONS as FLOAT8_OPTIONS
from bessemer.models.allocation import Allocation, compute_lzw_allocation
from bessemer.models.lookup import allocation_of, choose_path, has_lookup
from bessemer.models.lora import LoraSettings, Split, make_split
from bessemer.models.moe import active_share
from bessemer.models.protocol import Checked, HasPrecision, KernelChoice, group_of, new_parameters
from bessemer.models.shape import explain_flops, round_up
from bessemer.models.transformer import FP8_IF_SUPPORTED, Transformer
from bessemer.registry import models, objectives
from bessemer.storage.files import ALLOCATION
from bessemer.topology import Topology
from bessemer.training.settings import RunContext
from bessemer.training.setup.initial_weights import check_tokenizer

REMAT, DOCUMENTS = "architecture/remat", "architecture/max_documents"
PRECISION = "architecture/precision"
MOST_ROWS = 64  # rows of a micro-batch whose documents are counted; further ones count as the last of these
MOST_DOCUMENTS = 64  # cuDNN keeps a row of softmax statistics for each: above, the table of pairs costs less


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
    added: int  # parameters of adapters whose products are made beside the model's own


class Teacher(NamedTuple):
    """`apply(params, batch, method="projection")`; `place` is the directory the parameters are read from. The model is
    None if that directory is gone and the run trains on the tokens stored from it.

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


def build_model(context: RunContext[Any], kind: type[Any] | None, tokenizer: Tokenizer | None) -> ModelParts:
    """Make the module and count its parameters. kind: its class; None: the family that model.family names."""
    check_tokenizer(context.settings.init, context.settings.adapters, tokenizer)
    config, topology, model = context.config, context.topology, context.given.model
    if model is None:
        fit_vocabulary(config, tokenizer)
        fit_attention(config, topology)
        choose_float8(config, topology)
        model = config.make(kind or models.get(context.settings.family))
    if isinstance(model, Checked):
        with topology.layout():
            model.check()
    note_shape(context, model)
    lora = train_new_parameters(context, model)
    if lora.rank:
        model = recompute_with_adapters(context, model)
    if precision_of(model) == "fp8":
        check_float8(context, model)
        if lora.rank and lora.quantize != "none":
            raise InputError(
                f"lora.quantize={lora.quantize} and architecture.precision=fp8 do not go together: a quantized matrix "
                "is multiplied in the compute dtype. Use architecture.precision=auto, or lora.quantize=none."
            )
    if isinstance(model, KernelChoice) and (topology.platform != "cpu" or topology.mesh.shape["context"] > 1):
        for name, (kernel, why) in model.chosen_kernels().items():
            context.notes.derive(f"architecture.{name}", kernel, why)
    return describe_model(context, model, tokenizer, lora)


def recompute_with_adapters(context: RunContext[Any], model: Any) -> Any:
    """Let a run with adapters recompute what costs little, unless architecture.remat is set.

    The frozen weights need no gradient, so activations are most of the memory: an 8B Llama with 4 rows of 2,048 tokens
    takes 50.3 GiB without this on an H200 (2026-11-16).
    """
    config, names = context.config, model.remat_with_adapters if isinstance(model, Transformer) else ()
    if not names or REMAT not in config or config.is_set(REMAT):
        return model
    why = "with adapters, activations are most of the memory, and these cost little to recompute"
    config.set(REMAT, list(names), why)
    context.notes.derive("architecture.remat", ", ".join(names), why)
    return model.clone(remat=names)


def limit_documents(context: RunContext[Any], parts: ModelParts, sources: Sequence[Any]) -> ModelParts:
    """Tell a model with cuDNN attention how many documents a row of `sources` holds at most, and several rows together,
    if that is known."""
    model, config = parts.model, context.config
    if not isinstance(model, Transformer) or not model.document_mask or DOCUMENTS not in config:
        return parts
    if model.chosen_kernels()["attention"][0] != "cudnn" or not all(type(rows) is PieceRows for rows in sources):
        return parts
    counts = document_counts([1 + rows.pieces for rows in sources])  # padding counts as a document
    most, given = round_up(max(counts[:1], default=0), 8), config[DOCUMENTS]
    if most > MOST_DOCUMENTS:
        return parts
    if not given:
        why = "the packed rows hold no more, padding included: attention skips what is masked"
        config.set(DOCUMENTS, most, why)
        context.notes.derive("architecture.max_documents", most, why)
    enough = min(len(rows) for rows in sources) >= len(counts)
    limited = model.clone(max_documents=given or most, document_counts=counts if enough else ())
    return parts._replace(model=limited, apply=make_apply(limited))  # parameters and FLOPs stay


def document_counts(counts: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the largest numbers of documents that n rows may have, descending. counts: those of the rows of each
    source. Where an epoch ends within a batch, a row can come twice, so each is counted twice."""
    largest = np.sort(np.concatenate(counts))[::-1][: MOST_ROWS // 2]
    return tuple(np.repeat(largest, 2).tolist())


def describe_model(context: RunContext[Any], model: Any, tokenizer: Tokenizer | None, lora: LoraSettings) -> ModelParts:
    """Return the parts of `model`: its shapes, which of them are trained, and its FLOPs."""
    block = context.settings.block_size
    boxed = jax.eval_shape(lambda key: model.init(key, short_row(block)), jax.random.key(0))["params"]
    split = make_split(boxed, context.settings.freeze, lora, model, context.settings.param_dtype)
    if split.quantized:
        note_quantized(context, split, boxed)
    active = active_share(model)
    idle, added = split.idle(boxed, group_of(model), active), split.adapter_parameters(boxed, active)
    more = 6 * added - 2 * idle
    return ModelParts(
        model,
        None if tokenizer is None else tokenizer_of(model, tokenizer),
        make_apply(model),
        model.count_parameters(),
        model.flops_per_token(block) + more,
        model.flops_per_token(block, causal=True) + more,
        boxed,
        split,
        idle,
        added,
    )


def objective_settings(context: RunContext[Any]) -> Any:
    """Return the settings of the run's objective, or None."""
    entry = objectives.entry(context.settings.objective)
    if len(entry.settings) > 1:
        raise InputError(f"objective '{entry.name}' registers several settings classes; merge them into one.")
    return context.config.make(entry.settings[0]) if entry.settings else None


def note_quantized(context: RunContext[Any], split: Split, boxed: Any) -> None:
    """Record which matrices are quantized, and what they take in memory."""
    size, weights = split.quantized_bytes(boxed), split.quantized_parameters(boxed)
    why = f"{len(split.quantized)} frozen matrices, {weights:,} weights at {size / weights:.3f} bytes"
    context.notes.derive("quantized bytes", size, f"{split.lora.quantize}: {why}")


def note_shape(context: RunContext[Any], model: Any) -> None:
    """Record width and heads that follow from the depth, with their reasons."""
    config, notes = context.config, context.notes
    if not isinstance(model, Transformer) or "model/aspect" not in config or config["model/width"] != -1:
        return
    shape = model.shape
    why = f"depth {model.depth} · aspect {model.aspect}, up to a multiple of head_dim {model.head_dim}"
    notes.derive("model.width", shape.width, why)
    if config["model/heads"] == -1:
        notes.derive("model.heads", shape.heads, f"width {shape.width:,} / head_dim {model.head_dim}")


def train_new_parameters(context: RunContext[Any], model: Any) -> LoraSettings:
    """Return the adapter settings; lora.whole names the model's `new_parameters` unless it is set, since a head that
    begins at random would otherwise stay random."""
    config, lora = context.config, context.lora
    new = [name for name in new_parameters(model) if name not in lora.whole]
    if not lora.rank or not new or config.is_set("lora/whole"):
        return lora
    config.set("lora/whole", new, f"{context.settings.family}: new parameters")
    context.notes.derive("lora.whole", new, "begins at random, so it is trained beside the adapters")
    return config.make(LoraSettings)


def short_row(block_size: int) -> jax.Array:
    """Tokens (1, T) that a model is initialized with: no parameter's shape depends on T."""
    return jax.numpy.zeros((1, min(8, block_size)), jax.numpy.int32)


def fit_vocabulary(config: Config, tokenizer: Tokenizer | None) -> None:
    """Set model.vocab_size=-1 to the tokenizer's size; raise InputError if it is smaller than that."""
    if "model/vocab_size" not in config:
        return
    size = config["model/vocab_size"]
    if tokenizer is None:
        if size < 1:
            raise InputError("model.vocab_size is not set and there is no tokenizer to take it from; give one of them.")
        return
    if size == -1:
        config.set("model/vocab_size", tokenizer.vocab_size, "the tokenizer's")
    elif size < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but model.vocab_size={size}: ids would fall outside the "
            "embedding. Set model.vocab_size=-1 (the tokenizer's), or train a smaller tokenizer."
        )


def fit_attention(config: Config, topology: Topology) -> None:
    """With topology.deterministic on a GPU, avoid cuDNN attention: its gradient is summed in no fixed order."""
    exact = topology.settings.deterministic and topology.platform == "gpu"
    if not exact or "architecture/attention" not in config:
        return
    if config["architecture/attention"] == "cudnn":
        raise InputError(
            "architecture.attention=cudnn is not repeatable, and topology.deterministic=true asks for a repeatable "
            "run. Set architecture.attention=auto, or topology.deterministic=false."
        )
    config.set("architecture/attention", "xla", "topology.deterministic")


def make_apply(model: nn.Module) -> Callable[..., Any]:
    def apply(params: Any, *args: Any, method: str | None = None, rngs: Any = None, **kwargs: Any) -> Any:
        return model.apply({"params": params}, *args, method=method, rngs=rngs, **kwargs)

    return apply


def precision_of(model: nn.Module) -> str:
    """Return the precision of a model; bf16 for one without the setting."""
    return model.precision if isinstance(model, HasPrecision) else "bf16"


def choose_float8(config: Config, topology: Topology) -> None:
    """Replace architecture.precision=fp8-if-supported by what the chip supports."""
    if config.get(PRECISION) != FP8_IF_SUPPORTED:
        return
    if topology.float8:
        config.set(PRECISION, "fp8", f"the {topology.device_kind} has float8 units")
    else:
        config.set(PRECISION, "auto", f"the {topology.device_kind} has no float8 units")


def check_float8(context: RunContext[Any], model: Any) -> None:
    """Raise InputError if fp8 is neither supported by the device nor emulated; record what is converted."""
    topology = context.topology
    if not model.fp8_emulate and not topology.float8:
        raise InputError(
            f"architecture.precision=fp8 needs float8 units (NVIDIA Ada, Hopper or newer), and this is a "
            f"{topology.device_kind}. Use architecture.precision=bf16 or auto; architecture.fp8.emulate=true gives the "
            "same numbers here, slowly, for tests."
        )
    units = "emulated" if model.fp8_emulate and not topology.float8 else "in float8 units"
    peak = mfu_peak(topology, model)
    basis = f"; MFU is of {peak}" if peak else ""
    why = f"{model.fp8_conversion()}; {model.fp8_scaling}, {units}{basis}"
    context.notes.derive("architecture.precision", "fp8", why)


def mfu_peak(topology: Topology, model: nn.Module) -> str | None:
    """Describe the peak that MFU is a share of; None on an unknown chip."""
    chip, precision = topology.chip, precision_of(model)
    if chip is None:
        return None
    peak = chip.peak_flops(precision)
    kind = "bf16" if peak == chip.bf16_flops else precision
    return f"the {kind} peak of the {chip.name}, {peak / 1e12:,.0f} TFLOP/s"


def compiler_options(topology: Topology, model: nn.Module) -> dict[str, Any] | None:
    """XLA options of the training step: the topology's and the precision's."""
    options = topology.compiler_options or {}
    if topology.platform == "gpu" and precision_of(model) == "fp8":
        options = {**options, **FLOAT8_OPTIONS}
    return options or None


def flops_share(topology: Topology, parts: ModelParts, causal: bool) -> float | None:
    """FLOPs of one token over the peak of all devices; None on a chip without a known peak."""
    if topology.chip is None:
        return None
    flops = parts.flops_per_token_causal if causal else parts.flops_per_token
    return flops / (topology.chip.peak_flops(precision_of(parts.model)) * topology.device_count)


def flops_formula(parts: ModelParts, block_size: int) -> str:
    """Return the formula of FLOPs per token, which MFU is computed from, with its numbers."""
    model, words = parts.model, "the model's own flops_per_token"
    if isinstance(model, Transformer):
        words = explain_flops(model.shape, block_size)
    words += f", less 2 · {parts.idle:,} frozen parameters without a gradient" if parts.idle else ""
    return words + (f", plus 6 · {parts.added:,} of adapters" if parts.added else "")


def peak_memory() -> dict[str, float]:
    """mem/peak_gib of the busiest local device; empty where the backend does not say (a CPU)."""
    peaks = [stats["peak_bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return {"mem/peak_gib": max(peaks) / 2**30} if peaks else {}


# --- lookup layers: rows are allocated once, at the first start of a run, then stored in its checkpoints ---
SECTION = "architecture/lookup"


def allocate(
    context: RunContext[Any], parts: ModelParts, mixture: Mixture, checkpoints: Callable[[], Checkpoints]
) -> ModelParts:
    """Give a model with lookup layers its allocation: from the run's own checkpoints, from `init`, or a new one."""
    model: Any = parts.model
    if not has_lookup(model):
        return parts
    allocation, origin = model.allocation, "the model's own allocation"
    if allocation is None:
        allocation, origin = saved_allocation(context.settings.init, checkpoints()) or (None, "")
    if allocation is None:
        allocation, origin = new_allocation(parts, mixture, context.settings.seed)
    allocation.check(model, parts.tokenizer.hash if parts.tokenizer else None, origin)
    return with_allocation(context, parts, allocation, origin)


def with_allocation(context: RunContext[Any], parts: ModelParts, allocation: Allocation, origin: str) -> ModelParts:
    """Return the parts of the model with `allocation`; record its sizes, and write derived ones to the configuration,
    so that a saved run does not depend on the rule."""
    model: Any = parts.model
    config, shape = context.config, model.shape.lookup
    chosen = {
        "rows": (shape.rows, "max(vocabulary, parameters // 1000), up to 64s"),
        "d_up": (shape.d_up, "4 × width"),
        "sample_tokens": (model.lookup_sample, "5 × (rows − vocabulary)"),
    }
    for name, (value, why) in chosen.items():
        key = f"{SECTION}/{name}"
        if key in config and config[key] == 0:
            config.set(key, value, why)
    model = model.clone(allocation=allocation, lookup_rows=allocation.rows, lookup_d_up=shape.d_up)
    note_allocation(context, model, origin)
    return describe_model(context, model, parts.tokenizer, parts.split.lora)


def saved_allocation(init: str | None, manager: Checkpoints) -> tuple[Allocation, str] | None:
    """Return what this run, or the one it starts from, has saved; a resumed run never allocates again."""
    places = [manager.path(step) for step in reversed(manager.committed())]
    if not places and init is not None:
        places = [Path(init)] if ALLOCATION.path(Path(init)).is_file() else []
    problem: StorageError | None = None
    for place in places:
        try:
            return Allocation.read(place), str(place)
        except StorageError as error:  # a damaged checkpoint: the one before holds the same
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def new_allocation(parts: ModelParts, mixture: Mixture, seed: int) -> tuple[Allocation, str]:
    """LZW over a sample of the first stage's rows; a pure function of data and seed."""
    model: Any = parts.model
    rows, size = model.shape.lookup.rows, model.vocab_size
    sample = sample_tokens(mixture, model.lookup_sample, seed)
    largest = max((int(sequence.max()) for sequence in sample if len(sequence)), default=0)
    if largest >= size:
        raise InputError(f"the data holds token {largest}, outside the model's vocabulary of {size}.")
    k = compute_lzw_allocation(sample, size, rows, model.lookup_k_max)
    frequency = np.bincount(np.concatenate([np.empty(0, np.int64), *sample]), minlength=size)
    tokenizer = parts.tokenizer.hash if parts.tokenizer else None
    return Allocation.of(k, frequency, tokenizer), f"LZW over {int(frequency.sum()):,} training tokens"


def note_allocation(context: RunContext[Any], model: Any, origin: str) -> None:
    """Record the allocation's sizes."""
    derive, allocation = context.notes.derive, model.allocation
    layers, plain = list(model.lookup_after_layers), allocation.rows / allocation.vocab_size
    derive("lookup layers", layers, f"after these blocks, of 0 to {model.depth - 1}")
    chosen = context.config.provenance.get(f"{SECTION}/rows")
    rule = "of the model" if chosen is None else chosen.reason
    derive("lookup rows", allocation.rows, f"{rule}; shared out by {origin}")
    derive("lookup k_max", model.lookup_k_max, f"the largest k is {allocation.longest}")
    derive("lookup mean k", round(plain, 3), "rows / vocabulary")
    derive("lookup mean k, weighted", round(allocation.mean_k, 3), "by token frequency: what a token costs")


def note_path(context: RunContext[Any], model: Any, per_device: int) -> None:
    """Record which way the lookup attention is computed in training."""
    allocation = allocation_of(model)
    if allocation is None:
        return
    tokens = per_device * context.settings.block_size // context.topology.mesh.shape.get("context", 1)
    path = choose_path(model.lookup_path, tokens, allocation.longest)
    size = f"{tokens:,} tokens per device × up to {allocation.longest} rows"
    why = size if model.lookup_path == "auto" else "architecture.lookup.path"
    context.notes.derive("lookup path", path, why)
