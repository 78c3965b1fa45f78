"""Local names in settings mean the same file from whatever directory they are read again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bessemer.data import Sampling
from bessemer.data.sources.files import find_files
from bessemer.data.stores.catalog import found_again, full_path, relocated, relocated_root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose own name looks like a pattern, with two texts in it."""
    place = tmp_path / "a[b]"
    (place / "texts").mkdir(parents=True)
    for name in ("one.txt", "two.txt"):
        (place / "texts" / name).write_text(name)
    monkeypatch.chdir(place)
    return place


def test_what_is_here_gets_its_full_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert full_path("texts") == str(here / "texts")
    pattern = full_path("texts/*.txt")
    monkeypatch.chdir(here.parent)
    found = [file.path for file in find_files(pattern).files]
    assert found == [str(here / "texts" / name) for name in ("one.txt", "two.txt")]


@pytest.mark.parametrize("word", ["", " ", "/gone/x.txt", "s3://bucket/x.jsonl", "~/x", "nothing", "none*.txt"])
def test_other_words_stay(here: Path, word: str) -> None:
    assert full_path(word) == word == found_again(word)


def test_a_file_is_one_source_however_it_is_named(here: Path) -> None:
    assert find_files("texts/one.txt").key == find_files(here / "texts" / "one.txt").key


def test_a_moved_path_is_found_by_its_longest_tail(here: Path) -> None:
    (here / "one.txt").write_text("another")
    assert found_again("/gone/project/texts/one.txt") == str(here / "texts" / "one.txt")
    assert Path(found_again("/gone/project/texts/*.txt")).name == "*.txt"
    assert found_again(str(here / "one.txt")) == str(here / "one.txt")  # not gone


def test_registered_names_and_suffixes(here: Path) -> None:
    Path("python-stdlib").mkdir()
    assert relocated(Sampling("python-stdlib"), full_path) == Sampling("python-stdlib")
    shutil.copytree("texts", "store-small")
    moved = relocated(Sampling("store", rate=0.5, suffix="-small"), full_path)
    assert moved == Sampling(str(here / "store"), rate=0.5, suffix="-small")


def test_a_cache_is_found_again_by_what_it_holds(here: Path) -> None:
    Path("cache").mkdir()
    assert relocated_root("/gone/cache", found_again) == "/gone/cache"  # made anew: this one is another's
    Path("cache/stores").mkdir()
    assert relocated_root("/gone/cache", found_again) == str(here / "cache")
    assert relocated_root("new", full_path) == str(here / "new")
    assert relocated_root("s3://bucket/cache", full_path) == "s3://bucket/cache"
