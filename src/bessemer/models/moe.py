"""Mixtures of experts: a feed-forward layer of which every token uses `model.experts_active` of `model.experts` parts.

    s = softmax(W_r h) or sigmoid(W_r h)            scores of the experts, float32
    C = the experts_active largest of s + b          ties go to the expert with the lower number
                                                     (with expert_groups: of the best groups only)
    y = Σ_{e in C} w_e · expert_e(h) + shared(h),    w_e = s_e, or s_e / Σ_C s with `normalize`

Of softmax scores, normalized ones are computed as the softmax of the chosen logits: then experts outside C have no
gradient. Through s_e / Σ_C s they would have what rounding leaves of a sum that is 0 (1e-12, where gradients are 1e-4),
and Adam would make steps of it.

No token is dropped and no expert has a capacity: tokens are sorted by expert, and the products are grouped
(kernels/grouped.py). Experts are stored as stacks, expert_up (E, D, F), so an optimizer and an adapter see E matrices.

Balance. `bias` (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3): after each step b_e rises by `bias_rate` for an
expert with fewer tokens than the mean and falls for one with more. b has no gradient, is part of the parameters, and
decides only who is chosen. `loss`: an auxiliary loss, E/k · Σ_e f_e · P_e, f_e the share of a row's tokens that chose e
and P_e the row's mean score (DeepSeek-V3's sequence-wise form). Means over a row, weighted by the row's targets, keep
the sum over rows exact: the number of micro-batches and devices changes nothing. The z-loss is
Σ w · logsumexp(W_r h)² (Zoph et al. 2022, ST-MoE). Both are means over the layers.

Groups (DeepSeek-V3, arXiv 2412.19437): the experts are divided in order into `expert_groups` equal groups. A group's
score is the sum of its two largest s + b (or the largest: DeepSeek-V2), and only experts of the
`expert_groups_active` best groups can be chosen; of equal groups the first.

Replay. Reinforcement learning can give the choices C that were made when a text was sampled (EXPERT_IDS of a batch):
weights and gradients are still those of the router at hand, s_e for e in C (Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.kernels.exchange import exchange_sizes, give_back, send
from bessemer.kernels.grouped import (
    ALIGNMENT,
    Order,
    choose_padded,
    collect,
    dispatch,
    grouped_linear,
    quantized_grouped_linear,
)
from bessemer.kernels.ops import linear, relu_squared
from bessemer.kernels.quantized import Quantized
from bessemer.models.lora import Adapted
from bessemer.models.shape import ExpertShape, round_up
from bessemer.topology.rules import mesh_axes, rule_axes

SCORES = ("softmax", "sigmoid")
BALANCES = ("bias", "loss", "none")
GROUP_SCORES = ("top2", "max")
WIDTH_MULTIPLE = 16
MOST_EXPERTS = 4096  # checked before a shape is derived: a configuration from elsewhere may name any number
MEANS = ("loss", "entropy", "dropped")
LOAD = "expert_load"
"""In the sums of a training step: tokens by layer and expert, (layers, experts)."""
EXPERT_IDS = "expert_ids"
"""In a batch: recorded choices of experts, (B, T, layers with experts, experts_active), -1 for the router's own."""
ROUTING, CHOSEN, APART = "routing", "chosen", "routed_apart"
"""The collection that `decode` and scoring write to if it is mutable: the choices of each layer, (B, n, k); and the
number of choices, over tokens and layers, that differ from the replayed ones."""
ROUTER, BIAS = "router", "router_bias"
SHARED_GATE = "shared_gate"
"""(D, 1): the shared experts count σ(h·w) times (qwen3-next); without it once."""
LOGIT_BIAS = "router_logit_bias"
"""A trained bias of the router's logits (gpt-oss); BIAS balances the load and has no gradient."""
AXES: dict[str, tuple[str | None, ...]] = {
    "expert_gate": ("expert", "embed", "mlp"),
    "expert_up": ("expert", "embed", "mlp"),
    "expert_gate_up": ("expert", "embed", "mlp"),
    "expert_down": ("expert", "mlp", "embed"),
}
BIAS_AXES: dict[str, tuple[str | None, ...]] = {
    "expert_gate_up_bias": ("expert", "mlp"),
    "expert_down_bias": ("expert", "embed"),
}

Stats = dict[str, Array]
"""What the routers of a training step measured, summed over tokens; empty where nothing is measured."""


class Watch(NamedTuple):
    """What the routers of a forward pass are told."""

    counted: Array | None = None  # (B, T), weights of the tokens in the loss; None: measure nothing
    replayed: Array | None = None  # (B, T, layers, k), EXPERT_IDS, or of one layer (B, T, k); None: routers choose

    def of_layer(self, place: Array) -> Watch:
        """Return what the router of layer `place`, of those with experts, is told."""
        if self.replayed is None:
            return self
        return self._replace(replayed=jax.lax.dynamic_index_in_dim(self.replayed, place, axis=2, keepdims=False))


NOTHING = Watch()


class ExpertSettings(nn.Module):
    """Settings of the experts, for a model family to inherit."""

    experts: int = field("model/experts", default=0, minimum=0, help="experts of a feed-forward layer; 0 = one, dense")
    experts_active: int = field("model/experts_active", default=2, minimum=1, help="experts that a token uses")
    experts_shared: int = field(
        "model/experts_shared", default=0, minimum=0, help="experts that every token uses besides, as one dense layer"
    )
    expert_groups: int = field(
        "model/expert_groups",
        default=0,
        minimum=0,
        help="equal groups of experts, of which the router first chooses the best; 0 = none",
    )
    expert_groups_active: int = field(
        "model/expert_groups_active", default=1, minimum=1, help="groups whose experts a token may use"
    )
    expert_width: int = field(
        "model/expert_width",
        default=-1,
        minimum=1,
        also=(-1,),
        help="width of one expert; -1 = as many active parameters as the dense layer has, up to 16s",
    )
    expert_score: str = field(
        "architecture/experts/score", default="sigmoid", choices=SCORES, help="scores of experts from router logits"
    )
    expert_group_score: str = field(
        "architecture/experts/group_score",
        default="top2",
        choices=GROUP_SCORES,
        help="expert_groups: score of a group from its experts', the sum of the two largest or the largest",
    )
    expert_normalize: bool = field(
        "architecture/experts/normalize", default=True, help="weights of a token's experts sum to 1"
    )
    expert_balance: str = field(
        "architecture/experts/balance",
        default="bias",
        choices=BALANCES,
        help="how experts get equal shares of tokens: a bias moved after each step, an auxiliary loss, or not at all",
    )
    expert_bias_rate: float = field(
        "architecture/experts/bias_rate", default=0.001, minimum=0.0, help="balance=bias: change of a bias per step"
    )
    expert_aux_loss: float = field(
        "architecture/experts/aux_loss", default=0.01, minimum=0.0, help="balance=loss: weight of the auxiliary loss"
    )
    expert_z_loss: float = field(
        "architecture/experts/z_loss", default=0.0, minimum=0.0, help="weight of logsumexp² of the router logits"
    )

    def expert_shape(self, dense: int) -> ExpertShape | None:
        """Return the sizes of the experts, or None without any. dense: width of the layer they stand for."""
        if not self.experts:
            return None
        width = self.expert_width
        if width < 0:
            width = round_up(max(dense // (self.experts_active + self.experts_shared), 1), WIDTH_MULTIPLE)
        return ExpertShape(
            self.experts, self.experts_active, self.experts_shared, width, biased=self.expert_balance == "bias"
        )

    def routing(self) -> Routing | None:
        """Return the static part of the router, or None without experts."""
        if not self.experts:
            return None
        aux = self.expert_aux_loss if self.expert_balance == "loss" else 0.0
        return Routing(
            self.experts,
            self.experts_active,
            self.expert_score,
            self.expert_normalize,
            aux,
            self.expert_z_loss,
            groups=self.expert_groups,
            groups_active=self.expert_groups_active,
            group_score=self.expert_group_score,
        )

    @property
    def bias_step(self) -> float | None:
        """The change of a router's bias per step; None without such biases."""
        return self.expert_bias_rate if self.experts and self.expert_balance == "bias" else None

    def check_experts(self) -> None:
        """Raise InputError for settings of experts that cannot be built."""
        if not self.experts:
            return
        if self.experts > MOST_EXPERTS:
            raise InputError(f"model.experts is {self.experts}; a layer has at most {MOST_EXPERTS:,}.")
        if not 1 <= self.experts_active <= self.experts:
            raise InputError(
                f"model.experts_active is {self.experts_active}; a token uses 1 to {self.experts} (model.experts)."
            )
        self._check_groups()
        for name, value, known in (
            ("score", self.expert_score, SCORES),
            ("group_score", self.expert_group_score, GROUP_SCORES),
            ("balance", self.expert_balance, BALANCES),
        ):
            if value not in known:
                raise InputError(f"architecture.experts.{name} is '{value}'; known: {', '.join(known)}.")
        if self.experts_active == 1 and self.expert_normalize and self.expert_balance != "none":
            raise InputError(
                "model.experts_active=1 with architecture.experts.normalize=true weighs each chosen expert with 1, "
                "so the router would never learn; set architecture.experts.normalize=false."
            )

    def _check_groups(self) -> None:
        groups, active = self.expert_groups, self.expert_groups_active
        if not groups:
            if active != 1:
                raise InputError(
                    f"model.expert_groups_active is {active}, but there are no groups; set model.expert_groups."
                )
            return
        if self.experts % groups:
            raise InputError(
                f"model.expert_groups {groups} does not divide model.experts {self.experts}; use a divisor of it."
            )
        if not 1 <= active <= groups:
            raise InputError(
                f"model.expert_groups_active is {active}; a token uses 1 to {groups} groups (model.expert_groups)."
            )
        if self.experts_active > active * self.experts // groups:
            raise InputError(
                f"model.experts_active is {self.experts_active}, but {active} of {groups} groups hold "
                f"{active * self.experts // groups} experts; raise model.expert_groups_active or lower "
                "model.expert_groups."
            )


def recorded_shape(model: Any) -> tuple[int, int] | None:
    """Return (layers with experts, experts of a token), the choices that are recorded per token; None without any."""
    if not isinstance(model, ExpertSettings) or not model.experts:
        return None
    return model.depth, model.experts_active


def recorded(variables: Mapping[str, Any]) -> Array:
    """Return the choices of a call of `decode`, (B, n, layers, k) int16. variables: what ROUTING was mutable in."""
    return jnp.stack(variables[ROUTING][CHOSEN], axis=2).astype(jnp.int16)


def active_share(model: nn.Module) -> float:
    """Return the share of the experts that a token uses; 1 for a model without any."""
    return model.experts_active / model.experts if isinstance(model, ExpertSettings) and model.experts else 1.0


def balancer(model: nn.Module) -> Callable[[Any, Array], Any] | None:
    """Return (trained parameters, load) → parameters with moved biases, or None for a model without such biases."""
    rate = model.bias_step if isinstance(model, ExpertSettings) else None
    return None if rate is None else partial(move_biases, rate)


def move_biases(rate: float, params: Any, load: Array) -> Any:
    """Return the trained parameters with b + rate · sign(mean load − load). load: (layers, E)."""
    moved = dict(params)
    for layer in range(load.shape[0]):
        block = moved.get(f"blocks_{layer}", {})
        if BIAS in block:  # absent where it is frozen
            moved[f"blocks_{layer}"] = {**block, BIAS: block[BIAS] + rate * jnp.sign(load[layer].mean() - load[layer])}
    return moved


@dataclass(frozen=True)
class Routing:
    """The static part of a router."""

    experts: int
    active: int
    score: str
    normalize: bool
    aux_loss: float
    z_loss: float
    combine: Callable[[Array, Array], Array] | None = None  # of gate and up; None: activation(gate) · up
    groups: int = 0  # of experts; 0: none
    groups_active: int = 1
    group_score: str = "top2"

    @property
    def softmax_of_chosen(self) -> bool:
        """Whether the weights of a token's experts are the softmax of their logits."""
        return self.normalize and self.score == "softmax"


def expert_sizes(shape: ExpertShape, width: int, gated: bool, joined: bool = False) -> dict[str, tuple[int, int, int]]:
    """Return name → shape of the stacks of one layer. joined: gate and up are one stack."""
    into, out = (shape.count, width, shape.width), (shape.count, shape.width, width)
    if joined:
        return {"expert_gate_up": (shape.count, width, 2 * shape.width), "expert_down": out}
    return ({"expert_gate": into} if gated else {}) | {"expert_up": into, "expert_down": out}


def routed_feed_forward(
    routing: Routing,
    params: Mapping[str, Any],
    h: Array,
    watch: Watch,
    activation: Callable[[Array], Array],
    dtype: Any,
) -> tuple[Array, Stats]:
    """Return Σ w_e · expert_e(h), (B, T, D), and what the router chose (CHOSEN) and measured.

    params: `router` (D, E), `router_bias` (E,) or none, stacks with the names of AXES; with `expert_gate` an expert is
    down(activation(gate h) · up h), without it down(relu(up h)²). `expert_gate_up` (E, D, 2F) holds gate and up in
    turns, gate first. Stacks may have biases (BIAS_AXES), and the logits `router_logit_bias` (E,).
    """
    logits = linear(h.astype(jnp.float32), params[ROUTER], ("embed", None), jnp.float32)  # (B, T, E)
    if LOGIT_BIAS in params:
        logits = logits + params[LOGIT_BIAS]
    scores = jax.nn.softmax(logits) if routing.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = jax.lax.stop_gradient(scores)
    if BIAS in params:
        ranked = ranked + jax.lax.stop_gradient(params[BIAS])
    stacks = {name: _without_keys(params[name]) for name in (*AXES, *BIAS_AXES) if name in params}
    gates = logits if routing.softmax_of_chosen else scores
    y, chosen, apart = _on_own_tokens(routing, stacks, h, gates, ranked, watch.replayed, activation, dtype)
    stats = {CHOSEN: chosen} if apart is None else {CHOSEN: chosen, APART: jnp.sum(apart, dtype=jnp.float32)}
    return y, stats if watch.counted is None else stats | _measure(routing, logits, scores, chosen, watch.counted)


def _on_own_tokens(
    routing: Routing,
    stacks: dict[str, Any],
    h: Array,
    gates: Array,
    ranked: Array,
    replayed: Array | None,
    activation: Callable[[Array], Array],
    dtype: Any,
) -> tuple[Array, Array, Array | None]:
    """Route the tokens of each device on that device: a sort over all devices would gather the activations.

    Over the tensor axis every device has a slice of each expert's width, and the results are added up. Quantized stacks
    are whole on every device: their scales belong to blocks of rows. Over the expert axis every device has the stacks
    of its own experts, and tokens travel to them and back (`_by_owner`).
    """
    whole = any(isinstance(leaf, Quantized) for leaf in jax.tree.leaves(stacks, is_leaf=_is_quantized))
    width = stacks["expert_down"].shape[1]
    split = () if whole else mesh_axes("mlp", width)
    owners = mesh_axes("expert", routing.experts)
    if whole and owners:
        raise InputError("lora.quantize and generate.weights do not split experts over devices; set topology.expert=1.")

    def local(
        h: Array, gates: Array, ranked: Array, replayed: Array | None, stacks: dict[str, Any]
    ) -> tuple[Array, Array, Array | None]:
        parts = jax.lax.axis_size(split) if split else 1
        rows, own = h.shape[0] * h.shape[1] * routing.active, stacks["expert_down"].shape[0]
        implementation = choose_padded(rows, own, dtype, *stacks["expert_down"].shape[1:])
        run = partial(_experts, routing, stacks, activation, dtype, parts, implementation)
        chosen, apart = _choose(routing, ranked, replayed)
        multiple = ALIGNMENT.get(implementation, 1)
        if owners:
            y = _routed(routing, h, gates, chosen, partial(_by_owner, owners[0], multiple, run))
        else:
            y = _routed(routing, h, gates, chosen, run, multiple)
        y = jax.lax.psum(y, split) if split else y
        return y.astype(h.dtype), chosen, apart

    if jax.sharding.get_abstract_mesh().empty or not nn.get_logical_axis_rules():
        return local(h, gates, ranked, replayed, stacks)
    rows = PartitionSpec(rule_axes("batch", h.shape[0]), rule_axes("sequence", h.shape[1]))
    axes = {} if whole else {"mlp": rule_axes("mlp", width) or None, "expert": rule_axes("expert", routing.experts)}
    named = AXES | BIAS_AXES
    specs = {name: _specs(leaf, [axes.get(str(axis)) for axis in named[name]]) for name, leaf in stacks.items()}
    return jax.shard_map(
        local, in_specs=(rows, rows, rows, rows, specs), out_specs=(rows, rows, rows), check_vma=False
    )(h, gates, ranked, replayed, stacks)


def _without_keys(leaf: Any) -> Any:
    """Return a stack without the keys of its adapter's dropout, which stacks do not have (lora.make_split)."""
    return replace(leaf, keys=None) if isinstance(leaf, Adapted) else leaf


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def _specs(leaf: Any, axes: list[Any]) -> Any:
    """Return the specs of a stack (E, m, n) whose axes lie on the mesh axes `axes`, and of its adapter."""
    if isinstance(leaf, Adapted):
        expert, rows, columns = axes
        specs: dict[str, Any] = {"a": PartitionSpec(expert, rows), "b": PartitionSpec(expert, None, columns)}
        return replace(leaf, w=_specs(leaf.w, axes), **specs)
    return jax.tree.map(lambda _: PartitionSpec(), leaf) if _is_quantized(leaf) else PartitionSpec(*axes)


def _choose(routing: Routing, ranked: Array, replayed: Array | None) -> tuple[Array, Array | None]:
    """Return the experts of each token, (B, T, k), and if any are replayed, whether the router would choose other ones,
    (B, T). ranked: (B, T, E); replayed: (B, T, k)."""
    ranked = _of_best_groups(routing, ranked) if routing.groups else ranked
    _, chosen = jax.lax.top_k(ranked, routing.active)  # of equal ones the first
    if replayed is None:
        return chosen, None
    replayed = replayed.astype(chosen.dtype)
    given = replayed[..., 0] >= 0
    apart = given & (jnp.sort(chosen, axis=-1) != jnp.sort(replayed, axis=-1)).any(axis=-1)
    return jnp.where(given[..., None], replayed, chosen), apart


def _of_best_groups(routing: Routing, ranked: Array) -> Array:
    """Return the scores with -inf for the experts of groups that cannot be chosen. ranked: (B, T, E)."""
    groups = ranked.reshape(*ranked.shape[:-1], routing.groups, -1)
    best = jax.lax.top_k(groups, min(2 if routing.group_score == "top2" else 1, groups.shape[-1]))[0]
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), routing.groups_active)  # of equal ones the first
    member = jnp.any(kept[..., None] == jnp.arange(routing.groups), axis=-2)
    return jnp.where(member[..., None], groups, -jnp.inf).reshape(ranked.shape)


def _routed(
    routing: Routing, h: Array, gates: Array, chosen: Array, run: Callable[[Array, Array], Array], multiple: int = 1
) -> Array:
    """Return Σ w_e · expert_e(h) in float32. chosen: (B, T, k); run: (rows by expert, sizes) → rows.

    gates: (B, T, E), the scores, or the logits if weights are the softmax of the chosen ones.
    multiple: what the rows of an expert are padded to a multiple of.
    """
    batch, length, width = h.shape
    chosen = chosen.reshape(-1, routing.active)
    picked = chosen[..., None] == jnp.arange(routing.experts)  # (N, k, E)
    weights = jnp.sum(jnp.where(picked, gates.reshape(-1, 1, routing.experts), 0), axis=-1)  # (N, k)
    if routing.softmax_of_chosen:
        weights = jax.nn.softmax(weights)
    elif routing.normalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-20)
    order = Order.of(chosen, routing.experts, multiple)
    rows = dispatch(h.reshape(-1, width), order.order, order.inverse)
    made = collect(run(rows, order.sizes), order.order, order.inverse)
    made = made.reshape(batch, length, routing.active, width).astype(jnp.float32)
    return jnp.sum(made * weights.reshape(batch, length, routing.active, 1), axis=2)


def _experts(
    routing: Routing,
    stacks: dict[str, Any],
    activation: Callable[[Array], Array],
    dtype: Any,
    parts: int,
    implementation: str,
    rows: Array,
    sizes: Array,
) -> Array:
    """Return expert_e(rows) of rows sorted by expert. rows: (N, D); sizes: (E,), the sum at most N.

    parts: devices whose results are added up; each adds its share of the bias of `expert_down`.
    """

    def product(name: str, x: Array) -> Array:
        y = grouped_product(x, stacks[name], sizes, dtype, implementation)
        bias = stacks.get(f"{name}_bias")
        if bias is None:
            return y
        expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right")  # E: an empty row
        own = expert[:, None] == jnp.arange(sizes.shape[0])  # (N, E)
        share = bias / parts if name == "expert_down" else bias
        return y + (own.astype(dtype) @ share.astype(dtype)).astype(y.dtype)  # a product: its gradient adds in order

    if "expert_gate_up" in stacks:
        both = product("expert_gate_up", rows)
        hidden = _gated(routing, activation, both[:, ::2], both[:, 1::2])
    elif "expert_gate" in stacks:
        hidden = _gated(routing, activation, product("expert_gate", rows), product("expert_up", rows))
    else:
        hidden = relu_squared(product("expert_up", rows), "mlp_hidden")
    return product("expert_down", hidden)


def _by_owner(axis: str, multiple: int, run: Callable[[Array, Array], Array], rows: Array, sizes: Array) -> Array:
    """Return `run(rows, sizes)` where each device of the mesh axis holds an equal part of the experts, in order.

    Rows travel to the device of their expert and back. No token is dropped: the buffers have room for the case that
    every device sends all of its rows to one of them, X · N · k rows for X devices with N tokens each.
    """
    devices = jax.lax.axis_size(axis)
    by_device = sizes.reshape(devices, -1)  # (X, E/X)
    exchange = exchange_sizes(jnp.sum(by_device, axis=1), axis)
    counts = jax.lax.all_to_all(by_device, axis, 0, 0, tiled=True)  # rows from each device for each expert here
    capacity, own = rows.shape[0], counts.shape[1]
    place = jnp.arange(capacity)
    expert = jnp.sum(place[:, None] >= jnp.cumsum(counts, axis=1)[:, None], axis=2)  # (X, capacity); own: empty
    order = Order.of(expert.reshape(-1, 1), own + 1, multiple)
    received = send(rows, exchange, axis, capacity)
    made = run(dispatch(received, order.order, order.inverse), order.sizes[:own])
    return give_back(collect(made, order.order, order.inverse), exchange, axis, capacity, capacity)


def _gated(routing: Routing, activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
    made = activation(gate) * up if routing.combine is None else routing.combine(gate, up)
    return checkpoint_name(made, "mlp_hidden")


def grouped_product(x: Array, w: Any, sizes: Array, dtype: Any, implementation: str = "auto") -> Array:
    """Return x W by group, with the products of the adapters if the stack has them. x: (N, m); w: (E, m, n)."""
    if isinstance(w, Adapted):
        low = checkpoint_name(grouped_linear(x, w.a, sizes, dtype, implementation), "adapter")
        return grouped_product(x, w.w, sizes, dtype, implementation) + grouped_linear(
            low, w.scale * w.b, sizes, dtype, implementation
        )
    if isinstance(w, Quantized):
        return quantized_grouped_linear(x, w, sizes, dtype, implementation)
    return grouped_linear(x, w, sizes, dtype, implementation)


# -- what a training step measures -------------------------------------------------------------------------------------


def no_stats(routing: Routing | None, layers: int, watch: Watch) -> Stats:
    """Return the zeros to which layers add, or nothing where nothing is measured."""
    zero = jnp.zeros((), jnp.float32)
    if routing is None:
        return {}
    apart = {} if watch.replayed is None else {APART: zero}
    if watch.counted is None:
        return apart
    return {LOAD: jnp.zeros((layers, routing.experts), jnp.float32), **dict.fromkeys(MEANS, zero), **apart}


def add_stats(stats: Stats, layer: Stats, index: Array) -> Stats:
    """Return `stats` with those of layer number `index`; the sums become means over the layers."""
    if not stats:
        return stats
    sums = {APART: stats[APART] + layer[APART]} if APART in stats else {}
    if LOAD not in stats:
        return sums
    layers = stats[LOAD].shape[0]
    sums |= {name: stats[name] + layer[name] / layers for name in MEANS}
    return {LOAD: stats[LOAD].at[index].set(layer[LOAD]), **sums}


def _measure(routing: Routing, logits: Array, scores: Array, chosen: Array, counted: Array) -> Stats:
    """logits, scores: (B, T, E); chosen: (B, T, k); counted: (B, T)."""
    member = jnp.any(chosen[..., None] == jnp.arange(routing.experts), axis=2)  # (B, T, E)
    shares = scores if routing.score == "softmax" else scores / jnp.sum(scores, axis=-1, keepdims=True)
    entropy = -jnp.sum(shares * jnp.log(jnp.maximum(shares, 1e-30)), axis=-1)
    reached = jnp.sum(member, axis=-1) / routing.active
    loss = jnp.zeros((), jnp.float32)
    if routing.aux_loss:
        weight = jnp.sum(counted, axis=1)  # of a row
        mean = counted[..., None] / jnp.maximum(weight, 1e-20)[:, None, None]
        chosen_share, mean_score = (jnp.sum(mean * x, axis=1) for x in (member, shares))
        rows = routing.experts / routing.active * jnp.sum(chosen_share * mean_score, axis=-1)
        loss += routing.aux_loss * jnp.sum(weight * rows)
    if routing.z_loss:
        loss += routing.z_loss * jnp.sum(counted * jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    return {
        LOAD: jnp.sum(member & (counted > 0)[..., None], axis=(0, 1), dtype=jnp.float32),
        "loss": loss,
        "entropy": jax.lax.stop_gradient(jnp.sum(counted * entropy)),
        "dropped": jnp.sum(counted * (1 - reached)),
    }


def router_sums(stats: Stats) -> dict[str, Array]:
    """Return the sums that a loss reports beside its own: the load, and metrics to be divided by the weight."""
    if LOAD not in stats:
        return {}
    return {LOAD: stats[LOAD], "experts/entropy": stats["entropy"], "experts/dropped": stats["dropped"]}


def balance_metrics(load: Array) -> dict[str, Array]:
    """Return experts/balance: the busiest expert's share of tokens over the mean, averaged over layers; 1 is even."""
    return {"experts/balance": jnp.mean(jnp.max(load, axis=1) / jnp.maximum(jnp.mean(load, axis=1), 1e-20))}
