"""Seeded bad settings, files and bit flips: exit 2, 3 or 4, one line that says why, nothing accepted in silence.

50 of each kind run with the slow tests, 500 with `make long`. A failure prints its seed.
"""

from __future__ import annotations

import random
import shutil
import string
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import TEXTS, make_run, tiny_tokenizer

from bessemer.checkpoint import Checkpoints
from bessemer.cli import main
from bessemer.config import Schema, Setting
from bessemer.config.resolve import select_schema
from bessemer.data import prepare
from bessemer.errors import StorageError
from bessemer.job import RunDirectory
from bessemer.training.schema import schema_of

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
    values = [
        junk,
        "[[1]]",
        "{a: 1}",
        "!!python/object:os.system",
        "1e5000",
        "'",
        "[1, 2",
        "1 2",
        "true or false",
    ]
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
                draw.choice(
                    ["", ".", "..", "a.b.c.d", "training", "training.", ".steps", "__class__", "*", "[0]"]
                ),
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
        f"runs/tiny/{name}": [
            ("runs",),
            ("report", "tiny"),
            ("compare", "tiny", "tiny"),
            ("doctor", "tiny", "--json"),
        ]
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
def test_damaged_files_never_end_in_a_traceback(
    seeds: range, call: Callable[..., Outcome], place: Path
) -> None:
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


# --- bits ---------------------------------------------------------------------------------------------------------


def flip(path: Path, draw: random.Random) -> tuple[int, int]:
    data = bytearray(path.read_bytes())
    where, bit = draw.randrange(len(data)), draw.randrange(8)
    data[where] ^= 1 << bit
    path.write_bytes(bytes(data))
    return where, bit


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
