"""Against transformers itself, where it is installed: what it saves is read here, what is exported here it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.tiny_hf import config_of_case, load_folder, make_folder, raw
from tests.reference.huggingface import CASES, MORE, build, some_ids

from bessemer.generate.export import export_run
from bessemer.interop.bring import import_folder
from bessemer.interop.progress import nothing
from bessemer.serve.conversation import Turns

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize("name", {**CASES, **MORE})
def test_saved_by_transformers_imported_exported_and_loaded_by_it(name: str, tmp_path: Path) -> None:
    model = build({**CASES, **MORE}[name])
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    ids = some_ids(67, length=40)
    expected = their_logits(model, ids)
    ours, params = load_folder(tmp_path / "hf")
    logits = jax.jit(ours.apply)({"params": params}, ids)
    assert np.abs(np.asarray(logits) - expected).max() < 1e-4
    run, _ = import_folder(tmp_path / "hf", tmp_path / "run")
    export_run(run, tmp_path / "out", "hf", nothing)
    assert raw(tmp_path / "out") == raw(tmp_path / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    assert type(again) is type(model)
    np.testing.assert_array_equal(their_logits(again, ids), expected)


def test_an_exported_tokenizer_writes_the_same_conversation(tmp_path: Path) -> None:
    config = {**config_of_case("qwen2"), "vocab_size": 262, "eos_token_id": [2, 0]}
    run, _ = import_folder(make_folder(tmp_path / "hf", config, tokenizer=True), tmp_path / "run")
    export_run(run, tmp_path / "out", "hf", nothing)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}] * 2
    said = theirs.apply_chat_template(
        messages[:3], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    from bessemer.data import Tokenizer

    assert said == Turns(Tokenizer.load(tmp_path / "run/model")).prompt(messages[:3])
    loaded = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert loaded.eos_token_id == [2, 0]
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen2"
