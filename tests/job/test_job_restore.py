"""Jobs that save themselves: a toy counter goes through real checkpoints and comes back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from bessemer import registry
from bessemer.checkpoint import Checkpoints
from bessemer.errors import InputError
from bessemer.job import BasicJob, ExecutionSpec, RestoreableJob, Snapshot


class Counter(RestoreableJob[dict]):
    """Adds one to a vector until it is five."""

    def __init__(self, spec):
        super().__init__(spec)
        self.count = 0
        self.vector = jnp.zeros(4)
        self.loop = ""
        self.messages: list[str] = []
        self.manager = Checkpoints(spec.run_directory.checkpoints)

    @property
    def checkpoint_manager(self):
        return self.manager

    @property
    def done(self):
        return self.count >= 5

    def run(self):
        while not self.done:
            self.advance()
        return self.count

    def advance(self):
        self.count, self.vector = self.count + 1, self.vector + 1

    def snapshot(self):
        files = {"config.yaml": "job: counter\n", "loop.json": f'"{self.count}"'}
        return Snapshot(self.count, {"vector": self.vector}, files, {"kind": "toy"})

    def abstract_state(self):
        return {"vector": self.vector}

    def accept(self, tree, step, files):
        self.count, self.vector, self.loop = step, tree["vector"], files.read(step, "loop.json")

    def note(self, message):
        self.messages.append(message)


@pytest.fixture
def spec(tmp_path):
    spec = ExecutionSpec.local(tmp_path, name="toy")
    spec.run_directory.create()
    spec.run_directory.config.write_text("job: counter\nseed: 1\n")
    return spec


@pytest.fixture
def registered(monkeypatch):
    jobs = registry.Registry("job")
    jobs.register("counter")(Counter)
    jobs.register("basic")(BasicJob)
    monkeypatch.setattr("bessemer.job.jobs.jobs", jobs)


def test_calling_a_job_runs_it_unless_done(spec):
    job = Counter(spec)
    assert job() == 5 and job() is None


def test_save_load_and_fall_back(spec):
    job = Counter(spec)
    assert job.load() is False and job.latest() is None
    job.advance()
    job.save()
    job.advance()
    job.save("step_00000002")
    job.manager.wait()
    assert job.checkpoints() == [1, 2] and job.latest() == 2
    with pytest.raises(InputError, match="cannot save step 2"):
        job.save(3)
    again = Counter(spec)
    assert again.load() and again.count == 2 and again.loop == '"2"'
    np.testing.assert_array_equal(again.vector, np.full(4, 2.0))
    assert again.load(1) and again.count == 1 and again.load("7") is False
    (job.manager.path(2) / "loop.json").write_text('"9"')
    fresh = Counter(spec)
    assert fresh.load() and fresh.count == 1 and "loop.json" in fresh.messages[0]


def test_the_class_is_found_from_the_saved_config(spec, registered, tmp_path):
    job = Counter(spec)
    job.advance()
    job.save()
    job.manager.wait()
    found = RestoreableJob.from_checkpoint(spec.run_directory.path)
    assert isinstance(found, Counter) and found.count == 1 and found.spec.name == "toy"
    other = ExecutionSpec.local(tmp_path, name="other")
    moved = RestoreableJob.from_checkpoint(job.manager.path(1), other)
    assert moved.count == 1 and moved.run_directory.name == "other"


def test_from_checkpoint_says_what_is_wrong(spec, registered, tmp_path):
    with pytest.raises(InputError, match="no committed checkpoint"):
        RestoreableJob.from_checkpoint(spec.run_directory.path)
    with pytest.raises(InputError, match="does not exist"):
        RestoreableJob.from_checkpoint(tmp_path / "nothing")
    spec.run_directory.config.write_text("job: basic\n")
    with pytest.raises(InputError, match="cannot be restored"):
        RestoreableJob.from_checkpoint(spec.run_directory.path)
    spec.run_directory.config.write_text("seed: 1\n")
    with pytest.raises(InputError, match="no 'job'"):
        RestoreableJob.from_checkpoint(spec.run_directory.path)
