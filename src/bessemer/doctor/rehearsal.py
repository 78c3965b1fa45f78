"""Resume without resuming: the run is rebuilt as resume does it, up to the point where arrays would be read."""

from __future__ import annotations

import contextlib
import io
import json

from bessemer.checkpoint import Checkpoints
from bessemer.config import Config, configuration, configure
from bessemer.doctor.findings import Diagnosis
from bessemer.doctor.saved import saved_meta
from bessemer.errors import BessemerError, InputError
from bessemer.job import RunDirectory
from bessemer.topology import TopologySettings
from bessemer.training import launch
from bessemer.training.restore import machine_differences, meta


def mesh_fits(config: Config, found: Diagnosis) -> bool:
    with configuration(config):
        settings = configure(TopologySettings)
    try:
        launch.make_topology(settings)
    except InputError as error:
        found.add(
            "machine", "warning", str(error), "Give resume other topology.* settings; the run allows it."
        )
        return False
    return True


def rehearse(run: RunDirectory, config: Config, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Data, tokenizer, model and optimizer against the checkpoint that resume would take."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what a trainer says while it is built
            trainer = launch.rebuild(run, config)
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
        return
    try:
        if found.step is None:
            found.add("rehearsal", "ok", "the run can be built again.")
            return
        saved = saved_meta(checkpoints, found.step)
        current = json.loads(json.dumps(meta(trainer, found.step), default=str))
        for note in machine_differences(saved, current):
            found.add(
                "machine", "note", f"{note}: bit-for-bit is not promised, only the same run to rounding."
            )
        if not any(finding.area == "machine" for finding in found.findings):
            found.add("machine", "ok", "versions, mesh and cores are as they were.")
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.admit(found.step)
        checkpoints.check_fits(found.step, trainer.abstract_state())
        found.add("rehearsal", "ok", f"data, tokenizer, model and optimizer fit {found.checkpoint}.")
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
    finally:
        trainer.finish()
