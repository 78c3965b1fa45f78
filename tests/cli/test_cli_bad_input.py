"""Bad input: one paragraph that says what, where and what to do; exit code 2; nothing written, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from tests.conftest import words

from bessemer.cli import main
from bessemer.topology import make_topology
from bessemer.training import launch

Case = tuple[dict[str, object], tuple[str, ...]]


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(settings, devices=jax.devices()[:1]))


@pytest.fixture
def eight_devices(monkeypatch: pytest.MonkeyPatch, one_device: None) -> None:
    monkeypatch.setattr(launch, "make_topology", make_topology)


@pytest.fixture
def refuse(tiny: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `bessemer train` with changed settings; check the form of the refusal and return its text."""

    def call(*arguments: str, **changes: object) -> str:
        settings = {**tiny, **{key.replace("__", "."): value for key, value in changes.items()}}
        with pytest.raises(SystemExit) as caught:
            main(
                ["train", "quickstart", *words(settings), "--runs", str(tmp_path / "runs"), "--name", "bad", *arguments]
            )
        captured = capsys.readouterr()
        assert caught.value.code == 2, captured.err
        assert not (tmp_path / "runs" / "bad").exists(), "a refused run leaves nothing behind"
        text = captured.err.strip()
        assert text.startswith("error: ") and "\n" not in text and "Traceback" not in text
        return text

    return call


def test_misspelt_key(refuse: Callable[..., str]) -> None:
    assert "did you mean 'optimization.lr_multiplier'" in refuse("optimizaton.lr_multiplier=1")


def test_setting_of_an_unselected_part(refuse: Callable[..., str]) -> None:
    assert "optimization.name=adafactor|adamw" in refuse("optimization.lr=1e-3")


def test_wrong_type(refuse: Callable[..., str]) -> None:
    text = refuse(training__batch_size="many")
    assert "training.batch_size" in text and "many" in text


def test_out_of_range(refuse: Callable[..., str]) -> None:
    assert "training.steps" in refuse(training__steps=0)


def test_numbers_that_nothing_can_hold(refuse: Callable[..., str]) -> None:
    assert "optimization.lr_multiplier" in refuse("optimization.lr_multiplier=1e400")
    assert "4294967295" in refuse("seed=99999999999")
    assert "2147483647" in refuse(training__steps=10**20)
    assert "64 bits" in refuse(training__validation_steps=10**20)
    assert "training.flops" in refuse("training.flops=1e38", training__steps="none")


def test_a_platform_that_is_not_here(refuse: Callable[..., str], eight_devices: None) -> None:
    assert "topology.platform=gpu" in refuse("topology.platform=gpu")


def test_missing_file(refuse: Callable[..., str], tmp_path: Path) -> None:
    assert "nothing-here.txt" in refuse(training__dataset=tmp_path / "nothing-here.txt")


def test_empty_corpus(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in refuse(training__dataset=tmp_path / "empty.txt")


def test_a_dataset_without_a_name(refuse: Callable[..., str]) -> None:
    """Not the working directory, which an empty path would be."""
    assert "training.dataset names nothing" in refuse(training__dataset="")


def test_one_document_says_how_to_train_without_validation(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_text((json.dumps({"text": "the same again " * 9}) + "\n") * 3)
    text = refuse(training__dataset=tmp_path / "same.jsonl")
    assert "3 copies" in text and "data.val_fraction=0 training.validation=false" in text
    text = refuse(training__dataset=tmp_path / "same.jsonl", data__val_fraction=0)
    assert "training.validation=false" in text


def test_corrupt_parquet(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
    assert "bad.parquet" in refuse(training__dataset=tmp_path / "bad.parquet")


def test_truncated_jsonl_line(refuse: Callable[..., str], tmp_path: Path) -> None:
    good = json.dumps({"text": "a good line " * 30})
    (tmp_path / "cut.jsonl").write_text(f"{good}\n{good}\n" + good[:40])
    text = refuse(training__dataset=tmp_path / "cut.jsonl")
    assert "cut.jsonl" in text and "3" in text


def test_vocabulary_larger_than_the_models(refuse: Callable[..., str]) -> None:
    text = refuse(model__vocab_size=100)
    assert "model.vocab_size=100" in text and "300" in text


def test_block_size_longer_than_the_data(refuse: Callable[..., str]) -> None:
    assert "architecture.block_size=100000" in refuse(architecture__block_size=100000)


def test_horizon_and_batch_are_judged_before_data_is_prepared(
    refuse: Callable[..., str], tmp_path: Path, home: Path
) -> None:
    """Not after hours of it."""
    (tmp_path / "fresh.jsonl").write_text("".join(f'{{"text": "{n} more words"}}\n' for n in range(50)))
    unprepared = {"training__dataset": tmp_path / "fresh.jsonl", "data__tokenizer": "train:301"}
    assert "no horizon" in refuse(training__steps="none", **unprepared)
    assert "training.batch_size=8" in refuse(training__per_device_batch_size=3, **unprepared)
    assert not list(home.glob("*/*fresh*")) and not list(home.glob("tokenizers/bpe-301-*"))


def test_batch_not_divisible(refuse: Callable[..., str]) -> None:
    text = refuse(training__per_device_batch_size=3)
    assert "training.batch_size=8" in text and "1, 2, 4, 8" in text


def test_heads_do_not_fit_the_width(refuse: Callable[..., str]) -> None:
    assert "model." in refuse(model__width=40)


def test_width_does_not_fit_the_mesh(refuse: Callable[..., str], eight_devices: None) -> None:
    text = refuse("topology.fsdp=8", model__width=36, model__head_dim=12, training__per_device_batch_size=1)
    assert "topology.fsdp" in text and "36" in text


def test_mesh_does_not_fit_the_devices(refuse: Callable[..., str], eight_devices: None) -> None:
    assert "topology.fsdp=3" in refuse("topology.fsdp=3")


def test_two_horizons(refuse: Callable[..., str]) -> None:
    assert "one horizon" in refuse("training.tokens=10000")


def test_batch_given_twice(refuse: Callable[..., str]) -> None:
    assert "training.batch_tokens" in refuse("training.batch_tokens=1024")


def test_mixture_with_a_negative_rate(refuse: Callable[..., str], corpus: Path) -> None:
    """Rates are weights of any sum, but not below 0."""
    mixture = f"[{{name: {corpus}, rate: 0.5}}, {{name: python-stdlib, rate: -0.4}}]"
    assert "-0.4" in refuse(training__dataset=mixture)


def test_stages_without_their_horizons(refuse: Callable[..., str], corpus: Path) -> None:
    stages = f"[[{{name: {corpus}}}], [{{name: {corpus}, style: PACKED}}]]"
    assert "training.tokens" in refuse(training__dataset=stages)


def test_known_foreign_flags(refuse: Callable[..., str]) -> None:
    assert "training.per_device_batch_size" in refuse("--device-batch-size=4")
    assert "training.per_device_batch_size" in refuse("--grad_accum_steps", "4")


def test_bad_duration(refuse: Callable[..., str]) -> None:
    assert "time_limit" in refuse("training.time_limit=2h30x")


def test_unknown_names(refuse: Callable[..., str]) -> None:
    assert "Did you mean 'muon'" in refuse(optimization__name="moun")
    assert "pretrain" in refuse("objective=pretrian")
    assert "gpt" in refuse("model.family=gtp")
    assert "callback" in refuse("callbacks=[nothing]")


def test_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "quickstrat"])
    assert caught.value.code == 2 and "Did you mean 'quickstart'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my.txt", "chats.jsonl", "texts"])
def test_data_in_place_of_a_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither read as YAML nor printed."""
    path = tmp_path / name
    path.write_text("word " * 2000) if path.suffix else path.mkdir()
    with pytest.raises(SystemExit) as caught:
        main(["train", str(path)])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and f"training.dataset={path}" in said and "word word" not in said


def test_settings_as_another_system_calls_them(refuse: Callable[..., str]) -> None:
    assert "write optimization.lr=1e-3 optimization.name=adamw." in refuse("learning_rate=1e-3")
    assert refuse("depth=4").endswith("write model.depth=4")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2 and "Did you mean 'train'" in capsys.readouterr().err


def test_data_beside_a_recipe_without_the_name_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("{}")
    Path("sft").mkdir()  # a recipe's name stays one
    with pytest.raises(SystemExit) as caught:
        main(["train", "sft", "chats.jsonl"])
    assert caught.value.code == 2 and "write training.dataset=chats.jsonl" in capsys.readouterr().err


def test_an_objective_with_other_arguments(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "own_loss.py").write_text("def total(apply, params, batch): ...\n")
    text = refuse(f"objective={tmp_path / 'own_loss.py'}:total")
    assert "total cannot be called as f(apply, params, batch, key, settings=…)" in text


def test_a_recipe_in_the_place_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["finetune-lora", "init=runs/mine"])
    assert caught.value.code == 2 and "bessemer train finetune-lora" in capsys.readouterr().err


def test_bad_run_name(tiny: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "quickstart", *words(tiny), "--runs", str(tmp_path), "--name", "a/b"])
    assert caught.value.code == 2 and "run name" in capsys.readouterr().err


EXPERTS = ("model.family=llama", "model.experts=4", "model.experts_active=2", "model.expert_width=16")
MESHES: dict[str, tuple[tuple[str, ...], str]] = {
    "sinks": (
        ("model.family=gptoss", *EXPERTS[1:], "topology.data=4", "topology.context=2"),
        "topology.context=2 splits rows",
    ),
    "stages that differ": (
        ("topology.pipeline=2", "topology.context=2", "topology.data=2", "model.window=L"),
        "topology.pipeline=2 with topology.context=2",
    ),
    "quantized experts": (
        (*EXPERTS, "topology.data=4", "topology.expert=2", "lora.rank=2", "lora.quantize=nf4"),
        "topology.expert=2 with lora.quantize=nf4",
    ),
}


@pytest.mark.parametrize("name", list(MESHES))
def test_what_a_mesh_cannot_train(name: str, refuse: Callable[..., str], eight_devices: None) -> None:
    arguments, message = MESHES[name]
    assert message in refuse(*arguments, training__per_device_batch_size=1)
