"""Parameters that are not trained: a checkpoint holds what is trained, and with the frozen part it is the whole model.

The base of adapters stays where it is (generate/base.py): RUN/reference/base.json names it by path and sha256, and
every tensor is verified as it is read. Everything else is written once, to RUN/reference/frozen: what training.freeze
holds, a base without a path of its own (drawn in this run, or given from Python), and a checkpoint of a run that is not
finished, since that run will delete it. Either is on disk before the first checkpoint is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from bessemer.checkpoint import Checkpoints
from bessemer.checkpoint.files import COMMIT
from bessemer.errors import InputError, StorageError
from bessemer.generate import base as bases
from bessemer.generate.base import BaseRecord, VerifiedArrays
from bessemer.generate.load import SECTIONS, frozen_store, located, open_arrays, read_base, read_frozen
from bessemer.interop.folder import CONFIG
from bessemer.job import RunDirectory
from bessemer.models.lora import Split
from bessemer.storage.files import storage
from bessemer.storage.weights import flatten_names, place
from bessemer.topology import broadcast, unbox
from bessemer.training.settings import RunContext
from bessemer.training.setup.initial_weights import loadable, tree_in
from bessemer.training.setup.model import ModelParts
from bessemer.training.state import RunState


def open_frozen(context: RunContext) -> Checkpoints:
    return frozen_store(context.directory, context.topology.is_process_zero)


def frozen_names(split: Split) -> list[str]:
    return ["/".join(path) for path in (*split.frozen, *split.adapted)]


def find_base(context: RunContext, split: Split) -> tuple[Path | None, str]:
    """Return where the base of the adapters stays; (None, why) if the run keeps a copy of its own."""
    init = context.settings.init
    if not split.adapted:
        return None, ""
    if init is None or context.given.model_state is not None:
        return None, "it has no path"
    start, directory = Path(init), context.directory
    if bases.read_record(directory) is not None:
        return start, ""
    if open_frozen(context).committed():
        return None, "an older version began to"
    held = open_arrays(start).signature()
    if fresh := [name for name in frozen_names(split) if name not in held]:
        return None, f"{fresh[0]} is not in it and is drawn here"
    is_checkpoint = not (start / CONFIG).is_file()
    if is_checkpoint and not split.lora.keep_base:
        state = RunDirectory(start.parent.parent).read_status().get("state")
        if state != "done":
            return None, f"its run is not finished ({state or 'no status'}), and deletes old checkpoints as it goes on"
    return start, ""


def check_quantized(split: Split, why: str) -> None:
    """Raise InputError if the base is quantized but is not stored at a path of its own, for the reason `why`: codes
    alone can be neither verified nor merged into the weights they came from."""
    if split.quantized:
        raise InputError(
            f"lora.quantize={split.lora.quantize} needs a base model that can be read again, and {why}. Name one with "
            "init= (a Hugging Face folder, a finished run, an export); of a run that is still training, "
            "lora.keep_base=true copies the checkpoint."
        )


def read_start(context: RunContext, parts: ModelParts, start: Path) -> tuple[Any, BaseRecord]:
    """Return the parameters of the base at `start` on their devices, and what names it. Each tensor is hashed as it is
    read, and compared where the run knows its base already."""
    directory, boxed = context.directory, parts.boxed
    record, copy = bases.read_record(directory), bases.own_copy(directory)
    where = copy if copy.is_dir() else start if record is None else locate(context, record)
    arrays = open_arrays(where)
    wanted = loadable(parts.model, boxed, arrays.signature())
    verified = VerifiedArrays(arrays, flatten_names(unbox(wanted)), where, record, directory)
    params = place(verified, located(parts.split.stored(wanted), context.topology), str(where))
    hashes = {name: verified.hashes[name] for name in frozen_names(parts.split)}
    return params, BaseRecord.of(where, hashes, directory)


def locate(context: RunContext, record: BaseRecord) -> Path:
    """Return the path of a continued run's base: `init`, which was approved when the run was opened, or if that is
    gone, the one in base.json."""
    init = context.settings.init
    return bases.locate(context.directory, record, init if init is not None and Path(init).is_dir() else None)


def save_frozen(context: RunContext, run: RunState) -> None:
    """Write a reference to the frozen parameters, or a copy, before the first step. Every process calls it."""
    frozen = run.state.frozen
    if frozen is None:
        return
    if run.base is not None:
        broadcast("record the base model", lambda: _save_base(context, run.base))
        return
    manager = open_frozen(context)
    with storage("cannot save the frozen weights"):
        manager.root.parent.mkdir(exist_ok=True)
    manager.save(0, {"params": frozen}, meta={"kind": "frozen"}, wait=True)
    manager.close()


def _save_base(context: RunContext, record: BaseRecord | None) -> str:
    assert record is not None
    directory, known = context.directory, bases.read_record(context.directory)
    copy = bases.own_copy(directory)
    if copy.is_dir() and known is not None:
        return "recorded"
    if context.lora.keep_base and not copy.is_dir():
        record = _copy_base(record, directory)
    if known != record:
        bases.write_record(directory, record)
    return "recorded"


def _copy_base(record: BaseRecord, directory: RunDirectory) -> BaseRecord:
    """Copy the base into the run and return what names the copy; its layout, and so its hashes, are ours."""
    place, copy = Path(record.path), bases.own_copy(directory)
    arrays, tree = open_arrays(place), tree_in(place)
    verified = VerifiedArrays(arrays, arrays.signature(), place, record, directory)
    bases.copy_base(verified, {section: tree.get(section, {}) for section in SECTIONS}, directory)
    copied = open_arrays(copy)
    return BaseRecord.of(copy, {name: bases.read_hashed(copied, name)[1] for name in record.tensors}, directory)


def restore_frozen(context: RunContext, abstract: Any) -> tuple[Any, BaseRecord | None]:
    """Return the frozen parameters, in the shapes of `abstract`, and what names their base; (None, None) if every
    parameter is trained."""
    if abstract is None:
        return None, None
    record = bases.read_record(context.directory)
    if record is not None:
        where = locate(context, record)
        frozen = read_base(context.directory, record, abstract, where)
        return frozen, BaseRecord.of(where, record.tensors, context.directory)
    manager = open_frozen(context)
    if problems := manager.verify(0):
        raise StorageError(
            f"the frozen weights {manager.path(0)} are damaged: {'; '.join(problems[:3])}. They are written once; put "
            "them back from a copy, or start a new run with init=."
        )
    return read_frozen(manager, abstract), None


def frozen_identity(context: RunContext) -> str | None:
    """Return the hash of the frozen weights, for meta.json: of the base's tensors, or of the copy's manifest; None if
    there are none."""
    if (record := bases.read_record(context.directory)) is not None:
        return record.sha256
    manifest = open_frozen(context).path(0) / COMMIT
    return hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None


def describe(parts: ModelParts) -> str | None:
    """Return `12,288 of 1,048,576 parameters (1.2%): …`; None if every parameter is trained."""
    if parts.split.everything:
        return None
    trained, total = parts.split.count(parts.boxed)
    what = f"{len(parts.split.frozen) + len(parts.split.adapted)} tensors frozen"
    if parts.split.adapted:
        what = f"adapters of rank {parts.split.lora.rank} on {len(parts.split.adapted)} matrices, {what}"
    if parts.split.quantized:
        size = parts.split.quantized_bytes(parts.boxed) / 2**30
        what += f", {len(parts.split.quantized)} of them in {parts.split.lora.quantize} ({size:.3g} GiB)"
    return f"{trained:,} of {total:,} parameters ({trained / total:.2%}): {what}"
