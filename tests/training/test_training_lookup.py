"""Lookup rows in a run: shared out once, shown, saved in every checkpoint, carried to resume, init and export."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bessemer.data import Tokenizer
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.generate import load_model
from bessemer.models.allocation import Allocation
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.persistence.checkpoints import saved_tree
from bessemer.training.setup import model
from bessemer.training.trainer import BaseTrainer

LOOKUP = {
    "architecture.lookup.after_layers": [0],
    "architecture.lookup.rows": 448,
    "architecture.lookup.k_max": 12,
    "training.ema": 0.5,
    "training.steps": 6,
    "logging.checkpoint_interval": 3,
}


def on_devices(count: int) -> Any:
    from bessemer.topology import make_topology

    return lambda settings: make_topology(devices=jax.devices()[:count])


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", on_devices(1))


class StopAt(Callback):
    def on_batch_end(self, loop: Any) -> None:
        if loop.step == 2:
            loop.request_stop("test")


@pytest.fixture(scope="module")
def settings(tiny: dict[str, object]) -> dict[str, object]:
    return {**tiny, **LOOKUP}


@pytest.fixture(scope="module")
def whole(settings: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseTrainer:
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", on_devices(1))
        trainer = launch.build_trainer("quickstart", settings, name="whole", root=root)
        trainer.run()
    return trainer


def never(*args: Any) -> Any:
    raise AssertionError("the rows were shared out again")


@pytest.mark.slow
def test_rows_are_shown_and_saved(whole: BaseTrainer) -> None:
    run, allocation = whole.run_directory, whole.model.allocation
    assert allocation.rows == 448 and allocation.longest <= 12 and allocation.k.min() == 1
    assert allocation.tokenizer == whole.tokenizer.hash
    derived = json.loads(run.derived.read_text())
    assert derived["lookup rows"]["value"] == 448 and derived["lookup layers"]["value"] == [0]
    assert derived["lookup mean k"]["value"] == round(448 / 300, 3)
    assert derived["lookup mean k, weighted"]["value"] == round(allocation.mean_k, 3) > 448 / 300
    assert derived["lookup k_max"]["value"] == 12 and derived["lookup path"]["value"] == "gather"
    log = run.log.read_text()
    assert all(name in log for name in derived if name.startswith("lookup"))
    assert "devices    1 cpu; attention: xla, kernels: xla" in log
    formula = json.loads(run.facts.read_text())["flops_formula"]
    assert formula.endswith("rows · 1 lookup layer(s)") and f" per token = {formula}; " in log
    assert f" = {formula} |" in (run.path / "report.md").read_text()
    assert re.search(
        r"rates      matrix 0\.0\d*, decay [\d.]+ \(\d+ tensors\); head \S+ \(1 tensor\); .*value_embedding", log
    )
    for place in (*run.checkpoints.glob("step_*"), run.model):
        assert Allocation.read(place) == allocation
    saved = whole.config
    assert saved["architecture/lookup/d_up"] == 4 * 32 and saved["architecture/lookup/sample_tokens"] == 5 * 148
    assert whole.model_parts.flops_per_token == whole.model.flops_per_token(16)
    # It is no parameter: nothing that touches parameters can touch it.
    assert all(np.issubdtype(leaf.dtype, np.floating) for leaf in jax.tree.leaves(whole.state.params))
    table = np.asarray(whole.state.params["lookups_0"]["lookup_values"])
    assert np.abs(table - np.asarray(whole.state.ema["lookups_0"]["lookup_values"])).max() > 0


@pytest.mark.slow
def test_resume_is_the_same_run_and_shares_out_nothing(
    settings: dict[str, object], whole: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt()])
    with pytest.raises(Stopped):
        first.run()
    monkeypatch.setattr(model, "compute_lzw_allocation", never)
    second = launch.reopen(tmp_path / "part")
    assert second.step == 2 and second.model.allocation == whole.model.allocation
    second.run()
    for a, b in zip(jax.tree.leaves(saved_tree(second.state)), jax.tree.leaves(saved_tree(whole.state)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_checkpoint_and_export_load_as_the_same_model(whole: BaseTrainer, tmp_path: Path) -> None:
    from bessemer.job import RunDirectory

    moved = RunDirectory(tmp_path / "exported")
    shutil.copytree(whole.run_directory.model, moved.model)
    ids = np.arange(16, dtype=np.int32)[None]
    expected = jax.jit(lambda p: whole.model.apply({"params": p}, ids))(whole.state.params)
    for run in (whole.run_directory, moved):
        loaded = load_model(run)
        assert loaded.model.allocation == whole.model.allocation
        got = jax.jit(lambda p, m=loaded.model: m.apply({"params": p}, ids))(loaded.params)
        np.testing.assert_allclose(got, expected, atol=1e-6)
    generation = loaded.decoder(loaded.params, [[5, 6, 7]], max_tokens=4)
    assert generation.ids.shape == (1, 4)


def test_a_run_from_these_weights_takes_their_rows(
    settings: dict[str, object], whole: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "compute_lzw_allocation", never)
    more = {**settings, "init": str(whole.run_directory.path), "seed": 7}
    trainer = launch.build_trainer("quickstart", more, name="more", root=tmp_path)
    assert trainer.model.allocation == whole.model.allocation
    with pytest.raises(InputError, match="448 lookup rows"):
        other = {**more, "architecture.lookup.rows": 512}
        launch.build_trainer("quickstart", other, name="other", root=tmp_path)


def test_devices_and_micro_batches_do_not_change_the_rows(
    settings: dict[str, object], whole: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "make_topology", on_devices(8))
    changed = {**settings, "training.per_device_batch_size": 1, "training.batch_size": 16}
    trainer = launch.build_trainer("quickstart", changed, name="eight", root=tmp_path)
    assert trainer.model.allocation == whole.model.allocation
    seed = launch.build_trainer("quickstart", {**changed, "seed": 9}, name="seed", root=tmp_path)
    assert seed.model.allocation != whole.model.allocation


def test_another_tokenizer_is_refused(whole: BaseTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a changed run opens there needs no --trust
    run = tmp_path / "runs" / "whole"
    shutil.copytree(whole.run_directory.path, run)
    texts = ["other words make another tokenizer " + chr(97 + n % 26) * n for n in range(60)]
    other = Tokenizer.train(texts, 300)
    assert other.vocab_size == 300
    other.save(tmp_path / "tokenizer")
    config = run / "config.yaml"
    assert "train:300" in config.read_text()
    config.write_text(config.read_text().replace("train:300", str(tmp_path / "tokenizer")))
    with pytest.raises(InputError, match="another tokenizer"):
        launch.reopen(run)
    checkpoint = sorted((run / "checkpoints").glob("step_*"))[-1]
    other.save(run / "model")
    shutil.rmtree(checkpoint.parent)
    from bessemer.job import RunDirectory

    with pytest.raises(StorageError, match=r"tokenizer\.json is damaged or was changed"):
        load_model(RunDirectory(run))


def test_the_dials_reference_has_no_lookup(settings: dict[str, object], tmp_path: Path) -> None:
    """The reference tokens of the dial are those of the same model without lookup layers."""
    left_out = ("training.batch_size", "training.steps")
    turned = {key: value for key, value in settings.items() if key not in left_out}
    turned |= {"training.batch_tokens": -1, "training.tokens": 10_000_000}
    found = []
    for layers in ([0], []):
        more = {**turned, "architecture.lookup.after_layers": layers}
        trainer = launch.build_trainer("quickstart", more, name=f"dial{len(found)}", root=tmp_path)
        found.append({name: entry["value"] for name, entry in trainer.derived.items()})
    assert found[0]["reference tokens"] == found[1]["reference tokens"]
    assert found[0]["scaling parameters"] - found[1]["scaling parameters"] == 32 * 128 + (128 + 32) * 32
