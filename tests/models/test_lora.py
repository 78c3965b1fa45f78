"""Adapters and frozen parameters as algebra: what is trained, and what the model then sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from tests.tiny_run import tiny_model, tiny_params

from bessemer.errors import InputError
from bessemer.models.gpt import GPT
from bessemer.models.lora import A, B, LoraSettings, make_split, merged, split_of
from bessemer.topology import make_topology, shardings

IDS = np.random.default_rng(0).integers(0, 300, (2, 16)).astype(np.int32)


def boxed(model: GPT | None = None):
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return jax.eval_shape((model or tiny_model()).init, jax.random.key(0), ids)["params"]


def lora_split(**settings):
    return make_split(boxed(), lora=LoraSettings(**{"rank": 4, **settings}), group_of=GPT.group_of)


def names(tree) -> set[str]:
    return {"/".join(path) for path in flatten_dict(tree)}


def test_at_first_the_model_is_the_base_bit_for_bit() -> None:
    split, params = lora_split(), tiny_params()
    trained, frozen = split.divide(params, jax.random.key(1))
    whole = split.complete(trained, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.abs(leaf).max() > 0 for path, leaf in flatten_dict(trained).items() if path[-1] == A)


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


def test_gradients_are_those_of_the_formula() -> None:
    """dA = s·dW'·Bᵀ and dB = s·Aᵀ·dW', by hand from the gradient of a model with the merged matrix."""
    model, split = tiny_model(), lora_split(alpha=6.0)
    trained, frozen = split.divide(tiny_params(), jax.random.key(1))
    trained = jax.tree.map(lambda leaf: leaf + 0.05, trained)  # B away from 0
    batch = {"input_ids": IDS, "target_ids": np.roll(IDS, -1, 1)}

    def loss(params):
        return model.apply({"params": params}, batch, method="loss")[0]

    @jax.jit
    def both(trained):
        inside = jax.grad(lambda t: loss(split.complete(t, frozen)))(trained)
        return inside, jax.grad(loss)(split.complete(trained, frozen))

    got, full = (flatten_dict(tree) for tree in both(trained))
    given = flatten_dict(trained)
    for path in split.adapted:
        dw = np.asarray(full[path], np.float64)
        a, b = (np.asarray(given[(*path, name)], np.float64) for name in (A, B))
        np.testing.assert_allclose(got[(*path, A)], 1.5 * dw @ b.T, rtol=2e-3, atol=1e-5 * np.abs(dw).max())
        np.testing.assert_allclose(got[(*path, B)], 1.5 * a.T @ dw, rtol=2e-3, atol=1e-5 * np.abs(dw).max())


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
        make_split(boxed(), freeze, LoraSettings(**lora), GPT.group_of).shapes(boxed())


def test_a_saved_configuration_gives_the_same_split() -> None:
    saved = {"lora/rank": 4, "lora/alpha": 8.0, "lora/targets": ["*/q"], "training/freeze": []}
    split = split_of(saved, boxed(), GPT.group_of)
    assert split == lora_split(alpha=8.0, targets=("*/q",)) and split.lora.scale == 2.0
    assert split_of({}, boxed(), GPT.group_of).everything
