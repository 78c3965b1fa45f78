"""Adapters and frozen parameters as algebra: what is trained, and what the model then sees."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.interpreters import partial_eval as pe
from tests.tiny_run import random_params, tiny_model, tiny_params

from bessemer.errors import InputError
from bessemer.kernels.ops import dropout, row_keys
from bessemer.losses.cross_entropy import Projection, cross_entropy
from bessemer.losses.distillation import TopTokens, distillation_loss
from bessemer.losses.divergence import kl_regularized_loss
from bessemer.losses.token_scores import policy_scores, token_logprobs
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.models.lora import (
    A,
    Adapted,
    B,
    LoraSettings,
    M,
    for_rows,
    holds_several,
    make_split,
    merge_adapters,
    merged,
    project,
    project_all,
    split_of,
    stack_adapters,
)
from bessemer.topology import make_topology, planned_for, shardings, unbox

IDS = np.random.default_rng(0).integers(0, 300, (2, 16)).astype(np.int32)


def boxed(model: GPT | None = None):
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return jax.eval_shape((model or tiny_model()).init, jax.random.key(0), ids)["params"]


def lora_split(**settings):
    return make_split(boxed(), lora=LoraSettings(**{"rank": 4, **settings}), model=tiny_model())


def names(tree) -> set[str]:
    return {"/".join(path) for path in flatten_dict(tree)}


def test_at_first_the_model_is_the_base_bit_for_bit() -> None:
    split, params = lora_split(), tiny_params()
    trained, frozen = split.divide(params, jax.random.key(1))
    whole = split.complete(trained, frozen)
    plain = merge_adapters(whole)
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.abs(leaf).max() > 0 for path, leaf in flatten_dict(trained).items() if path[-1] == A)
    apply = jax.jit(lambda p: tiny_model().apply({"params": p}, IDS))
    np.testing.assert_array_equal(apply(whole), apply(params))


def test_the_default_targets_are_the_matrices_of_the_layers() -> None:
    trained, frozen = lora_split().shapes(boxed())
    matrices = {f"blocks_{n}/{name}" for n in (0, 1) for name in ("q", "k", "v", "out", "up", "down")}
    assert names(trained) == {f"{name}/{part}" for name in matrices for part in (A, B)}
    assert names(frozen) == names(boxed())  # the base stays whole
    few = lora_split(targets=("*/q", "blocks_1/v"), whole=("head",))
    assert names(few.shapes(boxed())[0]) == {
        f"{name}/{part}" for name in ("blocks_0/q", "blocks_1/q", "blocks_1/v") for part in (A, B)
    } | {"head"}
    assert "head" not in names(few.shapes(boxed())[1])  # each parameter is in one place


def test_trained_parameters_are_counted() -> None:
    model = tiny_model()
    width, mlp = 32, 128
    matrices = 4 * 4 * (width + width) + 2 * 4 * (width + mlp)  # q, k, v, out; up, down; per layer
    assert lora_split().count(boxed()) == (2 * matrices, model.count_parameters()["total"])


LLAMA = Llama(depth=3, width=32, head_dim=16, mlp_width=64, vocab_size=300, block_size=16, attention_bias="qkv")
FAMILIES = {
    "gpt": tiny_model(),
    "gpt-scan-remat": tiny_model().clone(depth=4, scan_layers=True, remat=["block"]),
    "llama": LLAMA,
    "llama-tied-scan": LLAMA.clone(tied_head=True, scan_layers=True, remat=["q", "mlp_hidden"]),
    "gpt-packed": tiny_model().clone(head_dim=32, kernels="pallas", precision="bf16"),
}
BATCH = {"input_ids": IDS, "target_ids": np.roll(IDS, -1, 1)}


def loss_of(model, params):
    return model.apply({"params": params}, BATCH, method="loss")[0] / IDS.size


def adapted_parts(model, **settings):
    """(split, trained, frozen) with adapters that do something."""
    split = make_split(boxed(model), lora=LoraSettings(**{"rank": 4, "alpha": 6.0, **settings}), model=model)
    trained, frozen = split.divide(random_params(model, scale=0.2), jax.random.key(1))
    return split, jax.tree.map(lambda leaf: leaf + 0.02, trained), frozen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_beside_their_matrices_equal_the_merged_form(family: str) -> None:
    """Loss, gradients and decoding, to rounding: float32, or bf16 where the kernels ask for it."""
    model = FAMILIES[family]
    split, trained, frozen = adapted_parts(model)
    exact = model.compute_dtype == jnp.float32
    rough = {"rtol": 1e-4, "atol": 1e-6} if exact else {"rtol": 0.1, "atol": 2e-3}

    def beside(t):
        return loss_of(model, split.complete(t, frozen))

    def merged_form(t):
        return loss_of(model, merge_adapters(split.complete(t, frozen)))

    (got, grads), (want, wanted) = (jax.jit(jax.value_and_grad(f))(trained) for f in (beside, merged_form))
    np.testing.assert_allclose(got, want, rtol=1e-6 if exact else 2e-3)
    for path, leaf in flatten_dict(grads).items():
        other = flatten_dict(wanted)[path]
        np.testing.assert_allclose(leaf, other, rtol=rough["rtol"], atol=rough["atol"] * max(1, np.abs(other).max()))
        assert leaf.dtype == jnp.float32 and np.abs(leaf).max() > 0
    whole = split.complete(trained, frozen)
    cache = model.init_cache(2, 16)
    both = [
        jax.jit(lambda p: model.apply({"params": p}, IDS, cache, method="decode")[0])(p)
        for p in (whole, merge_adapters(whole))
    ]
    np.testing.assert_allclose(*both, rtol=1e-4 if exact else 0.1, atol=1e-5 if exact else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama-tied-scan", "gpt-packed"])
def test_dora_scales_columns_by_a_trained_length(family: str) -> None:
    """y = m/‖W + sAB‖ · (xW + s·xAB) equals the merged form, begins at the base, and its norm has no gradient."""
    model = FAMILIES[family]
    exact = model.compute_dtype == jnp.float32
    split, trained, frozen = adapted_parts(model, dora=True)
    whole = split.complete(trained, frozen)
    one, other = loss_of(model, whole), loss_of(model, merge_adapters(whole))
    np.testing.assert_allclose(one, other, rtol=1e-5 if exact else 5e-3)
    fresh, base = split.divide(random_params(model, scale=0.2), jax.random.key(1))
    np.testing.assert_allclose(
        loss_of(model, split.complete(fresh, base)), loss_of(model, base), rtol=1e-6 if exact else 1e-3
    )

    def by_hand(t):
        flat, given = flatten_dict(frozen), flatten_dict(t)
        for path in split.adapted:
            a, b, m = (given[(*path, name)] for name in (A, B, M))
            full = flat[path].astype(jnp.float32) + 1.5 * a @ b
            flat[path] = full * (m / jax.lax.stop_gradient(jnp.linalg.norm(full, axis=0)))
        return loss_of(model, unflatten_dict(flat))

    if exact:
        got = flatten_dict(jax.grad(lambda t: loss_of(model, split.complete(t, frozen)))(trained))
        for path, leaf in flatten_dict(jax.grad(by_hand)(trained)).items():
            np.testing.assert_allclose(got[path], leaf, rtol=2e-4, atol=1e-5 * np.abs(leaf).max(), err_msg=str(path))


@pytest.mark.slow
def test_dropout_is_of_the_row_and_of_training_alone() -> None:
    """A row drops the same entries whatever rows stand beside it; evaluation drops none; the base's product none."""
    model = LLAMA
    split, trained, frozen = adapted_parts(model, dropout=0.5)
    whole = split.complete(trained, frozen)
    keys = row_keys(jax.random.key(3), jnp.arange(2))

    @jax.jit
    def hidden(params, ids, keys, deterministic=False):
        return model.apply({"params": params}, ids, deterministic=deterministic, keys=keys, method="hidden")

    both, second = hidden(whole, IDS, keys), hidden(whole, IDS[1:], keys[1:])
    np.testing.assert_allclose(both[1:], second, atol=1e-6)
    assert np.abs(hidden(whole, IDS, row_keys(jax.random.key(4), jnp.arange(2))) - both).max() > 1e-3
    plain = make_split(boxed(model), lora=LoraSettings(rank=4, alpha=6.0), model=model).complete(trained, frozen)
    evaluated = model.apply({"params": whole}, IDS, method="hidden")
    np.testing.assert_array_equal(evaluated, model.apply({"params": plain}, IDS, method="hidden"))
    silent = jax.tree.map(jnp.zeros_like, trained)
    unchanged = hidden(split.complete(silent, frozen), IDS, keys)
    np.testing.assert_allclose(unchanged, model.apply({"params": frozen}, IDS, method="hidden"), atol=1e-6)


def test_dropped_entries_are_those_of_the_formula() -> None:
    """x W + s·(drop(x) A) B with x/(1 − p) or 0 in the place of x."""
    random = np.random.default_rng(0)
    x, w, a, b = (jnp.asarray(random.standard_normal(n), jnp.float32) for n in ((2, 5, 8), (8, 6), (8, 2), (2, 6)))
    keys = row_keys(jax.random.key(0), jnp.arange(2))
    got = project(x, Adapted(w, a, b, 0.5, keys=keys, dropout=0.25), ("embed", "mlp"), jnp.float32)
    dropped = dropout(x, 0.25, keys)
    assert 0 < (np.asarray(dropped) == 0).mean() < 0.5
    np.testing.assert_allclose(got, x @ w + 0.5 * (dropped @ a) @ b, rtol=1e-5, atol=1e-5)


def test_ranks_by_pattern() -> None:
    split, trained, frozen = adapted_parts(LLAMA, rank_pattern={"blocks_1/q": 1, "*/q": 2, "*down": 8})
    ranks = {"/".join(path[:-1]): leaf.shape[1] for path, leaf in flatten_dict(trained).items() if path[-1] == A}
    assert (ranks["blocks_0/q"], ranks["blocks_1/q"], ranks["blocks_2/down"], ranks["blocks_0/v"]) == (2, 1, 8, 4)
    whole = split.complete(trained, frozen)
    assert (whole["blocks_0"]["q"].scale, whole["blocks_0"]["down"].scale) == (3.0, 0.75)  # α / its own rank
    np.testing.assert_allclose(loss_of(LLAMA, whole), loss_of(LLAMA, merge_adapters(whole)), rtol=1e-6)
    assert split == adapted_parts(LLAMA, rank_pattern={"blocks_1/q": 1, "*/q": 2, "*down": 8})[0] and hash(split)
    with pytest.raises(InputError, match=r"lora\.rank_pattern: 'blocks_9/q' matches no parameter"):
        adapted_parts(LLAMA, rank_pattern={"blocks_9/q": 2})


@pytest.mark.parametrize("family", ["llama", "gpt-packed", "llama-tied-scan"])
def test_several_adapters_over_one_base_are_chosen_by_row(family: str) -> None:
    """Other ranks, scales, targets and DoRA, and no adapter: each row as if its adapter were alone."""
    model = FAMILIES[family]
    kinds = [{"rank": 2}, {"dora": True, "alpha": 3.0, "targets": ("*/q", "*/down")}, {"targets": ("blocks_1/up",)}]
    splits = [adapted_parts(model, **kind) for kind in kinds]
    base = splits[0][2]
    nodes = []
    for split, trained, _ in splits:
        whole = flatten_dict(split.complete(trained, base), is_leaf=lambda _, leaf: isinstance(leaf, Adapted))
        nodes.append({path: whole[path] for path in split.adapted})
    held = stack_adapters(base, nodes)
    assert holds_several(held) and not holds_several(base)
    rows, ids = np.array([2, 0, 3, 1]), np.tile(IDS[:1], (4, 1))
    logits = jax.jit(lambda p, r: model.apply({"params": for_rows(p, r)}, ids))(held, rows)
    alone = [base, *(split.complete(trained, base) for split, trained, _ in splits)]
    loose = 1e-4 if model.compute_dtype == jnp.float32 else 0.1
    for row, number in enumerate(rows):
        wanted = jax.jit(lambda p: model.apply({"params": p}, ids[:1]))(alone[number])
        np.testing.assert_allclose(logits[row], wanted[0], rtol=loose, atol=loose)
        assert number == 2 or np.abs(logits[row] - logits[0]).max() > 2 * loose


def test_all_linear_is_the_default_by_name() -> None:
    assert lora_split(targets=("all-linear",)).adapted == lora_split().adapted


@pytest.mark.parametrize("setting", [{"dora": True}, {"dropout": 0.1}])
def test_a_table_takes_no_dora_and_no_dropout(setting) -> None:
    with pytest.raises(
        InputError, match=f"lora.{next(iter(setting))} is for matrices of plain products, and 'embedding'"
    ):
        adapted_parts(LLAMA, targets=("embedding", "*/q"), **setting)


def test_the_base_is_multiplied_in_float8_and_the_adapter_beside_it() -> None:
    """Training passes of an fp8 run: close to the same pass without float8, and not equal to it."""
    wide = GPT(depth=2, width=128, head_dim=32, vocab_size=300, window="L", block_size=16, fp8_emulate=True)
    split, trained, frozen = adapted_parts(wide)

    def loss(precision):
        model = wide.clone(precision=precision)
        return model.apply({"params": split.complete(trained, frozen)}, BATCH, deterministic=False, method="loss")[0]

    rounded, exact = loss("fp8"), loss("float32")
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=0.02)


def test_only_some_of_the_packed_matrices_adapted() -> None:
    model = FAMILIES["gpt-packed"]
    split, trained, frozen = adapted_parts(model, targets=("*/q", "blocks_1/v", "*/up"))
    whole = split.complete(trained, frozen)
    one, other = loss_of(model, whole), loss_of(model, merge_adapters(whole))
    np.testing.assert_allclose(one, other, rtol=2e-3)


def test_layers_with_different_adapters_are_scanned_apart() -> None:
    model = FAMILIES["gpt-scan-remat"]
    split, trained, frozen = adapted_parts(model, targets=("blocks_1/*q", "blocks_3/up"))
    whole = split.complete(trained, frozen)
    np.testing.assert_allclose(loss_of(model, whole), loss_of(model, merge_adapters(whole)), rtol=1e-6)


def test_a_table_is_merged_inside_the_step() -> None:
    """An embedding is looked up and a head is read by the loss: their adapters are merged, and trained."""
    split, trained, frozen = adapted_parts(LLAMA, targets=("embedding", "head", "*/q"))
    assert split.tables == {("embedding",), ("head",)} and not {("embedding",), ("head",)} & split.narrow
    whole = split.complete(trained, frozen)
    assert isinstance(whole["blocks_0"]["q"], Adapted) and not isinstance(whole["head"], Adapted)
    grads = jax.grad(lambda t: loss_of(LLAMA, split.complete(t, frozen)))(trained)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def dots(closed) -> list[tuple[tuple[int, ...], int]]:
    """(result shape, FLOPs) of every matrix product in a traced function, scans counted as often as they run."""
    found = []

    def visit(jaxpr, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                shape = eqn.outvars[0].aval.shape
                (summed, _), _ = eqn.params["dimension_numbers"]
                inner = np.prod([eqn.invars[0].aval.shape[axis] for axis in summed])
                found.append((shape, int(2 * times * np.prod(shape) * inner)))
            for value in eqn.params.values():
                for inner_jaxpr in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                    if hasattr(inner_jaxpr, "eqns") or hasattr(inner_jaxpr, "jaxpr"):
                        visit(getattr(inner_jaxpr, "jaxpr", inner_jaxpr), times * eqn.params.get("length", 1))

    visit(closed.jaxpr, 1)
    return found


def test_no_gradient_of_a_frozen_matrix_is_computed() -> None:
    """No product has the shape of an adapted matrix or of the head, and one pass takes 4 FLOPs a frozen parameter and
    6 of an adapter where full training takes 6 of each."""
    wide = {"depth": 2, "width": 128, "head_dim": 32, "mlp_width": 320, "vocab_size": 512, "block_size": 16}
    model = Llama(**wide, loss_chunks=1)
    split, trained, frozen = adapted_parts(model, rank=2)
    step = jax.make_jaxpr(jax.grad(lambda t, f: loss_of(model, split.complete(t, f))))(trained, frozen)
    step, _ = pe.dce_jaxpr(step.jaxpr, [True] * len(step.jaxpr.outvars))
    products = dots(types.SimpleNamespace(jaxpr=step))
    shapes = {leaf.shape for leaf in jax.tree.leaves(frozen) if leaf.ndim == 2}
    assert not [shape for shape, _ in products if shape in shapes or shape[::-1] in shapes]
    matrices = sum(
        leaf.size for path, leaf in flatten_dict(frozen).items() if path[-1] != "embedding" and leaf.ndim == 2
    )
    adapters = sum(leaf.size for leaf in jax.tree.leaves(trained))
    attention = 2 * 3 * 2 * 2 * IDS.size * 16 * 128  # two products in two layers, thrice
    first = 3 * (128 * 128 + 128 * 2)  # the frozen embeddings need no gradient from q, k, v and their A in layer 0
    assert sum(count for _, count in products) == attention + IDS.size * (4 * matrices + 6 * adapters - 2 * first)


MIXED = {
    "all of them": ("adapted", "adapted", "adapted"),
    "not the second": ("adapted", "plain", "adapted"),
    "one of them": ("plain", "adapted", "plain"),
}


def kernels_of(kinds, dora=False, ranks=(2, 3, 4)):
    """Matrices with one input, some of them with adapters, of different ranks and widths."""
    rng = np.random.default_rng(5)

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    made = []
    for kind, rank, width in zip(kinds, ranks, (12, 6, 6), strict=True):
        w = matrix(8, width)
        adapted = Adapted(w, matrix(8, rank), matrix(rank, width), 0.5, m=matrix(width) if dora else None)
        made.append(adapted if kind == "adapted" else w)
    return made


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kinds", MIXED.values(), ids=MIXED)
def test_adapters_that_share_an_input_read_it_together(kinds, dora) -> None:
    """The same products and gradients as one after the other; x is read once for all A's, forward and backward."""
    kernels, axes = kernels_of(kinds, dora), [("embed", "heads"), ("embed", "kv"), ("embed", "kv")]
    x = jnp.asarray(np.random.default_rng(6).standard_normal((2, 5, 8)), jnp.float32)

    def alone(x, kernels):
        return [project(x, kernel, one, jnp.float32) for kernel, one in zip(kernels, axes, strict=True)]

    def together(x, kernels):
        return project_all(x, kernels, axes, jnp.float32)

    def gradients(function):
        return jax.grad(lambda x, k: sum(jnp.sum(jnp.sin(y)) for y in function(x, k)), argnums=(0, 1))

    for own, expected in zip(together(x, kernels), alone(x, kernels), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(*(jax.tree.leaves(gradients(f)(x, kernels)) for f in (together, alone)), strict=True)
    for own, expected in pairs:
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
    ranks = [kernel.a.shape[-1] for kernel in kernels if isinstance(kernel, Adapted)]
    shapes = [shape for shape, _ in dots(jax.make_jaxpr(gradients(together))(x, kernels))]
    assert [shape for shape in shapes if shape[-2:] == (5, sum(ranks))], "one product with all A's"
    assert (8, sum(ranks)) in shapes, "one product for the gradient of all A's"


def test_adapters_with_dropout_read_their_own_input() -> None:
    """Each has its own dropped entries; those of training only."""
    kernels, axes = kernels_of(MIXED["all of them"]), [("embed", "heads"), ("embed", "kv"), ("embed", "kv")]
    x = jnp.ones((2, 5, 8), jnp.float32)
    dropping = [
        dataclasses.replace(kernel, dropout=0.5, keys=row_keys(jax.random.key(n), jnp.arange(2)))
        for n, kernel in enumerate(kernels)
    ]
    expected = [project(x, kernel, one, jnp.float32) for kernel, one in zip(dropping, axes, strict=True)]
    for own, other in zip(project_all(x, dropping, axes, jnp.float32), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    evaluated = [dataclasses.replace(kernel, dropout=0.5) for kernel in kernels]
    for own, other in zip(*(project_all(x, k, axes, jnp.float32) for k in (evaluated, kernels)), strict=True):
        np.testing.assert_array_equal(own, other)


HIDDEN, HEAD = (np.random.default_rng(n).standard_normal(s).astype("f4") for n, s in ((1, (2, 6, 8)), (2, (8, 64))))
TARGETS, ONES = np.random.default_rng(3).integers(0, 60, (2, 6)), np.ones((2, 6), "f4")
TOP = TopTokens(np.tile(np.arange(4), (2, 6, 1)), np.full((2, 6, 4), np.log(0.2), "f4"))


def against(h, w):
    """Another model's hidden states and head."""
    return Projection(0.5 * jax.lax.stop_gradient(h), 0.9 * jax.lax.stop_gradient(w), 60)


HEAD_LOSSES = {
    "cross-entropy": lambda h, w: cross_entropy(h, w, TARGETS, ONES, vocab_size=60, chunks=3)[0],
    "cross-entropy-kernel": lambda h, w: cross_entropy(
        h.astype("bfloat16"), w, TARGETS, ONES, vocab_size=60, kernels="pallas"
    )[0],
    "kl": lambda h, w: kl_regularized_loss(Projection(h, w, 60, chunks=3), against(h, w), TARGETS, ONES, 0.3).loss,
    "distill": lambda h, w: distillation_loss(
        Projection(h, w, 60), against(h, w), TARGETS, ONES, alpha=0.7, temperature=2.0, chunks=3
    )[0],
    "distill-stored": lambda h, w: distillation_loss(
        Projection(h, w, 60), TOP, TARGETS, ONES, alpha=0.7, temperature=2.0, chunks=3
    )[0],
    "dpo": lambda h, w: jax.nn.softplus(token_logprobs(Projection(h, w, 60, chunks=3), TARGETS).sum(1)).sum(),
    "grpo": lambda h, w: jnp.exp(policy_scores(Projection(h, w, 60, chunks=3), TARGETS, 0.8)[0]).sum(),
}


@pytest.mark.parametrize("name", HEAD_LOSSES)
def test_a_frozen_head_has_no_gradient_product(name: str) -> None:
    """Of every loss, in the traced program itself, before any compiler drops what is unused: dW is (D, V), and the
    gradient in `hidden` is what it is with a trained head."""
    loss = HEAD_LOSSES[name]
    frozen, both = jax.grad(loss), jax.grad(loss, argnums=(0, 1))

    def head_shaped(function) -> int:
        return sum(sorted(shape)[-2:] == [8, 64] for shape, _ in dots(jax.make_jaxpr(function)(HIDDEN, HEAD)))

    assert head_shaped(frozen) == 0 and head_shaped(both) == 1
    np.testing.assert_array_equal(frozen(HIDDEN, HEAD), both(HIDDEN, HEAD)[0])


@pytest.mark.parametrize("tied", [False, True])
def test_the_llama_family_takes_the_one_pass_loss_kernel(tied: bool) -> None:
    """With bf16 and kernels=pallas (auto on a GPU): one kernel makes the gradient of a tile of logits."""
    model = LLAMA.clone(tied_head=tied, precision="bf16", kernels="pallas", depth=1)
    split, trained, frozen = adapted_parts(model)

    def kernels(model) -> list[str]:
        traced = jax.make_jaxpr(jax.grad(lambda t: loss_of(model, split.complete(t, frozen))))(trained)
        return [line for line in str(traced).splitlines() if "pallas_call" in line and "320]" in line]

    assert len(kernels(model)) == 1 and not kernels(model.clone(kernels="xla"))


def test_frozen_matrices_are_stored_in_the_compute_dtype() -> None:
    """bf16 compute: matrices and tables are bf16 in memory, norms, biases and gates float32, adapters float32. The loss
    is bit for bit that of a float32 base, which every use would cast."""
    model = LLAMA.clone(precision="bf16")
    split, trained, frozen = adapted_parts(model)
    for path, leaf in flatten_dict(frozen).items():
        assert leaf.dtype == (jnp.bfloat16 if leaf.ndim == 2 else jnp.float32), path
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    abstract = flatten_dict(unbox(split.shapes(boxed(model))[1]))
    assert {path: leaf.dtype for path, leaf in abstract.items()} == {
        path: leaf.dtype for path, leaf in flatten_dict(frozen).items()
    }
    wide, _, whole = adapted_parts(model, base_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {jnp.dtype("float32")}
    one, other = loss_of(model, split.complete(trained, frozen)), loss_of(model, wide.complete(trained, whole))
    np.testing.assert_array_equal(one, other)
    gates = {
        path[-1]
        for path, leaf in flatten_dict(adapted_parts(tiny_model().clone(precision="bf16"))[2]).items()
        if leaf.dtype == jnp.float32 and leaf.ndim == 2
    }
    assert gates == {"value_gate", "smear_gate"}


def test_merged_is_the_formula_also_for_stacked_layers() -> None:
    random = np.random.default_rng(3)
    w, a, b = (random.standard_normal(size) for size in ((3, 8, 6), (3, 8, 2), (3, 2, 6)))
    got = merged(*(jnp.asarray(x, jnp.float32) for x in (w, a, b)), 0.5)
    np.testing.assert_allclose(got, w + 0.5 * np.einsum("lmr,lrn->lmn", a, b), rtol=1e-6, atol=1e-6)
    x = random.standard_normal((5, 8))
    apart = x @ w[0] + 0.5 * (x @ a[0]) @ b[0]
    np.testing.assert_allclose(x @ np.asarray(got[0], np.float64), apart, rtol=1e-6, atol=1e-6)


def test_adapters_lie_along_the_axes_of_their_matrix() -> None:
    stack = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((2, 8, 16), jnp.float32), ("layers", "embed", "mlp"))
    split = make_split({"up": stack}, lora=LoraSettings(rank=2))
    adapters = split.shapes({"up": stack})[0]["up"]
    assert adapters[A].names == ("layers", "embed", None) and adapters[A].value.shape == (2, 8, 2)
    assert adapters[B].names == ("layers", None, "mlp") and adapters[B].value.shape == (2, 2, 16)
    topology = make_topology(devices=jax.devices()[:8])
    placed = shardings(split.shapes({"up": stack})[0], topology.mesh, topology.rest_rules)
    assert "tensor" in placed["up"][B].spec and "tensor" not in placed["up"][A].spec


def test_draws_do_not_depend_on_what_else_is_adapted() -> None:
    params, key = tiny_params(), jax.random.key(7)
    all_of_them, _ = lora_split().divide(params, key)
    one, _ = lora_split(targets=("blocks_1/up",)).divide(params, key)
    np.testing.assert_array_equal(one["blocks_1"]["up"][A], all_of_them["blocks_1"]["up"][A])
    gaussian, _ = lora_split(init="gaussian", rank=16).divide(params, key)
    assert np.std(gaussian["blocks_0"]["down"][A]) == pytest.approx(1 / 16, rel=0.1)


def test_frozen_by_pattern() -> None:
    split = make_split(boxed(), ("embedding", "blocks_0/*"))
    params = tiny_params()
    trained, frozen = split.divide(params, jax.random.key(0))
    assert names(trained) | names(frozen) == names(params) and not names(trained) & names(frozen)
    assert {name for name in names(frozen) if not name.startswith("blocks_0/")} == {"embedding"}
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, split.complete(trained, frozen), params))
    assert make_split(boxed()).everything


@pytest.mark.parametrize(
    ("freeze", "lora", "message"),
    [
        (("blocks_9/*",), {}, "training.freeze: 'blocks_9/*' matches no parameter"),
        (("embeding",), {}, "Did you mean 'embedding'"),
        (("q",), {}, r"'\*q\*', as in blocks_0/q"),
        (("*",), {}, "leaves nothing to train"),
        (("embedding",), {"rank": 2}, "do not go together"),
        ((), {"rank": 2, "targets": ("*/w_q",)}, "lora.targets: '\\*/w_q' matches no parameter"),
        ((), {"rank": 2, "targets": ("rho",)}, "needs a matrix"),
        ((), {"rank": 64}, "lora.rank=64 is more than the 32"),
    ],
)
def test_a_wrong_pattern_says_what_is_wrong(freeze, lora, message) -> None:
    with pytest.raises(InputError, match=message.replace("*'", "\\*'") if "\\" not in message else message):
        make_split(boxed(), freeze, LoraSettings(**lora), tiny_model()).shapes(boxed())


def test_a_saved_configuration_gives_the_same_split() -> None:
    saved = {"lora/rank": 4, "lora/alpha": 8.0, "lora/targets": ["*/q"], "training/freeze": []}
    split = split_of(saved, boxed(), tiny_model())
    assert split == lora_split(alpha=8.0, targets=("*/q",)) and split.lora.scale == 2.0
    assert split_of({}, boxed(), tiny_model()).everything


@pytest.mark.parametrize("tokens", [1, 2**14])
def test_a_small_product_with_an_adapter_is_kept_apart_on_a_gpu(tokens: int) -> None:
    """XLA would join it with the product with W, copying W in every decode step."""
    x = jax.ShapeDtypeStruct((2, tokens, 1024), jnp.bfloat16)
    w, a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 64), (1024, 4), (4, 64)))

    def product(x, w, a, b):
        return project(x, Adapted(w, a, b, 1.0), ("embed", "heads"), jnp.bfloat16)

    with planned_for("gpu"):
        traced = str(jax.make_jaxpr(product)(x, w, a, b))
    assert ("optimization_barrier" in traced) == (tokens == 1)
    assert "optimization_barrier" not in str(jax.make_jaxpr(lambda *args: product(*args))(x, w, a, b))
