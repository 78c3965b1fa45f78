"""GPT, the family of the depth dial: untied, no biases, weightless norms, every device of architecture a switch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bessemer.models import blocks
from bessemer.models.attention import attention, cached_attention
from bessemer.models.axes import constrain
from bessemer.models.cache import Cache, begin, empty_cache, held_positions, write
from bessemer.models.checks import check_gpt
from bessemer.models.cross_entropy import cross_entropy, soft_cap, target_weights, token_logprobs
from bessemer.models.fp8_plan import Conversion, conversion_of
from bessemer.models.fused import choose_kernels
from bessemer.models.layers import BlockParameters, LayerOptions, declare, layer, ramp
from bessemer.models.lookup import LookupOptions, LookupParameters, lookup_layer
from bessemer.models.settings import GPTSettings
from bessemer.models.shape import group_of
from bessemer.models.stack import Stream, run_layers
from bessemer.models.token_scores import policy_scores, token_scores
from bessemer.registry import models


@models.register("gpt")
class GPT(GPTSettings):
    """The model of spec `model.depth=N`. Methods: logits (call), hidden, loss, token_logprobs, decode."""

    # -- facts ---------------------------------------------------------------------------------------------------

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
        return group_of(path)

    def fp8_conversion(self) -> Conversion:
        """Which matrices float8 takes, from the shapes of the parameters; no array is made."""
        return conversion_of(self)

    def _fp8(self, deterministic: bool) -> str | None:
        """The scaling of float8 products, which are for training passes alone."""
        return None if deterministic or self.precision != "fp8" else self.fp8_scaling

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
            self.rho = declare(self, "rho", ramp(1.15, 1.05), ("layers",), (s.depth,))
            self.xi = declare(self, "xi", ramp(0.20, 0.05), ("layers",), (s.depth,))
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
        embedding_noise: float = 0.0,
    ) -> Array:
        """The normed output of the last layer, (B, T, D): what the head reads. input_ids: (B, T); noise: blocks.py."""
        if positions is None:
            positions = jnp.arange(input_ids.shape[1])[None]
        documents = segment_ids if self.document_mask else None
        dropping = self.dropout > 0 and not deterministic
        key = self.make_rng("dropout") if dropping else None
        x = self._embed(input_ids)
        if embedding_noise > 0:
            x = blocks.add_noise(x, embedding_noise, self.make_rng("noise"))
        if self.smear:
            same = None if documents is None else documents == blocks.shift(documents, documents[:, :1])
            x = self._smear(x, blocks.shift(x, jnp.zeros_like(x[:, :1])), same)
        x = constrain(x, "batch", "sequence", "embed_act")
        if key is not None:
            x = blocks.dropout(x, self.dropout, jax.random.fold_in(key, self.depth))
        options = self._layer_options(self._fp8(deterministic))
        x = self._run_layers(options, x, input_ids, positions, documents, key)
        return blocks.rms_norm(x)

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
        return token_logprobs(*self._scored(batch, deterministic), **self._scoring())

    def token_scores(self, batch: Mapping[str, Array], deterministic: bool = True) -> tuple[Array, Array]:
        """(log p(target), whether the target is the likeliest token), (B, T) each; (0, True) without a target."""
        return token_scores(*self._scored(batch, deterministic), **self._scoring())

    def policy_scores(
        self, batch: Mapping[str, Array], temperature: float = 1.0, deterministic: bool = True
    ) -> tuple[Array, Array]:
        """(log π(target), entropy of π), (B, T) each, of π = softmax(logits / temperature); (0, 0) without a target."""
        options = self._scoring()
        return policy_scores(*self._scored(batch, deterministic), temperature=temperature, **options)

    def _scored(self, batch: Mapping[str, Array], deterministic: bool) -> tuple[Array, Array, Array]:
        return self._hidden_of(batch, deterministic), self.head, batch["target_ids"]

    def _scoring(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "softcap": self.softcap, "chunks": self.loss_chunks}

    def _hidden_of(self, batch: Mapping[str, Array], deterministic: bool, noise: float = 0.0) -> Array:
        return self.hidden(
            batch["input_ids"], batch.get("positions"), batch.get("segment_ids"), deterministic, noise
        )

    # -- decoding ------------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, length: int, dtype: Any = None) -> Cache:
        """An empty cache for `batch` rows of up to `length` tokens; a plain function, needs no parameters."""
        s = self.shape
        dtype = dtype or self.compute_dtype
        return empty_cache(s.windows, batch, length, s.kv_heads, s.head_dim, s.width, dtype)

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
            x = self._smear(x, blocks.shift(x, cache.previous[:, None].astype(x.dtype)), None)
        # n more than the capacity: padding may lie beyond it, and its NaN would reach real rows as 0 · NaN
        rotary = blocks.rotary_table(positions, cache.capacity + n, self.head_dim, self.rotary_base)
        stores: list[tuple[Array, Array]] = []
        x0 = middle = x
        for index, params in enumerate(self._layer_params()):
            attend = partial(self._attend_cache, cache, index, positions, added, stores)
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

    def _layer_options(self, scaling: str | None = None) -> LayerOptions:
        kernels = choose_kernels(self.kernels, self.compute_dtype)
        return LayerOptions(self.head_dim, self.compute_dtype, self.qk_norm, self.dropout, kernels, scaling)

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
