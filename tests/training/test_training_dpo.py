"""Preference training as a run: reference log-probabilities once, no reference in memory, resume bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.errors import InputError, Stopped, StorageError
from bessemer.storage.weights import WeightFile
from bessemer.training import launch
from bessemer.training.persistence.reference import ReferencedRows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_one_device")]
FILE = "reference/logps-*.safetensors"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Polite answers are chosen; eight steps of two micro-batches; a tokenizer and a model made for it."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("pairs") / "polite.jsonl"
    lines = []
    for _ in range(80):
        n = rng.randint(1, 99)
        lines.append({"prompt": f"Add 1 to {n}.", "chosen": f"{n + 1}, please.", "rejected": f"{n + 1}, fool."})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "objective": "dpo",
        "training.dataset": str(path),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 8,
        "training.validation_steps": 6,
        "data.tokenizer": "train:300",
        "data.val_fraction": 0.2,
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 128,
        "architecture.dropout": 0.1,
        "optimization.lr": 0.003,
        "optimization.name": "adamw",
        "logging.report_interval": 1,
        "logging.validation_interval": 4,
        "logging.checkpoint_interval": 3,
        "logging.keep_last": 20,
        "logging.progress": "none",
    }


@pytest.fixture(scope="module")
def undisturbed(settings: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path_factory.mktemp("runs"))
    trainer.run()
    return trainer


def test_it_learns_and_holds_no_reference(undisturbed: Any) -> None:
    """Held-out pairs are ranked right, and what they are compared with are two numbers a pair, not weights."""
    path = undisturbed.run_directory.path
    validations = [row for row in rows(path) if "val_pref_acc" in row]
    assert validations[0]["val_loss"] == pytest.approx(np.log(2)) and validations[0]["val_margin"] == 0
    assert validations[-1]["val_pref_acc"] > 0.9 and validations[-1]["val_margin"] > 0.1
    trained = [row for row in rows(path) if "margin" in row]
    assert trained[-1]["margin"] > trained[0]["margin"] and trained[-1]["loss"] < trained[0]["loss"]
    assert undisturbed.state.reference is None
    assert not list((path / "reference").glob("step_*")) and len(list(path.glob(FILE))) == 2  # train, held out
    assert undisturbed.config["architecture/document_mask"] is True  # the objective asks for it


def test_target_tokens_are_tokens_not_pairs(undisturbed: Any) -> None:
    check_target_tokens(undisturbed)


def check_target_tokens(trainer: Any) -> None:
    trained = [row for row in rows(trainer.run_directory.path) if "loss" in row]
    batches = [trainer.batch("train", step=step) for step in range(trained[-1]["step"])]
    tokens = sum(int(((batch["target_ids"] >= 0) & (batch["loss_mask"] > 0)).sum()) for batch in batches)
    assert trained[-1]["target_tokens"] == tokens > sum((batch["pair_ids"] >= 0).sum() for batch in batches)


def test_the_table_is_of_the_starting_weights(undisturbed: Any) -> None:
    """Every pair of the data has its numbers, and they are those of step 0, not of the trained policy."""
    source = undisturbed.data.plan.sources[0]
    assert isinstance(source, ReferencedRows) and np.isfinite(source.table).all()
    batch = undisturbed.data.plan.batch(0)
    real = batch["pair_ids"] >= 0
    np.testing.assert_array_equal(batch["reference_logps"][real], source.table[batch["pair_ids"][real]])
    assert not batch["reference_logps"][~real].any()
    first = next(row for row in rows(undisturbed.run_directory.path) if row.get("step") == 1 and "loss" in row)
    assert first["reward/chosen"] == pytest.approx(0.0, abs=0.05)  # but for dropout, the policy is the reference


def test_stopped_and_resumed_is_the_same_run(settings: dict[str, object], undisturbed: Any, tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(5)])
    with pytest.raises(Stopped):
        first.run()
    [held, train] = sorted((tmp_path / "part").glob(FILE), key=lambda path: path.stat().st_size)
    before = train.stat().st_mtime_ns
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, undisturbed)
    assert train.stat().st_mtime_ns == before and held.is_file()  # never computed again


def test_a_lost_or_changed_table_is_refused(settings: dict[str, object], tmp_path: Path) -> None:
    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt(3)])
    with pytest.raises(Stopped):
        first.run()
    tables = sorted((tmp_path / "part").glob(FILE))
    assert {WeightFile(path).metadata["weights"] for path in tables} == {WeightFile(tables[0]).metadata["weights"]}
    kept = tables[0].read_bytes()
    tables[0].write_bytes(kept[:-4] + bytes(4))
    with pytest.raises(StorageError, match="damaged"):
        launch.reopen(tmp_path / "part").run()
    tables[0].unlink()
    with pytest.raises(StorageError, match="reference"):
        launch.reopen(tmp_path / "part").run()


def test_live_reference_in_small_parts_is_the_cached_one_at_once(settings: dict[str, object], tmp_path: Path) -> None:
    """Frozen weights and two micro-batches against a table and one: the same losses to rounding. A resumed run still
    compares with the first weights."""
    losses = {}
    for kind, size in (("cached", 8), ("live", 4)):
        changed = settings | {
            "dpo.reference": kind,
            "training.per_device_batch_size": size,
            "architecture.dropout": 0.0,
        }
        stop = launch.build_trainer("quickstart", changed, name=kind, root=tmp_path, callbacks=[StopAt(5)])
        with pytest.raises(Stopped):
            stop.run()
        trainer = launch.reopen(tmp_path / kind)
        trainer.run()
        assert (trainer.state.reference is None) == (kind == "cached")
        losses[kind] = [row["loss"] for row in rows(trainer.run_directory.path) if "loss" in row]
    np.testing.assert_allclose(losses["cached"], losses["live"], rtol=2e-4, atol=1e-5)


def test_a_reward_model_starts_from_a_gpt(settings: dict[str, object], undisturbed: Any, tmp_path: Path) -> None:
    """Its new head is made, everything else is taken over; and it learns to rank."""
    start = undisturbed.run_directory.path
    changed = settings | {"objective": "reward", "model.family": "gpt-reward", "init": str(start)}
    del changed["data.tokenizer"]  # inherited, as are the shapes
    changed["training.steps"] = 30
    trainer = launch.build_trainer("quickstart", changed, name="reward", root=tmp_path)
    taken, policy = trainer.state.params, undisturbed.state.params
    assert set(taken) - set(policy) == {"value_head"}
    for name in policy:
        jax.tree.map(np.testing.assert_array_equal, taken[name], policy[name])
    trainer.run()
    final = [row for row in rows(trainer.run_directory.path) if "val_pref_acc" in row][-1]
    assert final["val_pref_acc"] > 0.9
    check_target_tokens(trainer)


def test_beside_adapters_a_new_head_is_trained(settings: dict[str, object], tmp_path: Path) -> None:
    changed = settings | {"objective": "reward", "model.family": "gpt-reward", "lora.rank": 2}
    trainer = launch.build_trainer("quickstart", changed, name="adapted", root=tmp_path)
    assert trainer.model_parts.split.trained == (("value_head",),)
    assert trainer.config["lora/whole"] == ("value_head",)  # saved: whoever loads the run finds the same split
    frozen = changed | {"lora.whole": ["smear*"]}  # what is given stands
    split = launch.build_trainer("quickstart", frozen, name="given", root=tmp_path).model_parts.split
    assert ("value_head",) in split.frozen


def test_answers_must_not_see_each_other(settings: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="document_mask"):
        launch.build_trainer("quickstart", settings | {"architecture.document_mask": False}, root=tmp_path)


def test_pairs_and_chats_in_one_mixture_are_refused(settings: dict[str, object], tmp_path: Path) -> None:
    """The rows of chats had no pair_ids, and 40 pairs were reported where 8 exist."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "Add 1 to 2.", "completion": "3, please."}) + "\n")
    mixture = [
        {"name": settings["training.dataset"], "rate": 0.5, "style": "CONTRASTIVE"},
        {"name": str(chats), "rate": 0.5, "style": "PADDED"},
    ]
    changed = settings | {"objective": "reward", "model.family": "gpt-reward", "training.dataset": [mixture]}
    changed |= {"training.validation": False, "data.val_fraction": 0.0}
    with pytest.raises(InputError, match=r"polite.jsonl' \(CONTRASTIVE\) has pair_ids"):
        launch.build_trainer("quickstart", changed, name="mixed", root=tmp_path)
