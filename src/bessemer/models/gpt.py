"""GPT, the family of the depth dial: untied, no biases, weightless norms, every device of architecture a switch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.models import blocks, fp8
from bessemer.models.attention import attention
from bessemer.models.axes import constrain
from bessemer.models.cache import Cache, empty_cache, write
from bessemer.models.checks import PRECISIONS, check_gpt
from bessemer.models.cross_entropy import cross_entropy, soft_cap, target_weights, token_logprobs
from bessemer.models.fp8_plan import TABLES, Conversion, plan_conversion
from bessemer.models.fused import choose_kernels
from bessemer.models.layers import AXES, TENSOR_NAMES, BlockParameters, LayerOptions, declare, layer
from bessemer.models.lookup import LookupOptions, LookupParameters, LookupSettings, lookup_layer, with_lookup
from bessemer.models.shape import Shape, layer_windows, round_up
from bessemer.models.stack import Stream, run_layers
from bessemer.models.token_scores import token_scores
from bessemer.registry import models
from bessemer.topology import unbox

GROUPS = {
    "embedding": "embedding",
    "head": "head",
    "value_table": "value_embedding",
    "lookup_keys": "value_embedding",
    "lookup_values": "value_embedding",
    "value_gate": "gate",
    "rho": "rho",
    "xi": "xi",
    "smear_gate": "scalar",
    "smear_scale": "scalar",
    "backout_scale": "scalar",
}


@models.register("gpt")
class GPT(LookupSettings):
    """The model of spec `model.depth=N`. Methods: logits (call), hidden, loss, token_logprobs, decode."""

    depth: int = field("model/depth", default=12, minimum=1, help="layers; the dial that derives the rest")
    aspect: int = field(
        "model/aspect", default=64, minimum=1, help="width = depth × aspect, rounded up to head_dim"
    )
    head_dim: int = field("model/head_dim", default=128, minimum=2, help="size of one attention head")
    width: int = field("model/width", default=-1, help="residual width; -1 = derived from depth and aspect")
    heads: int = field("model/heads", default=-1, help="query heads; -1 = width / head_dim")
    kv_heads: int = field(
        "model/kv_heads", default=-1, help="key-value heads, a divisor of heads; -1 = heads"
    )
    vocab_size: int = field("model/vocab_size", default=-1, help="tokens; -1 = the tokenizer's")
    window: str = field("model/window", default="SSSL", help="S short, L full context; tiled, last layer L")
    window_short: float = field(
        "model/window_short", default=0.5, help="S as a share of block_size, up to 128s"
    )

    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")
    precision: str = field(
        "architecture/precision",
        default="auto",
        choices=PRECISIONS,
        help="dtype of matmuls; auto = bf16 on accelerators, float32 on a CPU; fp8: training's, the rest as auto",
    )
    fp8_scaling: str = field(
        "architecture/fp8/scaling",
        default="tensorwise",
        choices=fp8.SCALINGS,
        help="fp8: a scale per tensor (faster), or per row with weight gradients in bf16 (closer)",
    )
    fp8_head: bool = field("architecture/fp8/head", default=False, help="fp8: convert the head too")
    fp8_emulate: bool = field(
        "architecture/fp8/emulate",
        default=False,
        help="fp8: same numbers on a chip without it, slowly; for tests",
    )
    attention: str = field(
        "architecture/attention",
        default="auto",
        choices=("auto", "xla", "cudnn"),
        help="attention kernel; auto = cuDNN on an NVIDIA GPU in half precision, XLA elsewhere",
    )
    kernels: str = field(
        "architecture/kernels",
        default="auto",
        choices=("auto", "xla", "pallas"),
        help="norms and loss; auto = one-pass kernels (pallas) on a GPU, XLA elsewhere",
    )
    remat: list[str] = field(
        "architecture/remat",
        default_factory=lambda: ["none"],
        help=f"recompute in the backward pass: none, block, or tensors of {', '.join(TENSOR_NAMES)}",
    )
    scan_layers: bool = field(
        "architecture/scan_layers", default=False, help="scan repeating layers: faster compile"
    )
    dropout: float = field("architecture/dropout", default=0.0, minimum=0.0, maximum=1.0, help="dropout rate")
    document_mask: bool = field(
        "architecture/document_mask", default=False, help="documents do not see each other"
    )
    loss_chunks: int | str = field(
        "architecture/loss_chunks", default="auto", help="pieces of the loss; auto by size"
    )
    smear: bool = field("architecture/smear", default=True, help="mix the previous token's embedding in")
    residual_mix: bool = field(
        "architecture/residual_mix", default=True, help="x ← ρx + ξx0 before each layer"
    )
    value_embeddings: bool = field(
        "architecture/value_embeddings", default=True, help="token tables added to v"
    )
    backout: bool = field("architecture/backout", default=True, help="subtract the middle layer's output")
    qk_norm: bool = field("architecture/qk_norm", default=True, help="norm queries and keys, then × 1.2")
    softcap: float = field(
        "architecture/softcap", default=15.0, minimum=0.0, help="c·tanh(logits/c); 0 = off"
    )
    rotary_base: float = field(
        "architecture/rotary_base", default=100_000.0, help="base of rotary frequencies"
    )

    def __post_init__(self) -> None:
        # A list would make the module unhashable, and so unusable as a static argument of jit.
        remat = (self.remat,) if isinstance(self.remat, str) else tuple(self.remat)
        object.__setattr__(self, "remat", remat)
        object.__setattr__(self, "lookup_after_layers", tuple(self.lookup_after_layers))
        super().__post_init__()

    # -- shape ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        width = self.width if self.width > 0 else round_up(self.depth * self.aspect, self.head_dim)
        heads = self.heads if self.heads > 0 else width // self.head_dim
        shape = Shape(
            depth=self.depth,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads if self.kv_heads > 0 else heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            windows=layer_windows(self.window, self.depth, self.block_size, self.window_short),
            value_embeddings=self.value_embeddings,
            smear=self.smear,
            residual_mix=self.residual_mix,
            backout=self.backout,
        )
        return with_lookup(self, shape)

    def check(self) -> None:
        """Raise InputError when the settings contradict each other; before anything is compiled."""
        check_gpt(self)

    def count_parameters(self) -> dict[str, int]:
        """Parameters by group, with "total" and "scaling"."""
        return self.shape.count_parameters()

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """Training FLOPs per token (see Shape.flops_per_token); `causal` counts only attended keys."""
        return self.shape.flops_per_token(block_size or self.block_size, causal)

    @staticmethod
    def group_of(path: tuple[str, ...]) -> str:
        """The optimizer group of a parameter, by its path in the tree."""
        return GROUPS.get(path[-1], "matrix")

    @property
    def compute_dtype(self) -> Any:
        """Of every product outside float8: in an fp8 run that is validation, sampling, and what is not converted."""
        if self.precision in ("auto", "fp8"):
            return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return {"float32": jnp.float32, "bf16": jnp.bfloat16}[self.precision]

    def fp8_conversion(self) -> Conversion:
        """Which matrices float8 takes, from the shapes of the parameters; no array is made."""
        ids = jax.ShapeDtypeStruct((1, min(8, self.block_size)), jnp.int32)
        tree = unbox(jax.eval_shape(self.init, jax.random.key(0), ids)["params"])
        leaves = [
            (tuple(k.key for k in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]
        matrices = [
            (path, leaf.shape)
            for path, leaf in leaves
            if leaf.ndim == 2 and self.group_of(path) not in TABLES
        ]
        return plan_conversion(matrices, AXES, self.fp8_head)

    def _fp8(self, deterministic: bool) -> fp8.Rule | None:
        """Float8 is for training passes alone."""
        return None if deterministic or self.precision != "fp8" else fp8.Rule(self.fp8_scaling)

    # -- parameters ----------------------------------------------------------------------------------------------

    def setup(self) -> None:
        s = self.shape
        normal, zeros, constant = nn.initializers.normal, nn.initializers.zeros, nn.initializers.constant
        table = (s.padded_vocab, s.width)
        self.embedding = declare(self, "embedding", normal(0.8), ("vocab", "embed"), table)
        self.head = declare(self, "head", normal(0.001), ("embed", "vocab"), table[::-1])
        self.blocks = [BlockParameters(s, s.has_value_embedding(layer)) for layer in range(s.depth)]
        if s.lookup is not None:
            self.lookups = {str(after): LookupParameters(s.lookup, s.width) for after in s.lookup.layers}
        if self.residual_mix:
            self.rho = declare(self, "rho", _linear(1.15, 1.05), ("layers",), (s.depth,))
            self.xi = declare(self, "xi", _linear(0.20, 0.05), ("layers",), (s.depth,))
        if self.smear:
            gate = nn.initializers.uniform(0.02)
            self.smear_gate = declare(self, "smear_gate", gate, ("gate", None), (s.smear_channels, 1))
            self.smear_scale = declare(self, "smear_scale", zeros, (), ())
        if self.backout:
            self.backout_scale = declare(self, "backout_scale", constant(0.2), (), ())

    # -- training ------------------------------------------------------------------------------------------------

    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Logits (B, T, vocab_size) in float32, of the whole sequence at once."""
        return self._logits(self.hidden(input_ids, positions, segment_ids, deterministic))

    def hidden(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """The normed output of the last layer, (B, T, D): what the head reads. input_ids: (B, T)."""
        if positions is None:
            positions = jnp.arange(input_ids.shape[1])[None]
        if not self.document_mask:
            segment_ids = None
        dropping = self.dropout > 0 and not deterministic
        key = self.make_rng("dropout") if dropping else None
        x = self._embed(input_ids)
        if self.smear:
            same = None if segment_ids is None else segment_ids == _shift(segment_ids, segment_ids[:, :1])
            x = self._smear(x, _shift(x, jnp.zeros_like(x[:, :1])), same)
        x = constrain(x, "batch", "sequence", "embed_act")
        if key is not None:
            x = blocks.dropout(x, self.dropout, jax.random.fold_in(key, self.depth))
        options = self._layer_options(self._fp8(deterministic))
        x = self._run_layers(options, x, input_ids, positions, segment_ids, key)
        return blocks.rms_norm(x)

    def loss(
        self,
        batch: Mapping[str, Array],
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """(Σ w·loss, Σ w, {"nll": Σ w·nll}). w is `loss_mask` (1 without one), 0 where the target is below 0."""
        targets = batch["target_ids"]
        weights = target_weights(batch)
        loss, nll = cross_entropy(
            self._hidden_of(batch, deterministic),
            self.head,
            targets,
            weights,
            vocab_size=self.vocab_size,
            softcap=self.softcap,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            chunks=self.loss_chunks,
            kernels=choose_kernels(self.kernels, self.compute_dtype),
            fp8=self._fp8(deterministic) if self.fp8_head else None,
        )
        return loss, jnp.sum(weights), {"nll": nll}

    def token_logprobs(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """log p(target) per token, (B, T) float32; 0 where the target is below 0."""
        return token_logprobs(
            self._hidden_of(batch, deterministic),
            self.head,
            batch["target_ids"],
            vocab_size=self.vocab_size,
            softcap=self.softcap,
            chunks=self.loss_chunks,
        )

    def token_scores(self, batch: Mapping[str, Array], deterministic: bool = True) -> tuple[Array, Array]:
        """(log p(target), whether the target is the likeliest token), (B, T) each; (0, True) without a target."""
        return token_scores(
            self._hidden_of(batch, deterministic),
            self.head,
            batch["target_ids"],
            vocab_size=self.vocab_size,
            softcap=self.softcap,
            chunks=self.loss_chunks,
        )

    def _hidden_of(self, batch: Mapping[str, Array], deterministic: bool) -> Array:
        return self.hidden(
            batch["input_ids"], batch.get("positions"), batch.get("segment_ids"), deterministic
        )

    # -- decoding ------------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        """An empty cache for `batch` rows of up to `length` tokens; a plain function, needs no parameters."""
        s = self.shape
        dtype = dtype or self.compute_dtype
        return empty_cache(s.depth, batch, length, s.kv_heads, s.head_dim, s.width, dtype)

    def decode(
        self, input_ids: Array, cache: Cache, lengths: Array | None = None, last_only: bool = False
    ) -> tuple[Array, Cache]:
        """Append n tokens to every row; (logits (B, n, vocab_size), cache). Prefill (n > 1) and steps (n = 1).

        input_ids: (B, n), right-padded; `lengths` (B,) says how many of a row's n are real (all of them when
        absent). Logits at padding are meaningless. `last_only` gives the logits of each row's last real token
        alone, (B, 1, vocab_size). The caller sees to it that a row never exceeds the cache's capacity.
        """
        n = input_ids.shape[1]
        added = jnp.full(cache.lengths.shape, n, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
        positions = cache.lengths[:, None] + jnp.arange(n)
        embedded = x = self._embed(input_ids)
        if self.smear:
            x = self._smear(x, _shift(x, cache.previous[:, None].astype(x.dtype)), None)
        rotary = blocks.rotary_table(positions, cache.capacity, self.head_dim, self.rotary_base)
        stores: list[tuple[Array, Array]] = []
        x0 = middle = x
        for index, params in enumerate(self._layer_params()):
            attend = partial(self._attend_cache, cache, index, positions, stores)
            x, x0 = layer(self._layer_options(), params, x, x0, input_ids, rotary, attend, None)
            middle = x if index == self.depth // 2 else middle
            x = self._look_up(input_ids, params["lookup"], x) if "lookup" in params else x
        x = blocks.rms_norm(self._back_out(x, middle))
        last = jnp.maximum(added - 1, 0)[:, None, None]
        logits = self._logits(jnp.take_along_axis(x, last, axis=1) if last_only else x)
        newest = jnp.take_along_axis(embedded, last, axis=1)[:, 0].astype(cache.previous.dtype)
        return logits, Cache(
            keys=tuple(store[0] for store in stores),
            values=tuple(store[1] for store in stores),
            lengths=cache.lengths + added,
            previous=jnp.where(added[:, None] > 0, newest, cache.previous),
        )

    def _attend_cache(
        self, cache: Cache, index: int, positions: Array, stores: list[Any], q: Array, k: Array, v: Array
    ) -> Array:
        keys = write(cache.keys[index], k, positions)
        values = write(cache.values[index], v, positions)
        stores.append((keys, values))
        return attention(q, keys, values, window=self.shape.windows[index], q_positions=positions)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _embed(self, ids: Array) -> Array:
        return blocks.rms_norm(blocks.lookup(self.embedding, ids, ("vocab", None), self.compute_dtype))

    def _smear(self, x: Array, previous: Array, same_document: Array | None) -> Array:
        return blocks.smear(x, previous, self.smear_gate, self.smear_scale, same_document)

    def _back_out(self, x: Array, middle: Array) -> Array:
        return (x - self.backout_scale * middle).astype(x.dtype) if self.backout else x

    def _logits(self, hidden: Array) -> Array:
        table = constrain(self.head.astype(hidden.dtype), "embed", "vocab")
        logits = jnp.einsum("btd,dv->btv", hidden, table, preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", "sequence", "vocab")
        return soft_cap(logits, self.softcap)[..., : self.vocab_size]

    def _layer_options(self, rule: fp8.Rule | None = None) -> LayerOptions:
        kernels = choose_kernels(self.kernels, self.compute_dtype)
        return LayerOptions(self.head_dim, self.compute_dtype, self.qk_norm, self.dropout, kernels, rule)

    def _look_up(self, ids: Array, params: dict[str, Array], x: Array) -> Array:
        if self.is_initializing():  # parameters need no allocation
            return x
        options = LookupOptions(self.compute_dtype, self.allocation, self.lookup_path)
        return lookup_layer(options, params, x, ids)

    def _layer_params(self) -> list[dict[str, Any]]:
        params: list[dict[str, Any]] = [block() for block in self.blocks]
        for after in self.lookup_after_layers:
            params[after]["lookup"] = self.lookups[str(after)]()
        if self.residual_mix:
            params = [{**p, "rho": self.rho[i], "xi": self.xi[i]} for i, p in enumerate(params)]
        return params

    def _run_layers(
        self,
        options: LayerOptions,
        x: Array,
        ids: Array,
        positions: Array,
        segment_ids: Array | None,
        key: Array | None,
    ) -> Array:
        """All layers and the backout. x: (B, T, D)."""
        length = max(self.block_size, x.shape[1])
        rotary = blocks.rotary_table(positions, length, self.head_dim, self.rotary_base)

        def step(window: int | None, params: dict[str, Array], index: Array, stream: Stream) -> Stream:
            attend = partial(attention, window=window, segment_ids=segment_ids, implementation=self.attention)
            layer_key = None if key is None else jax.random.fold_in(key, index)
            return layer(options, params, *stream, ids, rotary, attend, layer_key)

        params, windows = self._layer_params(), self.shape.windows
        after = partial(self._look_up, ids)
        x, middle = run_layers(step, after, params, windows, x, scan=self.scan_layers, remat=self.remat)
        return self._back_out(x, middle)


def _linear(first: float, last: float) -> Any:
    """Values from `first` to `last`, linear over the layers."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jnp.linspace(first, last, shape[0], dtype=dtype)

    return init


def _shift(x: Array, first: Array) -> Array:
    """x delayed by one position, `first` in front. x: (B, T, …), first: (B, 1, …)."""
    return jnp.concatenate([first, x[:, :-1]], axis=1)
