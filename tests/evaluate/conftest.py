"""Programs of these tests are kept on disk for the session: many of them compile the same tiny ones."""

from pathlib import Path

import pytest

from bessemer.training.setup.compiled import keep_compiled_programs


@pytest.fixture(scope="session", autouse=True)
def compiled(home: Path) -> None:
    keep_compiled_programs(str(home))
