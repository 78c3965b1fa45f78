"""Quantized frozen matrices: codes and scales, the product, and what a step keeps in memory."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import partial_eval as pe
from tests.models.test_lora import BATCH, FAMILIES, IDS, LLAMA, adapted_parts, boxed, dots, loss_of

from bessemer.errors import InputError
from bessemer.kernels.quantized import (
    CODEBOOK,
    KINDS,
    NF4,
    SAMPLING_KINDS,
    Int8,
    Quantized,
    dense,
    quantized_linear,
    size_of,
)
from bessemer.models.llama import Llama
from bessemer.models.lora import Adapted, LoraSettings, is_node, make_split, merge_adapters
from bessemer.topology import TopologySettings, make_topology, shardings, unbox

AXES = ("embed", "mlp")
# The 16 constants times 0.75 in float32 and bfloat16, as bits: a block whose largest weight is 0.75.
BITS = (
    "bf400000 bf05ab45 bec9a0c8 be97a5f8 be5a7374 be0de7ef bd8bda55 00000000 "
    "3d74787e 3df73054 3e3d03a6 3e81c26c 3ea93b8a 3ed80b80 3f0acec6 3f400000"
)
HALVES = "bf40 bf06 beca be98 be5a be0e bd8c 0000 3d74 3df7 3e3d 3e82 3ea9 3ed8 3f0b 3f40"


def matrix(m: int = 128, n: int = 96, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((m, n)) * 0.02, dtype)


def test_nf4_gives_the_constants_of_the_paper_bit_for_bit() -> None:
    """One block with every code, even rows in the high bits; the scale is exact, as its group has one value."""
    codes = np.resize(np.arange(16, dtype=np.uint8), 64)
    node = NF4(
        jnp.asarray(codes[::2] << 4 | codes[1::2])[:, None],
        jnp.zeros((1, 1), jnp.uint8),
        jnp.zeros((1, 1)),
        jnp.full((1, 1), 0.75),
    )
    assert node.shape == (64, 1)
    wide = np.asarray(node.dequantized(jnp.float32))[:16, 0]
    assert " ".join(f"{bits:08x}" for bits in wide.view(np.uint32)) == BITS
    half = np.asarray(node.dequantized(jnp.bfloat16))[:16, 0]
    assert " ".join(f"{bits:04x}" for bits in half.view(np.uint16)) == HALVES
    again = NF4.of(node.dequantized(jnp.float32))
    np.testing.assert_array_equal(again.codes, node.codes)
    assert float(again.mean[0, 0]) == 0.75 and float(again.step[0, 0]) == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0.1, 3.0),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    zeros=st.booleans(),
)
def test_errors_are_bounded_by_the_scale_of_their_block(seed: int, spread: float, dtype: str, zeros: bool) -> None:
    """NF4: half the widest gap of the constants, and the error of the scale, at most 1/28 of its group's deviation.
    Int8: half a step of the column. Values that are dequantized are quantized to the same codes."""
    random = np.random.default_rng(seed)
    w = random.standard_normal((128, 32)) * np.exp(spread * random.standard_normal((1, 32)))
    w[:64, :3] *= not zeros
    w = w.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)
    largest = np.abs(w).reshape(2, 64, 32).max(1)
    deviation = np.abs(largest - largest.mean(-1, keepdims=True)).max(-1, keepdims=True)
    bound = np.repeat(largest * 0.1520 + deviation / 28 + 1e-6 * largest.max(), 64, axis=0)
    node = _of(NF4)(w)
    back = np.asarray(node.dequantized(jnp.float32))
    assert (np.abs(back - w) <= bound).all()
    assert (back[w == 0] == 0).all() and (back[:64, :3] == 0).all() >= zeros
    scales = np.asarray(node.mean)[..., None] >= 0
    assert scales.all()
    node8 = _of(Int8)(w)
    error = np.abs(np.asarray(node8.dequantized(jnp.float32)) - w)
    assert (error <= np.abs(w).max(0) / 127 * 0.5001 + 1e-12).all()
    np.testing.assert_array_equal(_of(Int8)(node8.dequantized(jnp.float32)).codes, node8.codes)


def _of(kind: type[Quantized]):
    return jax.jit(kind.of)


def test_dequantized_weights_are_quantized_to_the_same_codes() -> None:
    """Also through bfloat16 and float16, in which a checkpoint may hold them."""
    node = NF4.of(matrix(256, 128))
    for dtype in ("float32", "bfloat16", "float16"):
        np.testing.assert_array_equal(NF4.of(node.dequantized(dtype)).codes, node.codes)


@pytest.mark.parametrize("kind", SAMPLING_KINDS)
def test_a_product_with_codes_per_weight_makes_no_dequantized_matrix(kind: str) -> None:
    """The codes go into the product: scaled first, all of W would be written and read again in every decode step."""
    node = SAMPLING_KINDS[kind].of(matrix())
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 1, 128)), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda x, w: quantized_linear(x, w, AXES, jnp.bfloat16))(x, node)
    inner = str(traced)
    assert "= mul" in inner and "bf16[128,96] = mul" not in inner and "f32[128,96] = mul" not in inner
    found = quantized_linear(x, node, AXES, jnp.bfloat16).astype("f4")
    expected = x.astype("f4") @ node.dequantized(jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_has_the_codes_of_its_matrices(kind: str) -> None:
    one, other = matrix(), matrix(seed=1)
    stacked = KINDS[kind].of(jnp.stack([one, other]))
    for layer, w in enumerate((one, other)):
        for piece, own in zip(jax.tree.leaves(stacked), jax.tree.leaves(KINDS[kind].of(w)), strict=True):
            np.testing.assert_array_equal(piece[layer], own)


def test_sizes_without_64_as_a_divisor_have_shorter_blocks_or_are_refused() -> None:
    node = NF4.of(matrix(96, 7))
    assert (node.shape, node.scales.shape, node.step.shape) == ((96, 7), (2, 7), (2, 1))  # blocks of 48
    np.testing.assert_allclose(node.dequantized(jnp.float32), matrix(96, 7), atol=0.012)
    with pytest.raises(InputError, match=r"the 134 inputs .*lora\.quantize=int8"):
        NF4.of(matrix(134, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_quantized_matrix(kind: str) -> None:
    w = matrix(192, 8)
    node = KINDS[kind].of(w)
    np.testing.assert_array_equal(node[64:].dequantized(jnp.float32), node.dequantized(jnp.float32)[64:])
    if kind == "nf4":
        with pytest.raises(InputError, match="blocks of 64 rows"):
            node[:32]


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_and_its_gradient_are_those_of_the_dequantized_matrix(kind: str) -> None:
    node, x = KINDS[kind].of(matrix()), jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, 128)), jnp.float32)

    def loss(product):
        return lambda x: jnp.sum(jnp.sin(product(x)))

    whole = dense(node)
    got = jax.value_and_grad(loss(lambda x: quantized_linear(x, node, AXES, jnp.float32)))(x)
    want = jax.value_and_grad(loss(lambda x: x @ whole))(x)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    half = quantized_linear(x.astype(jnp.bfloat16), node, AXES, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16


def as_dense(frozen):
    """The same frozen tree with arrays in the place of quantized matrices."""
    return jax.tree.map(dense, frozen, is_leaf=is_node)


def quantized_parts(model, **settings):
    """With matrices of 64 inputs, so that blocks are whole."""
    wide = {"width": 64, "depth": 2} | ({"mlp_width": 128} if isinstance(model, Llama) else {})
    model = model.clone(**wide)
    return (model, *adapted_parts(model, **{"quantize": "nf4", **settings}))


CASES = {
    "llama": ("llama", {}),
    "int8": ("llama", {"quantize": "int8"}),
    "scan, remat, tied": ("llama-tied-scan", {"targets": ("*/q", "*/down")}),
    "gpt, dora": ("gpt", {"dora": True}),
    "gpt, scan, remat, ranks": ("gpt-scan-remat", {"rank_pattern": {"*/q": 2}}),
    "packed": ("gpt-packed", {}),
}


QUICK = ("llama",)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_loss_gradients_and_decoding_are_those_of_the_dequantized_base(case: str) -> None:
    family, more = CASES[case]
    model, split, trained, frozen = quantized_parts(FAMILIES[family], **more)
    exact = model.compute_dtype == jnp.float32
    assert any(isinstance(leaf, Quantized) for leaf in jax.tree.leaves(frozen, is_leaf=is_node))

    @jax.jit
    def both(trained, frozen):
        loss, grads = jax.value_and_grad(lambda t: loss_of(model, split.complete(t, frozen)))(trained)
        cache = model.init_cache(2, 16)
        logits = model.apply({"params": split.complete(trained, frozen)}, IDS, cache, method="decode")[0]
        return loss, grads, logits

    (loss, grads, logits), (want, wanted, spoken) = both(trained, frozen), both(trained, as_dense(frozen))
    np.testing.assert_allclose(loss, want, rtol=1e-6 if exact else 5e-3)
    for path, leaf in flatten_dict(grads).items():
        other = flatten_dict(wanted)[path]
        rough = (1e-4, 1e-6) if exact else (0.1, 5e-3)
        np.testing.assert_allclose(leaf, other, rtol=rough[0], atol=rough[1] * max(1, np.abs(other).max()))
    np.testing.assert_allclose(logits, spoken, rtol=1e-4 if exact else 0.1, atol=1e-5 if exact else 0.2)


@pytest.mark.slow
def test_frozen_matrices_of_plain_products_take_half_a_byte_per_weight() -> None:
    """Adapted or not; embedding, head and norms stay as they are, and no full copy of a matrix is in the tree."""
    model = Llama(depth=2, width=256, head_dim=64, mlp_width=512, vocab_size=300, block_size=16, precision="bf16")
    split, _, frozen = adapted_parts(model, quantize="nf4", targets=("*/q",))
    flat = flatten_dict(frozen)
    nodes = {path: leaf for path, leaf in flat.items() if isinstance(leaf, Quantized)}
    matrices = ("q", "k", "v", "out", "gate", "up", "down")
    assert set(nodes) == split.quantized == {path for path in flat if path[-1] in matrices}
    weights = sum(np.prod(leaf.shape) for leaf in nodes.values())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nodes))
    assert held == split.quantized_bytes(boxed(model)) and weights == split.quantized_parameters(boxed(model))
    assert 0.515 < held / weights < 0.517
    wide = [leaf for leaf in jax.tree.leaves(nodes) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert sum(leaf.size for leaf in wide) < weights / 1000
    assert {leaf.dtype for path, leaf in flat.items() if path[0] in ("embedding", "head")} == {jnp.dtype("bfloat16")}
    eight = adapted_parts(model, quantize="int8")[0].quantized_bytes(boxed(model))
    assert 1.0 < eight / weights < 1.02


def test_the_tree_is_the_one_that_shapes_announce() -> None:
    model, split, _, frozen = quantized_parts(LLAMA)
    abstract = split.shapes(boxed(model))[1]
    assert jax.tree.structure(jax.tree.map(lambda b: 0, abstract, is_leaf=lambda b: hasattr(b, "names"))) == (
        jax.tree.structure(jax.tree.map(lambda _: 0, frozen))
    )
    for one, other in zip(
        jax.tree.leaves(unbox(abstract), is_leaf=is_node), jax.tree.leaves(frozen, is_leaf=is_node), strict=True
    ):
        assert one.shape == other.shape


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh_codes_are_split_and_the_same(kind: str) -> None:
    """Rows and columns over fsdp and tensor; quantized from pieces, to the same bits; the product is the same."""
    topology = make_topology(TopologySettings(data=2, fsdp=2, tensor=2))
    w, x = matrix(128, 96), jnp.asarray(np.random.default_rng(2).standard_normal((4, 3, 128)), jnp.float32)
    box = {"up": KINDS[kind].boxed(w.shape, AXES)}
    places = shardings(box, topology.mesh, topology.rest_rules)["up"]
    assert tuple(places.codes.spec) == (("fsdp", "pipeline"), "tensor")
    assert tuple(places.scales.spec) == (None, "tensor")
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), unbox(box)["up"], places
    )
    node, own = abstract.packed(jax.device_put(w, abstract.source().sharding)), KINDS[kind].of(w)
    assert node.codes.sharding.shard_shape(node.codes.shape)[1] == 48
    for one, other in zip(jax.tree.leaves(node), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(one, other)

    def loss(x, node):
        return jnp.sum(jnp.sin(quantized_linear(x, node, AXES, jnp.float32)))

    with topology.scope():
        got = jax.jit(jax.value_and_grad(loss))(x, node)
    for one, other in zip(got, jax.value_and_grad(loss)(x, own), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_gradient_of_a_quantized_matrix_is_computed() -> None:
    """No product has the shape of a matrix, and none of the results is a gradient of the frozen tree."""
    wide = {"depth": 2, "width": 128, "head_dim": 32, "mlp_width": 320, "vocab_size": 512, "block_size": 16}
    model = Llama(**wide, loss_chunks=1)
    split, trained, frozen = adapted_parts(model, rank=2, quantize="nf4")
    step = jax.make_jaxpr(jax.grad(lambda t, f: loss_of(model, split.complete(t, f))))(trained, frozen)
    step, _ = pe.dce_jaxpr(step.jaxpr, [True] * len(step.jaxpr.outvars))
    shapes = {leaf.shape for leaf in jax.tree.leaves(frozen, is_leaf=is_node) if len(leaf.shape) == 2}
    products = dots(types.SimpleNamespace(jaxpr=step))
    assert products and not [shape for shape, _ in products if shape in shapes or shape[::-1] in shapes]
    assert len(step.outvars) == len(jax.tree.leaves(trained))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_dequantized_matrices_of_all_layers_are_not_alive_at_once(scan: bool) -> None:
    """Temporary memory of a compiled step: a layer more costs less than its matrices in float32 would."""

    def temporary(depth: int, quantize: str) -> int:
        model = Llama(
            depth=depth, width=256, head_dim=64, mlp_width=1024, vocab_size=64, block_size=8, scan_layers=scan
        )
        split = make_split(boxed(model), lora=LoraSettings(rank=2, quantize=quantize), model=model)
        trained, frozen = (
            jax.tree.map(lambda box: box.value, part, is_leaf=lambda b: hasattr(b, "names"))
            for part in split.shapes(boxed(model))
        )
        batch = {name: ids[:1, :8] % 64 for name, ids in BATCH.items()}

        def step(t, f):
            def loss(t):
                return model.apply({"params": split.complete(t, f)}, batch, method="loss")[0]

            return jax.grad(loss)(t)

        return jax.jit(step).lower(trained, frozen).compile().memory_analysis().temp_size_in_bytes

    layer = 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    codes = layer // 8 * (2 if scan else 0)  # a scan stacks its codes, and keeps them for the backward pass
    assert temporary(4, "nf4") - temporary(2, "nf4") < 2 * (codes + layer // 4)


def test_what_cannot_be_quantized_says_so() -> None:
    with pytest.raises(InputError, match=r"lora\.quantize needs a model"):
        make_split(boxed(), lora=LoraSettings(rank=2, quantize="nf4"))


def test_merged_adapters_are_added_to_the_dequantized_matrix() -> None:
    node, a, b = NF4.of(matrix(64, 8)), matrix(64, 2), matrix(2, 8)
    adapted = Adapted(node, a, b, 2.0)
    assert adapted.shape == (64, 8)
    np.testing.assert_allclose(merge_adapters(adapted), dense(node) + 2 * a @ b, rtol=1e-6)
    assert size_of(node) == sum(leaf.nbytes for leaf in jax.tree.leaves(node))
    assert len(CODEBOOK) == 16 and dataclasses.is_dataclass(node)
