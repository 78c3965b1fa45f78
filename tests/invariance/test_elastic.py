"""Promise 1 on another mesh: `bessemer resume RUN topology.…` continues the same run, or says why it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.invariance.classes import ADAMW, EXPERTS, MUON, NORMALIZED, Member, Settings, accumulate, member, mesh
from tests.invariance.compare import difference, digests, meta, saved_arrays
from tests.invariance.conftest import STEPS, Runs

from bessemer.registry import callbacks
from bessemer.storage.weights import flatten
from bessemer.topology import make_topology
from bessemer.training import launch
from bessemer.training.persistence.checkpoints import saved_tree

WHOLE: Settings = {**ADAMW, "training.ema": 0.9}
"""Two moments, a count and an average of the weights: a state with something of everything."""

CHAINS: dict[str, tuple[Member, list[Member]]] = {
    "8 -> 4 -> 1": (mesh(data=8), [mesh(data=4, quick=True), mesh()]),
    "fsdp -> tensor": (mesh(fsdp=4), [mesh(tensor=4)]),
    "1 -> fsdp x tensor x context": (mesh(), [mesh(fsdp=2, tensor=2, context=2)]),
    "pipeline 2 -> 1 -> data 2 x pipeline 2": (mesh(pipeline=2), [mesh(), mesh(data=2, pipeline=2)]),
    "S=1 -> S=4 -> S=2": (mesh(), [accumulate(2), accumulate(4)]),
    "one process -> two -> one": (mesh(data=2), [mesh(data=2, processes=2), mesh()]),
}
"""First mesh, and those that take over at steps 2 and 4 of six."""

LONG = {"fsdp -> tensor", "S=1 -> S=4 -> S=2", "one process -> two -> one", "1 -> fsdp x tensor x context"}
chains = [pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow) for name in CHAINS]


def copied(run: Path, name: str) -> Path:
    target = run.parent / name
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(run, target))


def words(member: Member) -> list[str]:
    return [f"{key}={value}" for key, value in member.settings.items()]


@pytest.mark.parametrize("name", chains)
def test_a_run_goes_on_elsewhere(name: str, runs: Runs) -> None:
    """Six steps on mesh A, against two there, two on B and two on C: the same batches, and to rounding the same
    losses, weights, averages and moments."""
    first, others = CHAINS[name]
    undisturbed = runs.train("uneven", WHOLE, first)
    run = copied(undisturbed, f"elastic-{list(CHAINS).index(name)}")
    for number, other in enumerate(others, start=1):
        taken = len((run / "batches.jsonl").read_text().splitlines())
        runs.call("resume", str(run), "--trust", "--step", str(2 * number), *words(other), member=other)
        assert len((run / "batches.jsonl").read_text().splitlines()) == taken + STEPS - 2 * number
        assert meta(run)["topology"]["devices"] == other.devices * other.processes
        assert meta(run)["topology"]["processes"] == other.processes
    assert digests(run) == digests(undisturbed) and len(digests(run)) == STEPS
    found = difference(run, undisturbed, runs.start_arrays(WHOLE))
    print(f"{name}: {found}")
    assert found.within(NORMALIZED), f"{found}; allowed: {NORMALIZED}"


RESTORED: dict[str, tuple[Settings, Member]] = {
    "adamw, data 8": (WHOLE, mesh(data=8)),
    "adamw, fsdp 2 x tensor 2 x context 2": (WHOLE, mesh(fsdp=2, tensor=2, context=2)),
    "adamw, tensor 4": (WHOLE, mesh(tensor=4)),
    "adamw, pipeline 2 x fsdp 2": (WHOLE, mesh(pipeline=2, fsdp=2)),
    "experts, fsdp 2 x expert 2 x tensor 2": ({**WHOLE, **EXPERTS}, mesh(fsdp=2, expert=2, tensor=2)),
    "muon, fsdp 4 x tensor 2": (MUON, mesh(fsdp=4, tensor=2)),
}


def saved_by(settings: Settings) -> Member:
    """The mesh that a run is saved by; experts come from an axis of their own too."""
    if "model.experts" in settings:
        return mesh(expert=4, data=2)
    return mesh(data=8) if settings is WHOLE else Member()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if "muon" in n or "experts" in n else []) for n in RESTORED]
)
def test_every_array_comes_back_on_another_mesh(name: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by one kind of mesh, restored onto another: every weight, average and moment has its bits, is spread
    over the devices, and the batches to come are those the first mesh was given."""
    settings, other = RESTORED[name]
    source = runs.train("uneven", settings, saved_by(settings))
    run = copied(source, "restored")
    devices = jax.devices()[: other.devices]
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(settings, devices))
    trainer = launch.reopen(run, words(other), step=4, trust=True)
    assert trainer.step == 4
    saved, restored = saved_arrays(source, 4), flatten(saved_tree(trainer.state))
    assert saved.keys() == restored.keys()
    moments = [key for key in saved if key.startswith("opt_state/") and saved[key].ndim]
    assert len(moments) >= 2 * sum(key.startswith("params/") for key in saved) * 0.9
    for key, array in saved.items():
        assert np.any(array), f"{key} is all zeros, so that its return shows nothing"
        assert len(restored[key].sharding.device_set) == other.devices
        np.testing.assert_array_equal(np.asarray(restored[key]), array, err_msg=key)
    split = [leaf for leaf in restored.values() if leaf.addressable_shards[0].data.size < leaf.size]
    assert bool(split) is ("data 8" not in name)
    given, digest = digests(source), callbacks.get("record_batches").digest
    for step in range(STEPS):
        batch = trainer.data.plan.batch(step)
        assert digest({key: array[None] for key, array in batch.items()}) == given[step]
    trainer.finish()


REFUSED: dict[str, tuple[Member, list[str]]] = {
    "more devices than there are": (member(4, topology__data=8), ["4 device(s)", "topology.data=8"]),
    "a batch the mesh does not divide": (member(3, topology__data=3), ["training.batch_size=8", "multiple of 3"]),
    "micro-batches that do not fit": (mesh(per_device=3), ["training.per_device_batch_size", "1, 2, 4, 8"]),
    "more stages than layers": (mesh(pipeline=4), ["topology.pipeline=4", "model.depth=3"]),
    "more tensor shards than heads": (mesh(tensor=8), ["topology.tensor=8", "4 heads"]),
    "a sequence the context does not divide": (mesh(context=3), ["topology.context=3", "block_size=32"]),
    "another batch size": (member(training__batch_size=4), ["training.batch_size", "init=RUN"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_honoured_is_an_error(name: str, runs: Runs) -> None:
    """Exit 2, one paragraph that names the setting, and the run is as it was."""
    other, parts = REFUSED[name]
    run = copied(runs.train("uneven", WHOLE, mesh(data=8)), "refused")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.txt"}
    output = runs.call("resume", str(run), "--trust", "--step", "4", *words(other), member=other, code=2)
    message = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(message) == 1 and all(part in message[0] for part in parts), output
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert after == before
    assert json.loads((run / "status.json").read_text())["state"] == "done"
