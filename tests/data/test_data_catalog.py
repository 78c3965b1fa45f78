"""From a name to rows and a tokenizer: prepared once, found again, never stale. And the command line."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from bessemer.cli.data import command as data_command
from bessemer.cli.tokenizer import command as tokenizer_command
from bessemer.data import (
    DatasetStyle,
    DataSettings,
    Sampling,
    Tokenizer,
    data_root,
    open_dataset,
    open_store,
    prepare,
    rows_of,
    tokenizer_for,
)
from bessemer.errors import InputError
from bessemer.registry import datasets

TOKENIZER = Tokenizer.train(["some words to learn from 0123456789\n" * 50], 300)


def text_file(folder, name="my.txt", lines=2000):
    path = folder / name
    path.write_text("".join(f"line {i} of some words\n" for i in range(lines)))
    return path


def test_a_file_is_prepared_once_and_again_when_it_changes(tmp_path):
    path = text_file(tmp_path)
    states = []
    sampling = Sampling(str(path))
    rows = open_dataset(sampling, TOKENIZER, tmp_path / "root", "train", 32, progress=states.append)
    assert states and len(rows) > 100
    states.clear()
    again = open_dataset(sampling, TOKENIZER, tmp_path / "root", "train", 32, progress=states.append)
    assert not states and again.fingerprint == rows.fingerprint
    assert len(open_dataset(sampling, TOKENIZER, tmp_path / "root", "val", 32)) > 0
    text_file(tmp_path, lines=2001)
    changed = open_dataset(sampling, TOKENIZER, tmp_path / "root", "train", 32)
    assert changed.fingerprint != rows.fingerprint
    assert len(list((tmp_path / "root" / "stores").iterdir())) == 2


def test_a_store_directory_with_a_suffix_and_the_wrong_tokenizer(tmp_path):
    prepare(text_file(tmp_path), tmp_path / "store_v2", TOKENIZER, val_fraction=0.1)
    sampling = Sampling(str(tmp_path / "store"), suffix="_v2", style=DatasetStyle.PACKED)
    assert len(open_dataset(sampling, TOKENIZER, tmp_path / "root", "val", 16)) > 0
    assert not (tmp_path / "root").exists()
    other = Tokenizer.train(["another text"], 280)
    with pytest.raises(InputError, match="was made with tokenizer"):
        open_dataset(sampling, other, tmp_path / "root", "train", 16)
    assert tokenizer_for("auto", [sampling]).hash == TOKENIZER.hash


def test_a_suffix_that_nothing_would_read_is_an_error(tmp_path):
    """A variant of a store that is not there: the plain file beside it is other data."""
    path = text_file(tmp_path)
    for name in (str(path), "python-stdlib"):
        with pytest.raises(InputError, match=r"suffix '_de'.*no prepared store"):
            open_store(Sampling(name, suffix="_de"), TOKENIZER, tmp_path / "root")
        with pytest.raises(InputError, match=r"suffix '_de'.*no prepared store"):
            tokenizer_for("train:300", [Sampling(name, suffix="_de")], tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_registered_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_entries", dict(datasets._entries))

    @datasets.register("test-numbers")
    def numbers():
        return ({"text": f"number {i}"} for i in range(500))  # a generator: written to a store first

    rows = open_dataset(Sampling("test-numbers"), TOKENIZER, tmp_path, "train", 16)
    assert rows.stats["documents"] > 450
    assert open_dataset(Sampling("test-numbers"), TOKENIZER, tmp_path, "train", 16).fingerprint == rows.fingerprint
    assert tokenizer_for("train:300", ["test-numbers"], tmp_path).vocab_size <= 300
    assert "python-stdlib" in datasets.names()


def test_names_that_are_nothing(tmp_path):
    with pytest.raises(InputError, match=r"does not exist.*Registered datasets: .*python-stdlib"):
        open_store(Sampling("python-stdlb"), TOKENIZER, tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        open_store(Sampling(str(tmp_path / "none.txt")), TOKENIZER, tmp_path)


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch):
    path = str(text_file(tmp_path))
    settings = DataSettings(tokenizer="train:300", root=str(tmp_path / "root"))
    first = tokenizer_for(settings, [path])
    monkeypatch.setattr(Tokenizer, "train", None)
    assert tokenizer_for(settings, [Sampling(path)]).hash == first.hash
    assert list((tmp_path / "root" / "tokenizers").glob("bpe-300-*/tokenizer.json"))
    assert not list((tmp_path / "root" / "tokenizers").glob("*/*.tmp"))


def test_tokenizer_settings_that_cannot_be(tmp_path):
    path = str(text_file(tmp_path))
    prepare(path, tmp_path / "store", TOKENIZER)
    blank, other = tmp_path / "blank.jsonl", tmp_path / "other.jsonl"
    blank.write_text("\n")
    other.write_text('{"body": "x"}\n')
    for setting, sources, match in [
        ("auto", [path], "data.tokenizer is not set"),
        ("train:many", [path], "train:N"),
        ("train:300", [str(tmp_path / "store")], "prepared stores"),
        (str(tmp_path / "nowhere"), [path], "no tokenizer at"),
        ("train:300", [str(blank)], "no document was found in"),
        ("train:300", [str(other)], "line 1: no 'text' .it has body"),
    ]:
        with pytest.raises(InputError, match=match):
            tokenizer_for(setting, sources, tmp_path / "root")


def test_the_root_is_read_from_the_environment_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    assert data_root() == tmp_path / "home" and data_root(tmp_path) == tmp_path
    monkeypatch.delenv("BESSEMER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "bessemer"


def test_an_iterable_becomes_a_store_and_a_list_does_not(tmp_path):
    texts = [f"some words {i}" for i in range(50)]
    direct = rows_of(texts, TOKENIZER, DatasetStyle.PADDED, 32, tmp_path)
    assert not list(tmp_path.iterdir())
    stored = rows_of(iter(texts), TOKENIZER, DatasetStyle.PADDED, 32, tmp_path)
    index = np.arange(50)
    assert all((direct.get(index)[name] == stored.get(index)[name]).all() for name in direct.get(index))
    rows_of(iter(texts), TOKENIZER, DatasetStyle.PADDED, 32, tmp_path)
    assert len(list((tmp_path / "stores").iterdir())) == 1


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    run = CliRunner().invoke
    done = run(tokenizer_command, ["train", "my.txt", "-o", "tok", "--vocab-size", "300"], catch_exceptions=False)
    assert done.exit_code == 0 and "tok/tokenizer.json" in done.output
    arguments = ["prepare", "my.txt", "-o", "store", "--tokenizer", "tok", "--val-fraction", "0.1", "--workers", "1"]
    done = run(data_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "train:" in done.output and "0 skipped" in done.output
    assert "already prepared" in run(data_command, arguments, catch_exceptions=False).output
    done = run(data_command, ["inspect", "store", "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    assert facts["splits"]["val"]["documents"] >= 1 and facts["examples"]["train"][0].startswith("<|bos|>")
    assert facts["lengths"]["train"]["max"] > 0
    assert "documents" in run(data_command, ["inspect", "store"], catch_exceptions=False).output
    with pytest.raises(InputError, match="does not exist"):
        run(data_command, ["prepare", "none.txt", "-o", "x", "--tokenizer", "tok"], catch_exceptions=False)
