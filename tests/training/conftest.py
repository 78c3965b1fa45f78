"""Runs in this process come without plots, which cost a second each: tests/report looks at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bessemer.report.pages.write_plots", lambda summary: [])
        yield
