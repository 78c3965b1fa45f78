"""`bessemer export`: a model of the llama family as transformers loads it; any other in our own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.checkpoint.tree import Signature
from bessemer.checkpoint.weights import Arrays, total, write_file
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import InputError
from bessemer.interop.config import config_of, positions_of
from bessemer.interop.folder import CONFIG, GENERATION, INDEX, SINGLE
from bessemer.interop.names import tensors_of
from bessemer.interop.progress import ShowBytes, nothing
from bessemer.interop.tokenizers import token_ids, tokenizer_files
from bessemer.job.files import storage
from bessemer.models.llama_settings import LlamaSettings

SHARD = 5 * 10**9
"""Bytes of a weight file before another is begun."""


def export_folder(
    arrays: Arrays,
    model: LlamaSettings,
    tokenizer: Tokenizer | None,
    out: Path,
    show: ShowBytes = nothing,
    *,
    dtype: str | None = None,
    shard: int = SHARD,
) -> list[str]:
    """Write the folder and return lines to show. Memory: one tensor beside `arrays`. dtype None: each as it is."""
    ids = token_ids(model, tokenizer)
    stored = arrays.signature()
    tensors = tensors_of(stored, model.vocab_size)
    entries: Signature = {
        name: (dtype or stored[tensor.ours][0], tensor.their_shape) for name, tensor in tensors.items()
    }
    kinds = sorted({kind for kind, _ in entries.values()})
    config = config_of(model, kinds[0] if len(kinds) == 1 else "float32", ids)
    texts = {CONFIG: _json(config), GENERATION: _json({"_from_model_config": True, **ids})}
    if tokenizer is not None:
        texts |= tokenizer_files(tokenizer, ids, positions_of(model))

    def read(name: str) -> np.ndarray:
        return tensors[name].to_theirs(arrays.read(tensors[name].ours))

    with storage("cannot write the export"):
        make_empty(out)
        size = total(entries.values())
        with show(f"exporting {out.name}", size) as progress:
            parts = shards_of(entries, shard)
            for part, held in parts.items():
                write_file(out / part, held, read, {"format": "pt"}, progress)
        if len(parts) > 1:
            places = {name: part for part, held in parts.items() for name in held}
            texts[INDEX] = _json({"metadata": {"total_size": size}, "weight_map": places})
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    files = f"{len(parts)} files" if len(parts) > 1 else SINGLE
    lines = [f"model      {config['model_type']}, {size / 2**30:.2f} GiB of {', '.join(kinds)} in {files}"]
    return lines if tokenizer is not None else [*lines, "tokenizer  none: this run has none to export"]


def make_empty(out: Path) -> None:
    """The directory of an export: new, or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty directory; choose another, or empty it.")
    out.mkdir(parents=True, exist_ok=True)


def shards_of(entries: Signature, limit: int) -> dict[str, Signature]:
    """File name → its tensors, in order; a file ends before it would pass `limit` bytes."""
    parts: list[Signature] = [{}]
    for name, entry in entries.items():
        if parts[-1] and total(parts[-1].values()) + total([entry]) > limit:
            parts.append({})
        parts[-1][name] = entry
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
