"""Promise 2 and 7, by the command line: meshes of virtual devices and two processes give the run of one device."""

from __future__ import annotations

import pytest
from tests.invariance.conftest import Runs
from tests.invariance.test_invariance import cases, check


@pytest.mark.parametrize(("name", "label"), list(cases(many=True)))
def test_mesh_is_the_baseline(name: str, label: str, runs: Runs) -> None:
    check(name, label, runs)
