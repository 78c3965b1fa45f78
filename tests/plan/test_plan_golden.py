"""The shipped recipes move what they moved before: placement and collectives against the snapshots in golden/."""

from __future__ import annotations

import pytest
from tests.mesh.harness import LAST_RESORT
from tests.plan.golden.snapshots import CASES, read, snapshot, version

RENEW = "If that is meant, renew with `python -m tests.plan.golden` and say why in the commit."
SLOW = ("pretrain-fsdp8", "pretrain-fsdp4-tensor2")


def marked(name: str) -> object:
    """Nine seconds of compiling each: the others are neighbors of these."""
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_placement_and_collectives_are_those_of_the_snapshot(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    known, found = read(name), snapshot(name)
    assert LAST_RESORT not in capfd.readouterr().err
    assert found["settings"] == known["settings"], RENEW
    assert found["placement"] == known["placement"], f"{name}: parameters lie elsewhere. {RENEW}"
    assert version() in known["collectives"], (
        f"{name}: the snapshot has no collectives of jaxlib {version()}. With that version installed, "
        "`python -m tests.plan.golden` adds them beside the others."
    )
    before, now = known["collectives"][version()], found["collectives"][version()]
    assert now == before, f"{name}: devices send each other something else. {RENEW}"
