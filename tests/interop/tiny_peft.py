"""Folders of adapters made without PEFT: the adapters of tests/reference/peft_lora.py, real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.interop.tiny_hf import config_of_case, make_folder
from tests.reference.peft_lora import ADAPTERS, OUT, adapter

from bessemer.interop.peft import CONFIG, WEIGHTS
from bessemer.storage.weights import write_file

STORED: dict[str, Any] = json.loads(OUT.read_text())


def make_base(path: Path, name: str, **more: Any) -> Path:
    """The base of a case as a Hugging Face folder."""
    return make_folder(path, {**config_of_case(ADAPTERS[name][0]), **more})


def make_peft(path: Path, name: str, base: Path | str | None = None, **changes: Any) -> Path:
    """The adapters of a case as PEFT saves them, over `base`; `changes` to their configuration."""
    path.mkdir(parents=True)
    config = {**STORED[name]["config"], "base_model_name_or_path": None if base is None else str(base), **changes}
    (path / CONFIG).write_text(json.dumps(config))
    shapes = STORED[name]["shapes"]
    entries = {key: ("float32", tuple(shape)) for key, shape in shapes.items()}
    write_file(path / WEIGHTS, entries, lambda key: adapter(key, entries[key][1]).astype(np.float32), {"format": "pt"})
    return path
