"""A run's model as files for other programs: from its newest checkpoint, or from RUN/model where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bessemer.checkpoint import Checkpoints
from bessemer.config.recipes import parse_saved
from bessemer.console import ShowBytes
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.generate.adapters import run_adapters
from bessemer.generate.base import MergedArrays, read_record
from bessemer.generate.load import (
    SECTIONS,
    WEIGHTS,
    ModelFiles,
    allocated,
    build_model,
    check_finite,
    choose,
    load_model,
    open_arrays,
    tokenizer_in,
)
from bessemer.interop.config import TreeArrays
from bessemer.interop.folder import export_folder, is_folder, make_empty
from bessemer.interop.peft import export_adapters
from bessemer.job import RunDirectory
from bessemer.models.llama import Llama
from bessemer.models.lookup import allocation_of
from bessemer.models.lora import merge_adapters
from bessemer.models.protocol import new_parameters
from bessemer.storage.files import ALLOCATION, storage
from bessemer.storage.weights import OURS, Arrays, flatten, total, write_file


def export_run(
    run: RunDirectory,
    out: Path,
    form: str,
    show: ShowBytes,
    *,
    step: int | str | None = None,
    dtype: str | None = None,
    base: str | None = None,
) -> list[str]:
    """Write `out` and return lines to show. Beside one copy of the weights memory holds one tensor; of an imported run,
    and of adapters over a base, not even that, and each tensor stays in the dtype it came in. base: where that base
    lies, in place of where the run says."""
    natural: str | None = None
    if step is None and not Checkpoints(run.checkpoints).committed():
        files = ModelFiles.of(run, base)
        model, tokenizer, config, notes = files.model, files.tokenizer, files.config, files.notes
        arrays: Arrays = files.arrays
        chosen = files.step
    elif read_record(run) is not None:
        model, tokenizer, config, notes, chosen, arrays = open_adapted(run, step, base)
    else:
        loaded = load_model(run, step)
        model, tokenizer, config, notes = loaded.model, loaded.tokenizer, loaded.config, loaded.notes
        arrays = TreeArrays(flatten(merge_adapters(loaded.params)))
        chosen, natural = loaded.step, model.weights_dtype if isinstance(model, Llama) else None
    lines = [f"note: {note}" for note in notes]
    more = new_parameters(model)
    if form == "hf" and isinstance(model, Llama) and not more:
        return lines + export_folder(arrays, model, tokenizer, out, show, dtype=dtype or natural)
    if form == "hf":
        lines.append(
            f"note: transformers has no causal model like the {config['model']['family']} family "
            f"({', '.join(more) or 'smear, value embeddings, backout, …'}), so this is our own format: plain "
            "safetensors, described in docs/huggingface.md"
        )
    return lines + export_ours(arrays, model, tokenizer, config, out, show, chosen, dtype)


def open_adapted(
    run: RunDirectory, step: int | str | None, base: str | None
) -> tuple[Any, Tokenizer | None, dict[str, Any], list[str], int, Arrays]:
    """Return model, tokenizer, configuration, notes, step and merged weights of a run whose base stays where it is;
    the weights are read, and merged, one at a time."""
    checkpoints = Checkpoints(run.checkpoints)
    chosen, notes = choose(checkpoints, run, run.step_of_stage(step) if isinstance(step, str) else step)
    assert chosen is not None  # it has a checkpoint
    place = checkpoints.path(chosen)
    config = parse_saved(checkpoints.read(chosen, "config.yaml"), str(place))
    model, unknown = build_model(config, str(place))
    tokenizer = tokenizer_in(place, model)
    model = allocated(model, place, tokenizer)
    arrays = open_arrays(place, base)
    assert isinstance(arrays, MergedArrays)
    trained = {name: jnp.asarray(arrays.trained.read(name)) for name in arrays.trained.signature()}
    check_finite(trained, str(place), "Use another checkpoint with --step.")
    return model, tokenizer, config, [*notes, *unknown], chosen, arrays


def export_run_adapters(run: RunDirectory, out: Path, step: int | str | None = None) -> list[str]:
    """Write the adapters of a run in PEFT's layout, without the weights they were trained on."""
    held = run_adapters(run, step)
    if not held.lora.rank:
        raise InputError(f"{run.path} holds no adapters (lora.rank is 0); export it without --adapters.")
    model = build_model(held.config, held.where)[0]
    if not isinstance(model, Llama):
        raise InputError(
            f"PEFT's layout names matrices of transformers, which has no model like {held.config['model']['family']}. "
            "Export the merged model instead, without --adapters."
        )
    record, start = held.record, held.config.get("init")
    places = [start] if record is None else [start, record.path]
    base = next((str(place) for place in places if place is not None and is_folder(Path(place))), None)
    if record is not None and record.source is not None:
        base = record.source.removeprefix("hf:").partition("@")[0]
    notes = [f"note: {note}" for note in held.notes]
    return notes + export_adapters(held.arrays, held.lora, model, out, base)


def export_ours(
    arrays: Arrays,
    model: Any,
    tokenizer: Tokenizer | None,
    config: dict[str, Any],
    out: Path,
    show: ShowBytes,
    step: int,
    dtype: str | None,
) -> list[str]:
    """As RUN/model: model.safetensors under our names, config.json, the tokenizer's files, lookup.json."""
    entries = {name: (dtype or kind, shape) for name, (kind, shape) in arrays.signature().items()}
    size = total(entries.values())
    with storage("cannot write the export"):
        make_empty(out)
        shape = {name: config.get(name, {}) for name in SECTIONS}
        texts = {"config.json": json.dumps(shape, indent=1) + "\n"}
        if tokenizer is not None:
            texts |= tokenizer.files
        if (allocation := allocation_of(model)) is not None:
            texts[ALLOCATION.name] = allocation.to_json()
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        about = {"format": OURS, "step": str(step)}
        with show(f"exporting {out.name}", size) as progress:
            write_file(out / WEIGHTS, entries, arrays.read, about, progress, beside=texts)
    return [f"model      {config['model']['family']}, {size / 2**30:.2f} GiB in {WEIGHTS}"]
