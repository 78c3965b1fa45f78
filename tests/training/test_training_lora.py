"""Runs that train a part of their parameters: adapters, or what training.freeze leaves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from tests.tiny_run import make_run, tiny_params
from tests.training import held  # noqa: F401 -- registers the objective
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.checkpoint import Checkpoints
from bessemer.config.resolve import Config
from bessemer.doctor import Diagnosis, examine_checkpoints
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.generate.load import load_model
from bessemer.job import RunDirectory
from bessemer.models.lora import Adapted, merge_adapters
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.display import untrained_end
from bessemer.training.persistence import checkpoints

Build = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A model to start from: random weights at step 20."""
    return make_run(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def start(base: RunDirectory) -> dict[str, object]:
    return {
        "init": str(base.path),
        "training.dataset": str(base.path.parent.parent / "cats.jsonl"),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 4,
        "training.validation": False,
        "architecture.block_size": 16,
        "architecture.precision": "float32",
        "optimization.name": "adamw",
        "optimization.lr": 0.02,
        "logging.report_interval": 1,
        "logging.preview_interval": -1,
        "logging.checkpoint_interval": 2,
        "logging.progress": "none",
    }


BASE = tiny_params(20)


@pytest.fixture(scope="module")
def lora(start: dict[str, object]) -> dict[str, object]:
    return {**start, "lora.rank": 4, "lora.alpha": 8}


@pytest.fixture(scope="module")
def adapted(lora: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer("quickstart", lora, name="lora", root=tmp_path_factory.mktemp("runs"))
    trainer.run()
    return trainer


def arrays(tree: Any) -> dict[tuple[str, ...], np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(tree).items()}


def assert_equal(one: Any, other: Any) -> None:
    one, other = arrays(one), arrays(other)
    assert set(one) == set(other)
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg="/".join(path))


def test_only_adapters_are_trained_and_saved(adapted: Any) -> None:
    """No optimizer state, no gradient and no checkpoint byte for anything else; the base is as it was, bit for bit."""
    trained = adapted.model_parts.split.count(adapted.model_parts.boxed)[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(adapted.state.params)) == trained
    moments = sum(leaf.size for leaf in jax.tree.leaves(adapted.state.opt_state))
    assert 2 * trained <= moments <= 2 * trained + 8  # AdamW's two, and counters
    assert_equal(adapted.state.frozen, BASE)
    manager = adapted.checkpoint_manager
    saved = {name.split("/")[-1] for name in manager.leaves(4) if name.startswith("params/")}
    assert saved == {"lora_a", "lora_b"}
    assert manager.size(4) < 3 * 4 * adapted.model_parts.counts["total"] / 2  # half of weights and two moments
    log = adapted.run_directory.log.read_text()
    assert f"trains     {trained:,} of {adapted.model_parts.counts['total']:,} parameters" in log


def test_adapters_that_cannot_learn_to_end_a_turn_are_warned_of(lora: dict[str, object], tmp_path: Path) -> None:
    """The base saw documents alone. What the warning says to set ends it."""
    chats = tmp_path / "chats.jsonl"
    asked = ({"prompt": f"How many are {n}?", "completion": f"There are {n}."} for n in range(40))
    chats.write_text("".join(json.dumps(row) + "\n" for row in asked))
    talk = {**lora, "objective": "sft", "training.dataset": str(chats)}

    def warnings(name: str, **changes: object) -> list[str]:
        trainer = launch.build_trainer("quickstart", talk | changes, name=name, root=tmp_path)
        return untrained_end(trainer.settings, trainer.model_parts)

    [warning] = warnings("silent")
    assert "never trained on <|assistant_end|>" in warning
    setting, patterns = warning.split("'")[1].split("=")
    assert setting == "lora.whole" and {"embedding", "head"} <= set(patterns[1:-1].split(","))
    assert warnings("whole", **{setting: patterns[1:-1].split(",")}) == []
    assert warnings("text", objective="pretrain", **{"training.dataset": lora["training.dataset"]}) == []
    assert warnings("full", **{"lora.rank": 0}) == []


def test_it_learns_from_where_the_base_stood(adapted: Any) -> None:
    losses = [row["loss"] for row in rows(adapted.run_directory.path) if "loss" in row]
    assert losses[-1] < losses[0]
    start = launch.rebuild(adapted.run_directory, launch.overridden(adapted.run_directory.config)[0])
    assert_equal(start.full_params(), BASE)  # the adapters add nothing yet
    assert any(np.abs(leaf).max() > 0 for path, leaf in arrays(adapted.state.params).items() if path[-1] == "lora_b")


def test_the_loaded_run_its_file_and_a_run_from_it_share_weights(adapted: Any, start: dict[str, object]) -> None:
    """The loaded run, the file of the finished model, and a run that starts from it."""
    whole = adapted.full_params()
    loaded = load_model(adapted.run_directory, 4)
    assert isinstance(loaded.params["blocks_0"]["q"], Adapted)  # sampled without a merged copy
    assert_equal(merge_adapters(loaded.params), whole)
    ids = np.arange(16, dtype=np.int32)[None]
    merged = jax.jit(loaded.model.apply)({"params": loaded.params}, ids)
    inside = jax.jit(lambda state: adapted.model.apply({"params": state.whole()}, ids))(adapted.state)
    np.testing.assert_allclose(merged, inside, atol=1e-6)
    folder = adapted.run_directory.model
    written = load_file(folder / "model.safetensors")
    assert_equal(unflatten_dict({tuple(name.split("/")): leaf for name, leaf in written.items()}), whole)
    adapters = load_file(folder / "adapters.safetensors")
    assert set(adapters) == {"/".join(path) for path in flatten_dict(adapted.state.params)}
    about = json.loads((folder / "adapters.json").read_text())
    assert about["rank"] == 4 and about["scale"] == 2.0 and len(about["adapted"]) == 12
    settings = {**start, "init": str(adapted.run_directory.path)}
    on = launch.build_trainer("quickstart", settings, name="on", root=adapted.run_directory.path.parent)
    assert_equal(on.state.params, whole)


def test_resumed_adapters_are_the_same_run(adapted: Any, lora: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", lora, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, adapted)
    assert_equal(second.state.frozen, BASE)


@pytest.mark.long
def test_a_run_saved_with_the_old_spelling_of_a_setting_resumes_bit_for_bit(
    lora: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**lora, "lora.rank_stabilized": True}
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    written = Config.to_yaml
    with monkeypatch.context() as patch:
        patch.setattr(Config, "to_yaml", lambda config: written(config).replace("stabilized", "stabilised"))
        first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(3)])
        with pytest.raises(Stopped):
            first.run()
    saved = [tmp_path / "part/config.yaml", *(tmp_path / "part/checkpoints").glob("*/config.yaml")]
    assert len(saved) > 1 and all("rank_stabilised: true" in file.read_text() for file in saved)
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)
    assert load_model(second.run_directory, 3).params["blocks_0"]["q"].scale == 4.0  # α/√r


@pytest.mark.slow
def test_dora_dropout_and_ranks_by_pattern_resume_and_do_not_depend_on_the_micro_batch(
    lora: dict[str, object], tmp_path: Path
) -> None:
    """Two passes of four rows or one of eight drop the same entries; a resumed run is the same bit for bit."""
    settings = {**lora, "lora.dora": True, "lora.dropout": 0.3, "lora.rank_pattern": {"*/q": 2}}

    def run(name: str, **more: Any) -> Any:
        trainer = launch.build_trainer(
            "quickstart", settings | more.pop("settings", {}), name=name, root=tmp_path, **more
        )
        with contextlib.suppress(Stopped):
            trainer.run()
        return trainer

    two = run("two")
    one = run("one", settings={"training.per_device_batch_size": 8})
    losses = [[row["loss"] for row in rows(trainer.run_directory.path) if "loss" in row] for trainer in (two, one)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    run("part", callbacks=[StopAt(3)])
    resumed = launch.reopen(tmp_path / "part")
    resumed.run()
    assert_same(resumed, two)
    assert two.state.params["blocks_0"]["q"]["lora_a"].shape[1] == 2
    lengths = two.state.params["blocks_0"]["up"]["lora_m"]
    assert np.abs(lengths - np.linalg.norm(BASE["blocks_0"]["up"], axis=0)).max() > 1e-4  # they are trained
    assert_equal(merge_adapters(load_model(two.run_directory, 4).params), two.full_params())


def doctors_words(run: RunDirectory) -> str:
    found = Diagnosis(run.name, "stopped")
    examine_checkpoints(run, Checkpoints(run.checkpoints), found, None)
    return " ".join(finding.text for finding in found.findings)


@pytest.mark.slow
def test_frozen_weights_that_are_gone_are_refused(lora: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", lora, name="part", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        first.run()
    file = next(
        path for path in (tmp_path / "part/reference/frozen").rglob("*") if path.is_file() and "COMMIT" not in path.name
    )
    assert "frozen weights in reference/frozen are as they were" in doctors_words(first.run_directory)
    file.write_bytes(b"\0" * file.stat().st_size)
    assert "frozen weights in reference/frozen are damaged" in doctors_words(first.run_directory)
    with pytest.raises(StorageError, match="frozen"):
        load_model(first.run_directory, 2)
    with pytest.raises(StorageError, match="frozen weights"):
        launch.reopen(tmp_path / "part")


def test_the_reference_of_adapters_is_the_base_without_a_copy_of_it(lora: dict[str, object], tmp_path: Path) -> None:
    settings = lora | {"objective": "held"}  # an objective that compares with a reference
    trainer = launch.build_trainer("quickstart", settings, name="held", root=tmp_path)
    trainer.run_directory.create()
    trainer.take_reference()
    state = trainer.state
    assert jax.tree.structure(state.reference) == jax.tree.structure(state.params)  # adapters alone
    state = state.replace(params=jax.tree.map(lambda leaf: leaf + 1, state.params))
    assert_equal(merge_adapters(state.whole(state.reference)), BASE)


@pytest.mark.slow
def test_eight_devices_are_one(lora: dict[str, object], adapted: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """fsdp 2 × tensor 2 × data 2, remat and scan: the same losses to rounding, adapters split as their matrices are."""
    monkeypatch.setattr(launch, "make_topology", make_topology)
    settings = lora | {"topology.fsdp": 2, "topology.tensor": 2, "topology.data": 2}
    settings |= {"training.per_device_batch_size": 1, "architecture.remat": ["block"], "architecture.scan_layers": True}
    trainer = launch.build_trainer("quickstart", settings, name="mesh", root=tmp_path)
    trainer.run()
    block = trainer.state.params["blocks_0"]["up"]
    assert block["lora_a"].sharding.spec[0] == ("fsdp", "pipeline") and block["lora_b"].sharding.spec[1] == "tensor"
    got, want = ([row["loss"] for row in rows(run.run_directory.path) if "loss" in row] for run in (trainer, adapted))
    np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adafactor", marks=pytest.mark.long)])
def test_other_optimizers_take_adapters(optimizer: str, lora: dict[str, object], tmp_path: Path) -> None:
    settings = {key: value for key, value in lora.items() if key != "optimization.lr"}  # its own rates
    settings |= {"optimization.name": optimizer, "training.steps": 2, "lora.dora": True}
    trainer = launch.build_trainer("quickstart", settings, name=optimizer, root=tmp_path)
    trainer.run()
    assert_equal(trainer.state.frozen, BASE)
    assert all(np.abs(leaf).max() > 0 for leaf in arrays(trainer.state.params).values())


@pytest.mark.slow
def test_frozen_parameters_stay_and_have_no_moments(start: dict[str, object], tmp_path: Path) -> None:
    settings = {**start, "training.freeze": ["embedding", "blocks_0/*"]}
    trainer = launch.build_trainer("quickstart", settings, name="frozen", root=tmp_path)
    trainer.run()
    before, after = arrays(BASE), arrays(trainer.full_params())
    for path, leaf in before.items():
        kept = path[0] in ("embedding", "blocks_0", "backout_scale")  # the last: without use in two layers
        assert np.array_equal(leaf, after[path]) == kept, path
    names = set(trainer.checkpoint_manager.leaves(4))
    assert not [name for name in names if "blocks_0" in name or "embedding" in name]
    kept = Checkpoints(trainer.run_directory.path / "reference/frozen").leaves(0)
    assert {name.split("/")[1] for name in kept} == {"embedding", "blocks_0"}
    assert_equal(load_model(trainer.run_directory, 4).params, trainer.full_params())


@pytest.mark.long
def test_resumed_with_frozen_parameters_is_the_same_run(start: dict[str, object], tmp_path: Path) -> None:
    settings = {**start, "training.freeze": ["embedding", "blocks_0/*"]}
    whole = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path)
    whole.run()
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, whole)


def test_flops_leave_out_the_gradients_that_are_not_made(start: dict[str, object], tmp_path: Path) -> None:
    settings = {**start, "training.freeze": ["head"]}
    trainer = launch.build_trainer("quickstart", settings, name="flops", root=tmp_path)
    head = np.prod(trainer.model_parts.boxed["head"].value.shape)
    assert trainer.model_parts.flops_per_token == trainer.model.flops_per_token(16) - 2 * head
    with pytest.raises(InputError, match="Did you mean 'head'"):
        launch.build_trainer("quickstart", {**start, "training.freeze": ["haed"]}, name="no", root=tmp_path)
    assert "frozen" not in checkpoints.saved_tree(trainer.functions.abstract_state)
