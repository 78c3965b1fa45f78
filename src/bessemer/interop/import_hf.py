"""`bessemer import`: a Hugging Face model becomes a run, with weights in RUN/model in the dtype they came in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError
from bessemer.interop.folder import CONFIG, SINGLE, Folder
from bessemer.interop.progress import ShowBytes, nothing
from bessemer.job import RunDirectory, check_run_name
from bessemer.storage.files import storage
from bessemer.storage.weights import OURS, Progress, total, write_file


def import_folder(
    source: Path, out: Path, show: ShowBytes = nothing, context: int | None = None
) -> tuple[RunDirectory, list[str]]:
    """The run, and lines to show. Memory: one tensor. Everything is checked before anything is written."""
    check_run_name(out.name)
    if out.exists():
        raise InputError(
            f"{out} already exists; an import makes a new run. Choose another name, or delete it."
        )
    folder = Folder(source)
    if context is not None:
        folder.settings["architecture/block_size"] = context
    entries = folder.signature()
    tokenizer = Tokenizer.load(source) if (source / FILE).is_file() else None
    lines = facts(folder, tokenizer, total(entries.values()))
    partial = out.with_name(f".{out.name}.{os.getpid()}.importing")
    try:
        with storage("cannot write the imported model"):
            (partial / "model").mkdir(parents=True)
            with show(f"importing {source.name}", total(entries.values())) as progress:
                write_model(folder, tokenizer, partial, progress)
            RunDirectory(partial).write_status(
                state="done", step=0, exit_code=0, message=f"imported from {source.absolute()}"
            )
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return RunDirectory(out), lines


def write_model(folder: Folder, tokenizer: Tokenizer | None, run: Path, progress: Progress) -> None:
    import yaml

    texts = {CONFIG: json.dumps(folder.tree, indent=1) + "\n"} | (
        tokenizer.files if tokenizer is not None else {}
    )
    for name, text in texts.items():
        (run / "model" / name).write_text(text, encoding="utf-8")
    write_file(
        run / "model" / SINGLE,
        folder.signature(),
        folder.read,
        {"format": OURS, "step": "0"},
        progress,
        beside=texts,
    )
    (run / "config.yaml").write_text(yaml.safe_dump(folder.tree, sort_keys=False), encoding="utf-8")


def facts(folder: Folder, tokenizer: Tokenizer | None, size: int) -> list[str]:
    """What was found, and what a user should know about it."""
    model, counts = folder.model, folder.model.count_parameters()
    context, positions = folder.settings["architecture/block_size"], model.max_positions
    lines = [
        f"model      {model.hf_type}, {counts['total']:,} parameters, {size / 2**30:.2f} GiB of {model.weights_dtype}",
        f"context    {context:,} of the model's {positions:,} tokens"
        + (" (--context gives more)" if context < positions else ""),
    ]
    if tokenizer is None:
        return [
            *lines,
            f"tokenizer  none: {folder.path} has no {FILE}, so this run takes token ids, not text",
        ]
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"{folder.path / FILE} has {tokenizer.vocab_size} tokens and config.json a vocab_size of "
            f"{model.vocab_size}: ids would fall outside the embedding."
        )
    chat = "with its chat template" if tokenizer.chat_template else "without a chat template"
    return [*lines, f"tokenizer  {tokenizer.vocab_size:,} tokens, {chat}"]
