"""Against transformers itself, where it is installed: what it saves is read here, what is exported here it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.test_llama_reference import assert_close, compare, greedy, logits_and_gradients
from tests.interop.tiny_hf import SFT, chatty_folder, config_of_case, load_folder, make_folder, make_talks, raw
from tests.reference.huggingface import CASES, MORE, PROMPT, build, clear_case, gradients_of, some_ids
from tests.reference.peft_lora import ADAPTERS, OUT, adapted, answers

from bessemer.console import no_progress
from bessemer.generate import load_model
from bessemer.generate.adapters import import_adapters
from bessemer.generate.export import export_run, export_run_adapters
from bessemer.interop.config import tensors_of
from bessemer.interop.folder import Folder, import_folder
from bessemer.job import RunDirectory
from bessemer.serve.chat import Turns
from bessemer.storage.weights import flatten, signature
from bessemer.training.launch import build_trainer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)).logits.numpy()


def compare_gradients_and_text(model: Any, ours: Any, params: Any) -> None:
    """‖Δ‖ < 1e-4 ‖gradient‖ of every tensor, and the same 64 greedy tokens, each with its own cache."""
    ids, made = clear_case(model)
    model(input_ids=ids, labels=ids).loss.backward()
    theirs = gradients_of(model)
    _, gradients = logits_and_gradients(ours, params, ids.numpy().astype(np.int32))
    flat = flatten(gradients)
    for name, tensor in tensors_of(signature(flat), ours).items():
        gradient = flat[tensor.ours]
        wanted = theirs.pop(name)
        difference = np.linalg.norm(tensor.to_theirs(gradient) - wanted)
        assert difference < 1e-4 * max(np.linalg.norm(wanted), 1e-6), name
    assert not theirs
    assert greedy(ours, params, ids[0, :PROMPT].tolist()) == made[0, PROMPT:].tolist()


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_saved_by_transformers_imported_exported_and_loaded_by_it(name: str, tmp_path: Path) -> None:
    model = build({**CASES, **MORE}[name])
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    ids = some_ids(67, length=40)
    expected = their_logits(model, ids)
    ours, params = load_folder(tmp_path / "hf")
    logits = jax.jit(ours.apply)({"params": params}, ids)
    assert_close(np.asarray(logits), expected)
    compare_gradients_and_text(model, ours, params)
    run, _ = import_folder(tmp_path / "hf", tmp_path / "run")
    export_run(run, tmp_path / "out", "hf", no_progress)
    assert raw(tmp_path / "out") == raw(tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    assert type(again) is type(model)
    np.testing.assert_array_equal(their_logits(again, ids), expected)


def test_an_exported_tokenizer_writes_the_same_conversation(tmp_path: Path) -> None:
    config = {**config_of_case("qwen2"), "vocab_size": 262, "eos_token_id": [2, 0]}
    run, _ = import_folder(make_folder(tmp_path / "hf", config, tokenizer=True), tmp_path / "run")
    export_run(run, tmp_path / "out", "hf", no_progress)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}] * 2
    said = theirs.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=True, return_dict=False)
    from bessemer.data import Tokenizer

    assert said == Turns(Tokenizer.load(tmp_path / "run/model")).prompt(messages[:3])
    loaded = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert loaded.eos_token_id == [2, 0]
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen2"


def tuned(root: Path, case: str = "qwen2", **changes: Any) -> tuple[Path, RunDirectory]:
    """(the folder it began with, the run): conversations learned in the model's own template, hard enough to show."""
    folder = chatty_folder(root / "hf", dtype="float32", case=case)
    given = {"init": str(folder), "training.dataset": str(make_talks(root)), "optimization.lr": 0.02, **changes}
    trainer = build_trainer(None, {**SFT, **given}, name="tuned", root=root / "runs")
    trainer.run()
    return folder, trainer.run_directory


def our_logits(run: RunDirectory, ids: np.ndarray) -> np.ndarray:
    loaded = load_model(run)
    return np.asarray(jax.jit(loaded.model.clone(precision="float32").apply)({"params": loaded.params}, ids))


@pytest.mark.parametrize("case", ["qwen2", "smollm3", "gemma3", "qwen3.5"])
def test_fine_tuned_in_its_template_exported_and_spoken_with_by_transformers(case: str, tmp_path: Path) -> None:
    """The same prompt of the same conversation, the same logits, and the same 24 tokens of the answer."""
    _, run = tuned(tmp_path, case)
    export_run(run, tmp_path / "out", "hf", no_progress, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "7?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    loaded = load_model(run)
    assert loaded.tokenizer is not None and loaded.step == 2
    assert ids[0].tolist() == Turns(loaded.tokenizer).prompt(asked)
    assert_close(our_logits(run, ids.numpy()), their_logits(model, ids.numpy()))
    made = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    mine = loaded.decoder(loaded.params, [ids[0].tolist()], max_tokens=24)
    assert mine.ids[0, : mine.lengths[0]].tolist() == made


@pytest.mark.parametrize(
    ("case", "stabilized", "more"),
    [
        ("qwen2", False, {}),
        ("qwen2", True, {"lora.rank_pattern": {"*/q": 2}}),
        ("qwen2", False, {"lora.dora": True}),
        ("smollm3", False, {}),
        ("gemma3", False, {}),
        ("qwen3.5", False, {}),
    ],
)
def test_adapters_are_loaded_by_peft(case: str, stabilized: bool, more: dict[str, object], tmp_path: Path) -> None:
    """PEFT on the folder that training began with, PEFT's own merge, and our merged export: three times our logits."""
    peft = pytest.importorskip("peft")
    folder, run = tuned(
        tmp_path, case, **{"lora.rank": 4, "lora.alpha": 6.0, "lora.rank_stabilized": stabilized, **more}
    )
    export_run_adapters(run, tmp_path / "adapters")
    export_run(run, tmp_path / "merged", "hf", no_progress, dtype="float32")
    ids = some_ids(262, length=40)
    expected = our_logits(run, ids)

    def load(path: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    loaded = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapters").eval()
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapters")
    assert config.base_model_name_or_path == str(folder) and config.r == 4
    assert np.abs(their_logits(load(folder), ids) - expected).max() > 1e-2  # training has moved it
    for model in (loaded, loaded.merge_and_unload(), load(tmp_path / "merged")):
        assert_close(their_logits(model, ids), expected)


def test_the_proof_that_users_run_on_a_real_model_holds_on_a_tiny_one(tmp_path: Path) -> None:
    folder = chatty_folder(tmp_path / "hf", dtype="float32")
    script = Path(__file__).parents[2] / "examples" / "prove_real_model.py"
    words = ["--steps", "8", "--block", "64", "--runs", str(tmp_path / "proof")]
    variables = {**os.environ, "BESSEMER_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, script, folder, *words], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [check["holds"] for check in checks] == [True] * 4


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_saved_by_peft_are_imported_exported_and_loaded_by_it(name: str, tmp_path: Path) -> None:
    """PEFT's own files here, the same logits, ours there, the same logits again; and the stored numbers are PEFT's."""
    peft = pytest.importorskip("peft")
    model = adapted(name)
    found, stored = answers(model), json.loads(OUT.read_text())[name]
    assert abs(found["loss"] - stored["loss"]) < 1e-5
    assert compare(found["gradients"], stored["gradients"]) < 1e-4
    model.save_pretrained(tmp_path / "theirs")
    build(CASES[ADAPTERS[name][0]]).save_pretrained(tmp_path / "base")
    base = Folder(tmp_path / "base")
    run, _ = import_adapters(tmp_path / "theirs", tmp_path / "run", base.path, base.tree)
    ids = some_ids(67, length=40)
    expected = their_logits(model, ids)
    assert_close(our_logits(run, ids), expected)
    export_run_adapters(run, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of missing or unexpected keys
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    np.testing.assert_array_equal(their_logits(loaded, ids), expected)
