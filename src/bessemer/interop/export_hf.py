"""`bessemer export`: a model of the llama family as transformers loads it; any other in our own format."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.console import ShowBytes, no_progress
from bessemer.console import size as byte_size
from bessemer.data.tokenize.chat import TURN_TOKENS, can_chat, stop_ids
from bessemer.data.tokenize.templates import CONFIG as TOKENIZER_CONFIG
from bessemer.data.tokenize.templates import OUR_TEMPLATE
from bessemer.data.tokenize.tokenizer import FILE, Tokenizer
from bessemer.errors import InputError
from bessemer.interop.config import config_of, positions_of, tensors_of
from bessemer.interop.folder import CONFIG, GENERATION, INDEX, SINGLE
from bessemer.models.llama import Llama
from bessemer.storage.files import storage
from bessemer.storage.weights import Arrays, Signature, total, write_file

SHARD = 5 * 10**9
"""Bytes of a weight file before another is begun."""


def export_folder(
    arrays: Arrays,
    model: Llama,
    tokenizer: Tokenizer | None,
    out: Path,
    show: ShowBytes = no_progress,
    *,
    dtype: str | None = None,
    shard: int = SHARD,
) -> list[str]:
    """Write the folder and return lines to show. Memory: one tensor beside `arrays`. dtype None: each as it is."""
    ids = token_ids(model, tokenizer)
    stored = arrays.signature()
    tensors = tensors_of(stored, model)
    entries: Signature = {
        name: (dtype or stored[tensor.ours][0], tensor.their_shape) for name, tensor in tensors.items()
    }
    kinds = sorted({kind for kind, _ in entries.values()})
    config = config_of(model, kinds[0] if len(kinds) == 1 else "float32", ids)
    texts = {CONFIG: _json(config), GENERATION: _json({"_from_model_config": True, **ids})}
    if tokenizer is not None:
        texts |= tokenizer_files(tokenizer, ids, positions_of(model))

    @lru_cache(1)  # the experts of a stack are written one after the other
    def read_ours(name: str) -> np.ndarray:
        return arrays.read(name)

    def read(name: str) -> np.ndarray:
        return tensors[name].to_theirs(read_ours(tensors[name].ours))

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
    lines = [f"model      {config['model_type']}, {byte_size(size)} of {', '.join(kinds)} in {files}"]
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
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


# A tokenizer as transformers wants it: tokenizer.json, and tokenizer_config.json with names and the chat
# template.


def token_ids(model: Llama, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id, as config.json and generation_config.json hold them."""
    ends = list(model.end_tokens)
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": _one(ends), "pad_token_id": None}
    if not ends:
        turn = stop_ids(tokenizer) if can_chat(tokenizer) else ()
        ends = list(dict.fromkeys([tokenizer.bos_id, *turn]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one(ends), "pad_token_id": tokenizer.pad_id}


def _one(ids: list[int]) -> int | list[int] | None:
    return ids if len(ids) > 1 else ids[0] if ids else None


def tokenizer_files(tokenizer: Tokenizer, ids: dict[str, Any], positions: int) -> dict[str, str]:
    """File name → text. A tokenizer that came with a template keeps the names that came with it, and only those: a bos
    that it did not have would be put before every text."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template is not None:
        config |= {**tokenizer.chat_template.tokens, "chat_template": tokenizer.chat_template.as_configured}
    else:
        config |= _names(tokenizer, ids)
        if all(name in tokenizer.specials for name in TURN_TOKENS):
            config["chat_template"] = OUR_TEMPLATE
    return {FILE: tokenizer.to_json(), TOKENIZER_CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _names(tokenizer: Tokenizer, ids: dict[str, Any]) -> dict[str, str]:
    names = {index: name for name, index in tokenizer.specials.items()}
    ends = ids["eos_token_id"]
    wanted = {
        "bos_token": ids["bos_token_id"],
        "eos_token": ends[0] if isinstance(ends, list) else ends,
        "pad_token": ids["pad_token_id"],
    }
    return {name: names[index] for name, index in wanted.items() if index in names}
