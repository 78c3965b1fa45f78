"""`generate.weights`: 8-bit matrices for sampling. The error is bounded, bytes halve, scores are the sampler's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.tiny_run import make_run, random_params, tiny_model

from bessemer.errors import InputError, TrainingError
from bessemer.generate import Engine, Request, load_model, sample
from bessemer.generate.weights import Quantizer
from bessemer.job import RunDirectory
from bessemer.kernels.quantized import SAMPLING_KINDS, Float8, Int8, Quantized, size_of
from bessemer.models.gpt import GPT
from bessemer.models.llama import Llama
from bessemer.models.lora import Adapted
from bessemer.models.protocol import LanguageModel
from bessemer.storage.weights import flatten

SHAPE: dict[str, Any] = {"depth": 1, "width": 128, "head_dim": 32, "vocab_size": 60, "block_size": 32}
MODELS = {"gpt": GPT(**SHAPE, precision="float32"), "llama": Llama(**SHAPE, kv_heads=2, precision="float32")}
SIZES = {"family": "gpt", "depth": 2, "width": 32, "head_dim": 16, "vocab_size": 300, "window": "L"}
IDS = np.random.default_rng(0).integers(0, 60, (2, 24))


def nodes(params: Any) -> list[Quantized]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return [leaf for leaf in leaves if isinstance(leaf, Quantized)]


def test_float8_weights_are_within_a_sixteenth_or_a_thousandth_of_their_column() -> None:
    random = np.random.default_rng(0)
    w = random.standard_normal((96, 40)) * np.exp(2 * random.standard_normal((1, 40)))
    w[:, 3], w[5, 4] = 0, 1e-30
    w = w.astype(np.float32)
    node = jax.jit(Float8.of)(w)
    assert node.codes.dtype == jnp.float8_e4m3fn and node.shape == (96, 40) and node.scales.shape == (1, 40)
    back, scales = np.asarray(node.dequantized(jnp.float32)), np.asarray(node.scales)
    assert (np.abs(back - w) <= np.maximum(np.abs(w) / 16, scales * 2.0**-10) * 1.0001).all()
    np.testing.assert_allclose(np.abs(back).max(0), np.abs(w).max(0), rtol=1e-6)  # the largest of a column is exact
    x = random.standard_normal((2, 3, 96)).astype(np.float32)
    np.testing.assert_allclose(node.times(x, (None, None), jnp.float32), x @ back, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(node[32:].dequantized(jnp.float32), back[32:])
    stack = Float8.of(jnp.stack([w, 2 * w]))
    np.testing.assert_array_equal(stack.dequantized(jnp.float32)[1], 2 * back)


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.06), ("int8", 0.02)])
@pytest.mark.parametrize("family", MODELS)
def test_bytes_halve_and_the_error_of_the_logits_is_small(family: str, kind: str, bound: float) -> None:
    """rms error over the logits' standard deviation. Bytes against bf16; a scale per 128 weights is 3% more."""
    model = MODELS[family]
    params = random_params(model, 1, scale=0.08)
    made = Quantizer(model, kind)(params)
    found = nodes(made)
    assert found and all(isinstance(node, SAMPLING_KINDS[kind]) for node in found)
    matrices = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if model.group_of(tuple(key.key for key in path)) == "matrix"
    ]
    assert sum(map(size_of, found)) <= 0.52 * sum(leaf.size * 2 for leaf in matrices)
    assert made["embedding"] is params["embedding"], "what is not quantized is not copied"
    call = jax.jit(lambda params: model.apply({"params": params}, IDS))
    plain, rough = (np.asarray(call(tree)) for tree in (params, made))
    error = np.sqrt(np.mean((plain - rough) ** 2)) / plain.std()
    assert 0 < error < bound


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_recorded_logprobs_are_those_of_the_quantized_sampler(kind: str) -> None:
    model = MODELS["llama"]
    params = random_params(model, 1)
    engine = Engine(model, params, slots=2, steps=8, end_ids=(), weights=kind)
    result = engine.generate([Request((1, 5, 9), 12, logprobs=True)])[0].samples[0]
    ids = np.array([[1, 5, 9, *result.ids]])
    own, plain = (
        np.asarray(jax.nn.log_softmax(model.apply({"params": tree}, ids)))[0, 2:-1]
        for tree in (Quantizer(model, kind)(params), params)
    )
    chosen = np.array(result.ids)
    np.testing.assert_allclose(result.logprobs, own[np.arange(12), chosen], atol=2e-5)
    np.testing.assert_array_equal(chosen, own.argmax(-1))
    assert np.abs(plain - own).max() > 1e-3
    engine.update_params(jax.tree.map(lambda leaf: leaf * 1.1, params))  # a later rollout's: quantized anew
    other = engine.generate([Request((1, 5, 9), 12, logprobs=True)])[0].samples[0]
    assert other.logprobs != result.logprobs


def test_a_loaded_model_is_quantized_in_place_of_its_matrices(tmp_path: Any) -> None:
    loaded = load_model(make_run(tmp_path, steps=(20,)))
    before = loaded.params
    plain = sample(loaded, ["The"], max_tokens=6)[0][0]
    loaded.quantize("auto")
    assert loaded.params is before
    loaded.quantize("fp8")
    assert before == {}, "nothing keeps the originals in memory"
    assert all(isinstance(node, Float8) for node in nodes(loaded.params)) and nodes(loaded.params)
    rough = sample(loaded, ["The"], max_tokens=6)[0][0]
    assert rough.logprobs != plain.logprobs and np.isfinite(rough.logprobs).all()


def test_files_are_quantized_as_they_are_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from the whole tree, which is never in memory; damaged weights are still named."""
    run, params = RunDirectory(tmp_path / "run").create(), random_params(tiny_model(), 3)
    run.model.mkdir()
    config = {"model": SIZES, "architecture": {"block_size": 32, "precision": "float32"}}
    (run.model / "config.json").write_text(json.dumps(config))
    write_weights(run.model / "model.safetensors", params)
    monkeypatch.setattr(Quantizer, "release_each", None)
    loaded = load_model(run, weights="fp8")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, Quantizer(tiny_model(), "fp8")(params))
    params["blocks_0"]["q"] = params["blocks_0"]["q"].at[3, 4].set(np.nan)
    write_weights(run.model / "model.safetensors", params)
    with pytest.raises(TrainingError, match="blocks_0/q/codes"):
        load_model(run, weights="fp8")


def write_weights(path: Path, params: Any) -> None:
    save_file({name: np.asarray(leaf) for name, leaf in flatten(params).items()}, path, metadata={"step": "7"})


def test_the_matrix_beneath_an_adapter_is_quantized_and_the_adapter_is_not() -> None:
    model = tiny_model()
    params = random_params(model, 1)
    w = params["blocks_0"]["q"]
    a, b = (jnp.asarray(np.random.default_rng(n).standard_normal(s)) for n, s in ((0, (32, 2)), (1, (2, 32))))
    params["blocks_0"]["q"] = Adapted(w, a, b, 0.5)
    made = Quantizer(model, "int8")(params)["blocks_0"]["q"]
    assert isinstance(made, Adapted) and isinstance(made.w, Int8) and made.a is a and made.b is b
    every = jax.tree.map(lambda leaf: leaf, params)
    for block in (every["blocks_0"], every["blocks_1"]):
        for name, leaf in block.items():
            if model.group_of((name,)) == "matrix":
                bare = leaf.w if isinstance(leaf, Adapted) else leaf
                node = Int8.of(bare)
                block[name] = replace(leaf, w=node) if isinstance(leaf, Adapted) else node
    with pytest.raises(InputError, match=r"generate\.weights=fp8 has nothing to quantize.*lora\.quantize"):
        Quantizer(model, "fp8")(every)


class Foreign(LanguageModel):
    """Multiplies by its matrices as it likes."""


def test_a_model_that_multiplies_by_itself_is_refused() -> None:
    with pytest.raises(InputError, match=r"generate\.weights=fp8 needs a model .*Foreign is not one"):
        Quantizer(Foreign(vocab_size=8, block_size=8), "fp8")
