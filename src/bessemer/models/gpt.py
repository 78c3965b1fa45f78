"""GPT, the family of the depth dial: untied, no biases, weightless norms, every architectural feature optional."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.kernels import fp8, ops
from bessemer.kernels.feed_forward import joins_on_chip
from bessemer.kernels.fp8 import SCALINGS
from bessemer.kernels.norms import choose_kernels
from bessemer.models.allocation import check_rows
from bessemer.models.cache import NONE, Cache
from bessemer.models.dense_connections import ConnectionParameters, connect
from bessemer.models.layers import (
    AXES,
    OFFLOAD,
    After,
    BlockParameters,
    Connect,
    LayerOptions,
    Step,
    Stream,
    declare,
    layer,
    ramp,
)
from bessemer.models.lookup import AXES as LOOKUP_AXES
from bessemer.models.lookup import LookupOptions, LookupParameters, LookupSettings, lookup_layer, with_lookup
from bessemer.models.moe import ExpertSettings, Stats, add_stats, no_stats
from bessemer.models.pipeline import Rows, Stack, run_stack
from bessemer.models.previous_token import ROWS_MULTIPLE, BigramSettings, add_bigrams
from bessemer.models.shape import Shape, layer_windows
from bessemer.models.transformer import AttendAt, Tokens, Transformer, require
from bessemer.registry import models
from bessemer.topology import unbox
from bessemer.topology.rules import constrain, shards

# The optimizer group of a parameter, by its name; all others are "matrix".
GROUPS = {
    "embedding": "embedding",
    "head": "head",
    "value_table": "value_embedding",
    "bigram_table": "value_embedding",
    "lookup_keys": "value_embedding",
    "lookup_values": "value_embedding",
    "value_gate": "gate",
    "rho": "rho",
    "xi": "xi",
    "smear_gate": "scalar",
    "smear_scale": "scalar",
    "backout_scale": "scalar",
    "connect_read": "gate",
    "connect_write": "rho",
    "connect_bias": "rho",
    "router": "gate",
    "router_bias": "scalar",
}
TABLES = ("embedding", "value_embedding")  # groups that are looked up, not multiplied


@dataclass(frozen=True)
class Conversion:
    """Paths of converted matrices, and what is left in the compute dtype: (path, shape, reason)."""

    converted: tuple[str, ...]
    skipped: tuple[tuple[str, tuple[int, ...], str], ...]

    def __str__(self) -> str:
        """converted 12 of 15 matrices, skipped 3: 2 × value_gate 12 × 2 (a side below 128), head 256 × 320 (…)"""
        total = len(self.converted) + len(self.skipped)
        line = f"converted {len(self.converted)} of {total} matrices, skipped {len(self.skipped)}"
        kinds = Counter((path.rsplit("/", 1)[-1], shape, why) for path, shape, why in self.skipped)
        parts = [
            f"{f'{count} × ' if count > 1 else ''}{name} {' × '.join(map(str, shape))} ({why})"
            for (name, shape, why), count in kinds.items()
        ]
        return f"{line}: {', '.join(parts)}" if parts else line


def plan_conversion(matrices: Iterable[tuple[tuple[str, ...], tuple[int, ...]]], head: bool) -> Conversion:
    """`matrices`: (path, shape) of every matrix or stack that multiplies; `head`: whether the head is wanted."""
    converted, skipped = [], []
    for path, shape in matrices:
        in_block = path[0].startswith("blocks_") and path[-1] in AXES
        of_lookup = path[0].startswith("lookups_") and path[-1] in LOOKUP_AXES
        # W_mix reads W_up's output beside h, and may be used in these two parts
        sides = (shape[0] - shape[1], shape[1]) if of_lookup and path[-1] == "mix" else shape
        reason = None
        if len(shape) > 2:
            reason = "a stack of experts, multiplied by group in the compute dtype"
        elif min(sides) < fp8.SMALLEST:
            reason = f"a side below {fp8.SMALLEST}"
        elif not fp8.fits(sides):
            reason = f"a side not divisible by {fp8.MULTIPLE}"
        elif path[-1] == "head" and not head:
            reason = "architecture.fp8.head is false"
        elif path[-1] != "head" and not in_block and not of_lookup:
            reason = "not a matrix of a block or lookup layer"
        if reason is None:
            converted.append("/".join(path))
        else:
            skipped.append(("/".join(path), shape, reason))
    return Conversion(tuple(converted), tuple(skipped))


@models.register("gpt")
class GPT(Transformer, LookupSettings, ExpertSettings, BigramSettings):
    """The family of the depth dial, `model.depth=N`. Every architectural feature can be turned off."""

    window: str = field("model/window", default="SSSL", help="S short, L full context; tiled, last layer L")
    window_short: float = field(
        "model/window_short", default=0.5, above=0, maximum=1, help="S as a share of block_size, up to 128s"
    )
    fp8_scaling: str = field(
        "architecture/fp8/scaling",
        default="tensorwise",
        choices=SCALINGS,
        help="fp8: a scale per tensor (faster), or per row with weight gradients in bf16 (closer)",
    )
    fp8_head: bool = field("architecture/fp8/head", default=False, help="fp8: convert the head too")
    fp8_emulate: bool = field(
        "architecture/fp8/emulate", default=False, help="fp8: same numbers on a chip without it, slowly; for tests"
    )
    smear: bool = field("architecture/smear", default=True, help="mix the previous token's embedding in")
    residual_mix: bool = field("architecture/residual_mix", default=True, help="x ← ρx + ξx0 before each layer")
    value_embeddings: bool = field("architecture/value_embeddings", default=True, help="token tables added to v")
    key_offset: bool = field(
        "architecture/key_offset",
        default=False,
        help="half of a key's channels are the previous token's, so that one layer finds what follows a token",
    )
    paired_heads: bool = field(
        "architecture/paired_heads",
        default=False,
        help="two heads share their keys and values, over a sequence that interleaves both",
    )
    backout: bool = field("architecture/backout", default=True, help="subtract the middle layer's output")
    dense_connections: bool = field(
        "architecture/dense_connections",
        default=False,
        help="what a block reads is a learned mixture, by token, of the outputs of all blocks before it",
    )
    qk_norm: bool = field("architecture/qk_norm", default=True, help="norm queries and keys, then × 1.2")
    softcap: float = field("architecture/softcap", default=15.0, minimum=0.0, help="c·tanh(logits/c); 0 = off")
    rotary_base: float = field(
        "architecture/rotary_base", default=100_000.0, above=1, help="base of rotary frequencies"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup_after_layers", tuple(self.lookup_after_layers))
        super().__post_init__()

    @property
    def shape(self) -> Shape:
        shape = Shape(
            **self.sizes(),
            windows=layer_windows(self.window, self.depth, self.block_size, self.window_short),
            value_embeddings=self.value_embeddings,
            smear=self.smear,
            residual_mix=self.residual_mix,
            backout=self.backout,
            bigram_rows=self.bigram_rows,
            key_offset=self.key_offset,
            dense_connections=self.dense_connections,
            paired_heads=self.paired_heads,
        )
        return with_lookup(self, replace(shape, experts=self.expert_shape(shape.mlp_width)))

    # -- facts ---------------------------------------------------------------------------------------------------

    projected_groups: ClassVar[tuple[str, ...]] = ("matrix",)
    has_stages: ClassVar[bool] = True
    cast_groups: ClassVar[tuple[str, ...]] = ("matrix", "embedding", "value_embedding", "head")
    silent_at_start: ClassVar[tuple[str, ...]] = ("rho", "xi", "backout_scale", "connect_write", "connect_bias")
    """Parameters without a gradient in a fresh model. All output projections are 0, so the residual stream is a
    multiple of x0, and the final norm removes any factor; what is computed is rounding noise (1e-11 to 1e-8)."""

    def check(self) -> None:
        super().check()
        s, layers = self.shape, list(self.lookup_after_layers)
        require(
            s.heads * s.head_dim == s.width,
            f"model.width {s.width} is not model.heads {s.heads} × model.head_dim {s.head_dim}; change one of them, "
            "or leave width and heads at -1 to derive them.",
        )
        require(
            bool(self.window) and set(self.window) <= set("SL"),
            f"model.window is '{self.window}'; it is a pattern of S (short) and L (long), such as SSSL.",
        )
        require(
            0 < self.window_short <= 1,
            f"model.window_short is {self.window_short}; it is a share of the block, above 0 and at most 1.",
        )
        require(
            self.fp8_scaling in SCALINGS,
            f"architecture.fp8.scaling is '{self.fp8_scaling}'; known: {', '.join(SCALINGS)}.",
        )
        require(
            self.precision == "fp8" or (self.fp8_scaling == SCALINGS[0] and not self.fp8_head and not self.fp8_emulate),
            f"architecture.fp8 is set but architecture.precision is '{self.precision}', so it would do nothing; set "
            "architecture.precision=fp8, or leave architecture.fp8 out.",
        )
        self.check_experts()
        require(
            self.bigram_rows >= 0 and self.bigram_rows % ROWS_MULTIPLE == 0,
            f"architecture.bigram_rows is {self.bigram_rows}; use a multiple of {ROWS_MULTIPLE}, or 0 for no table.",
        )
        require(
            not self.key_offset or self.head_dim % 4 == 0,
            f"architecture.key_offset halves the rotary pairs of a head, and model.head_dim is {self.head_dim}; make "
            "it a multiple of 4, or leave architecture.key_offset out.",
        )
        require(
            not self.paired_heads or (s.kv_heads % 2 == 0 and s.heads // 2 % shards("heads") == 0),
            f"architecture.paired_heads takes an even model.kv_heads, which is {s.kv_heads}, and a topology.tensor "
            f"that divides the {s.heads // 2} pairs of heads, which is {shards('heads')}. Change them, or leave "
            "architecture.paired_heads out.",
        )
        self._check_connections()
        require(self.softcap >= 0, f"architecture.softcap is {self.softcap}; 0 turns it off.")
        require(self.rotary_base > 1, f"architecture.rotary_base is {self.rotary_base}; it must be above 1.")
        require(
            all(0 <= layer < self.depth for layer in layers) and len(set(layers)) == len(layers),
            f"architecture.lookup.after_layers is {layers}; it lists blocks of this model, 0 to {self.depth - 1}, "
            "once each.",
        )
        require(
            self.lookup_path in ("auto", "gather", "sorted"),
            f"architecture.lookup.path is '{self.lookup_path}'; known: auto, gather, sorted.",
        )
        if s.lookup is not None:
            check_rows(self.vocab_size, s.lookup.rows, self.lookup_k_max)
            if self.allocation is not None:
                self.allocation.check(self, None, "allocation")

    def _check_connections(self) -> None:
        """A scan would keep all outputs once per layer, a stage would have to send them on, and they stay on the
        device where they are read."""
        stages = shards("stage")
        for holds, setting, fix in (
            (not self.scan_layers, "architecture.scan_layers=true", "architecture.scan_layers=false"),
            (OFFLOAD not in self.remat, "architecture.remat=offload", "architecture.remat=block"),
            (stages == 1, f"topology.pipeline={stages}", "topology.fsdp for these devices"),
        ):
            require(
                holds or not self.dense_connections,
                f"architecture.dense_connections and {setting} do not go together: every layer reads the outputs of "
                f"all before it. Use {fix}, or leave architecture.dense_connections out.",
            )

    @staticmethod
    def group_of(path: tuple[str, ...]) -> str:
        return GROUPS.get(path[-1], "matrix")

    def fp8_conversion(self) -> Conversion:
        """Return which matrices float8 takes, from the shapes of the parameters; no array is made."""
        ids = jax.ShapeDtypeStruct((1, min(8, self.block_size)), jnp.int32)
        tree = unbox(jax.eval_shape(self.init, jax.random.key(0), ids)["params"])
        leaves = [(tuple(k.key for k in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        matrices = [(path, leaf.shape) for path, leaf in leaves if leaf.ndim > 1 and self.group_of(path) not in TABLES]
        return plan_conversion(matrices, self.fp8_head)

    def kernel_work(self, implementation: str) -> str:
        joined = self.precision != "fp8" and not self.experts and joins_on_chip(implementation)
        return "norms, relu² inside its products, loss" if joined else super().kernel_work(implementation)

    def _fp8(self, training: bool) -> str | None:
        """The scaling of float8 products, which only training uses."""
        return self.fp8_scaling if training and self.precision == "fp8" else None

    # -- parameters ----------------------------------------------------------------------------------------------

    def setup(self) -> None:
        s = self.shape
        normal, zeros, constant = nn.initializers.normal, nn.initializers.zeros, nn.initializers.constant
        table = (s.padded_vocab, s.width)
        self.embedding = declare(self, "embedding", normal(0.8), ("vocab", "embed"), table)
        self.head = declare(self, "head", normal(0.001), ("embed", "vocab"), table[::-1])
        if self.bigram_rows:
            size = (self.bigram_rows, s.width)
            self.bigram_table = declare(self, "bigram_table", zeros, ("vocab", "embed"), size)
        self.blocks = [BlockParameters(s, s.has_value_embedding(layer)) for layer in range(s.depth)]
        if self.dense_connections:
            counts = range(2, s.depth + 2)  # of the outputs after each block, the embeddings included
            self.connections = [ConnectionParameters(count, s.depth + 1, s.width) for count in counts]
        if s.lookup is not None:
            self.lookups = {str(after): LookupParameters(s.lookup, s.width) for after in s.lookup.layers}
        if self.residual_mix:
            self.rho = declare(self, "rho", ramp(1.15, 1.05), ("layers",), (s.depth,))
            self.xi = declare(self, "xi", ramp(0.20, 0.05), ("layers",), (s.depth,))
        if self.smear:
            gate = nn.initializers.uniform(0.02)
            self.smear_gate = declare(self, "smear_gate", gate, ("gate", None), (s.smear_channels, 1))
            self.smear_scale = declare(self, "smear_scale", zeros, (), ())
        if self.backout:
            self.backout_scale = declare(self, "backout_scale", constant(0.2), (), ())

    # -- training ------------------------------------------------------------------------------------------------

    def _embed(self, ids: Array) -> Array:
        return ops.rms_norm(ops.lookup(self.embedding, ids, ("vocab", None), self.compute_dtype))

    def _layers(self, x: Array, tokens: Tokens) -> tuple[Array, Stats]:
        ids, positions, documents, keys, training, watch = tokens
        same = None
        if documents is not None and (self.smear or self.bigram_rows):
            same = documents == ops.shift(documents, documents[:, :1])
        if self.smear:
            x = self._smear(x, ops.shift(x, jnp.zeros_like(x[:, :1])), same)
        if self.bigram_rows:
            previous = ops.shift(ids, jnp.full_like(ids[:, :1], NONE))
            x = self._add_bigrams(x, previous if same is None else jnp.where(same, previous, NONE), ids)
        x = constrain(x, "batch", "sequence", "embed_act")
        if keys is not None:
            x = ops.dropout(x, self.dropout, ops.fold_in(keys, self.depth))
        rows = Rows(ids, positions, documents, keys, *watch)
        stack = Stack(
            partial(self._block, self._layer_options(self._fp8(training)), max(self.block_size, x.shape[1])),
            self.kinds,
            self.scan_layers,
            self.remat,
            self._back_out,
            mixes=self.residual_mix,
            middle=self._backs_out,
        )
        shared = {"backout_scale": self.backout_scale} if self._backs_out else {}
        stats = no_stats(self.routing(), self.depth, watch)
        x, stats = run_stack(stack, self._layer_params(), shared, x, rows, stats, self._connect())
        return ops.rms_norm(x), stats

    def _block(self, options: LayerOptions, length: int, rows: Rows) -> tuple[Step, After]:
        """Return what a layer computes on `rows`, whose positions are below `length`, and what its lookups do."""
        rotary = ops.rotary_table(rows.positions, length, self.head_dim, self.rotary_base)

        def step(window: int | None, params: dict[str, Array], index: Array, stream: Stream) -> Stream:
            attend = self._attend(window, rows.documents)
            keys = None if rows.keys is None else ops.fold_in(rows.keys, index)
            watch = rows.watch.of_layer(index)
            x, x0, seen = layer(options, params, *stream[:2], rows.ids, rotary, attend, keys, watch)
            return x, x0, add_stats(stream[2], seen, index)

        return step, partial(self._look_up, rows.ids, scaling=options.fp8)

    # -- decoding ------------------------------------------------------------------------------------------------

    def _decode_layers(self, input_ids: Array, cache: Cache, positions: Array, attend: AttendAt) -> tuple[Array, Array]:
        embedded = x = self._embed(input_ids)
        if self.smear:
            x = self._smear(x, ops.shift(x, cache.previous[:, None].astype(x.dtype)), None)
        if self.bigram_rows:
            x = self._add_bigrams(x, ops.shift(input_ids, cache.last.astype(input_ids.dtype)), input_ids)
        # n more than the capacity: padding may lie beyond it, and its NaN would reach real rows as 0 · NaN
        length = cache.capacity + input_ids.shape[1]
        rotary = ops.rotary_table(positions, length, self.head_dim, self.rotary_base)
        x0 = middle = x
        connect, outputs = self._connect(), [x]
        for index, params in enumerate(self._layer_params()):
            x, x0, seen = layer(self._layer_options(), params, x, x0, input_ids, rotary, attend(index), None)
            self._record(seen)
            middle = x if index == self.depth // 2 else middle
            x = self._look_up(input_ids, params["lookup"], x) if "lookup" in params else x
            if connect is not None:
                outputs.append(x)
                x = connect(outputs)
        shared = {"backout_scale": self.backout_scale} if self._backs_out else {}
        return ops.rms_norm(self._back_out(shared, x, middle)), embedded

    # -- parts ---------------------------------------------------------------------------------------------------

    def _smear(self, x: Array, previous: Array, same_document: Array | None) -> Array:
        return ops.smear(x, previous, self.smear_gate, self.smear_scale, same_document)

    def _add_bigrams(self, x: Array, previous: Array, ids: Array) -> Array:
        return add_bigrams(x, self.bigram_table, previous, ids)

    def _connect(self) -> Connect | None:
        """Return what mixes the outputs so far, the embeddings first, for the next block; None: it reads the last."""
        if not self.dense_connections:
            return None
        params = [connection() for connection in self.connections]
        return lambda outputs: connect(params[len(outputs) - 2], outputs, self.compute_dtype)

    def _head(self) -> Array:
        return self.head

    def _cap(self) -> float:
        return self.softcap

    def _head_fp8(self, training: bool) -> str | None:
        return self._fp8(training) if self.fp8_head else None

    @property
    def _backs_out(self) -> bool:
        """Below three layers the middle is the last one: (1 − s)·x, which the norm makes x again for any s below 1, 0
        at 1 and −x above. Its gradient is rounding, which Adam walks across 1; so it is left out."""
        return self.backout and self.depth >= 3

    def _back_out(self, shared: dict[str, Array], x: Array, middle: Array | None) -> Array:
        """x − s·middle."""
        if middle is None or not self._backs_out:
            return x
        return (x - shared["backout_scale"] * middle).astype(x.dtype)

    def _layer_options(self, scaling: str | None = None) -> LayerOptions:
        kernels = choose_kernels(self.kernels, self.compute_dtype)
        return LayerOptions(
            self.head_dim, self.compute_dtype, self.qk_norm, self.dropout, kernels, scaling, self.routing()
        )

    def _look_up(self, ids: Array, params: dict[str, Array], x: Array, scaling: str | None = None) -> Array:
        if self.is_initializing():  # parameters need no allocation
            return x
        options = LookupOptions(self.compute_dtype, self.allocation, self.lookup_path, fp8=scaling)
        return lookup_layer(options, params, x, ids)

    def _layer_params(self) -> list[dict[str, Any]]:
        params: list[dict[str, Any]] = [block() for block in self.blocks]
        for after in self.lookup_after_layers:
            params[after]["lookup"] = self.lookups[str(after)]()
        if self.residual_mix:
            params = [{**p, "rho": self.rho[i], "xi": self.xi[i]} for i, p in enumerate(params)]
        return params
