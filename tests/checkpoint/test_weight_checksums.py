"""Weight files carry checksums: damage is an error that names the file, whoever reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.interop.tiny_hf import SFT, chatty_folder, load_folder, make_talks
from tests.tiny_run import make_run

from bessemer.cli import main
from bessemer.console import no_progress
from bessemer.errors import BessemerError, InputError, StorageError
from bessemer.generate import load_model
from bessemer.generate.export import export_run
from bessemer.interop.folder import SINGLE, import_folder
from bessemer.job import RunDirectory
from bessemer.storage.weights import CHECKSUMS, OURS, WeightFile, to_bytes, write_file
from bessemer.training.launch import build_trainer

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(6, 12, dtype=np.float32).reshape(2, 3),
    "none": np.zeros((0, 4), np.int32),
}


def write(path: Path, **metadata: str) -> Path:
    entries = {name: (str(array.dtype), array.shape) for name, array in ARRAYS.items()}
    path.with_name("config.json").write_text('{"model": {}}')
    write_file(path, entries, ARRAYS.__getitem__, metadata, beside=["config.json"])
    return path


def contents(path: Path) -> dict[str, tuple[str, bytes]]:
    file = WeightFile(path)
    found = {name: (str(file.read(name).dtype), file.read(name).tobytes()) for name in file.entries}
    return found | {name: (value, b"") for name, value in file.metadata.items() if name in ("format", "step")}


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_no_flipped_bit_of_a_weight_file_goes_unnoticed(tmp_path: Path) -> None:
    """Header and arrays alike: a file with a flipped bit is refused, or gives what was written (the bit was in the
    word "checksums" or in the padding)."""
    path = write(tmp_path / SINGLE, format="bessemer", step="7")
    whole, data = contents(path), path.read_bytes()
    unnoticed = []
    for position in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
            try:
                if contents(path) != whole:
                    unnoticed.append((position, bit))
            except BessemerError as error:
                assert SINGLE in str(error)
    assert not unnoticed


def test_the_library_reads_the_arrays_of_a_file_with_checksums(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = load_file(write(tmp_path / SINGLE, format="pt"))
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


@pytest.mark.parametrize("lost", [True, False])
def test_files_beside_the_weights_are_verified(tmp_path: Path, lost: bool) -> None:
    path = write(tmp_path / SINGLE, format="bessemer")
    beside = tmp_path / "config.json"
    beside.unlink() if lost else beside.write_text('{"model": {"depth": 3}}')
    with pytest.raises(StorageError, match=r"config\.json is (missing|damaged or was changed)"):
        WeightFile(path)


def without_checksums(path: Path) -> None:
    """The file as an older version wrote it."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"][CHECKSUMS]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has files and no checkpoint."""
    folder = chatty_folder(tmp_path_factory.mktemp("hub") / "tiny-qwen")
    return import_folder(folder, tmp_path_factory.mktemp("runs") / "qwen", context=64)[0]


@pytest.fixture
def damaged(imported: RunDirectory, tmp_path: Path) -> RunDirectory:
    """One bit of the middle of its weights is flipped: a finite value that is a little different."""
    run = RunDirectory(shutil.copytree(imported.path, tmp_path / "damaged"))
    path = run.model / SINGLE
    flip(path, path.stat().st_size - 4096)
    return run


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "RUN", "--prompt", "hello", "--max-tokens", "2"),
        ("chat", "RUN"),
        ("serve", "RUN", "--port", "0"),
        ("eval", "RUN", "--tasks", "bpb"),
        ("export", "RUN", "OUT"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_opens_damaged_weights_ends_with_exit_4(
    words: tuple[str, ...], damaged: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(damaged.path), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as left:
        main([places.get(word, word) for word in words])
    assert left.value.code == 4
    said = capsys.readouterr().err
    assert str(damaged.model / SINGLE) in said and "is damaged" in said and "Put the file back" in said


@pytest.mark.slow
def test_init_from_damaged_weights_is_an_error_that_names_the_file(damaged: RunDirectory, tmp_path: Path) -> None:
    talks = make_talks(tmp_path)
    settings = {**SFT, "training.dataset": str(talks), "init": str(damaged.path)}
    trainer = build_trainer("sft", settings, name="from", root=tmp_path)
    with pytest.raises(StorageError, match="is damaged") as caught:
        trainer.run()
    assert str(damaged.model / SINGLE) in str(caught.value) and caught.value.exit_code == 4


def test_an_export_for_transformers_is_verified_when_it_is_read_again(imported: RunDirectory, tmp_path: Path) -> None:
    export_run(imported, tmp_path / "out", "hf", no_progress)
    load_folder(tmp_path / "out")
    flip(tmp_path / "out" / SINGLE, (tmp_path / "out" / SINGLE).stat().st_size - 4096)
    with pytest.raises(StorageError, match="is damaged"):
        import_folder(tmp_path / "out", tmp_path / "again")


def test_weights_of_an_older_version_are_opened_with_a_note(imported: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory(shutil.copytree(imported.path, tmp_path / "old"))
    assert not load_model(run).notes
    without_checksums(run.model / SINGLE)
    (note,) = load_model(run).notes
    assert str(run.model / SINGLE) in note and "without checksums" in note


def test_our_own_format_carries_checksums_of_its_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=(10,))
    export_run(run, tmp_path / "out", "hf", no_progress)
    checksums = WeightFile(tmp_path / "out" / SINGLE).checksums
    assert checksums is not None and set(checksums.files) == {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("name", ["", "..", "a\0b", "x" * 5000, "é" * 200, "a/b", "/etc/passwd"])
def test_checksums_of_files_that_cannot_be_beside_are_bad_input(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    data = to_bytes({"a": np.zeros(2, np.float32)}, {"format": OURS})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    sums = json.loads(header["__metadata__"][CHECKSUMS])
    header["__metadata__"][CHECKSUMS] = json.dumps(sums | {"files": {name: "0" * 64}})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(InputError, match=f"{path} .*its checksums name a file"):
        WeightFile(path)
