"""Contradictions among a model's settings, found before anything is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bessemer.errors import InputError
from bessemer.kernels.fp8 import SCALINGS
from bessemer.models.allocation import check_rows
from bessemer.models.layers import TENSOR_NAMES, remat_names
from bessemer.topology.rules import shards

if TYPE_CHECKING:
    from bessemer.models.gpt import GPT
    from bessemer.models.protocol import HeadedModel

MOST_LAYERS = 1024
MOST_PARAMETERS = 2**44
LONGEST_BLOCK = 2**22
"""Sizes are checked before a shape is derived from them: a configuration from elsewhere may name any number."""
PRECISIONS = ("auto", "float32", "bf16", "fp8")


def check_gpt(model: GPT) -> None:
    """Raise InputError for the first setting that cannot be built, naming it and the remedy."""
    check_sizes(model)
    _check_shape(model)
    check_switches(model)
    _check_switches(model)
    _check_lookup(model)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def check_sizes(model: HeadedModel) -> None:
    """What holds for the sizes of every family."""
    require(
        1 <= model.depth <= MOST_LAYERS,
        f"model.depth is {model.depth}; a model has 1 to {MOST_LAYERS:,} layers.",
    )
    require(
        model.head_dim >= 2 and model.head_dim % 2 == 0,
        f"model.head_dim is {model.head_dim}; rotary positions turn pairs, so it must be even.",
    )
    require(
        model.vocab_size > 0,
        f"model.vocab_size is {model.vocab_size}; give it, or a tokenizer to take it from (data.tokenizer).",
    )
    require(
        1 <= model.block_size <= LONGEST_BLOCK,
        f"architecture.block_size is {model.block_size}; it must be from 1 to {LONGEST_BLOCK:,}.",
    )
    s = model.shape
    require(
        0 < s.kv_heads <= s.heads and s.heads % s.kv_heads == 0,
        f"model.kv_heads {s.kv_heads} does not divide model.heads {s.heads}; use a divisor of it.",
    )
    count = s.count_parameters()["total"]
    require(
        count <= MOST_PARAMETERS,
        f"the model would have {count:.3g} parameters (depth {s.depth}, width {s.width}, {s.heads} heads of "
        f"{s.head_dim}, {s.vocab_size} tokens); at most {MOST_PARAMETERS:.3g} are supported.",
    )
    require(
        s.heads % shards("heads") == 0,
        f"topology.tensor={shards('heads')} does not divide the {s.heads} heads of the model, so attention would be "
        "computed whole on every device; use a divisor of model.heads.",
    )


def _check_shape(model: GPT) -> None:
    s = model.shape
    require(
        s.heads * s.head_dim == s.width,
        f"model.width {s.width} is not model.heads {s.heads} × model.head_dim {s.head_dim}; change one of them, "
        "or leave width and heads at -1 to derive them.",
    )
    require(
        bool(model.window) and set(model.window) <= set("SL"),
        f"model.window is '{model.window}'; it is a pattern of S (short) and L (long), such as SSSL.",
    )
    require(
        0 < model.window_short <= 1,
        f"model.window_short is {model.window_short}; it is a share of the block, above 0 and at most 1.",
    )


def check_switches(model: HeadedModel) -> None:
    """What holds for how every family is computed."""
    require(
        model.precision in PRECISIONS,
        f"architecture.precision is '{model.precision}'; known: {', '.join(PRECISIONS)}.",
    )
    unknown = [name for name in remat_names(model.remat) or () if name not in TENSOR_NAMES]
    require(
        not unknown,
        f"architecture.remat names {', '.join(unknown)}; it is none, block, or a list of "
        f"{', '.join(TENSOR_NAMES)}.",
    )
    require(0 <= model.dropout < 1, f"architecture.dropout is {model.dropout}; it must be in [0, 1).")
    chunks = model.loss_chunks
    require(
        chunks == "auto" or (isinstance(chunks, int) and chunks >= 1),
        f"architecture.loss_chunks is {chunks!r}; it is auto or a number of at least 1.",
    )


def _check_switches(model: GPT) -> None:
    require(
        model.fp8_scaling in SCALINGS,
        f"architecture.fp8.scaling is '{model.fp8_scaling}'; known: {', '.join(SCALINGS)}.",
    )
    require(
        model.precision == "fp8"
        or (model.fp8_scaling == SCALINGS[0] and not model.fp8_head and not model.fp8_emulate),
        f"architecture.fp8 is set but architecture.precision is '{model.precision}', so it would do nothing; set "
        "architecture.precision=fp8, or leave architecture.fp8 out.",
    )
    require(model.softcap >= 0, f"architecture.softcap is {model.softcap}; 0 turns it off.")
    require(model.rotary_base > 1, f"architecture.rotary_base is {model.rotary_base}; it must be above 1.")


def _check_lookup(model: GPT) -> None:
    layers = list(model.lookup_after_layers)
    require(
        all(0 <= layer < model.depth for layer in layers) and len(set(layers)) == len(layers),
        f"architecture.lookup.after_layers is {layers}; it lists blocks of this model, 0 to {model.depth - 1}, once "
        "each.",
    )
    require(
        model.lookup_path in ("auto", "gather", "sorted"),
        f"architecture.lookup.path is '{model.lookup_path}'; known: auto, gather, sorted.",
    )
    if model.shape.lookup is not None:
        check_rows(model.vocab_size, model.shape.lookup.rows, model.lookup_k_max)
        if model.allocation is not None:
            model.allocation.check(model, None, "allocation")
