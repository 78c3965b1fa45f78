"""Promise 2 and 7, by the command line: meshes of virtual devices and two processes give the run of one device."""

from __future__ import annotations

from typing import Any

import pytest
from tests.invariance.classes import CLASSES
from tests.invariance.conftest import Runs
from tests.invariance.test_invariance import cases, check


@pytest.mark.parametrize(("name", "label"), list(cases(many=True)))
def test_mesh_is_the_baseline(name: str, label: str, runs: Runs, record_property: Any) -> None:
    check(CLASSES[name], CLASSES[name].members[label], runs, record_property)
