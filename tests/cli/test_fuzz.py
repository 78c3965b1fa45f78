"""Seeded bad settings, files and bit flips: exit 2, 3 or 4, one line that says why, nothing accepted in silence.

50 of each kind run with the slow tests, 500 with `make long`. A failure prints its seed.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.interop.test_bitsandbytes import make_quantized
from tests.interop.test_mxfp4 import packed_folder
from tests.interop.tiny_hf import chatty_folder, config_of_case, foreign_tokenizer, make_folder
from tests.interop.tiny_peft import make_base, make_peft
from tests.tiny_run import TEXTS, make_run, tiny_tokenizer
from tests.training.test_training_resume import StopAt

from bessemer.checkpoint import Checkpoints
from bessemer.cli import main
from bessemer.config import Schema, Setting
from bessemer.config.resolve import select_schema
from bessemer.data import prepare, tokenizer_for
from bessemer.data.plan.mixture import Sampling
from bessemer.data.stores.catalog import open_dataset
from bessemer.errors import BessemerError, Stopped, StorageError
from bessemer.generate import load_model
from bessemer.interop.folder import import_folder
from bessemer.job import RunDirectory
from bessemer.topology import TopologySettings, make_topology
from bessemer.training import launch
from bessemer.training.setup.schema import schema_of

ROUNDS = pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(50), marks=pytest.mark.slow, id="50"),
        pytest.param(range(50, 550), marks=pytest.mark.long, id="500"),
    ],
)
RECIPES = ("quickstart", "sft", "dpo", "grpo", "kl", "distill")
EXPECTED = (0, 2, 3, 4)


class Outcome(typing.NamedTuple):
    code: int
    out: str
    err: str

    @property
    def is_refusal(self) -> bool:
        """One paragraph on stderr, with an exit code of bad input, failed training or bad storage."""
        return self.code in (2, 3, 4) and "error: " in self.err.lower() and not self.is_bug

    @property
    def is_bug(self) -> bool:
        return self.code not in EXPECTED or "Traceback" in self.out + self.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(caught.value.code or 0), captured.out, captured.err)

    return run


# --- settings -----------------------------------------------------------------------------------------------------


@cache
def schema(recipe: str) -> Schema:
    return select_schema(schema_of, recipe)


def plain_type(setting: Setting) -> type | None:
    """bool, int or float, where the setting takes that and None at most."""
    members = typing.get_args(setting.type) if isinstance(setting.type, types.UnionType) else (setting.type,)
    found = [member for member in members if member is not type(None)]
    return found[0] if len(found) == 1 and found[0] in (bool, int, float) else None


def bad_value(setting: Setting, draw: random.Random) -> str | None:
    """A value that the setting cannot take, whatever it means; None for a setting that takes any text."""
    junk = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(5, 12))) + "q"
    kind = plain_type(setting)
    if setting.choices is not None:
        return draw.choice([junk, f"[{junk}, {junk}]", "{a: 1}", "12345"])
    if kind is None:
        return None
    values = [junk, "[[1]]", "{a: 1}", "!!python/object:os.system", "1e5000", "'", "[1, 2", "1 2", "true or false"]
    if kind is bool:
        return draw.choice([*values, "2", "0.5", "-1"])
    least, most = setting.range.minimum, setting.range.maximum
    outside = [least - 1000] if least is not None else []
    outside += [most * 2 + 1000] if most is not None else []
    values += [str(int(value) if kind is int else value) for value in outside]
    values += ["nan", "inf", "-inf", "1.5", str(2**70)] if kind is int else []
    return draw.choice(values)


def bad_key(key: str, known: Schema, draw: random.Random) -> str:
    """A key that does not exist: letters lost, doubled or exchanged, another section, or no form at all."""
    while True:
        place = draw.randrange(len(key))
        changed = draw.choice(
            [
                key[:place] + key[place + 1 :],
                key[:place] + key[place] * 2 + key[place:],
                key[:place] + draw.choice(string.ascii_letters + "._-/$ {}[]é\x1b") + key[place + 1 :],
                f"{draw.choice(['model', 'data', 'x'])}.{key}",
                f"{key}.{draw.choice(['x', 'lr', 'steps'])}",
                draw.choice(["", ".", "..", "a.b.c.d", "training", "training.", ".steps", "__class__", "*", "[0]"]),
            ]
        )
        if changed.replace(".", "/").strip() not in known.settings:
            return changed


def bad_setting(seed: int) -> tuple[str, str]:
    """(recipe, word)."""
    draw = random.Random(f"settings {seed}")
    recipe = draw.choice(RECIPES)
    known = schema(recipe)
    while True:
        setting = known.settings[draw.choice(sorted(known.settings))]
        key = setting.key.replace("/", ".")
        if draw.random() < 0.4:
            return recipe, f"{bad_key(key, known, draw)}=1"
        if (value := bad_value(setting, draw)) is not None:
            return recipe, f"{key}={value}"


@ROUNDS
def test_bad_settings_are_refused(seeds: range, call: Callable[..., Outcome]) -> None:
    wrong = []
    for seed in seeds:
        recipe, word = bad_setting(seed)
        found = call("config", recipe, word)
        if not found.is_refusal:
            wrong.append((seed, recipe, word, found.code, found.err[-300:]))
    assert wrong == []


# --- files --------------------------------------------------------------------------------------------------------


def damaged(data: bytes, draw: random.Random) -> bytes:
    place, length = draw.randrange(len(data) + 1), draw.randint(1, 40)
    garbage = draw.randbytes(length)
    return draw.choice(
        [
            data[:place],
            data[:place] + garbage + data[place:],
            data[:place] + data[place + length :],
            data[:place] + garbage + data[place + length :],
            data + data,
            b"",
            b"\0" * length,
            b"null",
            b"[]",
            b"{}",
            b'"text"',
            b"[" * 100_000,
            b"{a: " * 5_000,
            b'{"a": 1e999, "step": -1}',
            "\ud800".encode("utf-16", "surrogatepass"),
        ]
    )


RECIPE = b"""extends: quickstart
model: {depth: 1, width: 32, head_dim: 16}
training: {steps: 3, batch_size: 8, dataset: corpus.jsonl}
optimization: {name: adamw, lr: 1e-3}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, a corpus, a tokenizer and a run."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(RECIPE)
    (tmp_path / "corpus.jsonl").write_bytes((tmp_path / "cats.jsonl").read_bytes())
    (tmp_path / "plain.txt").write_text("\n\n".join(TEXTS))
    tiny_tokenizer().save(tmp_path / "tok")
    prepare([str(tmp_path / "corpus.jsonl")], tmp_path / "store", tiny_tokenizer())
    run = RunDirectory(tmp_path / "runs" / "tiny")
    run.write_status(state="stopped", step=20)
    run.metrics.write_text('{"step": 10, "loss": 3.0, "val_bpb": 2.0}\n{"step": 20, "loss": 2.5}\n')
    run.samples.write_text('{"step": 10, "prompt": "a", "text": "b"}\n')
    run.facts.write_text('{"steps": 20, "validation": {"fingerprint": "0", "sequences": 8}}')
    run.derived.write_text('{"model.width": {"value": 32, "reason": "given"}}')
    return tmp_path


READERS: dict[str, list[tuple[str, ...]]] = {
    "recipe.yaml": [("config", "recipe.yaml"), ("launch", "slurm", "recipe.yaml", "-o", "-")],
    "corpus.jsonl": [
        ("data", "prepare", "corpus.jsonl", "-o", "out", "--tokenizer", "tok"),
        ("data", "prepare", "corpus.jsonl", "-o", "out", "--tokenizer", "tok", "--on-error", "skip"),
        ("tokenizer", "train", "corpus.jsonl", "-o", "out", "--vocab-size", "270"),
    ],
    "plain.txt": [("data", "prepare", "plain.txt", "-o", "out", "--tokenizer", "tok")],
    "store/store.json": [("data", "inspect", "store"), ("data", "inspect", "store", "--json")],
    "tok/tokenizer.json": [("data", "prepare", "corpus.jsonl", "-o", "out", "--tokenizer", "tok")],
    **{
        f"runs/tiny/{name}": [("runs",), ("report", "tiny"), ("compare", "tiny", "tiny"), ("doctor", "tiny", "--json")]
        for name in (
            "config.yaml",
            "status.json",
            "metrics.jsonl",
            "samples.jsonl",
            "facts.json",
            "derived.json",
            "lock",
        )
    },
}


@ROUNDS
def test_damaged_files_never_end_in_a_traceback(seeds: range, call: Callable[..., Outcome], place: Path) -> None:
    wrong = []
    for seed in seeds:
        draw = random.Random(f"files {seed}")
        name = draw.choice(sorted(READERS))
        command, path = draw.choice(READERS[name]), place / name
        sound = path.read_bytes() if path.exists() else None
        path.write_bytes(damaged(sound or b'{"pid": 1, "host": "x"}', draw))
        found = call(*command)
        if found.is_bug:
            wrong.append((seed, name, command, found.code, found.err[-300:]))
        if sound is None:
            path.unlink()
        else:
            path.write_bytes(sound)
        shutil.rmtree(place / "out", ignore_errors=True)
    assert wrong == []


VALUES: list[Any] = [None, True, False, 0, -1, 1, 3, 1.5, 2**31, 2**62, 10**400, 1e300, float("nan"), float("inf")]
VALUES += [
    "",
    "x",
    "4",
    "false",
    "nf4",
    "\0",
    "../..",
    "/etc",
    "x" * 5000,
    [],
    [1],
    ["x"],
    [[]],
    {},
    {"a": 1},
    {"x": []},
]


def with_other_values(text: bytes, draw: random.Random) -> bytes:
    """JSON with one to three values replaced, at any depth, or a key renamed."""
    tree = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        place = tree
        while isinstance(place, dict) and place:
            key = draw.choice(sorted(place))
            if isinstance(place[key], dict) and place[key] and draw.random() < 0.6:
                place = place[key]
                continue
            if draw.random() < 0.1:
                place[f"{key}_{draw.choice(['x', 'a.b', ' '])}"] = place.pop(key)
            else:
                place[key] = draw.choice(VALUES)
            break
    return json.dumps(tree).encode()


def with_another_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header has other values; the arrays stay."""
    length = int.from_bytes(data[:8], "little")
    header = with_other_values(data[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


@ROUNDS
def test_damaged_model_folders_never_end_in_a_traceback(
    seeds: range, call: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's, 4-bit ones of two kinds and PEFT's adapters: garbage, other values in their JSON, other headers
    of tensors."""
    monkeypatch.chdir(tmp_path)
    base = make_base(tmp_path / "plain", "lora", vocab_size=262, eos_token_id=0)
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    make_quantized(make_folder(tmp_path / "wide", {**config_of_case("qwen2"), **sizes}, dtype="float32"), Path("four"))
    make_folder(tmp_path / "gemma", config_of_case("gemma3"))
    packed_folder(tmp_path / "experts")
    make_peft(tmp_path / "adapters", "dora", make_base(tmp_path / "over", "dora"))
    foreign_tokenizer(base)
    folders = {"plain": [], "four": [], "gemma": [], "experts": [], "adapters": ["--base", "over"]}
    wrong = []
    for seed in seeds:
        draw = random.Random(f"folders {seed}")
        folder = draw.choice(sorted(folders))
        path = draw.choice(
            [path for path in sorted(Path(folder).iterdir()) if path.suffix in (".json", ".safetensors")]
        )
        sound = path.read_bytes()
        change = damaged if draw.random() < 0.3 else with_other_values
        change = with_another_header if change is with_other_values and path.suffix != ".json" else change
        path.write_bytes(change(sound, draw))
        found = call("import", folder, "out", *folders[folder])
        if found.is_bug or (found.code and not found.is_refusal):
            wrong.append((seed, str(path), found.code, found.err[-300:]))
        path.write_bytes(sound)
        shutil.rmtree("out", ignore_errors=True)
    assert wrong == []
    for folder, words in folders.items():
        assert call("import", folder, f"sound-{folder}", *words).code == 0


# --- bits ---------------------------------------------------------------------------------------------------------


def flip(path: Path, draw: random.Random) -> tuple[int, int]:
    data = bytearray(path.read_bytes())
    where, bit = draw.randrange(len(data)), draw.randrange(8)
    data[where] ^= 1 << bit
    path.write_bytes(bytes(data))
    return where, bit


def silent_flips(files: list[Path], result: Callable[[], Any], draws: typing.Iterable[random.Random]) -> list[Any]:
    """Flips of a bit after which `result` returned something else than before. One that raises an expected error, or
    after which the result is the same, is not silent; any other exception is a bug and ends the test."""
    sound, silent = result(), []
    for draw in draws:
        path = draw.choice(files)
        data = path.read_bytes()
        place = flip(path, draw)
        try:
            if result() != sound:
                silent.append((path.name, place))
        except BessemerError as error:
            assert str(error) and error.exit_code in EXPECTED, (path, place)
        path.write_bytes(data)
    assert result() == sound
    return silent


def files_below(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path for path in found if path.stat().st_size)


@ROUNDS
def test_no_flipped_bit_of_a_token_store_is_accepted(seeds: range, tmp_path: Path) -> None:
    """Whatever is trained on is what was prepared: rows of both splits, their fingerprints, the tokenizer."""
    store = tmp_path / "store"
    prepare([{"text": text} for text in TEXTS], store, tiny_tokenizer(), val_fraction=0.2)
    sampling = Sampling.from_string(str(store))

    def trained_on() -> list[Any]:
        tokenizer, found = tokenizer_for("auto", [str(store)]), []
        for split in ("train", "val"):
            rows = open_dataset(sampling, tokenizer, split=split, block_size=16)
            batch = rows.get(np.arange(len(rows)))
            unverified = rows.stats.get("unverified", False)  # which the run reports
            found.append((rows.fingerprint, {n: a.tobytes() for n, a in batch.items()}, unverified))
        return found

    draws = (random.Random(f"store {seed}") for seed in seeds)
    assert silent_flips(files_below(store), trained_on, draws) == []


@ROUNDS
def test_no_flipped_bit_of_a_token_store_passes_a_full_verification(
    seeds: range, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    store, wrong = tmp_path / "store", []
    prepare([{"text": text} for text in TEXTS], store, tiny_tokenizer(), val_fraction=0.2)
    sound = call("data", "inspect", store, "--verify")
    for seed in seeds:
        draw = random.Random(f"inspect {seed}")
        path = draw.choice(files_below(store))
        data = path.read_bytes()
        place = flip(path, draw)
        found = call("data", "inspect", store, "--verify")
        if found.is_bug or not (found.is_refusal or found.out == sound.out):
            wrong.append((seed, path.name, place, found))
        path.write_bytes(data)
    assert sound.code == 0 and wrong == []


@ROUNDS
def test_no_flipped_bit_of_a_model_is_accepted(seeds: range, tmp_path: Path) -> None:
    """model.safetensors, config.json and tokenizer.json of RUN/model: what is loaded to sample, serve and evaluate."""
    folder = chatty_folder(tmp_path / "hub")
    run, _ = import_folder(folder, tmp_path / "run", context=64)

    def loaded() -> list[Any]:
        model = load_model(run)
        arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model.params)]
        assert model.tokenizer is not None
        return [model.model, arrays, model.tokenizer.hash, model.step]

    draws = [random.Random(f"model {seed}") for seed in seeds]
    files = files_below(run.model)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in files}
    assert silent_flips(files, loaded, draws) == []


EDITABLE = ("logging/", "topology/", "eval/", "training/per_device_batch_size", "training/time_limit")
EDITABLE += ("training/dataset", "training/validation_dataset", "data/root")  # what they lead to is compared


@ROUNDS
def test_no_flipped_bit_of_config_yaml_is_accepted_by_resume(
    seeds: range, tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of a run that was stopped after two steps are those of its checkpoint, or resume refuses. Settings that
    cannot change the run (logging.*, topology.* and the like) may be edited, so they are not compared; nor are paths,
    but what they lead to is."""
    monkeypatch.chdir(tmp_path)  # a flipped path is relative
    one = make_topology(TopologySettings(), devices=jax.devices()[:1])
    monkeypatch.setattr(launch, "make_topology", lambda settings: one)
    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stopped):
        trainer.run()

    def resumed() -> list[Any]:
        again = launch.reopen(tmp_path / "a")
        values = {key: str(value) for key, value in again.config.values.items() if not key.startswith(EDITABLE)}
        return [again.step, again.data.plan.fingerprint, values]

    draws = (random.Random(f"config {seed}") for seed in seeds)
    assert silent_flips([tmp_path / "a/config.yaml"], resumed, draws) == []


@ROUNDS
def test_every_flipped_bit_of_a_checkpoint_is_found(seeds: range, tmp_path: Path) -> None:
    """The damaged checkpoint is named and passed over; with all of them damaged nothing is used."""
    run = make_run(tmp_path)
    newest = run.checkpoints / "step_00000020"
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    wrong: list[Any] = []
    store = Checkpoints(run.checkpoints)
    try:
        for seed in seeds:
            draw = random.Random(f"bits {seed}")
            path = draw.choice(files)
            sound = path.read_bytes()
            where = flip(path, draw)
            try:
                step, messages = store.newest_valid()
                if step != 10 or "step_00000020" not in " ".join(messages):
                    wrong.append((seed, str(path.relative_to(newest)), where, step, messages))
            except StorageError as error:
                wrong.append((seed, str(path.relative_to(newest)), where, str(error)))
            path.write_bytes(sound)
    finally:
        store.close()
    assert wrong == []
