"""Runs over a quantized base: what is read, kept, said, exported and refused. Resuming is in test_frozen_base.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tests.training import test_frozen_base as plain
from tests.training.test_frozen_base import adapters, stopped, trained
from tests.training.test_training_imported import letters, settings_of

from bessemer.checkpoint import Checkpoints
from bessemer.console import no_progress
from bessemer.errors import InputError
from bessemer.evaluate import Evaluator
from bessemer.generate.export import export_run
from bessemer.generate.load import load_model
from bessemer.interop.folder import Folder
from bessemer.kernels.quantized import NF4, Quantized
from bessemer.models.lora import Adapted, is_node
from bessemer.storage import weights
from bessemer.training import launch

pytestmark = pytest.mark.usefixtures("on_one_device")
original, text, finished_with = plain.original, plain.text, plain.finished_with


@pytest.fixture(scope="module")
def finished(finished_with: Any) -> Any:
    return finished_with("nf4")


@pytest.mark.slow
def test_the_state_holds_codes_of_the_stored_weights(finished: Any, original: Path) -> None:
    folder, nodes = Folder(original), {
        path: leaf for path, leaf in flatten_dict(finished.state.frozen).items() if isinstance(leaf, Quantized)
    }  # fmt: skip
    assert len(nodes) == 14 and set(nodes) == finished.model_parts.split.quantized
    for path, node in nodes.items():
        stored = folder.read("/".join(path))
        for one, other in zip(jax.tree.leaves(node), jax.tree.leaves(NF4.of(jnp.asarray(stored))), strict=True):
            np.testing.assert_array_equal(one, other, str(path))
    others = {leaf.shape for path, leaf in flatten_dict(finished.state.frozen).items() if path not in nodes}
    assert others == {(128,), (64,), (32,), (320, 128), (128, 320)} & others


def test_the_run_says_what_is_quantized(finished: Any) -> None:
    run = finished.run_directory
    assert "14 of them in nf4 (" in run.log.read_text()
    derived = json.loads((run.path / "derived.json").read_text())["quantized bytes"]
    nodes = [leaf for leaf in jax.tree.leaves(finished.state.frozen, is_leaf=is_node) if is_node(leaf)]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nodes))
    assert derived["value"] == held and derived["reason"].startswith("nf4: 14 frozen matrices")


@pytest.mark.slow
def test_loaded_sampled_and_evaluated_with_codes(finished: Any) -> None:
    run = finished.run_directory
    params = load_model(run).params
    nodes = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_node) if isinstance(leaf, Adapted)]
    assert len(nodes) == 14 and all(isinstance(node.w, NF4) for node in nodes)
    assert isinstance(launch.Run(run).sample("The number", max_tokens=3), str)
    assert np.isfinite(Evaluator.from_run(run, tasks=["loss"], limit=2).run()["loss"]["value"])


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_a_run_does_not_resume_over_another_quantization(kind: str, change: bool, finished: Any) -> None:
    """Its adapters were trained over the codes of one kind."""
    with pytest.raises(InputError, match=r"lora\.quantize cannot be changed on resume"):
        launch.reopen(finished.run_directory.path, [f"lora.quantize={kind}"], change=change)


def test_the_export_is_merged_into_the_stored_weights(finished: Any, original: Path, tmp_path: Path) -> None:
    """Not into the dequantized ones; also by save_pretrained, and for another run that begins from this one."""
    run, base = finished.run_directory, Folder(original)
    export_run(run, tmp_path / "merged", "hf", no_progress)
    merged = Folder(tmp_path / "merged")
    params, split = flatten_dict(finished.state.params), finished.model_parts.split
    finished.save_pretrained(finished.state, tmp_path / "torch", to_torch=True)
    torch = Folder(tmp_path / "torch")
    for path in split.adapted:
        stored = base.read("/".join(path)).astype(np.float32)
        want = stored + split.lora.scale * np.asarray(params[(*path, "lora_a")] @ params[(*path, "lora_b")])
        held = merged.read("/".join(path))
        assert held.dtype == "bfloat16"
        np.testing.assert_allclose(held.astype(np.float32), want, rtol=1e-2, atol=1e-6)
        np.testing.assert_array_equal(torch.read("/".join(path)), held)


def test_weights_are_read_and_quantized_one_at_a_time(
    original: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a matrix is put on a device, at most one other wide matrix is there: the live float32 arrays are counted."""
    most, put = 0, weights._put
    size = 4 * 128 * 512
    before = {id(array) for array in jax.live_arrays()}

    def counted(array: np.ndarray, leaf: Any) -> jax.Array:
        nonlocal most
        placed = put(array, leaf)
        wide = [a for a in jax.live_arrays() if id(a) not in before and a.dtype == jnp.float32 and a.nbytes >= size]
        most = max(most, len(wide))
        return placed

    monkeypatch.setattr(weights, "_put", counted)
    trainer = launch.build_trainer(None, adapters(original, text, lora__quantize="nf4"), name="run", root=tmp_path)
    assert trainer.state.frozen is not None and 1 <= most <= 2


@pytest.mark.slow
def test_quantized_under_dpo_and_grpo(original: Path, text: Path, tmp_path: Path) -> None:
    """Rollouts decode with the codes, and the reference is adapters alone."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}?", "chosen": "yes", "rejected": "no"}) + "\n" for n in range(9))
    )
    common = {"lora__rank": 2, "lora__quantize": "nf4", "lora__dropout": 0.1, "training__steps": 2}
    dpo = trained(settings_of(original, path, objective="dpo", **common), tmp_path, "dpo")
    assert dpo.step == 2
    grpo = trained(
        settings_of(
            original,
            path,
            job="GRPOTrainer",
            objective="grpo",
            grpo__max_completion_length=4,
            grpo__rewards=[f"{letters.__module__}:letters"],
            **common,
        ),
        tmp_path,
        "grpo",
    )
    assert grpo.step == 2 and jax.tree.structure(grpo.state.reference) == jax.tree.structure(grpo.state.params)


@pytest.mark.slow
def test_a_base_that_cannot_be_read_again_is_refused(original: Path, text: Path, tmp_path: Path) -> None:
    settings = settings_of(original, text, objective="pretrain", training__steps=4)
    base = stopped(settings, tmp_path, step=2)
    asked = adapters(base.path, text, lora__quantize="nf4")
    with pytest.raises(InputError, match=r"its run is not finished.*lora\.keep_base=true"):
        launch.build_trainer(None, asked, name="refused", root=tmp_path).run()
    kept = trained({**asked, "lora.keep_base": True, "training.steps": 1}, tmp_path, "kept")
    assert Checkpoints(kept.run_directory.checkpoints).committed() == [1]
    no_path = {key: value for key, value in asked.items() if key != "init"} | {
        "model.head_dim": 16,
        "model.depth": 1,
        "model.aspect": 32,
        "data.tokenizer": "train:300",
    }
    with pytest.raises(InputError, match="this one has no path"):
        launch.build_trainer(None, no_path, name="drawn", root=tmp_path).run()
