"""Low-rank adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

Ours: W' = W + s·A·B with A (fan_in, r), B (r, fan_out), s = α/r or α/√r. Theirs are the transposes, under the names of
the matrices they adapt. The lengths of DoRA are a vector there and here, and ranks by pattern become PEFT's
`rank_pattern`, by the full name of each matrix. Merged weights need nothing of this: a plain export has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.interop.config import MATRICES, their_name
from bessemer.interop.export_hf import make_empty
from bessemer.storage.files import storage
from bessemer.storage.weights import Arrays, Signature, write_file

PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapters(arrays: Arrays, lora: Mapping[str, Any], out: Path, base: str | None = None) -> list[str]:
    """`arrays`: the trained part of a run's parameters; `lora`: that section of its configuration. Lines to show."""
    entries: Signature = {}
    sources: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for name, (dtype, shape) in arrays.signature().items():
        matrix, _, part = name.rpartition("/")
        if part not in PARTS or matrix.rpartition("/")[2] not in MATRICES:
            raise InputError(
                f"'{name}' is trained and is no adapter of an attention or feed-forward matrix, so PEFT's layout has "
                "no place for it here. Export the merged model instead, without --adapters."
            )
        module = their_name(matrix).removesuffix(".weight")
        theirs = f"base_model.model.{module}.{PARTS[part]}"
        entries[theirs], sources[theirs] = (dtype, shape[::-1]), name
        if part == "lora_a":
            ranks[module] = shape[-1]
    if not entries:
        raise InputError("this checkpoint holds no adapters (lora.rank is 0); export it without --adapters.")
    modules = sorted({module.split(".")[-1] for module in ranks})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": int(lora["rank"]),
        "lora_alpha": float(lora["alpha"]),
        "use_rslora": bool(lora.get("rank_stabilised", False)),
        "rank_pattern": {module: rank for module, rank in sorted(ranks.items()) if rank != int(lora["rank"])},
        "use_dora": bool(lora.get("dora", False)),
        "lora_dropout": float(lora.get("dropout", 0.0)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }

    def read(name: str) -> np.ndarray:
        return arrays.read(sources[name]).T

    with storage("cannot write the adapters"):
        make_empty(out)
        write_file(out / WEIGHTS, entries, read, {"format": "pt"})
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [f"adapters   rank {config['r']} on {', '.join(modules)}: {len(ranks)} matrices"]
