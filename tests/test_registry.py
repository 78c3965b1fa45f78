"""A registry fills itself once, whoever asks first."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from bessemer.errors import InputError
from bessemer.registry import Registry

SLOW = """
import time
import {package} as home
time.sleep(0.2)
assert "third" not in home.table
home.table.register("first")(print)
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry over a folder of two modules, the first of which takes its time and looks into the registry."""
    package = "a_folder_of_things"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "a.py").write_text(SLOW.format(package=package))
    (tmp_path / package / "b.py").write_text(f"import {package} as home\nhome.table.register('second')(repr)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Registry("thing", package)
    __import__(package)
    sys.modules[package].table = made  # type: ignore[attr-defined]
    yield made  # type: ignore[misc]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def test_a_lookup_waits_for_the_folder_another_thread_is_reading(table: Registry) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(table.get("second"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [repr] * 4 and table.names() == ["first", "second"]


def test_an_unknown_name_says_what_there_is(table: Registry) -> None:
    with pytest.raises(InputError, match=r"unknown thing 'secnd'. Did you mean 'second'\? Known: first, second"):
        table.get("secnd")
