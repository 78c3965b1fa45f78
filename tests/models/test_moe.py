"""Mixtures of experts: the grouped layer is a loop over experts, in value and gradient, however it is computed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.test_llama import QUICK, SIZES, assert_same, batch_of

from bessemer.errors import InputError
from bessemer.kernels.grouped import Order, grouped_linear
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.models.moe import (
    APART,
    BIAS,
    CHOSEN,
    EXPERT_IDS,
    LOAD,
    ROUTING,
    Routing,
    Watch,
    balance_metrics,
    move_biases,
    recorded,
    recorded_shape,
    routed_feed_forward,
)
from bessemer.topology import TopologySettings, make_topology, shardings, unbox

EXPERTS: dict[str, Any] = {"experts": 6, "experts_active": 2, "experts_shared": 1, "expert_width": 24}
FAMILIES: dict[str, Any] = {
    "llama": Llama(**SIZES, **EXPERTS, block_size=16, document_mask=True, expert_z_loss=1e-2),
    "gpt": GPT(
        **{**SIZES, "heads": 2, "kv_heads": 1, "depth": 4},
        **EXPERTS,
        block_size=16,
        document_mask=True,
        expert_balance="loss",
        expert_score="softmax",
    ),
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- grouped products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["tiles", "ragged"])
@pytest.mark.parametrize("sizes", [(3, 0, 5, 1, 0), (0, 0, 0, 0, 9), (1, 1, 1, 1, 1), (200, 7, 0, 129, 64)])
def test_grouped_products_and_gradients_are_those_of_each_group(sizes: tuple[int, ...], implementation: str) -> None:
    x, w, weights = normal(1, sum(sizes), 6), normal(2, 5, 6, 4), normal(3, sum(sizes), 4)
    owner = np.repeat(np.arange(5), sizes)

    def grouped(x: Any, w: Any) -> Any:
        return jnp.sum(weights * grouped_linear(x, w, jnp.asarray(sizes, jnp.int32), jnp.float32, implementation))

    def plain(x: Any, w: Any) -> Any:
        return jnp.sum(weights * jnp.einsum("nd,ndf->nf", x, w[owner]))

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)), compiler_options=QUICK)(x, w) for f in (grouped, plain))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    for a, b in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_no_expert_multiplies_the_rows_of_another() -> None:
    """The products of forward and backward pass are small tiles: nothing has as many rows for every expert."""
    rows, experts = 1024, 16

    def loss(x: Any, w: Any) -> Any:
        sizes = jnp.full(experts, rows // experts, jnp.int32)
        return jnp.sum(jnp.sin(grouped_linear(x, w, sizes, jnp.float32, "tiles")))

    shapes = (jax.ShapeDtypeStruct((rows, 32), jnp.float32), jax.ShapeDtypeStruct((experts, 32, 48), jnp.float32))
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 3  # y, dx, dW: one in the body of each loop
    assert all(f"tensor<{rows}x" not in line and f"tensor<{experts}x" not in line for line in products)


def test_rows_keep_the_order_of_their_tokens() -> None:
    order = Order.of(jnp.array([[2, 0], [0, 1], [2, 1]]), 4)
    assert order.order.tolist() == [1, 2, 3, 5, 0, 4] and order.sizes.tolist() == [2, 2, 2, 0]
    assert order.order[order.inverse].tolist() == list(range(6))


# -- the layer, against a loop over experts ----------------------------------------------------------------------------


def layer_params(experts: int, width: int, hidden: int, gated: bool) -> dict[str, np.ndarray]:
    params = {"router": normal(1, width, experts), "expert_up": normal(3, experts, width, hidden) / width**0.5}
    params["expert_down"] = normal(4, experts, hidden, width) / hidden**0.5
    return params | ({"expert_gate": normal(2, experts, width, hidden) / width**0.5} if gated else {})


def reference(routing: Routing, params: Any, h: Any, counted: Any) -> tuple[Any, Any]:
    """Every expert computes every token; a mask keeps those that were chosen. Choices by sorting in numpy's order."""
    logits = h @ params["router"]
    scores = jax.nn.softmax(logits) if routing.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores + params.get("router_bias", 0)
    place = jnp.argsort(jnp.argsort(-ranked, axis=-1, stable=True), axis=-1, stable=True)
    member = place < routing.active
    weights = jnp.where(member, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) if routing.normalize else weights
    y = jnp.zeros_like(h)
    for e in range(routing.experts):
        up = h @ params["expert_up"][e]
        hidden = jax.nn.silu(h @ params["expert_gate"][e]) * up if "expert_gate" in params else jax.nn.relu(up) ** 2
        y += weights[..., e, None] * (hidden @ params["expert_down"][e])
    shares = scores / scores.sum(-1, keepdims=True)
    loss = 0.0
    for row in range(h.shape[0]):
        w = counted[row] / counted[row].sum()
        f, p = (w[:, None] * member[row]).sum(0), (w[:, None] * shares[row]).sum(0)
        loss += routing.aux_loss * counted[row].sum() * routing.experts / routing.active * (f * p).sum()
    loss += routing.z_loss * (counted * jax.nn.logsumexp(logits, axis=-1) ** 2).sum()
    return y, loss


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_layer_is_a_loop_over_experts(gated: bool, score: str, normalize: bool) -> None:
    routing = Routing(7, 3, score, normalize, aux_loss=0.1, z_loss=0.01)
    params, h, upstream = layer_params(7, 12, 10, gated), normal(5, 3, 11, 12), normal(6, 3, 11, 12)
    params["router_bias"] = 0.2 * normal(7, 7)
    counted = np.random.default_rng(8).uniform(size=(3, 11)).astype(np.float32)

    def ours(params: Any, h: Any) -> Any:
        y, stats = routed_feed_forward(routing, params, h, Watch(counted), jax.nn.silu, jnp.float32)
        return jnp.sum(upstream * y) + stats["loss"]

    def theirs(params: Any, h: Any) -> Any:
        y, loss = reference(routing, params, h, counted)
        return jnp.sum(upstream * y) + loss

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)), compiler_options=QUICK)(params, h) for f in (ours, theirs))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    assert not np.any(got[1][0].pop("router_bias"))  # it decides who is chosen, and has no gradient
    wanted[1][0].pop("router_bias")
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("replay", [False, True])
def test_softmax_weights_of_the_chosen_leave_the_others_no_gradient(replay: bool) -> None:
    """Exactly none: of rounding, 1e-12 where gradients are 1e-4, AdamW would make steps. Also with scores that
    underflow, which a bias or a replay chooses all the same: their logits decide, not a quotient of zeros."""
    routing = Routing(6, 2, "softmax", True, 0.0, 0.0)
    params, h, upstream = layer_params(6, 12, 10, True), normal(5, 3, 11, 12), normal(6, 3, 11, 12)
    h[..., 0] = 1.0
    params["router"][0] = [-300.0, 0.0, -301.0, 0.0, 0.0, 0.0]
    params["router_bias"] = np.zeros(6, np.float32) if replay else np.array([9, 0, 9, 0, 0, 0], np.float32)
    watch = Watch(replayed=np.tile(np.array([2, 0], np.int16), (3, 11, 1)) if replay else None)

    def ours(params: Any, h: Any) -> Any:
        return jnp.sum(upstream * routed_feed_forward(routing, params, h, watch, jax.nn.silu, jnp.float32)[0])

    def theirs(params: Any, h: Any) -> Any:
        weights = jax.nn.softmax((h @ params["router"])[..., [0, 2]])
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, params["expert_gate"][jnp.array([0, 2])]))
        hidden = hidden * jnp.einsum("btd,edf->btef", h, params["expert_up"][jnp.array([0, 2])])
        made = jnp.einsum("btef,efd->bted", hidden, params["expert_down"][jnp.array([0, 2])])
        return jnp.sum(upstream * jnp.einsum("bted,bte->btd", made, weights))

    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)), compiler_options=QUICK)(params, h) for f in (ours, theirs))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    for name in ("router", "expert_gate", "expert_down"):
        np.testing.assert_allclose(got[1][0][name], wanted[1][0][name], atol=1e-5 * np.abs(wanted[1][0][name]).max())
    got_h, wanted_h = (np.asarray(made[1][1])[..., 1:] for made in (got, wanted))  # the first is of a sum that cancels
    np.testing.assert_allclose(got_h, wanted_h, atol=1e-5 * np.abs(wanted_h).max())
    assert not np.any(got[1][0]["router"][:, [1, 3, 4, 5]]) and np.any(got[1][0]["router"][:, [0, 2]])


def test_replayed_experts_are_weighed_by_the_router_at_hand() -> None:
    """Choices that no router would make: value and gradients of a loop over them. -1 is the router's own choice."""
    routing = Routing(7, 3, "sigmoid", True, 0.0, 0.0)
    params, h, upstream = layer_params(7, 12, 10, True), normal(5, 3, 11, 12), normal(6, 3, 11, 12)
    replayed = np.argsort(normal(9, 3, 11, 7), axis=-1)[..., :3].astype(np.int16)
    replayed[0, :4] = -1
    scores = jax.nn.sigmoid(h @ params["router"])
    own = np.asarray(jax.lax.top_k(scores, 3)[1])
    member = np.where(replayed[..., :1] < 0, own, replayed)[..., None] == np.arange(7)

    def ours(params: Any, h: Any) -> Any:
        y, stats = routed_feed_forward(routing, params, h, Watch(replayed=replayed), jax.nn.silu, jnp.float32)
        return jnp.sum(upstream * y), stats[APART]

    def theirs(params: Any, h: Any) -> Any:
        weights = jnp.where(member.any(axis=2), jax.nn.sigmoid(h @ params["router"]), 0)
        weights = weights / weights.sum(-1, keepdims=True)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", h, params["expert_gate"]))
        hidden = hidden * jnp.einsum("btd,edf->btef", h, params["expert_up"])
        return jnp.sum(upstream * jnp.einsum("btef,efd,bte->btd", hidden, params["expert_down"], weights))

    got = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True), compiler_options=QUICK)(params, h)
    wanted = jax.jit(jax.value_and_grad(theirs, (0, 1)), compiler_options=QUICK)(params, h)
    np.testing.assert_allclose(got[0][0], wanted[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    assert np.any(got[1][0]["router"])
    same = np.sort(own, axis=-1) == np.sort(replayed, axis=-1)
    assert got[0][1] == np.sum((replayed[..., 0] >= 0) & ~same.all(axis=-1)) > 20


def plain_choice(ranked: np.ndarray, groups: int, groups_active: int, active: int, score: str) -> list[int]:
    """The experts of one token in loops: the best groups, then the best experts in them; of equal ones the first."""
    size = len(ranked) // groups
    worth = [sum(sorted(ranked[g * size : (g + 1) * size])[-(2 if score == "top2" else 1) :]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[:groups_active]
    allowed = [e for e in range(len(ranked)) if e // size in best]
    return sorted(allowed, key=lambda e: (-ranked[e], e))[:active]


@pytest.mark.parametrize("groups", [(4, 2, "top2"), (4, 1, "max"), (2, 2, "top2"), (8, 3, "top2")])
def test_experts_of_the_best_groups_are_chosen(groups: tuple[int, int, str]) -> None:
    """Value and gradients of a loop over tokens, with a bias that decides."""
    count, active, score = groups
    routing = Routing(8, 2, "sigmoid", True, 0.0, 0.0, groups=count, groups_active=active, group_score=score)
    params, h, upstream = layer_params(8, 12, 10, True), normal(5, 2, 9, 12), normal(6, 2, 9, 12)
    params["router_bias"] = 0.3 * normal(7, 8)
    ranked = np.asarray(jax.nn.sigmoid(h @ params["router"])) + params["router_bias"]
    wanted = np.array([[plain_choice(token, count, active, 2, score) for token in row] for row in ranked])
    ungrouped = np.array([[plain_choice(token, 1, 1, 2, score) for token in row] for row in ranked])
    assert (wanted != ungrouped).any() == (active < count < 8)  # a group of one holds no weaker expert back

    def value(routing: Routing, replayed: Any) -> Any:
        def total(params: Any, h: Any) -> Any:
            y, stats = routed_feed_forward(routing, params, h, Watch(replayed=replayed), jax.nn.silu, jnp.float32)
            return jnp.sum(upstream * y), stats[CHOSEN]

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=QUICK)(params, h)

    (got, chosen), gradients = value(routing, None)
    np.testing.assert_array_equal(chosen, wanted)
    (given, _), theirs = value(Routing(8, 2, "sigmoid", True, 0.0, 0.0), wanted)  # proven against a loop above
    np.testing.assert_allclose(got, given, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(b).max(), 1e-9))


def test_of_equal_groups_the_first_are_chosen() -> None:
    routing = Routing(8, 3, "softmax", True, 0.0, 0.0, groups=4, groups_active=2)
    params = layer_params(8, 8, 6, True) | {"router": np.zeros((8, 8), np.float32)}
    for bias, chosen in ((np.zeros(8), [0, 1, 2]), (np.array([0, 0, 1, 0, 0, 1, 0, 1.0]), [2, 5, 3])):
        given = params | {"router_bias": bias.astype(np.float32)}
        stats = routed_feed_forward(routing, given, normal(1, 2, 4, 8), Watch(), jax.nn.silu, jnp.float32)[1]
        assert (np.asarray(stats[CHOSEN]) == chosen).all()


def test_of_equal_experts_the_first_are_chosen() -> None:
    routing = Routing(5, 2, "softmax", True, 0.0, 0.0)
    params = layer_params(5, 8, 6, True) | {"router": np.zeros((8, 5), np.float32)}
    watch = Watch(jnp.ones((2, 4)))
    _, stats = routed_feed_forward(routing, params, normal(1, 2, 4, 8), watch, jax.nn.silu, jnp.float32)
    assert stats[LOAD].tolist() == [8, 8, 0, 0, 0]
    assert float(stats["dropped"]) == 0
    np.testing.assert_allclose(stats["entropy"], 8 * np.log(5), rtol=1e-6)
    assert float(balance_metrics(stats[LOAD][None])["experts/balance"]) == 2.5


def test_biases_move_towards_the_idle_experts_and_spread_the_load() -> None:
    params = {"blocks_0": {BIAS: jnp.zeros(4), "router": jnp.ones((2, 4))}, "norm": jnp.ones(2)}
    moved = move_biases(0.5, params, jnp.array([[4.0, 2.0, 0.0, 2.0]]))
    assert moved["blocks_0"][BIAS].tolist() == [-0.5, 0.0, 0.5, 0.0]
    assert moved["norm"] is params["norm"] and params["blocks_0"][BIAS].tolist() == [0] * 4

    routing = Routing(8, 2, "sigmoid", True, 0.0, 0.0)
    layer = layer_params(8, 12, 6, True) | {"router_bias": jnp.zeros(8)}
    layer["router"][:, 0] += 1.0  # a preference that only the bias can undo
    h = np.abs(normal(1, 4, 64, 12))

    @jax.jit
    def load(bias: Any) -> Any:
        given = {**layer, "router_bias": bias}
        watch = Watch(jnp.ones(h.shape[:2]))
        return routed_feed_forward(routing, given, h, watch, jax.nn.silu, jnp.float32)[1][LOAD]

    before = load(layer["router_bias"])
    for _ in range(200):
        layer = move_biases(0.01, {"blocks_0": layer}, load(layer["router_bias"])[None])["blocks_0"]
    after = load(layer["router_bias"])
    assert float(before.max() / before.mean()) > 2 and float(after.max() / after.mean()) < 1.25


# -- models with experts -----------------------------------------------------------------------------------------------


def step_of(model: Any) -> Any:
    """Loss and gradients of a training step, with what the routers measured."""

    def loss(params: Any, batch: Any) -> Any:
        total, weight, sums = model.apply({"params": params}, batch, deterministic=False, method="loss")
        return total / weight, sums

    return jax.value_and_grad(loss, has_aux=True)


@cache
def single(family: str) -> Any:
    model = FAMILIES[family]
    model.check()
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape).astype(np.float32) * 0.2 + (len(leaf.shape) < 2), unbox(boxed)
    )
    return boxed, params, jax.device_get(jax.jit(step_of(model), compiler_options=QUICK)(params, batch_of()))


def assert_same_step(got: Any, expected: Any) -> None:
    assert_same((got[0][0], got[1]), (expected[0][0], expected[1]))
    np.testing.assert_array_equal(got[0][1][LOAD], expected[0][1][LOAD])
    for name in ("experts/entropy", "experts/dropped"):
        np.testing.assert_allclose(got[0][1][name], expected[0][1][name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "context": 2}])
def test_a_mesh_with_scanned_and_recomputed_layers_changes_nothing(family: str, axes: dict[str, int]) -> None:
    boxed, params, expected = single(family)
    topology = make_topology(TopologySettings(**{"data": 1, **axes}))
    places = shardings(boxed, topology.mesh)
    again = FAMILIES[family].clone(scan_layers=True, remat=["mlp_hidden", "q"])
    with topology.scope():
        batch = jax.device_put(batch_of(), topology.batch_sharding())
        step = jax.jit(step_of(again), out_shardings=(None, places), compiler_options=QUICK)
        assert_same_step(step(jax.device_put(params, places), batch), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("axes", [{"expert": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2, "context": 2}])
def test_replayed_experts_on_a_mesh_are_those_of_one_device(family: str, axes: dict[str, int]) -> None:
    boxed, params, _ = single(family)
    model, rng = FAMILIES[family].clone(scan_layers=True, remat=["block"]), np.random.default_rng(3)
    rows = batch_of()
    order = np.argsort(rng.random((*rows["input_ids"].shape, model.depth, model.experts)), axis=-1)
    rows[EXPERT_IDS] = order[..., : model.experts_active].astype(np.int16)
    rows[EXPERT_IDS][:, 11:] = -1

    def scores(params: Any, batch: Any) -> Any:
        (logprobs, _), seen = model.apply({"params": params}, batch, method="policy_scores", mutable=[ROUTING])
        return jnp.mean(logprobs), seen[ROUTING][APART][0]

    step = jax.value_and_grad(scores, has_aux=True)
    expected = jax.device_get(jax.jit(step, compiler_options=QUICK)(params, rows))
    topology = make_topology(TopologySettings(**{"data": 1, **axes}))
    places = shardings(boxed, topology.mesh)
    with topology.scope():
        batch = jax.tree.map(lambda x: jax.device_put(x, topology.batch_sharding()), rows)
        again = jax.value_and_grad(scores, has_aux=True)
        got = jax.jit(again, compiler_options=QUICK)(jax.device_put(params, places), batch)
    assert got[0][1] == expected[0][1] > 100
    assert_same((got[0][0], got[1]), (expected[0][0], expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_add_up_to_the_batch(family: str) -> None:
    """Also the auxiliary loss, whose usual form is a product of means over the micro-batch."""
    _, params, expected = single(family)
    model, batch = FAMILIES[family], batch_of()

    def sums(params: Any, rows: Any) -> Any:
        total, weight, sums = model.apply({"params": params}, rows, deterministic=False, method="loss")
        return total, (weight, sums)

    parts = [{name: array[rows] for name, array in batch.items()} for rows in (slice(0, 3), slice(3, 8))]
    step = jax.jit(jax.value_and_grad(sums, has_aux=True), compiler_options=QUICK)
    made = [jax.device_get(step(params, rows)) for rows in parts]
    (total, (weight, counted)), gradients = jax.tree.map(lambda a, b: a + b, *made)
    got = (total / weight, counted), jax.tree.map(lambda g: g / weight, gradients)
    assert_same_step(got, expected)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow) if one == "gpt" else one for one in FAMILIES]
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_row(family: str) -> None:
    _, params, _ = single(family)
    model, ids = FAMILIES[family].clone(document_mask=False), batch_of(rows=2)["input_ids"]
    wanted = jax.jit(model.apply, compiler_options=QUICK)({"params": params}, ids)

    @partial(jax.jit, compiler_options=QUICK)
    def decode(params: Any, ids: Any, cache: Any) -> Any:
        (logits, cache), seen = model.apply({"params": params}, ids, cache, method="decode", mutable=[ROUTING])
        return logits, cache, recorded(seen)

    logits, cache, chosen = decode(params, ids[:, :9], model.init_cache(2, 16))
    made, routes = [logits], [chosen]
    for place in range(9, 16):
        logits, cache, chosen = decode(params, ids[:, place : place + 1], cache.replace(empty=False))
        made.append(logits)
        routes.append(chosen)
    np.testing.assert_allclose(np.concatenate(made, axis=1), wanted, atol=2e-5 * np.abs(wanted).max())
    # what was recorded is what a training pass chooses, so it replays the same; other choices are another model
    replayed = np.concatenate(routes, axis=1)
    assert replayed.shape == (2, 16, *recorded_shape(model)) and replayed.dtype == np.int16

    @partial(jax.jit, compiler_options=QUICK)
    def score(params: Any, batch: Any) -> Any:
        hidden, seen = model.apply({"params": params}, batch, method="projection", mutable=[ROUTING])
        return hidden.hidden, seen.get(ROUTING, {}).get(APART, (-1,))[0]

    batch = {"input_ids": ids, "target_ids": ids}
    plain, nothing = score(params, batch)
    same, apart = score(params, {**batch, EXPERT_IDS: replayed})
    np.testing.assert_array_equal(plain, same)
    assert nothing == -1 and apart == 0
    moved, apart = score(params, {**batch, EXPERT_IDS: (replayed + 1) % model.experts})
    assert np.abs(np.asarray(moved) - plain).max() > 1e-3 and apart > 0.3 * replayed[..., 0].size


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_and_flops(family: str) -> None:
    """Parameters count all experts; FLOPs those that a token uses, as a dense model of the active width has."""
    model = FAMILIES[family]
    _, params, _ = single(family)
    counts = model.count_parameters()
    assert counts["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    groups: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        group = model.group_of(tuple(key.key for key in path))
        groups[group] = groups.get(group, 0) + leaf.size
    assert {name: counts[name] for name in groups} == groups
    matrices = 3 if family == "llama" else 2
    idle = model.depth * 4 * matrices * 32 * 24  # 4 of 6 experts
    assert counts["scaling"] == counts["matrix"] + counts["head"] - idle
    dense = model.clone(experts=0, experts_shared=0)
    active = dense.shape.matmul_parameters() - model.depth * matrices * 32 * (dense.shape.mlp_width - 3 * 24)
    assert model.shape.matmul_parameters() == active + model.depth * 32 * 6
    assert model.clone(expert_width=-1).shape.experts.width == 48  # 128 / 3, up to 16s


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"experts_active": 7}, r"model\.experts_active is 7"),
        ({"experts_active": 1}, r"architecture\.experts\.normalize=false"),
        ({"mlp_bias": True}, r"architecture\.mlp_bias"),
        ({"expert_groups": 4}, r"model\.expert_groups 4 does not divide"),
        ({"expert_groups": 3, "expert_groups_active": 4}, r"model\.expert_groups_active is 4"),
        ({"expert_groups": 6, "experts_active": 2}, "1 of 6 groups hold 1 experts"),
        ({"expert_groups_active": 2}, "there are no groups"),
        ({"expert_score": "tanh"}, r"architecture\.experts\.score is 'tanh'"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        FAMILIES["llama"].clone(**settings).check()
