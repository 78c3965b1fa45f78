"""`bessemer doctor`: checks of a run directory, and the verdict: what `bessemer resume` would do, or why it refuses.

Checked are checkpoints, weights, metrics, leftovers, configuration and data, and a rehearsal of the resume. Only
`remove_stale` changes anything.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bessemer.checkpoint import Checkpoints, store
from bessemer.checkpoint.files import unlisted_files
from bessemer.config import Config
from bessemer.config.bounded import parse_json
from bessemer.config.recipes import flat_values, saved_tree
from bessemer.console import Advance, counted, duration, size
from bessemer.data import DataSettings, Sampling, Tokenizer, find_source
from bessemer.data.rows.rows import TokenStore, is_store
from bessemer.data.sources.hub import must_download
from bessemer.data.stores.catalog import store_directory, store_place, tokenizer_place
from bessemer.data.tokenize.tokenizer import FILE
from bessemer.errors import BessemerError, InputError, StorageError
from bessemer.generate.base import BaseRecord, read_record
from bessemer.generate.load import base_arrays, frozen_store
from bessemer.job import RunDirectory, RunLock
from bessemer.job.directory import STALE_SECONDS, step_name
from bessemer.job.trust import named_code, names_own_code, refused_requests
from bessemer.report import MetricsFile
from bessemer.report.summary import Summary, disk_size, has_phases, is_number, phases_of, summarize
from bessemer.storage.files import TEMPORARY, discard
from bessemer.storage.weights import WeightFile
from bessemer.topology import TopologySettings
from bessemer.training import launch
from bessemer.training.persistence.checkpoints import (
    META_KEYS,
    edited_settings,
    machine_differences,
    read_branches,
    recorded_changes,
)
from bessemer.training.setup.schema import saved_config
from bessemer.training.state import LoopState

Level = Literal["ok", "note", "warning", "error"]
OLDER = "Continue from an older one with --step, or use the version of Bessemer that wrote it."
NOT_NEEDED = {"model_state", "callbacks"}  # the checkpoint holds the weights; a run can continue without its callbacks


@dataclass(frozen=True)
class Finding:
    """The result of one check. `resume` refuses a run with an `error`; `remedy` says what to do."""

    area: str
    level: Level
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.text} {self.remedy}".strip()


@dataclass
class Diagnosis:
    """`step` and `checkpoint` are what resume would start from; both are None when it starts from the beginning."""

    run: str
    state: str
    findings: list[Finding] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    checkpoint: str | None = None
    resumable: bool = False
    verdict: str = ""
    exit_code: int = 0

    def add(self, area: str, level: Level, text: str, remedy: str = "") -> None:
        self.findings.append(Finding(area, level, text, remedy))

    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]


def _shortened(words: Sequence[str], separator: str = "; ") -> str:
    """Return the first three words and how many more there are."""
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return f"{separator.join(words[:3])}{more}"


# Checkpoints and weights


def examine_checkpoints(
    run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis, progress: Advance | None
) -> None:
    """Add one finding per checkpoint, newest first, and set the step that resume would take."""
    try:
        steps = store.final_steps(run.checkpoints)
    except StorageError as error:
        found.add("checkpoints", "error", str(error))
        return
    for step in reversed(steps):
        name, problems = step_name(step), checkpoints.verify(step, progress)
        if problems and not checkpoints.path(step).is_dir():
            continue  # the run itself deleted it meanwhile
        saved = None if problems else checkpoints.size(step)
        found.checkpoints.append(
            {"step": step, "name": name, "sound": not problems, "problems": problems, "bytes": saved}
        )
        if problems:
            remedy = "Resume skips it." if found.step is None else ""
            found.add("checkpoints", "warning", f"{name} is damaged: {_shortened(problems)}.", remedy)
            continue
        found.add("checkpoints", "ok", f"{name}: every byte is as it was saved ({size(saved)}).")
        if extra := unlisted_files(checkpoints.path(step)):
            found.add(
                "checkpoints", "note", f"{name} holds files that were not saved with it: {_shortened(extra, ', ')}."
            )
        if found.step is None:
            found.step, found.checkpoint = step, name
            _examine_metadata(checkpoints, step, found)
            _examine_frozen(run, saved_meta(checkpoints, step), found, progress)
    if not found.checkpoints:
        found.add("checkpoints", "note", "no checkpoint was committed yet.")
    elif found.step is None:
        text = f"none of the {len(found.checkpoints)} checkpoints can be used."
        found.add("checkpoints", "error", text, f"Restore {run.checkpoints} from a copy, or start a new run.")


def saved_meta(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """Return meta.json of a sound checkpoint."""
    return parse_json(checkpoints.read(step, "meta.json"))


def _examine_metadata(checkpoints: Checkpoints, step: int, found: Diagnosis) -> None:
    """Check that this version can read meta.json and loop.json, and that the tokenizer is the recorded one."""
    saved = saved_meta(checkpoints, step)
    if lacking := [key for key in META_KEYS if key not in saved]:
        found.add("checkpoints", "error", f"{step_name(step)}: meta.json does not have {', '.join(lacking)}.", OLDER)
    try:
        LoopState.from_json(checkpoints.read(step, "loop.json"))
    except (StorageError, ValueError, TypeError) as error:
        found.add("checkpoints", "error", f"{step_name(step)}: loop.json is not usable ({error}).", OLDER)
    path = checkpoints.path(step) / FILE
    try:
        actual = Tokenizer.load(path).hash if path.is_file() else None
    except InputError:
        actual = None
    if saved.get("tokenizer_hash") != actual:
        text = f"{step_name(step)}: its tokenizer.json is not the one that meta.json names."
        found.add("checkpoints", "error", text, OLDER)


def _examine_frozen(run: RunDirectory, meta: dict[str, Any], found: Diagnosis, progress: Advance | None) -> None:
    """Verify the parameters that the run does not train; they are saved once, beside the checkpoints."""
    if meta.get("frozen") is None:
        return
    try:
        if (record := read_record(run)) is not None:
            _examine_base(run, record, meta, found, progress)
            return
    except (InputError, StorageError) as error:
        found.add("checkpoints", "error", f"the base model cannot be used: {error}")
        return
    if problems := frozen_store(run).verify(0, progress):
        text = f"the frozen weights in reference/frozen are damaged: {'; '.join(problems[:3])}."
        found.add("checkpoints", "error", text, "Restore that folder from a copy.")
    else:
        found.add("checkpoints", "ok", "the frozen weights in reference/frozen are as they were saved.")


def _examine_base(
    run: RunDirectory, record: BaseRecord, meta: dict[str, Any], found: Diagnosis, progress: Advance | None
) -> None:
    """Verify the base of the adapters by reading every tensor."""
    if meta["frozen"] != record.sha256:
        text = "reference/base.json does not describe the base model that the checkpoints were trained with."
        found.add("checkpoints", "error", text, "Restore it from a copy.")
        return
    arrays = base_arrays(run, record)
    for name in arrays.names:
        held = arrays.read(name)
        if progress is not None:
            progress(held.nbytes)
    found.add("checkpoints", "ok", f"the base model {arrays.where} is as it was: {len(arrays.names)} tensors verified.")


def examine_weights(run: RunDirectory, found: Diagnosis, progress: Advance | None) -> None:
    """Verify RUN/model by reading every array. Resume does not need it, so damage is a warning."""
    for path in sorted(run.model.glob("*.safetensors")):
        try:
            file = WeightFile(path)
            for array, entry in file.entries.items():
                file.read(array)
                if progress is not None:
                    progress(entry.size)
        except StorageError as error:
            found.add("weights", "warning", str(error))
        else:
            known = "every byte is as it was saved" if file.checksums else "readable; it has no checksums"
            found.add("weights", "ok" if file.checksums else "note", f"{path.relative_to(run.path)}: {known}.")


# Metrics


def examine_metrics(run: RunDirectory, found: Diagnosis, interval: int | None) -> None:
    """Check that metrics.jsonl is readable and has every step once. `interval`: steps between rows, if known."""
    file = MetricsFile(run.metrics)
    try:
        rows = file.rows()
    except StorageError as error:
        found.add("metrics", "error", str(error))
        return
    for note in file.notes:
        found.add("metrics", "note", note)
    if not rows:
        found.add("metrics", "note", "metrics.jsonl has no rows yet.")
        return
    steps = [int(row["step"]) for row in rows if is_number(row.get("step"))]
    if doubled := _doubled_steps(rows):
        shown = ", ".join(map(str, doubled[:5])) + (" …" if len(doubled) > 5 else "")
        word = "step" if len(doubled) == 1 else "steps"
        found.add("metrics", "warning", f"metrics.jsonl has duplicate rows for {word} {shown}.")
    if any(later < earlier for earlier, later in itertools.pairwise(steps)):
        found.add("metrics", "warning", "the steps in metrics.jsonl do not ascend.")
    trained = sorted({int(row["step"]) for row in rows if "loss" in row and is_number(row.get("step"))})
    if gaps := _missing_spans(trained, interval, found.step):
        spans = ", ".join(f"{first} and {last}" for first, last in gaps[:3])
        found.add("metrics", "warning", f"rows are missing between steps {spans}{' …' if gaps[3:] else ''}.")
    if not doubled and not gaps:
        found.add("metrics", "ok", f"{len(rows)} rows up to step {max(steps, default=0)}.")
    if beyond := [step for step in steps if found.step is not None and step > found.step]:
        text = f"{len(beyond)} rows are beyond step {found.step}."
        found.add("metrics", "note", text, "Resume removes them and writes them again.")


def _doubled_steps(rows: list[dict[str, Any]]) -> list[int]:
    """Return steps with two training rows or two validation rows; one of each is normal."""
    seen = collections.Counter(
        (int(row["step"]), name)
        for row in rows
        if is_number(row.get("step"))
        for name in ("loss", "val_loss")
        if name in row
    )
    return sorted({step for (step, _), count in seen.items() if count > 1})


def _missing_spans(steps: list[int], interval: int | None, saved: int | None) -> list[tuple[int, int]]:
    """Return neighbors (a, b) further apart than the interval and than the most common distance in the file.

    A resume may have changed the interval, so the most common distance counts too. The checkpoint at `saved` was taken
    after its rows were written.
    """
    apart = collections.Counter(later - earlier for earlier, later in itertools.pairwise(steps))
    usual = max(interval or 1, apart.most_common(1)[0][0] if apart else 1)
    marks = [0, *steps]
    spans = [(a, b) for a, b in itertools.pairwise(marks) if b - a > usual]
    if saved is not None and saved - marks[-1] > usual:
        spans.append((marks[-1], saved))
    return spans


# Leftovers of killed processes


def stale_paths(run: RunDirectory) -> list[Path]:
    """Return unfinished saves, half-finished deletions, and half-written files of killed processes."""
    files = [path for path in sorted(run.path.glob(".*.tmp")) if TEMPORARY.fullmatch(path.name)]
    return [*(run.checkpoints / name for name in store.leftovers(run.checkpoints)), *files]


def examine_leftovers(run: RunDirectory, found: Diagnosis, alive: bool) -> None:
    """List files that are not part of the run, with their size and who removes them."""
    if not run.checkpoints.is_dir():
        return
    for path in stale_paths(run):
        label = f"{path.name} ({size(disk_size(path))})"
        if alive:
            found.add("leftovers", "note", f"the run is writing {label}.")
        else:
            text = f"{label} was left by a killed process and is never read."
            found.add("leftovers", "note", text, "Resume removes it; so does --fix.")
    for name in store.set_aside_names(run.checkpoints):
        label = f"{name} ({size(disk_size(run.checkpoints / name))})"
        text = f"{label} is from an abandoned branch of this run, which continued from an earlier step."
        remedy = "It is deleted once the run has saved that far again; renaming it back restores it."
        found.add("leftovers", "note", text, remedy)


def remove_stale(run: RunDirectory) -> list[str]:
    """Delete `stale_paths`, and nothing else, while holding the run's lock; return their names."""
    with RunLock(run, status=False):  # raises if the run is in use
        paths = stale_paths(run)
        for path in paths:
            discard(path)
        return [path.name for path in paths]


# Configuration


def examine_config(run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis) -> Config | None:
    """Return the checked configuration; None if it is not usable, or names code, which is never imported here."""
    copy = None if found.checkpoint is None else run.checkpoints / found.checkpoint / "config.yaml"
    remedy = "" if copy is None else f"The checkpoint holds a copy: cp {copy} {run.config}"
    if not run.config.is_file():
        found.add("config", "error", f"{run.config} is missing.", remedy)
        return None
    config = None
    try:
        tree = saved_tree(run.config)
        if named := named_code(tree):
            _examine_code(run, tree, named, found)
        elif refused := refused_requests(run, tree):
            text = f"the run was not started here, and config.yaml {'; '.join(map(str, refused[:5]))}: not checked."
            found.add("trust", "warning", text, "Resume asks for --trust: review each of these first.")
        else:
            config = saved_config(run.config)
            found.add("config", "ok", "config.yaml is valid for this version.")
    except InputError as error:
        found.add("config", "error", str(error), remedy)
        return None
    _compare_with_checkpoint(run, tree, checkpoints, found)
    return config


def _examine_code(run: RunDirectory, tree: dict[str, Any], named: list[str], found: Diagnosis) -> None:
    listed = ", ".join(named)
    text = f"config.yaml names code ({listed}), which is not imported here, so settings and data are not checked."
    found.add("code", "note", text)
    try:
        trusted = names_own_code(run, tree)
    except InputError as error:
        found.add("code", "warning", str(error))
        return
    if not trusted:
        text = "the run is not marked as started by this user with that code."
        found.add("code", "warning", text, "Resume asks for --trust: review the code first.")


def _compare_with_checkpoint(
    run: RunDirectory, tree: dict[str, Any], checkpoints: Checkpoints, found: Diagnosis
) -> None:
    """Report settings edited by hand since the checkpoint: they make it another run."""
    if found.step is None:
        return
    path = checkpoints.path(found.step) / "config.yaml"
    try:
        saved = flat_values(saved_tree(path))
    except InputError as error:
        found.add("config", "warning", str(error))
        return
    try:
        branches = [branch for branch in read_branches(run) if branch.step == found.step]
    except InputError as error:
        found.add("config", "error", str(error))
        return
    for branch in branches:
        found.add("config", "note", f"the run branches off at step {branch.step}: {branch.describe()}.")
    recorded = recorded_changes(branches, found.step)
    edited = [
        f"{name} is {values['to']!r}, was {values['from']!r}"
        for name, values in sorted(edited_settings(saved, flat_values(tree)).items())
        if name not in recorded
    ]
    if edited:
        text = f"config.yaml is not what {found.checkpoint} was saved with: {_shortened(edited)}."
        remedy = f"Resuming would make it another run; restore the original: cp {path} {run.config}"
        found.add("config", "error", text, remedy)


# Data and tokenizer


def examine_material(run: RunDirectory, config: Config, found: Diagnosis) -> bool:
    """Check data and tokenizer. Return whether the run can be rebuilt without preparing anything."""
    try:
        given = sorted(run.given_parts() - NOT_NEEDED)
    except InputError as error:
        found.add("data", "error", str(error))
        return False
    if given:
        text = f"the run was started from Python with its own {', '.join(given)}, which cannot be checked here."
        parts = ", ".join(f"{name}=…" for name in given)
        found.add("data", "note", text, f"Pass the same again: bm.resume('{run.name}', {parts}).")
        return False
    settings = config.make(DataSettings)
    samplings = [sampling for mixture in config["training/dataset"] or [] for sampling in mixture]
    if not samplings:
        found.add("data", "note", "the run names no data: an imported model was not trained here.")
        return False
    sources = {(sampling.name, sampling.suffix): sampling for sampling in samplings}.values()
    there = [_examine_source(sampling, found) for sampling in sources]
    if not all(there):
        return False
    try:
        tokenizer = _examine_tokenizer(settings, samplings, found)
        if tokenizer is None:
            return False
        there = [_examine_store(sampling, tokenizer, settings, found) for sampling in sources]
        return all(there)
    except BessemerError as error:
        found.add("data", "error", str(error))
        return False


def _examine_source(sampling: Sampling, found: Diagnosis) -> bool:
    """Return whether a dataset's store or source exists."""
    try:
        if must_download(sampling.name):
            text = f"the files of {sampling.name} are not in the hub's cache."
            found.add("data", "warning", text, "Resume downloads them again and verifies their checksums.")
            return False
        if store_directory(sampling) is None:
            find_source(sampling.name)
    except BessemerError as error:
        text = f"training.dataset names {sampling.name}{sampling.suffix}, which is gone: {error}"
        remedy = "Put it back where it was; a copy elsewhere below this directory is found too."
        found.add("data", "error", text, remedy)
        return False
    return True


def _examine_tokenizer(settings: DataSettings, samplings: list[Sampling], found: Diagnosis) -> Tokenizer | None:
    place = tokenizer_place(settings, samplings)
    if settings.tokenizer.startswith("train:") and not (place / FILE).is_file():
        text = f"the tokenizer {settings.tokenizer} is not at {place}: it was deleted, or its training text changed."
        remedy = "Resume trains it again, and refuses unless it comes out the same. The checkpoint holds the original."
        found.add("data", "warning", text, remedy)
        return None
    tokenizer = Tokenizer.load(place)
    found.add("data", "ok", f"tokenizer {tokenizer.hash[:12]} at {place}.")
    return tokenizer


def _examine_store(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings, found: Diagnosis) -> bool:
    """Verify the prepared data of a dataset; return whether it is there."""
    place = store_directory(sampling)
    if place is None:
        place = store_place(sampling, find_source(sampling.name), tokenizer, settings=settings)
    if not is_store(place):
        text = f"the prepared data of {sampling.name} is not at {place}: it was deleted, or its files have changed."
        remedy = "Resume prepares it again, and refuses unless it comes out the same."
        found.add("data", "warning", text, remedy)
        return False
    parts = [TokenStore(place, split) for split in TokenStore(place).splits]
    for part in parts:
        part.verify()
    found.add("data", "ok", f"prepared data of {sampling.name} at {place}, every byte verified.")
    if not all(part.has_checksums for part in parts):
        text = f"{place} was prepared before stores had checksums, so damage during a run would go unnoticed."
        found.add("data", "note", text, "Prepare it again to have every chunk verified before it is used.")
    return True


# A rehearsal: the run is rebuilt as resume does it, up to the point where arrays would be read


def mesh_fits(config: Config, found: Diagnosis) -> bool:
    """Return whether the run's mesh fits the devices of this machine."""
    settings = config.make(TopologySettings)
    try:
        launch.make_topology(settings)
    except InputError as error:
        found.add("machine", "warning", str(error), "Pass other topology.* settings to resume; the run allows it.")
        return False
    return True


def rehearse(run: RunDirectory, config: Config, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Rebuild data, tokenizer, model and optimizer and compare them with the checkpoint that resume would take."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the trainer prints while it is built
            trainer = launch.rebuild(run, config)
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
        return
    try:
        if found.step is None:
            found.add("rehearsal", "ok", "the run can be rebuilt.")
            return
        current = json.loads(json.dumps(trainer.meta(found.step), default=str))
        for note in machine_differences(saved_meta(checkpoints, found.step), current):
            found.add("machine", "note", f"{note}: resuming is not bit for bit the same run, only equal to rounding.")
        if not any(finding.area == "machine" for finding in found.findings):
            found.add("machine", "ok", "versions, mesh and cores are unchanged.")
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.admit(found.step)
        checkpoints.check_fits(found.step, trainer.abstract_state())
        found.add("rehearsal", "ok", f"data, tokenizer, model and optimizer fit {found.checkpoint}.")
    except BessemerError as error:
        found.add("rehearsal", "error", str(error))
    finally:
        trainer.finish()


# --- all checks in order, and the verdict ---


CONDITIONS = ("code", "trust", "data", "disk", "machine")
"""Areas whose remedies are part of the verdict: without them resume refuses, or fails later."""


def diagnose(run: RunDirectory, progress: Advance | None = None) -> Diagnosis:
    """Check everything and change nothing. `progress` gets the bytes verified, from several threads."""
    if not run.exists():
        raise InputError(f"{run.path} holds a model but no run: there is nothing to resume.")
    summary, owner = summarize(run), RunLock.owner(run)
    found = Diagnosis(str(run.path), summary.state)
    checkpoints = Checkpoints(run.checkpoints)
    try:
        examine_status(summary, found, owner)
        examine_checkpoints(run, checkpoints, found, progress)
        examine_weights(run, found, progress)
        examine_leftovers(run, found, alive=owner is not None)
        config = examine_config(run, checkpoints, found)
        examine_metrics(run, found, None if config is None else config.get("logging/report_interval"))
        examine_disk(run, checkpoints, found)
        if config is not None:
            ready = examine_material(run, config, found)
            resumable = owner is None and found.state != "done" and not found.errors()
            if mesh_fits(config, found) and ready and resumable:
                rehearse(run, config, checkpoints, found)
    finally:
        checkpoints.close()
    conclude(found, summary, owner)
    return found


def examine_status(summary: Summary, found: Diagnosis, owner: dict[str, Any] | None) -> None:
    """Check status.json and the lock: is the run in use, and if not, how did it end?"""
    try:
        status = summary.run.read_status()
    except InputError as error:
        found.add("status", "error", str(error))
        return
    if owner is not None:
        found.add("status", "note", f"the run is in use by pid {owner.get('pid')} on host {owner.get('host')}.")
        if (summary.age or 0.0) > STALE_SECONDS:
            text = f"its last heartbeat is {duration(summary.age)} old, though it holds the lock."
            found.add("status", "warning", text)
    elif found.state == "crashed":
        text = f"the run crashed after step {summary.step}: its status says running, but no process holds its lock."
        found.add("status", "note", text, "Resume takes the lock over.")
    else:
        message = f" ({status['message']})" if status.get("message") else ""
        level: Level = "ok" if found.state in ("done", "stopped") else "note"
        found.add("status", level, f"{found.state} at step {summary.step}{message}.")


def examine_disk(run: RunDirectory, checkpoints: Checkpoints, found: Diagnosis) -> None:
    """Check that there is room for one more checkpoint, and permission to write it."""
    if not os.access(run.path, os.W_OK):
        remedy = "Resume needs write access: change its permissions, or copy it to where you may write."
        found.add("disk", "error", f"{run.path} cannot be written.", remedy)
        return
    free = shutil.disk_usage(run.path).free
    needed = 0 if found.step is None else checkpoints.size(found.step)
    if free < needed:
        text = f"{size(free)} free, less than a checkpoint needs ({size(needed)})."
        found.add("disk", "warning", text, "Free space, or the next save fails.")
    else:
        found.add("disk", "ok", f"{size(free)} free; a checkpoint needs {size(needed)}.")


def conclude(found: Diagnosis, summary: Summary, owner: dict[str, Any] | None) -> None:
    """Set the verdict, the exit code and whether the run can be resumed."""
    errors = found.errors()
    unusable = bool(found.checkpoints) and found.step is None
    if owner is not None:
        found.verdict = "the run is in progress; there is nothing to resume."
    elif found.state == "done" and not unusable:
        found.verdict = f"the run is finished at step {summary.step}; there is nothing to resume."
    elif errors:
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this run: {errors[0].line}"
    else:
        found.resumable = True
        found.verdict = _promise(found, summary.step)


def _promise(found: Diagnosis, reached: int | None) -> str:
    """Return what resume will do, and what the user must do first."""
    conditions = [f.remedy for f in found.findings if f.area in CONDITIONS and f.remedy]
    but = f" But: {' '.join(conditions)}" if conditions else ""
    if found.step is None:
        return f"resume will start again from step 0, as the same run: no checkpoint was committed.{but}"
    lost = (reached or 0) - found.step
    again = f" {counted(lost, 'step')} after it will be repeated." if lost > 0 else ""
    return f"resume will continue at step {found.step} from checkpoint {found.checkpoint}.{again}{but}"


def examine(run: RunDirectory, progress: Advance | None = None) -> Diagnosis:
    """Return the diagnosis of a run, or of a job of phases: it can be resumed if each of its runs can."""
    if not has_phases(run):
        return diagnose(run, progress)
    summary, owner = summarize(run), RunLock.owner(run)
    found = Diagnosis(str(run.path), summary.state)
    examine_status(summary, found, owner)
    for phase in phases_of(run):
        diagnosis = diagnose(phase, progress)
        found.add("phase", "error" if diagnosis.exit_code else "ok", f"{phase.name}: {diagnosis.verdict}")
    if owner is not None:
        found.verdict = "the job is in progress; there is nothing to resume."
    elif found.errors():
        found.exit_code = StorageError.exit_code
        found.verdict = f"resume cannot continue this job: {found.errors()[0].line}"
    elif found.state == "done":
        found.verdict = "the job is finished; there is nothing to resume."
    else:
        found.resumable = True
        found.verdict = "resume will continue with the phases that are not done."
    return found
