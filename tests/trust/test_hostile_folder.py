"""Hostile model folders, of PEFT's adapters and of 4-bit weights, against every command that opens one: exit 2 with the
file and the key (4 for weights that are cut off), before memory is taken, and nothing outside the folder is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.interop.test_bitsandbytes import STATE, Q, edit, make_quantized
from tests.interop.tiny_hf import config_of_case, foreign_tokenizer, make_folder, make_talks
from tests.interop.tiny_peft import make_base, make_peft
from tests.trust.hostile import CONTROL, NESTED, SECRET
from tests.trust.test_hostile_run import bounded_memory, called, check_untouched

from bessemer.interop.peft import CONFIG, WEIGHTS

__all__ = ["bounded_memory"]  # a fixture of every test here
MATRIX = "base_model.model.model.layers.0.self_attn.q_proj"
Attack = Callable[[Path], Any]


def says(**values: Any) -> Attack:
    def change(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | values))

    return change


def holds(name: str, array: np.ndarray, file: str = WEIGHTS) -> Attack:
    def change(folder: Path) -> None:
        save_file({**load_file(folder / file), name: array}, folder / file)

    return change


def header(text: str) -> Attack:
    return lambda folder: (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text.encode())


def linked(name: str) -> Attack:
    """A file that is a link to something private."""

    def change(folder: Path) -> None:
        private = folder.parent.parent / "private.txt"
        private.write_text(f"password {SECRET}\n")
        (folder / name).unlink()
        (folder / name).symlink_to(private)

    return change


def piped(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


HUGE = {f"{MATRIX}.lora_{part}.weight": {"dtype": "F32", "shape": [2**40, 0][:: 1 - 2 * (part == "B")],
        "data_offsets": [0, 0]} for part in "AB"}  # fmt: skip
ADAPTERS: dict[str, tuple[Attack, tuple[str, ...]]] = {
    "nested configuration": (lambda folder: (folder / CONFIG).write_text(NESTED), (CONFIG, "nested too deeply")),
    "configuration without end": (lambda folder: os.truncate(folder / CONFIG, 1 << 40), (CONFIG, "at most")),
    "configuration linked": (linked(CONFIG), (CONFIG, "outside its directory")),
    "weights linked": (linked(WEIGHTS), (WEIGHTS, "outside its directory")),
    "weights piped": (piped, (WEIGHTS, "pipe")),
    "rank beyond memory": (says(r=2**30), ("q_proj", "rank 4", "1.07374e+09")),
    "rank of 400 digits": (says(r=10**400), (CONFIG, "r is 1000", "integer")),
    "rank as text": (says(r="4"), (CONFIG, "r is '4'", "integer")),
    "alpha of 400 digits": (says(lora_alpha=10**400), (CONFIG, "lora_alpha", "finite")),
    "alpha that overflows": (says(lora_alpha=1e300), (CONFIG, "lora_alpha")),
    "alpha not a number": (says(lora_alpha=float("nan")), (CONFIG, "lora_alpha is nan")),
    "dropout of everything": (says(lora_dropout=1), (CONFIG, "lora_dropout")),
    "a slow regular expression": (says(rank_pattern={"(a+)+$": 4}), (CONFIG, "rank_pattern", "regular expression")),
    "a name that controls a terminal": (says(**{f"x{CONTROL}": 1}), (CONFIG, "does not support")),
    "nested header": (header(NESTED), (WEIGHTS, "nested too deeply")),
    "shapes beyond memory": (header(json.dumps(HUGE)), (WEIGHTS, "q_proj", "rank 1099511627776")),
    "NaN": (holds(f"{MATRIX}.lora_A.weight", np.full((4, 32), np.nan, np.float32)), (WEIGHTS, "lora_A", "NaN")),
    "integers": (holds(f"{MATRIX}.lora_A.weight", np.zeros((4, 32), np.int32)), (WEIGHTS, "lora_A", "int32")),
    "a matrix of another size": (
        holds(f"{MATRIX}.lora_B.weight", np.zeros((2**16, 4), np.float32)),
        ("blocks_0/q/lora_b", "(4, 65536)"),
    ),
}
NAMED: dict[str, tuple[Attack, tuple[str, ...]]] = {
    "an absolute path": (says(base_model_name_or_path="/etc"), ("base_model_name_or_path is /etc", "not opened")),
    "a path upwards": (says(base_model_name_or_path="../.."), ("base_model_name_or_path", "not opened")),
    "a revision that is a path": (says(base_model_name_or_path="a/b", revision="../../x"), ("@../../x", "REVISION")),
    "a name that no file has": (says(base_model_name_or_path="a\0b"), ("base_model_name_or_path", "neither")),
}
"""Of the base; only where the user names none."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a base, an import of it, conversations and PEFT's folder over the base."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets=None: None)
    base = make_base(folder / "base", "lora", vocab_size=262, eos_token_id=0)
    foreign_tokenizer(base)
    make_talks(folder)
    make_peft(folder / "peft", "lora", base)
    return folder


TRAIN = ["training.dataset=talks.jsonl", "training.steps=1", "training.batch_size=8", "training.validation=false"]


def refused(words: list[str], expected: tuple[str, ...], place: Path, codes: tuple[int, ...] = (2,)) -> None:
    code, output = called(words)
    line = output.strip().splitlines()[-1] if output.strip() else ""
    assert code in codes, f"{words}: exit {code}\n{output[-2000:]}"
    assert "Traceback" not in output and all(word in line for word in expected), f"{words}: {line}"
    check_untouched(place, output)
    assert not (place / "runs" / "new").exists()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_hostile_adapters_are_refused_with_file_and_key(kind: str, place: Path) -> None:
    attack, expected = ADAPTERS[kind]
    attack(place / "peft")
    fits = (2, 4) if kind == "a matrix of another size" else (2,)
    refused(["import", "peft", "runs/new"], expected, place, fits)
    refused(["import", "peft", "runs/new", "--base", "base"], expected, place, fits)
    if kind not in ("NaN", "a matrix of another size"):  # those are seen when the base has been read: below
        refused(["train", "sft", "init=peft", *TRAIN, "--name", "new"], expected, place)
        refused(["plan", "sft", "init=peft", *TRAIN, "--no-compile"], expected, place)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_no_server_takes_hostile_adapters(kind: str, place: Path) -> None:
    assert called(["import", "base", "runs/whole"])[0] == 0
    attack, expected = ADAPTERS[kind]
    attack(place / "peft")
    refused(["serve", "whole", "--port", "0", "--adapter", "x=peft"], expected, place, (2, 4))
    if kind in ("NaN", "a matrix of another size"):
        refused(["train", "sft", "init=peft", *TRAIN, "--name", "again"], expected, place, (2, 4))


@pytest.mark.parametrize("kind", NAMED)
def test_a_base_is_not_opened_on_the_word_of_a_hostile_folder(kind: str, place: Path) -> None:
    attack, expected = NAMED[kind]
    attack(place / "peft")
    for words in (["import", "peft", "runs/new"], ["train", "sft", "init=peft", *TRAIN, "--name", "new"]):
        refused(words, expected, place)


def state(**values: Any) -> Attack:
    """Change values in the JSON of a matrix in 4 bits."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        about = json.loads(tensors[Q + STATE].tobytes()) | values
        tensors[Q + STATE] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        save_file(tensors, folder / "model.safetensors")

    return change


WHOLE = "model.safetensors"
FOUR_BITS: dict[str, tuple[Attack, tuple[str, ...]]] = {
    "shape beyond memory": (state(shape=[2**30, 2**30]), (WHOLE, Q, "values of uint8")),
    "shape as text": (state(shape="128,128"), (WHOLE, STATE, "shape is 128,128")),
    "block of nothing": (state(blocksize=0), (WHOLE, STATE, "blocksize is 0")),
    "block of 400 digits": (state(blocksize=10**400), (WHOLE, STATE, "blocksize is 1000")),
    "offset of 400 digits": (state(nested_offset=10**400), (WHOLE, STATE, "nested_offset is 1000")),
    "dtype as a list": (state(dtype=["bfloat16"]), (WHOLE, STATE, "dtype is ['bfloat16']")),
    "nested JSON": (holds(Q + STATE, np.frombuffer(NESTED[:60_000].encode(), np.uint8), WHOLE), (WHOLE, STATE, "JSON")),
    "state of a gigabyte": (holds(Q + STATE, np.zeros(1 << 20, np.uint8), WHOLE), (WHOLE, STATE, "JSON as bytes")),
    "scales without a number": (holds(Q + ".nested_absmax", np.full(1, np.nan, np.float32), WHOLE), (WHOLE, Q, "NaN")),
    "method as a list": (
        lambda folder: edit(folder, quantization_config={"quant_method": ["bitsandbytes"]}),
        ("config.json", "quantization_config"),
    ),
    "method without end": (
        lambda folder: edit(folder, quantization_config=[[]]),
        ("config.json", "quantization_config", "object"),
    ),
}


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_hostile_weights_in_4_bits_are_refused_with_file_and_key(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    sizes = {"vocab_size": 262, "eos_token_id": 0, "hidden_size": 128, "intermediate_size": 256}
    plain = make_folder(tmp_path / "plain", {**config_of_case("qwen2"), **sizes}, dtype="float32")
    foreign_tokenizer(plain)
    make_talks(place)
    attack, expected = FOUR_BITS[kind]
    attack(make_quantized(plain, place / "model"))
    refused(["import", "model", "runs/new"], expected, place)
    if kind != "scales without a number":  # seen while the weights are read
        train = ["train", "sft", "init=model", "lora.rank=4", "lora.quantize=nf4", *TRAIN, "--name", "new"]
        refused(train, expected, place)
        refused(["plan", "sft", "init=model", *TRAIN, "--no-compile"], expected, place)
