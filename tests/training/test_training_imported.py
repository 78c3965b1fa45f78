"""Every objective on an imported llama; adapters under dpo and grpo, from the first step to what others load."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import chatty_folder, load_folder
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.console import no_progress
from bessemer.errors import Stopped
from bessemer.generate.export import export_run, export_run_adapters
from bessemer.interop.folder import import_folder
from bessemer.storage.weights import WeightFile, flatten
from bessemer.training import launch
from bessemer.training.persistence import checkpoints
from bessemer.training.setup import compiled
from bessemer.training.setup.initial_weights import weights_digest

NUMBERS = range(40)


def letters(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Something that any text has more or less of."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 of two layers with a chat template."""
    return chatty_folder(tmp_path_factory.mktemp("hub") / "qwen", dtype="float32")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "Oh no.", "answer": n} for n in NUMBERS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings_of(folder: Path, data: Path, **more: Any) -> dict[str, Any]:
    return {
        "init": str(folder),
        "training.dataset": str(data),
        "training.batch_size": 8,
        "training.per_device_batch_size": 8,
        "training.steps": 3,
        "training.validation": False,
        "architecture.block_size": 64,
        "optimization.name": "adamw",
        "optimization.lr": 0.01,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": 2,
        "logging.preview_interval": 0,
        "logging.plots": False,
        "logging.progress": "none",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def trained(settings: dict[str, Any], root: Path, name: str) -> tuple[Any, list[dict[str, Any]]]:
    trainer = launch.build_trainer(None, settings, name=name, root=root)
    trainer.run()
    return trainer, [row for row in rows(trainer.run_directory.path) if "loss" in row]


def assert_equal(one: Any, other: Any) -> None:
    one, other = flatten(one), flatten(other)
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.slow
def test_weights_are_read_while_the_steps_compile(
    folder: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that waits for the weights would wait forever if they were read after it."""
    read, compile_steps, initial_params = threading.Event(), compiled.compile_steps, checkpoints.initial_params

    def read_params(*given: Any) -> Any:
        found = initial_params(*given)
        read.set()
        return found

    def compile_late(*given: Any) -> Any:
        assert read.wait(60), "the weights are not being read"
        return compile_steps(*given)

    monkeypatch.setattr(checkpoints, "initial_params", read_params)
    monkeypatch.setattr(compiled, "compile_steps", compile_late)
    trainer, losses = trained(settings_of(folder, pairs, objective="dpo", training__steps=1), tmp_path, "ahead")
    assert len(losses) == 1 and trainer.step == 1


@pytest.mark.slow
def test_the_state_is_created_while_the_steps_compile(
    folder: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executables that wait for the state would wait forever if it was created after them. None of the weights that
    were read is drawn, too."""
    created, initial_state, compile_lowered = threading.Event(), compiled.initial_state, jax.stages.Lowered.compile

    def create(*given: Any) -> Any:
        state = initial_state(*given)
        created.set()
        return state

    def compile_late(lowered: Any, *given: Any) -> Any:
        assert created.wait(60), "the state is not being created"
        return compile_lowered(lowered, *given)

    def draw(*given: Any) -> Any:
        raise AssertionError("parameters are drawn that were read")

    monkeypatch.setattr(compiled, "initial_state", create)
    monkeypatch.setattr(compiled, "drawn_params", draw)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_late)
    settings = settings_of(folder, pairs, objective="dpo", training__steps=1, lora__rank=2)
    trainer, losses = trained(settings, tmp_path, "ahead")
    assert len(losses) == 1 and trainer.step == 1


def test_an_error_of_the_state_is_raised_after_the_steps_compiled(
    folder: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*given: Any) -> Any:
        raise RuntimeError("the state")

    monkeypatch.setattr(compiled, "initial_state", create)
    with pytest.raises(RuntimeError, match="the state"):
        trained(settings_of(folder, pairs, objective="dpo", training__steps=1), tmp_path, "full")
    log = (tmp_path / "full/log.txt").read_text()
    assert "compiled   in" in log or "loaded     from the cache" in log


def check_adapters(trainer: Any, folder: Path, out: Path) -> None:
    """Adapters alone were trained; PEFT's layout holds them, and the merged export is the trained model."""
    assert_equal(trainer.state.frozen, load_folder(folder)[1])
    moved = flatten(trainer.state.params)
    assert {name.rpartition("/")[2] for name in moved} == {"lora_a", "lora_b"}
    assert all(np.abs(leaf).max() > 0 for leaf in moved.values())
    export_run_adapters(trainer.run_directory, out / "adapters")
    held = WeightFile(out / "adapters/adapter_model.safetensors")
    assert len(held.entries) == len(moved) == 2 * 2 * 7  # layers, matrices
    first = held.read("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight")
    np.testing.assert_array_equal(first.T, moved["blocks_0/down/lora_a"])
    export_run(trainer.run_directory, out / "merged", "hf", no_progress)
    assert_equal(load_folder(out / "merged")[1], trainer.full_params())


@pytest.mark.slow
def test_adapters_under_dpo(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """The reference is the imported model: at first both are equal, so the loss is log 2."""
    settings = settings_of(folder, pairs, objective="dpo", lora__rank=2)
    trainer, found = trained(settings, tmp_path, "dpo")
    assert found[0]["loss"] == pytest.approx(np.log(2), rel=1e-5) and found[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert found[-1]["loss"] < 0.9 * found[0]["loss"] and found[-1]["margin"] > 0.1
    check_adapters(trainer, folder, tmp_path)


@pytest.mark.long
def test_adapters_under_grpo(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """Rollouts come from the merged weights, the reference holds adapters alone, and a stopped run is the same run."""
    settings = settings_of(
        folder,
        pairs,
        job="GRPOTrainer",
        objective="grpo",
        lora__rank=2,
        grpo__max_completion_length=8,
        grpo__rewards=[f"{__name__}:letters"],
        grpo__mini_batches=2,
    )
    trainer, found = trained(settings, tmp_path, "grpo")
    assert jax.tree.structure(trainer.state.reference) == jax.tree.structure(trainer.state.params)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-9) and found[-1]["kl"] > 0
    assert {0, 2} <= set(trainer.sampler.engine.end_ids)  # the model's own end, and that of its turns
    check_adapters(trainer, folder, tmp_path)
    first = launch.build_trainer(None, settings, name="part", root=tmp_path, callbacks=[StopAt(1)])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    assert_same(second, trainer)


@pytest.mark.slow
def test_a_reward_model_of_the_family(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """The recipe says gpt-reward; the weights are a llama's, so it becomes a llama with that head."""
    settings = settings_of(folder, pairs, training__steps=2)
    trainer = launch.build_trainer("reward", settings, name="reward", root=tmp_path)
    assert trainer.config["model/family"] == "llama-reward"
    taken = {name: part for name, part in trainer.state.params.items() if name != "value_head"}
    assert_equal(taken, load_folder(folder)[1])
    trainer.run()
    lines = export_run(trainer.run_directory, tmp_path / "out", "hf", no_progress)
    assert any("value_head" in line and "our own format" in line for line in lines)


@pytest.mark.long
def test_distilled_from_a_folder(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """A student of one layer takes tokenizer and template from its teacher, and needs the folder no more."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The number is {n}. " * 4}) + "\n" for n in NUMBERS))
    size = {"model__family": "llama", "model__depth": 1, "model__width": 16, "model__head_dim": 8}
    given = settings_of(folder, text, objective="distill", distill__teacher=str(folder), **size)
    del given["init"]
    given |= {"model.vocab_size": 262, "optimization.lr": 0.02}
    trainer, found = trained(given, tmp_path, "distilled")
    assert trainer.tokenizer.chat_template is not None and found[-1]["kl"] < found[0]["kl"]
    assert_equal(trainer.state.reference, load_folder(folder)[1])
    folder.rename(folder.with_name("away"))
    try:
        assert launch.reopen(tmp_path / "distilled").step == 3
    finally:
        folder.with_name("away").rename(folder)


@pytest.mark.long
def test_held_near_the_imported_model(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """The exact divergence from the weights it began with."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The number is {n}. " * 4}) + "\n" for n in NUMBERS))
    given = settings_of(folder, text, objective="kl", optimization__kl__estimator="exact")
    _, found = trained(given, tmp_path, "held")
    assert found[0]["kl"] == pytest.approx(0, abs=1e-5) and found[-1]["kl"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True], ids=["folder", "imported run"])
def test_stored_tokens_of_a_folder(folder: Path, imported: bool, tmp_path: Path) -> None:
    """A teacher without a checkpoint was a FileNotFoundError."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The number is {n}. " * 4}) + "\n" for n in NUMBERS))
    size = {"model__family": "llama", "model__depth": 1, "model__width": 16, "model__head_dim": 8}
    given = settings_of(folder, text, objective="distill", distill__top_k=4, **size)
    del given["init"]
    teacher = folder
    if imported:
        teacher = tmp_path / "imported"
        import_folder(folder, teacher)
    given |= {"distill.teacher": str(teacher), "model.vocab_size": 262, "training.steps": 1}
    trainer, found = trained(given, tmp_path, "distilled")
    assert trainer.batch()["teacher_ids"].shape == (8, 64, 4) and np.isfinite(found[0]["kl"])
    record = json.loads((tmp_path / "distilled/reference/teacher.json").read_text())
    assert record["sha256"] == weights_digest(Path(record["teacher"]))
