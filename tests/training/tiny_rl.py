"""A GRPO run of seconds: its prompts, tokenizer and settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.tiny_run import tiny_tokenizer

from bessemer.training import launch


def grpo_settings(folder: Path, rows: Iterable[Mapping[str, Any]], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Write `rows` and a tokenizer to `folder`; return the settings of a run over them, with `changes`."""
    tiny_tokenizer().save(folder)
    data = folder / "cats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "job": "GRPOTrainer",
        "objective": "grpo",
        "training.dataset": str(data),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.validation": False,
        "data.tokenizer": str(folder),
        "model.depth": 1,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 32,
        "grpo.mini_batches": 2,
        "grpo.max_completion_length": 6,
        "optimization.name": "adamw",
        "optimization.lr": 0.03,
        "logging.report_interval": 1,
        "logging.checkpoint_interval": 2,
        "logging.keep_last": 20,
        "logging.progress": "none",
        "logging.preview_interval": 0,
        **changes,
    }


def build(settings: dict[str, Any], root: Path, name: str = "run", **changes: Any) -> Any:
    """Return the trainer of `settings` with changes, whose names have `__` for a dot."""
    given = settings | {key.replace("__", "."): value for key, value in changes.items()}
    return launch.build_trainer(None, given, name=name, root=root)
