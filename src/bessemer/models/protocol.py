"""What every family gets from its hidden states and its head: logits, losses, scores, and decoding with a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.kernels.attention import attention, cached_attention
from bessemer.kernels.decode import decode_attention, suits_decode
from bessemer.kernels.norms import choose_kernels
from bessemer.kernels.ops import ROW_KEYS
from bessemer.losses.cross_entropy import (
    LossOptions,
    _pick,
    _statistics,
    _token_loss,
    cross_entropy,
    soft_cap,
    target_weights,
    token_logprobs,
)
from bessemer.losses.divergence import Projection
from bessemer.losses.token_scores import policy_scores, policy_scores_of, scores_of, token_scores
from bessemer.models.cache import Cache, begin, empty_cache, held_positions, write
from bessemer.models.common import ModelSettings
from bessemer.models.shape import Shape
from bessemer.topology import unbox
from bessemer.topology.rules import constrain, shards

AttendAt = Callable[[int], Callable[[Array, Array, Array], Array]]  # layer → its attention to the cache


class HeadedModel(ModelSettings):
    """A family gives `shape`, `hidden`, `_head` and `_decode_layers`; everything below follows. No logits of a whole
    batch are ever held, but where they are asked for (call)."""

    @property
    def shape(self) -> Shape:
        raise NotImplementedError

    def hidden(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        keys: Array | None = None,
    ) -> Array:
        """The normed output of the last layer, (B, T, D): what the head reads. input_ids: (B, T).

        embedding_noise: α of blocks.add_noise; keys: (B,), of what each row draws (default: by its place in input_ids).
        """
        raise NotImplementedError

    def _head(self) -> Array:
        """(D, V), its columns padded."""
        raise NotImplementedError

    def _decode_layers(
        self, input_ids: Array, cache: Cache, positions: Array, attend: AttendAt
    ) -> tuple[Array, Array]:
        """(normed output of the last layer, embeddings to remember in `cache.previous`), (B, n, …) each."""
        raise NotImplementedError

    def _cap(self) -> float:
        """c of c·tanh(logits/c); 0 = off."""
        return 0.0

    def _head_fp8(self, deterministic: bool) -> str | None:
        """The scaling of the head's float8 products; None: they are in the compute dtype."""
        return None

    # -- facts ---------------------------------------------------------------------------------------------------

    def count_parameters(self) -> dict[str, int]:
        """Parameters by group, with "total" and "scaling"."""
        return self.shape.count_parameters()

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """Training FLOPs per token (see Shape.flops_per_token); `causal` counts only attended keys."""
        return self.shape.flops_per_token(block_size or self.block_size, causal)

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

    def loss(
        self,
        batch: Mapping[str, Array],
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """(Σ w·loss, Σ w, {"nll": Σ w·nll}). w is `loss_mask` (1 without one), 0 where the target is below 0."""
        targets = batch["target_ids"]
        weights = target_weights(batch)
        loss, nll = cross_entropy(
            self._hidden_of(batch, deterministic, embedding_noise),
            self._head(),
            targets,
            weights,
            vocab_size=self.vocab_size,
            softcap=self._cap(),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            chunks=self.loss_chunks,
            kernels=choose_kernels(self.kernels, self.compute_dtype),
            fp8=self._head_fp8(deterministic),
        )
        return loss, jnp.sum(weights), {"nll": nll}

    def token_logprobs(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """log p(target) per token, (B, T) float32; 0 where the target is below 0."""
        return self._per_target(token_logprobs, batch, deterministic)

    def token_scores(self, batch: Mapping[str, Array], deterministic: bool = True) -> tuple[Array, Array]:
        """(log p(target), whether the target is the likeliest token), (B, T) each; (0, True) without a target."""
        return self._per_target(token_scores, batch, deterministic)

    def projection(self, batch: Mapping[str, Array], deterministic: bool = True) -> Projection:
        """Hidden states and head: for losses that compare whole distributions without holding the logits."""
        hidden, fp8 = self._hidden_of(batch, deterministic), self._head_fp8(deterministic)
        return Projection(hidden, self._head(), self.vocab_size, self._cap(), self.loss_chunks, fp8)

    def policy_scores(
        self, batch: Mapping[str, Array], temperature: float = 1.0, deterministic: bool = True
    ) -> tuple[Array, Array]:
        """(log π(target), entropy of π), (B, T) each, of π = softmax(logits / temperature); (0, 0) without a target."""
        return self._per_target(policy_scores, batch, deterministic, temperature=temperature)

    def _per_target(
        self, score: Callable[..., Any], batch: Mapping[str, Array], deterministic: bool, **options: Any
    ) -> Any:
        return score(
            self._hidden_of(batch, deterministic),
            self._head(),
            batch["target_ids"],
            vocab_size=self.vocab_size,
            softcap=self._cap(),
            chunks=self.loss_chunks,
            **options,
        )

    def _hidden_of(self, batch: Mapping[str, Array], deterministic: bool, noise: float = 0.0) -> Array:
        fields = (batch["input_ids"], batch.get("positions"), batch.get("segment_ids"))
        return self.hidden(*fields, deterministic, noise, batch.get(ROW_KEYS))

    def _logits(self, hidden: Array) -> Array:
        table = constrain(self._head().astype(hidden.dtype), "embed", "vocab")
        logits = jnp.einsum("btd,dv->btv", hidden, table, preferred_element_type=jnp.float32)
        logits = constrain(logits, "batch", "sequence", "vocab")
        return soft_cap(logits, self._cap())[..., : self.vocab_size]

    # -- decoding ------------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        """An empty cache for `batch` rows of up to `length` tokens; a plain function, needs no parameters."""
        s = self.shape
        dtype = dtype or self.compute_dtype
        return empty_cache(s.windows, batch, length, s.kv_heads, s.head_dim, s.remembered, dtype)

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

        def attend(index: int) -> Callable[[Array, Array, Array], Array]:
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
        )

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
    ) -> Array:
        """Attention of new tokens, whose keys and values go to `stores`. positions: (B, n); added: (B,)."""
        window, old = self.shape.windows[index], (cache.keys[index], cache.values[index])
        if q.shape[1] == 1 and self._steps_in_one_kernel():
            tokens = (q[:, 0], k[:, 0], v[:, 0])
            out, *stored = decode_attention(*tokens, *old, cache.lengths, added)
            stores.append(tuple(stored))
            return out[:, None]
        put = begin if cache.empty else write
        keys, values = (put(store, new, cache.lengths, added) for store, new in zip(old, (k, v), strict=True))
        stores.append((keys, values))
        if cache.empty:
            return attention(q, k, v, window=window, implementation=self.attention)
        size = keys.shape[2]
        if q.shape[1] == 1:
            held = held_positions(size, cache.lengths + added)
        else:  # a window may lose keys to the last of these tokens that the first of them still sees
            keys, values = (
                jnp.concatenate([store, new.swapaxes(1, 2).astype(store.dtype)], axis=2)
                for store, new in zip(old, (k, v), strict=True)
            )
            held = jnp.concatenate([held_positions(size, cache.lengths), positions], axis=1)
        return cached_attention(q, keys, values, window=window, q_positions=positions, k_positions=held)

    def _steps_in_one_kernel(self) -> bool:
        """Whether a step's attention is the kernel: its rows and heads are then those of one device."""
        chosen = choose_kernels(self.kernels, self.compute_dtype) == "pallas"
        alone = shards("batch") * shards("kv") == 1
        s = self.shape
        return chosen and alone and suits_decode(s.head_dim, s.heads // s.kv_heads)


# A base for models of your own: write `__call__`, and the trainer can train, validate and count it.


class LanguageModel(nn.Module):
    """A subclass gives `__call__(input_ids, positions, segment_ids, deterministic) -> logits (B, T, V)`.

    Everything else follows from the logits, at the price of holding them whole: GPT's own loss never does.
    Parameters need no axis names; those without are repeated on every device. A model that declares
    `group_of(path)` tells the optimizer which parameter is what; without it names and shapes decide.
    """

    vocab_size: int = field(
        "model/vocab_size", default=-1, minimum=1, also=(-1,), help="tokens; -1 = the tokenizer's"
    )
    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")

    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Logits (B, T, V). input_ids, positions, segment_ids: (B, T); see docs/data.md for what they hold."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(input_ids, ...) -> logits")

    def loss(
        self,
        batch: Mapping[str, Array],
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """(Σ w·loss, Σ w, {"nll": Σ w·nll}). w is `loss_mask` (1 without one), 0 where the target is below 0."""
        if embedding_noise:
            raise InputError(
                f"{type(self).__name__} does not say where its embeddings are, so it cannot add noise to them: set "
                "sft.neftune_alpha=0, or give it a `loss` that takes embedding_noise."
            )
        targets = batch["target_ids"]
        weights = target_weights(batch)
        logits = self._logits_of(batch, deterministic)
        options = LossOptions(logits.shape[-1], 1, label_smoothing=label_smoothing, z_loss=z_loss)
        z, lse = _statistics(options, logits)
        loss, nll = _token_loss(options, z, lse, jnp.maximum(targets, 0))
        return jnp.sum(weights * loss), jnp.sum(weights), {"nll": jnp.sum(weights * nll)}

    def token_logprobs(self, batch: Mapping[str, Array], deterministic: bool = True) -> Array:
        """log p(target) per token, (B, T) float32; 0 where the target is below 0."""
        targets = batch["target_ids"]
        logits = self._logits_of(batch, deterministic)
        z, lse = _statistics(LossOptions(logits.shape[-1], 1), logits)
        return jnp.where(targets < 0, 0.0, _pick(z, jnp.maximum(targets, 0)) - lse)

    def token_scores(self, batch: Mapping[str, Array], deterministic: bool = True) -> tuple[Array, Array]:
        """(log p(target), whether the target is the likeliest token), (B, T) each; (0, True) without a target."""
        targets = batch["target_ids"]
        logits = self._logits_of(batch, deterministic)
        return scores_of(LossOptions(logits.shape[-1], 1), logits, targets)

    def projection(self, batch: Mapping[str, Array], deterministic: bool = True) -> Projection:
        """The logits, for losses that compare whole distributions."""
        logits = self._logits_of(batch, deterministic)
        return Projection(logits, None, logits.shape[-1])

    def policy_scores(
        self, batch: Mapping[str, Array], temperature: float = 1.0, deterministic: bool = True
    ) -> tuple[Array, Array]:
        """(log π(target), entropy of π), (B, T) each, of π = softmax(logits / temperature); (0, 0) without a target."""
        logits = self._logits_of(batch, deterministic)
        return policy_scores_of(LossOptions(logits.shape[-1], 1), logits, batch["target_ids"], temperature)

    def _logits_of(self, batch: Mapping[str, Array], deterministic: bool) -> Array:
        positions, segments = batch.get("positions"), batch.get("segment_ids")
        return self(batch["input_ids"], positions, segments, deterministic).astype(jnp.float32)

    def count_parameters(self) -> dict[str, int]:
        """Parameters by group, with "total" and "scaling" (those that multiply activations). No array is made."""
        counts = {"matrix": 0, "embedding": 0, "scalar": 0}
        for path, shape in self._parameter_shapes():
            counts[_kind(path, shape)] += math.prod(shape)
        return {**counts, "total": sum(counts.values()), "scaling": counts["matrix"]}

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """Training FLOPs per token: 6 × matrices. Attention adds to that, in a way only its model knows: override."""
        return 6.0 * self.count_parameters()["scaling"]

    def _parameter_shapes(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        ids = jax.ShapeDtypeStruct((1, min(8, self.block_size)), jnp.int32)
        variables: Any = jax.eval_shape(self.init, jax.random.key(0), ids)
        leaves = jax.tree_util.tree_leaves_with_path(unbox(variables["params"]))
        return [
            (tuple(str(getattr(key, "key", key)) for key in path), tuple(leaf.shape)) for path, leaf in leaves
        ]


def _kind(path: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """Tables of tokens are looked up, not multiplied; whatever has one axis or none is a scale or a bias."""
    if len(shape) < 2:
        return "scalar"
    return "embedding" if any("embed" in name.lower() for name in path) else "matrix"
