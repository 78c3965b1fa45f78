"""The llama family against transformers' own numbers, stored by tests/reference/huggingface.py: no torch is needed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import STORED, config_of_case, load_folder, make_folder
from tests.reference.huggingface import CASES, NEW, PROMPT, sketch

from bessemer.generate.decoder import Decoder
from bessemer.interop.config import tensors_of
from bessemer.storage.weights import flatten, signature

# These programs run for a moment: what they cost is their compilation.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def logits_and_gradients(model: Any, params: Any, ids: np.ndarray) -> tuple[np.ndarray, Any]:
    """Logits (B, T, V), and the gradient of the mean loss over the next tokens."""
    batch = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(params: Any) -> Any:
        def loss(params: Any) -> Any:
            total, weight, _ = model.apply({"params": params}, batch, method="loss")
            return total / weight

        return model.apply({"params": params}, ids), jax.grad(loss)(params)

    return jax.device_get(both(params))


def sketches(model: Any, gradients: Any) -> dict[str, list[float]]:
    """As stored: by their names, in their layout."""
    found = {}
    flat = flatten(gradients)
    for name, tensor in tensors_of(signature(flat), model).items():
        found[name] = sketch(name, np.ascontiguousarray(tensor.to_theirs(flat[tensor.ours])))
    return found


def compare(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """The largest difference of a gradient's products with ±1, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(np.array(found[name]) - np.array(expected[name])).max()) / max(expected[name][0], 1e-6)
        for name in expected
    )


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """The documented bound of logits: 2e-5 of the largest one. Float32 rounding grows with the logits."""
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def greedy(model: Any, params: Any, tokens: list[int]) -> list[int]:
    """NEW tokens after the given ones, with a cache, one token a step."""
    step = jax.jit(functools.partial(model.apply, method="decode"), compiler_options=QUICK)
    cache = model.init_cache(1, model.block_size).replace(empty=False)
    for place in range(PROMPT + NEW - 1):
        logits, cache = step({"params": params}, np.array([[tokens[place]]]), cache)
        if place >= PROMPT - 1:
            tokens.append(int(np.argmax(logits[0, 0])))
    return tokens[PROMPT:]


SLOW = ("llama-biased", "smollm", "olmo2", "gemma3", "mixtral", "gpt-oss")  # the longest, and what they alone have


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_logits_gradients_and_greedy_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    stored = STORED[name]
    model, params = load_folder(make_folder(tmp_path / name, stored["config"]))
    ids = np.array(stored["ids"], np.int32)
    logits, gradients = logits_and_gradients(model, params, ids)
    assert_close(logits[0], np.array(stored["logits"]))
    assert compare(sketches(model, gradients), stored["gradients"]) < 1e-4
    assert greedy(model, params, ids[0, :PROMPT].tolist()) == stored["generated"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "olmo3", "gemma2", "gemma3"])
def test_the_decoder_prefills_sliding_layers_alike(name: str, tmp_path: Path) -> None:
    """A prompt longer than the window in one piece, then the loop on the device."""
    stored = STORED[name]
    model, params = load_folder(make_folder(tmp_path / name, stored["config"]))
    tokens = [*stored["ids"][0][:PROMPT], *stored["generated"]]
    made = Decoder(model)(params, [tokens[: PROMPT + 12]], max_tokens=NEW - 12)
    assert made.ids[0].tolist() == tokens[PROMPT + 12 :]


def test_counts_are_those_of_the_weights(tmp_path: Path) -> None:
    for name in CASES:
        model, params = load_folder(make_folder(tmp_path / name, config_of_case(name)))
        counts = model.count_parameters()
        assert counts["total"] == sum(leaf.size for leaf in jax.tree.leaves(params)), name
        groups: dict[str, int] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            group = model.group_of(tuple(key.key for key in path))
            groups[group] = groups.get(group, 0) + leaf.size
        assert {key: value for key, value in counts.items() if value and key in groups} == groups, name
