"""The base of the transformer families: settings they share, what follows from hidden states and a head, decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.kernels import ops
from bessemer.kernels.attention import (
    IMPLEMENTATIONS,
    attention,
    cached_attention,
    choose_attention,
    layout_of,
    too_many_documents,
)
from bessemer.kernels.decode import decode_attention, suits_decode
from bessemer.kernels.norms import choose_kernels
from bessemer.losses.cross_entropy import Projection, cross_entropy, join_further, soft_cap, target_weights
from bessemer.models.cache import Cache, begin, empty_cache, held_positions, unwrite, write
from bessemer.models.layers import TENSOR_NAMES, Attend, remat_names
from bessemer.models.lora import drops
from bessemer.models.moe import APART, CHOSEN, EXPERT_IDS, ROUTING, Stats, Watch, router_sums
from bessemer.models.paired_heads import attend_paired, attend_paired_cache, paired_window
from bessemer.models.previous_token import attend_with_offset, leave_waiting, offset_keys, unwrite_offset, waiting_key
from bessemer.models.protocol import Batch, Model
from bessemer.models.shape import Shape, round_up
from bessemer.topology.chips import backend
from bessemer.topology.rules import constrain, shards

# Sizes are checked before a shape is derived from them: a configuration from elsewhere may name any number.
MOST_LAYERS = 1024
MOST_PARAMETERS = 2**44
LONGEST_BLOCK = 2**22
PRECISIONS = ("auto", "float32", "bf16", "fp8")
FP8_IF_SUPPORTED = "fp8-if-supported"
"""A choice that a run replaces by fp8 or auto before there is a model."""

AttendAt = Callable[[int], Attend]  # layer → its attention to the cache


class Tokens(NamedTuple):
    """What layers know of the tokens of a batch besides their embeddings."""

    ids: Array  # (B, T)
    positions: Array  # (B, T) or (1, T)
    documents: Array | None  # (B, T); tokens of different numbers do not see each other
    keys: Array | None  # (B,), for dropout
    training: bool
    watch: Watch


class Transformer(Model):
    """A family provides `shape`, `_embed`, `_layers`, `_decode_layers` and `_head`.

    Sizes are `model/…`, derived from the depth where they are -1; how they are computed is `architecture/…`.
    """

    remat_with_adapters: ClassVar[tuple[str, ...]] = ()  # architecture/remat of a run with adapters, unless it is set
    has_stages: ClassVar[bool] = False  # whether `_layers` runs its layers with pipeline.run_stack

    depth: int = field("model/depth", default=12, minimum=1, help="layers; the dial that derives the rest")
    aspect: int = field("model/aspect", default=64, minimum=1, help="width = depth × aspect, rounded up to head_dim")
    head_dim: int = field("model/head_dim", default=128, minimum=2, help="size of one attention head")
    width: int = field(
        "model/width", default=-1, minimum=1, also=(-1,), help="residual width; -1 = derived from depth and aspect"
    )
    heads: int = field("model/heads", default=-1, minimum=1, also=(-1,), help="query heads; -1 = width / head_dim")
    kv_heads: int = field(
        "model/kv_heads", default=-1, minimum=1, also=(-1,), help="key-value heads, a divisor of heads; -1 = heads"
    )
    vocab_size: int = field("model/vocab_size", default=-1, minimum=1, also=(-1,), help="tokens; -1 = the tokenizer's")

    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")
    precision: str = field(
        "architecture/precision",
        default="auto",
        choices=(*PRECISIONS, FP8_IF_SUPPORTED),
        help="dtype of matmuls; auto = bf16 on accelerators, float32 on a CPU; fp8: training's, the rest as auto; "
        "fp8-if-supported: fp8 on a chip that has it, elsewhere auto",
    )
    attention: str = field(
        "architecture/attention",
        default="auto",
        choices=IMPLEMENTATIONS,
        help="attention kernel; auto = cuDNN on an NVIDIA GPU in half precision, splash on a TPU, XLA elsewhere",
    )
    kernels: str = field(
        "architecture/kernels",
        default="auto",
        choices=("auto", "xla", "pallas"),
        help="norms, relu² and loss; auto = one-pass kernels (pallas) on a GPU, XLA elsewhere",
    )
    remat: list[str] = field(
        "architecture/remat",
        default_factory=lambda: ["none"],
        help="recompute in the backward pass: none, block, offload (block, with its inputs in host memory), or "
        f"tensors of {', '.join(TENSOR_NAMES)}",
    )
    scan_layers: bool = field("architecture/scan_layers", default=False, help="scan repeating layers: faster compile")
    dropout: float = field("architecture/dropout", default=0.0, minimum=0.0, below=1.0, help="dropout rate")
    document_mask: bool = field("architecture/document_mask", default=False, help="documents do not see each other")
    max_documents: int = field(
        "architecture/max_documents",
        default=0,
        minimum=0,
        help="most documents in a row, padding included; speeds up cuDNN with a document mask; 0 = any number",
    )
    loss_chunks: int | str = field("architecture/loss_chunks", default="auto", help="pieces of the loss; auto by size")
    document_counts: tuple[int, ...] = ()  # of single rows, the largest first; see `document_slots`

    def __post_init__(self) -> None:
        # A list would make the module unhashable, and so unusable as a static argument of jit.
        remat = (self.remat,) if isinstance(self.remat, str) else tuple(self.remat)
        object.__setattr__(self, "remat", remat)
        super().__post_init__()

    # -- what a family provides ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """All derived sizes."""

    @abstractmethod
    def group_of(self, path: tuple[str, ...]) -> str:
        """Return the optimizer group of a parameter, by its path in the tree."""

    @abstractmethod
    def _embed(self, ids: Array) -> Array:
        """Return embeddings (B, T, D) of ids (B, T)."""

    @abstractmethod
    def _layers(self, x: Array, tokens: Tokens) -> tuple[Array, Stats]:
        """Return the normed output of the last layer, (B, T, D), and what routers measured. x: embeddings."""

    @abstractmethod
    def _decode_layers(self, input_ids: Array, cache: Cache, positions: Array, attend: AttendAt) -> tuple[Array, Array]:
        """Return (normed output of the last layer, embeddings to remember in `cache.previous`), (B, n, …) each."""

    @abstractmethod
    def _head(self) -> Array:
        """Return the head (D, V), or the table (V, D) if `head_is_embedding`; the vocabulary is padded."""

    @property
    def head_is_embedding(self) -> bool:
        """Whether the head is the embedding table, as rows."""
        return False

    def _cap(self) -> float:
        """c of c·tanh(logits/c); 0 = off."""
        return 0.0

    def _attention_cap(self) -> float:
        """c of attention scores c·tanh(s/c); 0 = off."""
        return 0.0

    def _has_sinks(self) -> bool:
        """Whether attention has a learned logit per head beside the keys."""
        return False

    def _head_fp8(self, training: bool) -> str | None:
        """The scaling of the head's float8 products; None: they are in the compute dtype."""
        return None

    def kernel_work(self, implementation: str) -> str:
        """What `kernels` stands for, in words."""
        return "norms and loss"

    # -- facts ---------------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, Any]:
        """Return depth, width, heads, kv_heads, head_dim and vocab_size, derived where they are -1."""
        width = self.width if self.width > 0 else round_up(self.depth * self.aspect, self.head_dim)
        heads = self.heads if self.heads > 0 else width // self.head_dim
        return {
            "depth": self.depth,
            "width": width,
            "heads": heads,
            "kv_heads": self.kv_heads if self.kv_heads > 0 else heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
        }

    @property
    def compute_dtype(self) -> Any:
        """Of every product outside float8: in an fp8 run that is validation, sampling, and what is not converted."""
        if self.precision in ("auto", "fp8"):
            return jnp.float32 if backend() == "cpu" else jnp.bfloat16
        return {"float32": jnp.float32, "bf16": jnp.bfloat16}[self.precision]

    def count_parameters(self) -> dict[str, int]:
        return self.shape.count_parameters()

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        return self.shape.flops_per_token(block_size or self.block_size, causal)

    def chosen_kernels(self) -> dict[str, tuple[str, str]]:
        """Return setting → (kernel that runs on this platform and mesh, reason)."""
        dtype, s, folds = self.compute_dtype, self.shape, 1 + self.shape.paired_heads
        length = folds * self.block_size
        layout = layout_of((1, length, s.heads // folds, s.head_dim), (1, length, s.kv_heads // folds, s.head_dim))
        capped = self._attention_cap() > 0
        attention = choose_attention(
            self.attention, dtype, s.head_dim, self.document_mask, length, layout, capped, self._has_sinks()
        )
        rows = choose_kernels(self.kernels, dtype)
        why = f"{jnp.dtype(dtype).name}, head dimension {s.head_dim}"
        masked = ", with a document mask" if self.document_mask else ""
        return {
            "attention": (attention, f"for {why}{masked}{layout.describe()}"),
            "kernels": (rows, f"{self.kernel_work(rows)} for {jnp.dtype(dtype).name}"),
        }

    @property
    def kinds(self) -> Sequence[Hashable]:
        """The kind of each layer: layers of one kind with parameters of the same shapes are one program."""
        return self.shape.windows

    def check(self) -> None:
        """Raise InputError for the first setting that cannot be built, naming it and the remedy."""
        require(
            1 <= self.depth <= MOST_LAYERS, f"model.depth is {self.depth}; a model has 1 to {MOST_LAYERS:,} layers."
        )
        require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            f"model.head_dim is {self.head_dim}; rotary positions turn pairs, so it must be even.",
        )
        require(
            self.vocab_size > 0,
            f"model.vocab_size is {self.vocab_size}; give it, or a tokenizer to take it from (data.tokenizer).",
        )
        require(
            1 <= self.block_size <= LONGEST_BLOCK,
            f"architecture.block_size is {self.block_size}; it must be from 1 to {LONGEST_BLOCK:,}.",
        )
        s = self.shape
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
            f"topology.tensor={shards('heads')} does not divide the {s.heads} heads of the model, so attention would "
            "be computed whole on every device; use a divisor of model.heads.",
        )
        stages = shards("stage")
        require(
            stages == 1 or self.has_stages,
            f"topology.pipeline={stages}, but {type(self).__name__} does not divide its layers into stages. Use "
            "topology.fsdp for these devices, or let its `_layers` call models.pipeline.run_stack.",
        )
        require(
            self.depth >= stages,
            f"topology.pipeline={stages} is more than model.depth={self.depth}: every stage needs a layer of its own. "
            "Use fewer stages, and topology.fsdp or topology.data for the other devices.",
        )
        require(
            self.precision in PRECISIONS,
            f"architecture.precision is '{self.precision}'; known: {', '.join(PRECISIONS)}.",
        )
        unknown = [name for name in remat_names(self.remat) or () if name not in TENSOR_NAMES]
        require(
            not unknown,
            f"architecture.remat names {', '.join(unknown)}; it is none, block, offload, or a list of "
            f"{', '.join(TENSOR_NAMES)}.",
        )
        require(0 <= self.dropout < 1, f"architecture.dropout is {self.dropout}; it must be in [0, 1).")
        chunks = self.loss_chunks
        require(
            chunks == "auto" or (isinstance(chunks, int) and chunks >= 1),
            f"architecture.loss_chunks is {chunks!r}; it is auto or a number of at least 1.",
        )

    # -- training ------------------------------------------------------------------------------------------------

    def hidden(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        keys: Array | None = None,
    ) -> Array:
        """Return the normed output of the last layer, (B, T, D), which the head reads. input_ids: (B, T).

        embedding_noise: α of ops.add_noise; keys: (B,), random keys of the rows (default: by place in input_ids).
        """
        return self._run(input_ids, positions, segment_ids, deterministic, embedding_noise, keys, Watch())[0]

    def _run(
        self,
        input_ids: Array,
        positions: Array | None,
        segment_ids: Array | None,
        deterministic: bool,
        embedding_noise: float,
        keys: Array | None,
        watch: Watch,
    ) -> tuple[Array, Stats]:
        """Return `hidden`, and what routers measured."""
        if positions is None:
            positions = jnp.arange(input_ids.shape[1])[None]
        documents = segment_ids if self.document_mask else None
        dropping = not deterministic and (self.dropout > 0 or drops(self.variables.get("params")))
        if keys is None and (dropping or embedding_noise > 0):
            keys = ops.row_keys(self.make_rng("dropout"), jnp.arange(len(input_ids)))
        x = self._embed(input_ids)
        if keys is not None and embedding_noise > 0:
            x = ops.add_noise(x, embedding_noise, keys)
        if documents is not None and self.max_documents:
            # more would attend wrongly: NaN is seen, and nothing is trained
            x = jnp.where(too_many_documents(documents, self.document_slots(len(documents))), jnp.nan, x)
        dropped = keys if dropping else None
        return self._layers(x, Tokens(input_ids, positions, documents, dropped, not deterministic, watch))

    def _attend(self, window: int | None, documents: Array | None) -> Attend:
        """Return the attention of one layer over whole rows."""
        attend = partial(
            attention,
            implementation=self.attention,
            max_documents=0 if documents is None else self.document_slots(len(documents)),
            softcap=self._attention_cap(),
        )
        if self.shape.paired_heads:
            attend = partial(attend_paired, attend, window, documents)
        else:
            attend = partial(attend, window=window, segment_ids=documents)
        return partial(attend_with_offset, attend, documents) if self.shape.key_offset else attend

    def document_slots(self, rows: int) -> int:
        """Return the most documents that `rows` rows hold together; 0 = any number."""
        known = self.document_counts[:rows]
        rest = known[-1] if known else self.max_documents
        return min(rows * self.max_documents, sum(known) + (rows - len(known)) * rest)

    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Return logits (B, T, vocab_size) in float32, of the whole sequence at once."""
        return self._logits(self.hidden(input_ids, positions, segment_ids, deterministic))

    def projection(self, batch: Batch, deterministic: bool = True) -> Projection:
        (hidden, _), fp8 = self._hidden_of(batch, deterministic), self._head_fp8(not deterministic)
        kernels = choose_kernels(self.kernels, self.compute_dtype)
        own = (self.vocab_size, self._cap(), self.loss_chunks, fp8, kernels, self.head_is_embedding)
        return Projection(hidden, self._head(), *own)

    def loss(
        self,
        batch: Batch,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        further: Array | None = None,
    ) -> tuple[Array, Array, dict[str, Array]]:
        weights = target_weights(batch)
        hidden, stats = self._hidden_of(batch, deterministic, embedding_noise, None if deterministic else weights)
        loss, *nll = cross_entropy(
            hidden,
            self._head(),
            batch["target_ids"],
            weights,
            vocab_size=self.vocab_size,
            softcap=self._cap(),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            chunks=self.loss_chunks,
            kernels=choose_kernels(self.kernels, self.compute_dtype),
            fp8=self._head_fp8(not deterministic),
            tied=self.head_is_embedding,
            further=None if further is None else join_further(batch, further),
        )
        loss = loss + stats["loss"] if "loss" in stats else loss
        sums = dict(zip(("nll", "further_nll"), nll, strict=False))
        return loss, jnp.sum(weights), sums | router_sums(stats)

    def _hidden_of(
        self, batch: Batch, deterministic: bool, noise: float = 0.0, counted: Array | None = None
    ) -> tuple[Array, Stats]:
        fields = (batch["input_ids"], batch.get("positions"), batch.get("segment_ids"))
        watch = Watch(counted, batch.get(EXPERT_IDS))
        hidden, stats = self._run(*fields, deterministic, noise, batch.get(ops.ROW_KEYS), watch)
        if APART in stats:
            self.sow(ROUTING, APART, stats[APART])
        return hidden, stats

    def _logits(self, hidden: Array) -> Array:
        tied, head = self.head_is_embedding, self._head().astype(hidden.dtype)
        table = constrain(head, *(("vocab", "embed") if tied else ("embed", "vocab")))
        form = "btd,vd->btv" if tied else "btd,dv->btv"
        logits = jnp.einsum(form, hidden, table, preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", "sequence", "vocab")
        return soft_cap(logits, self._cap())[..., : self.vocab_size]

    # -- decoding ------------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        """Return an empty cache for `batch` rows of up to `length` tokens; needs no parameters."""
        s = self.shape
        dtype = dtype or self.compute_dtype
        bigrams = s.bigram_rows > 0
        sizes = (s.kv_heads, s.head_dim, s.remembered)
        return empty_cache(s.windows, batch, length, *sizes, dtype, bigrams, int(s.key_offset))

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
        stores: list[tuple[Array, Array]] = []
        states: list[tuple[Array, ...]] = []

        def attend(index: int) -> Attend:
            if self.shape.windows[index] == 0:
                stores.append((cache.keys[index], cache.values[index]))  # no slots
                return self._recur_cache(cache.states[len(states)], added, states)
            return partial(self._attend_cache, cache, index, positions, added, stores)

        x, embedded = self._decode_layers(input_ids, cache, positions, attend)
        last = jnp.maximum(added - 1, 0)[:, None, None]
        logits = self._logits(jnp.take_along_axis(x, last, axis=1) if last_only else x)
        newest = jnp.take_along_axis(embedded, last, axis=1)[:, 0].astype(cache.previous.dtype)
        return logits, Cache(
            keys=tuple(store[0] for store in stores),
            values=tuple(store[1] for store in stores),
            lengths=cache.lengths + added,
            previous=jnp.where(added[:, None] > 0, newest, cache.previous),
            last=_last_token(input_ids, added, cache.last),
            states=tuple(states),
            spare=cache.spare,
        )

    def _recur_cache(self, state: tuple[Array, ...], added: Array, states: list[tuple[Array, ...]]) -> Attend:
        """Return how new tokens, `added` (B,) of them real, read the state of a recurrent layer; the next goes to
        `states`."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent layers")

    @property
    def most_rewound(self) -> int:
        """The most tokens that one call of `decode` may append if `rewind` is to take some of them back.

        0 with recurrent layers, whose state cannot go back.
        """
        return min((window for window in self.shape.windows if window is not None), default=self.block_size)

    def rewind(self, cache: Cache, before: Cache, input_ids: Array, kept: Array) -> Cache:
        """Return `cache`, which `decode` made of `before` and input_ids (B, n), with only the first `kept` (B,) of the
        appended tokens. n is at most `most_rewound`.

        A layer that sees everything forgets by its length alone; in a window the dropped tokens have replaced others.
        """
        n, added = input_ids.shape[1], cache.lengths - before.lengths

        def restored(
            stores: tuple[Array, ...], old: tuple[Array, ...], take_back: Callable[..., Array] = unwrite
        ) -> tuple[Array, ...]:
            pairs = zip(self.shape.windows, stores, old, strict=True)
            return tuple(
                store if window is None else take_back(store, held, before.lengths, added, kept, n)
                for window, store, held in pairs
            )

        previous = before.previous
        if previous.shape[-1]:
            last = jnp.take_along_axis(input_ids, jnp.maximum(kept - 1, 0)[:, None], axis=1)
            newest = self._embed(last)[:, 0, : previous.shape[-1]].astype(previous.dtype)
            previous = jnp.where(kept[:, None] > 0, newest, previous)
        return Cache(
            keys=restored(cache.keys, before.keys, unwrite_offset if self.shape.key_offset else unwrite),
            values=restored(cache.values, before.values),
            lengths=before.lengths + kept,
            previous=previous,
            last=_last_token(input_ids, kept, before.last),
            spare=cache.spare,
        )

    def shorten(self, cache: Cache, last: Array, lengths: Array) -> Cache:
        """Return `cache` with only the first `lengths` (B,) tokens of every row; last: (B,), the last of them.

        A row that is cut has at most `most_rewound` tokens: a window that has gone round has lost earlier keys.
        """
        cut, previous, token = (lengths < cache.lengths)[:, None], cache.previous, cache.last
        if previous.shape[-1]:
            newest = self._embed(last[:, None])[:, 0, : previous.shape[-1]].astype(previous.dtype)
            previous = jnp.where(cut, newest, previous)
        if token.shape[-1]:
            token = jnp.where(cut, last[:, None].astype(token.dtype), token)
        return Cache(cache.keys, cache.values, lengths, previous, token, states=cache.states, spare=cache.spare)

    def _record(self, seen: Stats) -> None:
        """Note the experts that a layer chose, if the caller of `decode` makes ROUTING mutable."""
        if CHOSEN in seen:
            self.sow(ROUTING, CHOSEN, seen[CHOSEN])

    def _attend_cache(
        self,
        cache: Cache,
        index: int,
        positions: Array,
        added: Array,
        stores: list[Any],
        q: Array,
        k: Array,
        v: Array,
        sinks: Array | None = None,
    ) -> Array:
        """Attention of new tokens, whose keys and values go to `stores`. positions: (B, n); added: (B,)."""
        window, old = self.shape.windows[index], (cache.keys[index], cache.values[index])
        if q.shape[1] == 1 and self.steps_in_one_kernel():
            tokens = (q[:, 0], k[:, 0], v[:, 0])
            out, *stored = decode_attention(*tokens, *old, cache.lengths, added)
            stores.append(tuple(stored))
            return out[:, None]
        put, own = begin if cache.empty else write, k
        if self.shape.key_offset:
            k = offset_keys(k, ops.shift(k, waiting_key(old[0], cache.lengths).astype(k.dtype), "kv"))
        keys, values = (put(store, new, cache.lengths, added) for store, new in zip(old, (k, v), strict=True))
        if self.shape.key_offset:
            keys = leave_waiting(keys, own, cache.lengths, added)
        stores.append((keys, values))
        if cache.empty:
            attend = partial(attention, implementation=self.attention, softcap=self._attention_cap(), sinks=sinks)
            if self.shape.paired_heads:
                return attend_paired(attend, window, None, q, k, v)
            return attend(q, k, v, window=window)
        size = keys.shape[2]
        if q.shape[1] == 1:
            held = held_positions(size, cache.lengths + added)
        else:  # a window may lose keys to the last of these tokens that the first of them still sees
            keys, values = (
                jnp.concatenate([store, new.swapaxes(1, 2).astype(store.dtype)], axis=2)
                for store, new in zip(old, (k, v), strict=True)
            )
            held = jnp.concatenate([held_positions(size, cache.lengths), positions], axis=1)
        attend = partial(cached_attention, softcap=self._attention_cap(), sinks=sinks)
        if self.shape.paired_heads:
            attend = partial(attend, window=paired_window(window))
            return attend_paired_cache(attend, q, keys, values, positions, held)
        return attend(q, keys, values, window=window, q_positions=positions, k_positions=held)

    def steps_in_one_kernel(self) -> bool:
        """Whether a step's attention is the kernel: its rows and heads are then those of one device."""
        chosen = choose_kernels(self.kernels, self.compute_dtype) == "pallas"
        alone = shards("batch") * shards("kv") == 1
        s = self.shape
        if self._attention_cap() or self._has_sinks() or s.key_offset or s.paired_heads:  # the kernel has none of them
            return False
        return chosen and alone and suits_decode(s.head_dim, s.heads // s.kv_heads)


def _last_token(input_ids: Array, added: Array, before: Array) -> Array:
    """Return the token that rows end with, (B, 1), after the first `added` (B,) of input_ids (B, n)."""
    if not before.shape[-1]:
        return before
    newest = jnp.take_along_axis(input_ids, jnp.maximum(added - 1, 0)[:, None], axis=1).astype(before.dtype)
    return jnp.where(added[:, None] > 0, newest, before)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
