"""One undisturbed run, which every disturbed one is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.faults.harness")

from tests.faults.harness import call, fault_settings, train, write_corpus  # noqa: E402
from tests.faults.in_place import build, ends, one_device  # noqa: E402

from bessemer.training import launch  # noqa: E402


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return fault_settings(write_corpus(tmp_path_factory.mktemp("faults") / "corpus.jsonl"))


@pytest.fixture(scope="session")
def whole(settings: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault; it also leaves prepared data and compiled programs in `home`."""
    run = tmp_path_factory.mktemp("undisturbed") / "whole"
    code, output = call(home, *train(settings, run))
    assert code == 0, output
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where the disturbed run goes."""
    return tmp_path / "runs" / "part"


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Runs in this process take one of its devices."""
    patch.setattr(launch, "make_topology", one_device)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.fixture(scope="session")
def whole_in_place(settings: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of `in_place`."""
    run = tmp_path_factory.mktemp("undisturbed") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        prepare(patch)
        assert ends(build(settings, run)) == (0, "")
    return run
