"""The base of adapters stays where it is: nothing copies it, and nothing goes on with another one."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file
from tests import processes
from tests.interop.tiny_hf import config_of_case, load_folder, make_folder
from tests.training.test_training_imported import assert_equal, settings_of
from tests.training.test_training_resume import StopAt, assert_same, rows
from tests.trust.test_foreign_run import called

from bessemer.checkpoint import Checkpoints
from bessemer.console import no_progress
from bessemer.doctor import Diagnosis, examine_checkpoints
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.evaluate import Evaluator
from bessemer.generate import base as bases
from bessemer.generate.export import export_run, export_run_adapters
from bessemer.generate.load import load_model
from bessemer.interop.folder import Folder, import_folder
from bessemer.job import RunDirectory
from bessemer.models.lora import merge_adapters
from bessemer.storage.weights import total
from bessemer.training import launch

TALKS = [{"text": f"The number is {n}. " * 4} for n in range(40)]


pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 of two layers in bfloat16, 1 MB: adapters with their moments are far smaller."""
    sizes = {"vocab_size": 262, "eos_token_id": 0, "hidden_size": 128, "intermediate_size": 512}
    config = {**config_of_case("qwen2"), **sizes}
    return make_folder(tmp_path_factory.mktemp("hub") / "qwen", config, dtype="bfloat16", tokenizer=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may move or damage."""
    return shutil.copytree(original, tmp_path / "qwen")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TALKS))
    return path


def adapters(folder: Path, text: Path, **more: Any) -> dict[str, Any]:
    return settings_of(folder, text, **{"objective": "pretrain", "lora__rank": 2, "training__steps": 4, **more})


def trained(settings: dict[str, Any], root: Path, name: str = "run") -> Any:
    trainer = launch.build_trainer(None, settings, name=name, root=root)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def finished_with(
    original: Path, text: Path, on_one_device: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """lora.quantize → a finished run; one of each."""

    @functools.cache
    def finished(quantize: str) -> Any:
        return trained(adapters(original, text, lora__quantize=quantize), tmp_path_factory.mktemp("runs"))

    return finished


@pytest.fixture(scope="module")
def finished(finished_with: Callable[[str], Any]) -> Any:
    return finished_with("none")


QUANTIZED = pytest.mark.parametrize("quantize", ["none", "nf4"])


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def weights_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def flip_a_bit(folder: Path) -> None:
    """In the middle of the weights; the header, and so every shape, stays as it was."""
    file = next(folder.glob("*.safetensors"))
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    file.write_bytes(held)


def without_checksums(folder: Path) -> None:
    """As others write safetensors files: damage to one is not noticed by reading it."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"] = {"format": "pt"}
        small = json.dumps(header).encode().ljust(size)
        file.write_bytes(size.to_bytes(8, "little") + small + data[8 + size :])
        assert safe_open(file, "np").metadata() == {"format": "pt"}


def stopped(settings: dict[str, Any], root: Path, step: int = 3) -> RunDirectory:
    first = launch.build_trainer(None, settings, name="part", root=root, callbacks=[StopAt(step)])
    with pytest.raises(Stopped):
        first.run()
    return first.run_directory


def test_a_run_writes_nothing_of_the_size_of_its_base(finished: Any, original: Path) -> None:
    """Two checkpoints, the final weights and everything else together are smaller than the base, in bytes."""
    run = finished.run_directory
    adapted = sum(leaf.nbytes for leaf in jax.tree.leaves(finished.state.params))
    assert adapted < weights_of(original) / 10
    assert bytes_below(run.path) < weights_of(original)
    assert bytes_below(run.path / "reference") < 10_000  # base.json
    saved = finished.checkpoint_manager.leaves(4)
    assert total(saved.values()) < 3 * adapted + 100  # with two moments and counters
    assert (run.model / "model.safetensors").stat().st_size < adapted + 10_000
    assert {name.rpartition("/")[2] for name in load_file(run.model / "model.safetensors")} == {"lora_a", "lora_b"}
    assert_equal(finished.state.frozen, load_folder(original)[1])
    assert f"{original} stays where it is" in run.log.read_text()


def test_the_run_names_its_base_by_path_and_hash(finished: Any, original: Path) -> None:
    run = finished.run_directory
    record = json.loads((run.path / "reference/base.json").read_text())
    assert record["path"] == str(original) and set(record["tensors"]) == set(Folder(original).signature())
    about = json.loads((run.model / "config.json").read_text())
    assert about["base"] == record and about["lora"]["rank"] == 2
    meta = json.loads((run.checkpoints / "step_00000004/meta.json").read_text())
    assert meta["frozen"] == record["sha256"]
    assert f"{original}, sha256 {record['sha256'][:16]}" in (run.path / "report.md").read_text()


@pytest.mark.slow
def test_keep_base_copies_it_once_in_its_own_dtype(folder: Path, text: Path, finished: Any, tmp_path: Path) -> None:
    trainer = trained(adapters(folder, text, lora__keep_base=True), tmp_path)
    copy = trainer.run_directory.path / "reference/base/model.safetensors"
    assert weights_of(folder) < copy.stat().st_size < 1.2 * weights_of(folder)
    shutil.rmtree(folder)
    assert_equal(merge_adapters(load_model(trainer.run_directory).params), finished.full_params())
    assert launch.reopen(trainer.run_directory.path, step=2).step == 2


def test_a_new_copy_of_the_base_removes_what_a_killed_copy_left(original: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    unfinished = run.path / "reference/.base.0123456789ab.1.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    bases.copy_base(Folder(original), {"model": {}}, run)
    assert [path.name for path in (run.path / "reference").iterdir()] == ["base"]
    assert sorted(path.name for path in bases.own_copy(run).iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=pytest.mark.long)])
def test_resumed_is_the_same_run(
    finished_with: Callable[[str], Any], quantize: str, original: Path, text: Path, tmp_path: Path
) -> None:
    run = stopped(adapters(original, text, lora__quantize=quantize), tmp_path)
    second = launch.reopen(run.path)
    second.run()
    assert_same(second, finished_with(quantize))


@pytest.mark.slow
@QUANTIZED
def test_killed_and_resumed_is_the_same_run(
    quantize: str, original: Path, text: Path, home: Path, tmp_path: Path
) -> None:
    """kill -9 after the first checkpoint, in a process of its own; the base is where it was."""
    asked = adapters(original, text, training__steps=30, lora__quantize=quantize)
    settings = [f"{key}={json.dumps(value)}" for key, value in asked.items()]
    whole, part = tmp_path / "whole", tmp_path / "part"
    words = ["train", "pretrain", *settings, "--runs", str(tmp_path)]
    (code,), (output,) = processes.finish(processes.start(home, 1, *words, "--name", "whole"))
    assert code == 0, output
    (process,) = killed = processes.start(home, 1, *words, "--name", "part")
    processes.wait_until(killed, lambda: bool(Checkpoints(part / "checkpoints").committed()))
    os.kill(process.pid, signal.SIGKILL)
    processes.finish(killed)
    assert Checkpoints(part / "checkpoints").latest() < 30
    (code,), (output,) = processes.finish(processes.start(home, 1, "resume", str(part)))
    assert code == 0, output
    assert rows(part) == rows(whole)
    one, other = (load_file(path / "model/model.safetensors") for path in (whole, part))
    assert set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)
    assert bytes_below(part / "reference") < 10_000  # base.json


@pytest.mark.slow
@QUANTIZED
def test_a_base_that_moved_is_pointed_to(
    folder: Path, text: Path, finished_with: Callable[[str], Any], quantize: str, tmp_path: Path
) -> None:
    """The error says how; afterwards the run knows the new path. Quantized again, the codes are the same."""
    finished = finished_with(quantize)
    run = stopped(adapters(folder, text, lora__quantize=quantize), tmp_path)
    away = tmp_path.parent / f"{tmp_path.name}-away"
    folder.rename(away)
    with pytest.raises(StorageError, match=r"bessemer resume .*part --base PATH"):
        launch.reopen(run.path)
    with pytest.raises(StorageError, match="--base"):
        load_model(run)
    assert load_model(run, base=away).step == 3
    second = launch.reopen(run.path, base=str(away))
    second.run()
    assert_same(second, finished)
    assert jax.tree.all(jax.tree.map(np.array_equal, second.state.frozen, finished.state.frozen))
    assert json.loads((run.path / "reference/base.json").read_text())["path"] == str(away)
    assert_equal(merge_adapters(load_model(run).params), finished.full_params())


@pytest.mark.slow
def test_the_base_of_a_finished_run_is_pointed_to(folder: Path, text: Path, tmp_path: Path, home: Path) -> None:
    run = trained(adapters(folder, text), tmp_path).run_directory
    away = tmp_path.parent / f"{tmp_path.name}-away"
    folder.rename(away)
    (line,) = launch.point_to_base(run.path, str(away))
    assert str(away) in line and load_model(run).step == 4


@pytest.mark.slow
def test_a_base_that_moved_with_the_run_is_found(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(adapters(folder, text), tmp_path)
    together = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(together)
    monkeypatch.chdir(together)
    assert load_model(RunDirectory(together / run.name)).step == 3


@pytest.mark.parametrize(
    ("checksums", "quantize"),
    [(True, "none"), (False, "none"), pytest.param(False, "nf4", marks=pytest.mark.slow)],
    ids=["with checksums", "without", "without, quantized"],
)
def test_a_base_changed_by_one_bit_is_refused(
    folder: Path, text: Path, checksums: bool, quantize: str, tmp_path: Path
) -> None:
    """By resume, by everything that loads the run, and by the doctor."""
    if not checksums:
        without_checksums(folder)
    run = stopped(adapters(folder, text, lora__quantize=quantize), tmp_path)
    flip_a_bit(folder)
    why = "damaged" if checksums else r"is not the one that .* was trained with"
    with pytest.raises(StorageError, match=why):
        launch.reopen(run.path)
    with pytest.raises(StorageError, match=why):
        load_model(run)
    with pytest.raises(StorageError, match=why):
        export_run(run, tmp_path / "out", "hf", no_progress)
    found = Diagnosis(run.name, "stopped")
    examine_checkpoints(run, Checkpoints(run.checkpoints), found, None)
    assert any(finding.level == "error" and "base model" in finding.text for finding in found.findings)


@pytest.mark.slow
def test_another_model_of_the_same_shape_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    """Its own checksums are right: only the run knows that it is another one."""
    run = stopped(adapters(folder, text), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    other = make_folder(tmp_path / "other", config, dtype="float32", tokenizer=True)  # bits of another dtype
    with pytest.raises(StorageError, match="is not the one that"):
        launch.reopen(run.path, base=str(other))


@pytest.mark.slow
def test_a_record_that_was_changed_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    run = stopped(adapters(folder, text), tmp_path)
    record = bases.read_record(run)
    assert record is not None
    first = next(iter(record.tensors))
    bases.write_record(run, bases.BaseRecord.of(folder, {**record.tensors, first: "0" * 64}, run))
    with pytest.raises(StorageError, match=r"base\.json does not describe"):
        load_model(run)
    with pytest.raises(StorageError, match="frozen weights"):
        launch.reopen(run.path)


@pytest.mark.slow
def test_loaded_sampled_evaluated_and_exported(finished: Any, original: Path, tmp_path: Path) -> None:
    """Everything that reads the run gets base and adapters; the export is merged, in the base's dtype."""
    run, whole = finished.run_directory, finished.full_params()
    assert_equal(merge_adapters(load_model(run).params), whole)
    assert isinstance(launch.Run(run).sample("The number", max_tokens=3), str)
    assert np.isfinite(Evaluator.from_run(run, tasks=["loss"], limit=2).run()["loss"]["value"])
    export_run(run, tmp_path / "merged", "hf", no_progress)
    merged = Folder(tmp_path / "merged")
    assert {dtype for dtype, _ in merged.signature().values()} == {"bfloat16"}
    for path, leaf in flatten_dict(whole).items():
        held = merged.read("/".join(path))
        np.testing.assert_array_equal(held, np.asarray(leaf).astype(held.dtype), str(path))
    export_run_adapters(run, tmp_path / "adapters")
    about = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(original)


def test_the_final_model_alone_is_enough(finished: Any, text: Path, tmp_path: Path) -> None:
    """RUN/model without checkpoints: to load, and for another run to begin from."""
    copy = RunDirectory(shutil.copytree(finished.run_directory.path, tmp_path / "copy"))
    shutil.rmtree(copy.checkpoints)
    want = finished.full_params()
    for path, leaf in flatten_dict(merge_adapters(load_model(copy).params)).items():
        np.testing.assert_allclose(
            leaf, flatten_dict(want)[path], rtol=1e-2, atol=1e-3
        )  # merged in the base's bfloat16
    on = launch.build_trainer(None, settings_of(copy.model, text, objective="pretrain"), name="on", root=tmp_path)
    assert_equal(on.state.params, merge_adapters(load_model(copy).params))


@pytest.mark.slow
def test_adapters_on_adapters(finished: Any, text: Path, tmp_path: Path) -> None:
    """The base is a finished run with a base of its own: nothing is copied, and the chain is loaded and resumed."""
    trainer = trained(adapters(finished.run_directory.path, text), tmp_path)
    assert not (trainer.run_directory.path / "reference/frozen").exists()
    assert_equal(merge_adapters(load_model(trainer.run_directory).params), trainer.full_params())
    again = launch.reopen(trainer.run_directory.path, step=2)
    assert_equal(again.state.frozen, trainer.state.frozen)


def test_an_imported_run_is_a_base(original: Path, text: Path, finished: Any, tmp_path: Path) -> None:
    run, _ = import_folder(original, tmp_path / "imported")
    trainer = trained(adapters(run.path, text), tmp_path)
    assert_equal(trainer.full_params(), finished.full_params())
    assert not (trainer.run_directory.path / "reference/frozen").exists()


@pytest.mark.slow
def test_a_checkpoint_of_an_unfinished_run_is_copied(original: Path, text: Path, tmp_path: Path) -> None:
    """That run deletes it when it goes on; the log says why there is a copy."""
    settings = settings_of(original, text, objective="pretrain", training__steps=4)
    base = stopped(settings, tmp_path, step=2)
    trainer = trained(adapters(base.path, text), tmp_path)
    assert (trainer.run_directory.path / "reference/frozen").is_dir()
    assert "is copied into the run: its run is not finished" in trainer.run_directory.log.read_text()
    shutil.rmtree(base.path)
    assert_equal(merge_adapters(load_model(trainer.run_directory).params), trainer.full_params())


@pytest.mark.slow
def test_a_run_from_elsewhere_opens_no_base_of_its_choice(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is outside the working directory: only --base or --trust opens it."""
    run = stopped(adapters(folder, text), tmp_path / "runs")
    run.origin.unlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r"was not started here.*--base"):
        load_model(run)
    with pytest.raises(InputError, match=r"was not started here.*--base"):
        launch.reopen(run.path)
    assert load_model(run, base=folder).step == 3
    assert launch.reopen(run.path, trust=True).step == 3
    assert load_model(run).step == 3  # trusted from now on


@pytest.mark.slow
def test_a_base_of_the_hub_is_named_by_its_revision(
    original: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache on disk stands in for the network. When it moves, the revision is found in the new one."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "cache/models--acme--tiny"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs/main").write_text(commit)
    shutil.copytree(original, stored / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = stopped({**adapters(original, text), "init": "hf:acme/tiny"}, tmp_path / "runs")
    record = bases.read_record(run)
    assert record is not None and record.source == f"hf:acme/tiny@{commit}"
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="acme/tiny"):
        load_model(run)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert load_model(run).step == 3
    export_run_adapters(run, tmp_path / "adapters")
    about = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "acme/tiny"
    run.origin.unlink()  # of somebody else: nothing is fetched on its word
    with pytest.raises((InputError, StorageError), match="--base"):
        load_model(run)


@pytest.mark.slow
def test_the_commands_take_the_base_that_is_given(folder: Path, text: Path, tmp_path: Path) -> None:
    run = trained(adapters(folder, text), tmp_path).run_directory
    away = tmp_path.parent / f"{tmp_path.name}-away"
    folder.rename(away)
    base, words = ["--base", str(away)], str(run.path)
    assert called("sample", words, "--prompt", "The", "--max-tokens", "2").exit_code == 4
    for command in (
        ["sample", words, "--prompt", "The", "--max-tokens", "2"],
        ["eval", words, "--tasks", "loss", "--limit", "2"],
        ["export", words, str(tmp_path / "out")],
        ["resume", words],
    ):
        answer = called(*command, *base)
        assert answer.exit_code == 0, answer.output
    assert "verified, and recorded" in answer.output
    assert called("sample", words, "--prompt", "The", "--max-tokens", "2").exit_code == 0
