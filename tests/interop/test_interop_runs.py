"""An imported model is a run: it is sampled, fine-tuned with its own template, resumed and given back."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import (
    SFT,
    chatty_folder,
    config_of_case,
    foreign_tokenizer,
    load_folder,
    make_folder,
    make_talks,
    raw,
)

from bessemer.console import no_progress
from bessemer.errors import InputError
from bessemer.generate import load_model, sample
from bessemer.generate.export import export_run
from bessemer.interop.folder import Folder, import_folder
from bessemer.job import RunDirectory, find_run
from bessemer.serve.chat import template_of
from bessemer.storage.weights import flatten
from bessemer.training.launch import build_trainer, reopen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatty_folder(tmp_path_factory.mktemp("hub") / "tiny-qwen")


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return import_folder(folder, tmp_path_factory.mktemp("runs") / "qwen", context=64)[0]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talks(tmp_path_factory.mktemp("talks"))


def test_an_imported_run_is_sampled_and_chats_with_its_template(imported: RunDirectory, folder: Path) -> None:
    run = find_run(imported.path)
    loaded = load_model(run)
    assert loaded.step == 0 and loaded.model.block_size == 64 and not loaded.notes
    _, params = load_folder(folder)
    for name, leaf in flatten(loaded.params).items():  # widened exactly
        np.testing.assert_array_equal(leaf, flatten(params)[name])
    assert loaded.decoder.end_ids == (0,)
    texts, _ = sample(loaded, ["Once"], max_tokens=8)
    assert len(texts[0].tokens) <= 8
    template = template_of(loaded)
    assert template.name == "chat"
    said = loaded.tokenizer.decode(template.prompt([{"role": "user", "content": "Hi"}]))  # type: ignore[union-attr]
    assert said == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert run.read_status()["state"] == "done"


def test_a_prompt_as_text_begins_as_the_models_own_tokenizer_begins_it(
    imported: RunDirectory, folder: Path, talks: Path, tmp_path: Path
) -> None:
    """Qwen's puts nothing before a text; <|endoftext|> used to be."""
    tokenizer = load_model(imported).tokenizer
    assert tokenizer is not None and tokenizer.prompt("Once") == tokenizer.encode("Once")
    settings = {**SFT, "init": str(folder), "training.dataset": str(talks)}
    trained = build_trainer(None, settings, name="sft", root=tmp_path)
    assert trained.tokenizer.prompt("Once") == tokenizer.encode("Once")
    fresh = build_trainer(
        None,
        {**SFT, "data.tokenizer": str(folder), "training.dataset": str(talks), "model.depth": 1},
        name="new",
        root=tmp_path,
    )
    assert fresh.tokenizer.prompt("Once")[0] == tokenizer.bos_id  # its documents begin with it


@pytest.mark.slow
def test_fine_tuned_from_a_folder_or_its_import_then_exported(
    folder: Path, imported: RunDirectory, talks: Path, tmp_path: Path
) -> None:
    """init=HF_DIR and init=RUN begin from the same weights; the result is exported in the dtype that came in."""
    settings = {**SFT, "training.dataset": str(talks)}
    through = build_trainer(None, {**settings, "init": str(imported.path)}, name="through", root=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, through.state.params, load_model(imported).params)
    direct = build_trainer(None, {**settings, "init": str(folder)}, name="direct", root=tmp_path)
    for trainer in (direct, through):
        assert trainer.model.hf_type == "qwen2" and trainer.model.block_size == 48
        assert trainer.tokenizer.chat_template is not None
    jax.tree.map(np.testing.assert_array_equal, through.state.params, direct.state.params)
    direct.run()
    trained = load_model(find_run("direct", tmp_path)).params
    lines = export_run(find_run("direct", tmp_path), tmp_path / "out", "hf", no_progress)
    assert "bfloat16" in lines[0]
    there, here = raw(folder), raw(tmp_path / "out")
    assert there.keys() == here.keys() and there != here
    exported = flatten(load_folder(tmp_path / "out")[1])
    for name, leaf in flatten(trained).items():
        np.testing.assert_array_equal(exported[name], leaf.astype("bfloat16").astype("float32"))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    again = reopen("direct", root=tmp_path)  # a second start reads its own checkpoint
    assert again.step == 2


def test_another_shape_on_the_command_line_is_refused(folder: Path, talks: Path, tmp_path: Path) -> None:
    given = {"training.dataset": str(talks), "init": str(folder), "model.family": "llama", "model.mlp_width": 64}
    with pytest.raises(InputError, match=r"model\.mlp_width=64 \(it was 48\)"):
        build_trainer(None, {**SFT, **given}, root=tmp_path)


def test_save_pretrained_for_torch(folder: Path, talks: Path, tmp_path: Path) -> None:
    settings = {**SFT, "training.dataset": str(talks), "init": str(folder), "training.steps": 1}
    trainer = build_trainer(None, settings, name="pre", root=tmp_path)
    with trainer.topology.scope():
        path = trainer.save_pretrained(trainer.state, tmp_path / "torch", to_torch=True)
    assert raw(path) == raw(folder)
    assert Folder(path).model.end_tokens == (0,)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", config_of_case("smollm"))
    run, lines = import_folder(source, tmp_path / "run")
    assert "no tokenizer.json" in lines[-1]
    assert load_model(run).tokenizer is None
    foreign_tokenizer(source)  # 259 tokens, the model has 67
    with pytest.raises(InputError, match="259 tokens"):
        import_folder(source, tmp_path / "other")
