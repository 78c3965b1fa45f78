"""Adapters of PEFT: its numbers, stored by tests/reference/peft_lora.py, and its files read, continued and refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.test_llama_reference import QUICK, assert_close, compare
from tests.interop.tiny_hf import SFT, foreign_tokenizer, load_folder, make_talks
from tests.interop.tiny_peft import STORED, make_base, make_peft
from tests.reference.huggingface import sketch
from tests.reference.peft_lora import ADAPTERS
from tests.training.test_frozen_base import flip_a_bit
from tests.training.test_training_resume import StopAt, assert_same, one_device
from tests.trust.test_foreign_run import called

from bessemer.data import Tokenizer
from bessemer.errors import BessemerError, InputError, Stopped, StorageError
from bessemer.generate.adapters import import_adapters
from bessemer.generate.export import export_run_adapters
from bessemer.generate.load import boxed_params, located
from bessemer.generate.load import load_model as load_run
from bessemer.interop.folder import Folder
from bessemer.interop.peft import CONFIG, WEIGHTS, PeftFolder
from bessemer.job import RunDirectory
from bessemer.models.lora import make_split, saved_settings
from bessemer.storage.weights import WeightFile, flatten, place, write_file
from bessemer.training import launch
from bessemer.training.launch import build_trainer


def adapted_logits(base: Path, peft: Path, ids: np.ndarray) -> tuple[Any, np.ndarray, Any, PeftFolder]:
    """(loss, logits, gradients of the adapters, the folder)."""
    model, params = load_folder(base)
    folder = PeftFolder(peft)
    split = make_split(boxed_params(model), lora=saved_settings(folder.settings(model)), model=model)
    trained = place(folder.arrays(model), located(split.shapes(boxed_params(model))[0], None), str(peft))
    frozen = split.divide(params, jax.random.key(0))[1]
    batch = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def all_of_it(trained: Any) -> Any:
        def loss(trained: Any) -> Any:
            total, weight, _ = model.apply({"params": split.complete(trained, frozen)}, batch, method="loss")
            return total / weight

        logits = model.apply({"params": split.complete(trained, frozen)}, ids)
        return (*jax.value_and_grad(loss)(trained), logits)

    value, gradients, logits = jax.device_get(all_of_it(trained))
    return value, logits, gradients, folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "lora" else []) for name in ADAPTERS]
)
def test_loss_logits_and_gradients_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """LoRA on every matrix, DoRA, and rsLoRA with ranks and α by pattern: to 1e-4 of each gradient's norm."""
    stored = STORED[name]
    peft = make_peft(tmp_path / "peft", name)
    ids = np.array(stored["ids"], np.int32)
    loss, logits, gradients, folder = adapted_logits(make_base(tmp_path / "base", name), peft, ids)
    assert abs(loss - stored["loss"]) < 1e-5
    assert_close(logits[0], np.array(stored["logits"]))
    theirs = {folder.parts[ours].theirs: np.ascontiguousarray(g.T) for ours, g in flatten(gradients).items()}
    assert compare({key: sketch(key, g) for key, g in theirs.items()}, stored["gradients"]) < 1e-4


def imported(root: Path, name: str = "patterns") -> tuple[RunDirectory, Path, Path]:
    """(the run, the base, PEFT's folder)."""
    base = make_base(root / "base", name)
    peft = make_peft(root / "peft", name)
    run, _ = import_adapters(peft, root / "runs" / "imported", base, Folder(base).tree)
    return run, base, peft


def test_an_imported_run_holds_the_adapters_alone_and_answers_as_peft_does(tmp_path: Path) -> None:
    run, base, _ = imported(tmp_path)
    size = sum(file.stat().st_size for file in run.path.rglob("*.safetensors"))
    assert size < sum(file.stat().st_size for file in base.glob("*.safetensors"))
    loaded = load_run(run)
    stored = STORED["patterns"]
    logits = jax.jit(loaded.model.clone(precision="float32").apply)({"params": loaded.params}, np.array(stored["ids"]))
    assert_close(np.asarray(logits)[0], np.array(stored["logits"]))
    held = json.loads((run.model / "config.json").read_text())["lora"]
    assert held["targets"] == ["*/q", "*/v", "*/down"] and held["rank_stabilized"] is True
    assert held["rank_pattern"] == {"*/q": 2, "blocks_1/down": 6}
    assert held["alpha_pattern"] == {"blocks_0/v": 9.0, "*/down": 3.0}


def test_ours_to_peft_and_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Import, export, import: the same tensors and the same meaning, in fewer words or more."""
    run, base, peft = imported(tmp_path)
    export_run_adapters(run, tmp_path / "out")
    once, twice = WeightFile(peft / WEIGHTS), WeightFile(tmp_path / "out" / WEIGHTS)
    assert set(once.entries) == set(twice.entries)
    for name in once.entries:
        np.testing.assert_array_equal(once.read(name), twice.read(name), err_msg=name)
    model = Folder(base).model
    assert PeftFolder(peft).settings(model) == PeftFolder(tmp_path / "out").settings(model)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["base_model_name_or_path"] == str(base)


def test_damage_to_exported_adapters_is_noticed(tmp_path: Path) -> None:
    """They carry checksums, as every export does; PEFT reads past them."""
    run, base, _ = imported(tmp_path)
    export_run_adapters(run, tmp_path / "out")
    flip_a_bit(tmp_path / "out")
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is damaged"):
        import_adapters(tmp_path / "out", tmp_path / "runs" / "again", base, Folder(base).tree)
    assert not (tmp_path / "runs" / "again").exists()


def test_a_head_trained_whole_is_one_of_modules_to_save(tmp_path: Path) -> None:
    """Its padding columns are ours alone."""
    base, peft = make_base(tmp_path / "base", "lora"), make_peft(tmp_path / "peft", "lora", modules_to_save=["lm_head"])
    file = WeightFile(peft / WEIGHTS)
    entries = {**file.signature(), "base_model.model.lm_head.weight": ("float32", (67, 32))}
    head = np.random.default_rng(0).standard_normal((67, 32)).astype(np.float32)
    kept = {name: file.read(name) for name in file.entries} | {"base_model.model.lm_head.weight": head}
    write_file(peft / WEIGHTS, entries, kept.__getitem__, {"format": "pt"})
    run, _ = import_adapters(peft, tmp_path / "runs" / "one", base, Folder(base).tree)
    loaded = load_run(run)
    np.testing.assert_array_equal(np.asarray(loaded.params["head"])[:, :67], head.T)
    assert not np.asarray(loaded.params["head"])[:, 67:].any()
    export_run_adapters(run, tmp_path / "out")
    np.testing.assert_array_equal(WeightFile(tmp_path / "out" / WEIGHTS).read("base_model.model.lm_head.weight"), head)
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, r"adapter_config\.json: peft_type is 'LOHA'; only LORA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["score"]}, "modules_to_save is .*only embed_tokens and lm_head"),
        ({"layers_to_transform": [0]}, "layers_to_transform is .*does not support"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; such adapters fit a base that was changed"),
        ({"something_new": {"a": 1}}, "something_new is"),
        ({"r": "four"}, "r is 'four'; it must be an integer"),
        ({"r": 5}, "has rank 4, and r with rank_pattern in adapter_config.json give 5"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be above 0"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*a finite number"),
        ({"lora_alpha": 1e300}, r"lora_alpha is 1e\+300; it must be above 0 and below"),
        ({"lora_dropout": 1}, r"adapter_config\.json: lora_dropout is 1; it must be below 1"),
        ({"lora_dropout": 10**400}, "lora_dropout is 1000.*a finite number"),
        ({"use_dora": True}, r"lora_magnitude_vector' is missing \(use_dora is true"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; it must be true or false"),
        ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern is .*is a regular expression"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern is .*must be a number above 0"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*must be an object"),
        ({"target_modules": ["q_proj"]}, "target_modules is .*which it leaves out"),
        ({"target_modules": 7}, "target_modules is 7; it must be a list"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path is 7; it must be a string"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    peft = make_peft(tmp_path / "peft", "lora", **changes)
    with pytest.raises(InputError, match=message):
        folder = PeftFolder(peft)
        folder.settings(Folder(make_base(tmp_path / "base", "lora")).model)
        folder.find_base("")


def rewritten(peft: Path, **tensors: tuple[int, ...] | None) -> Path:
    """The folder with other tensors: a shape, or None to leave one out."""
    entries = dict(WeightFile(peft / WEIGHTS).signature())
    for name, shape in tensors.items():
        entries.pop(name, None)
        entries |= {} if shape is None else {name: ("float32", shape)}
    write_file(peft / WEIGHTS, entries, lambda name: np.zeros(entries[name][1], np.float32), {"format": "pt"})
    return peft


Q = "base_model.model.model.layers.0.self_attn.q_proj"
LATE = "base_model.model.model.layers.7.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_A.weight": None}, r"q_proj\.lora_A\.weight' is missing"),
        ({f"{Q}.lora_magnitude_vector": (64,)}, r"has no use \(use_dora is false"),
        ({f"{Q}.lora_B.weight": (64, 3)}, r"has lora_A \(4, 32\) and lora_B \(64, 3\)"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 67)}, "is not an adapter of an attention"),
        ({"base_model.model.lm_head.weight": (67, 32)}, "nor named by modules_to_save"),
        ({f"{Q.replace('layers.0', 'layers.00')}.lora_A.weight": (4, 32)}, "is not an adapter of an attention"),
        ({f"{Q.replace('self_attn', 'mlp')}.lora_A.weight": (4, 32)}, "is not an adapter of an attention"),
        ({f"{LATE}.lora_A.weight": (4, 32), f"{LATE}.lora_B.weight": (64, 4)}, "beyond the 2 layers"),
        ({f"{Q}.lora_A.weight": (4, 31), f"{Q}.lora_B.weight": (64, 4)}, "blocks_0/q/lora_a"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: Any, message: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "lora")
    peft = rewritten(make_peft(tmp_path / "peft", "lora"), **tensors)
    with pytest.raises(BessemerError, match=message):
        import_adapters(peft, tmp_path / "runs" / "one", base, Folder(base).tree)
    assert not (tmp_path / "runs").exists()


def test_a_pickle_and_broken_files_are_refused(tmp_path: Path) -> None:
    peft = make_peft(tmp_path / "peft", "lora")
    (peft / WEIGHTS).rename(peft / "adapter_model.bin")
    with pytest.raises(InputError, match=r"no adapter_model\.safetensors.*a pickle, which is never opened"):
        _ = PeftFolder(peft).file
    (peft / CONFIG).write_text("{")
    with pytest.raises(InputError, match=r"adapter_config\.json cannot be read"):
        PeftFolder(peft)
    (peft / CONFIG).write_text("[]")
    with pytest.raises(InputError, match="not an object"):
        PeftFolder(peft)


def test_a_base_is_opened_only_where_a_run_from_elsewhere_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", "lora")
    peft = make_peft(tmp_path / "here" / "peft", "lora", base)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r"outside the working directory.*--base"):
        PeftFolder(peft).find_base("Name it: --base PATH")
    monkeypatch.chdir(tmp_path)
    assert PeftFolder(peft).find_base("") == str(base)
    hub = make_peft(tmp_path / "hub", "lora", "acme/tiny", revision="abc")
    assert PeftFolder(hub).find_base("") == "hf:acme/tiny@abc"
    gone = make_peft(tmp_path / "gone", "lora", "/nowhere/at all")
    with pytest.raises(InputError, match="neither a directory here nor OWNER/NAME"):
        PeftFolder(gone).find_base("")
    with pytest.raises(InputError, match="base_model_name_or_path is missing"):
        PeftFolder(make_peft(tmp_path / "none", "lora")).find_base("")


@pytest.mark.slow
def test_the_commands_import_sample_evaluate_and_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base with a tokenizer, named by --base and found again by the run: outside the working directory."""
    base = make_base(tmp_path / "elsewhere" / "base", "patterns", vocab_size=262, eos_token_id=0)
    foreign_tokenizer(base)
    peft = make_peft(tmp_path / "peft", "patterns")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    answer = called("import", str(peft), "runs/one")
    assert answer.exit_code != 0 and "Name the base yourself: --base PATH" in answer.output
    for command in (
        ["import", str(peft), "runs/one", "--base", str(base)],
        ["sample", "one", "--prompt", "The", "--max-tokens", "2"],
        ["eval", "one", "--tasks", "exact:toy-reverse", "--limit", "2"],
        ["export", "one", "adapters", "--adapters"],
        ["export", "one", "merged"],
        ["import", "adapters", "runs/two", "--base", str(base)],
        ["sample", "two", "--prompt", "The", "--max-tokens", "2"],
    ):
        answer = called(*command)
        assert answer.exit_code == 0, answer.output
    assert called("import", str(base), "runs/three", "--base", str(base)).exit_code == 2


# --- init=PEFT_DIR: training goes on with the adapters ---


def sft(root: Path, **more: Any) -> dict[str, Any]:
    return {**SFT, "training.dataset": str(make_talks(root)), "lora.dropout": 0.0, "optimization.lr": 0.0, **more}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(base with a tokenizer, PEFT's folder that names it), both below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "make_topology", lambda settings: one_device())
    base = make_base(tmp_path / "base", "patterns", vocab_size=262, eos_token_id=0)
    foreign_tokenizer(base)
    return base, make_peft(tmp_path / "peft", "patterns", base)


def test_a_run_continues_the_adapters_of_peft(started: tuple[Path, Path], tmp_path: Path) -> None:
    """Their values, settings and base; B is not zero at first, and the run that it makes is one like any other."""
    base, peft = started
    trainer = build_trainer(None, sft(tmp_path, init=str(peft)), name="on", root=tmp_path / "runs")
    config = trainer.config
    assert config["init"] == str(base) and config["lora/adapters"] == str(peft)
    assert (config["lora/rank"], config["lora/alpha"], config["lora/rank_stabilized"]) == (4, 6.0, True)
    assert config["lora/rank_pattern"] == {"*/q": 2, "blocks_1/down": 6}
    arrays = PeftFolder(peft).arrays(Folder(base).model)
    for name, leaf in flatten(trainer.state.params).items():
        np.testing.assert_array_equal(leaf, arrays.read(name), err_msg=name)
    assert str(config.provenance["lora/rank"]) == f"inherited from {peft}"
    explicit = sft(tmp_path, init=str(base), **{"lora.adapters": str(peft)})
    again = build_trainer(None, explicit, name="again", root=tmp_path / "runs")
    assert again.config["lora/alpha_pattern"] == config["lora/alpha_pattern"]


def test_the_tokenizer_beside_the_adapters_is_the_runs(started: tuple[Path, Path], tmp_path: Path) -> None:
    """Trainers save it there with the chat template that the adapters were trained in; `import` takes it, too."""
    base, peft = started
    foreign_tokenizer(peft)
    about = json.loads((peft / "tokenizer_config.json").read_text())
    template = about["chat_template"].replace("<|im_start|>", "<|im_start|>the ")
    (peft / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    trainer = build_trainer(None, sft(tmp_path, init=str(peft)), name="on", root=tmp_path / "runs")
    assert trainer.tokenizer is not None and trainer.tokenizer.hash == Tokenizer.load(peft).hash
    assert trainer.tokenizer.hash != Tokenizer.load(base).hash
    assert str(trainer.config.provenance["data/tokenizer"]) == f"inherited from {peft}"
    given = sft(tmp_path, init=str(peft), **{"data.tokenizer": str(base)})
    with pytest.raises(InputError, match=r"lora\.adapters=.*trained with another tokenizer"):
        build_trainer(None, given, name="given", root=tmp_path / "runs")


@pytest.mark.slow
def test_a_run_on_peft_adapters_trains_resumes_and_exports(started: tuple[Path, Path], tmp_path: Path) -> None:
    _, peft = started
    settings = sft(tmp_path, init=str(peft), **{"optimization.lr": 0.01, "training.per_device_batch_size": 8})
    whole = build_trainer(None, settings, name="whole", root=tmp_path / "runs")
    whole.run()
    part = build_trainer(None, settings, name="part", root=tmp_path / "runs", callbacks=[StopAt(1)])
    with pytest.raises(Stopped):
        part.run()
    resumed = launch.reopen(tmp_path / "runs" / "part")
    resumed.run()
    assert_same(resumed, whole)
    export_run_adapters(whole.run_directory, tmp_path / "out")
    once, twice = WeightFile(peft / WEIGHTS), WeightFile(tmp_path / "out" / WEIGHTS)
    moved = [np.abs(once.read(name) - twice.read(name)).max() for name in once.entries]
    assert set(once.entries) == set(twice.entries) and 0 < max(moved) < 0.1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora.rank": 8}, r"lora\.rank=8 \(command line\) contradicts .*peft, whose adapters have 4"),
        ({"lora.alpha": 16}, r"lora\.alpha=16\.0 \(command line\) contradicts"),
        ({"lora.dora": True}, r"lora\.dora=True"),
        ({"lora.targets": ["*/q"]}, r"lora\.targets=\['\*/q'\]"),
        ({"lora.adapters": "base"}, r"lora\.adapters=base has no adapter_config\.json"),
    ],
)
def test_a_setting_that_contradicts_the_adapters_is_refused(
    more: dict[str, Any], message: str, started: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        build_trainer(None, sft(tmp_path, init=str(started[1]), **more), name="no", root=tmp_path / "runs")


def test_a_base_outside_is_not_opened_on_the_word_of_the_folder(
    started: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r"not opened on the word of a file\. Name the base yourself: init=BASE lora"):
        build_trainer(None, sft(tmp_path, init=str(started[1])), name="no", root=tmp_path / "runs")
