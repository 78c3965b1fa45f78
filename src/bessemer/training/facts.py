"""facts.json: what a report says about a run that its configuration and metrics do not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.config.bounded import read_json
from bessemer.config.values import plain
from bessemer.job import atomic_write
from bessemer.report import baselines
from bessemer.training.finale import teaches_chat
from bessemer.training.model_parts import flops_formula, mfu_peak
from bessemer.training.restore import versions

if TYPE_CHECKING:
    from bessemer.training.trainer import BaseTrainer

BASELINE_BYTES = 16 << 20
"""Held-out text up to this size is also given to gzip and xz; more would take them minutes."""


def run_facts(trainer: BaseTrainer) -> dict[str, Any]:
    """Counts, FLOPs, devices and versions, known before the first step."""
    parts, topology = trainer.model_parts, trainer.topology.describe()
    return {
        "data": trainer.data.plan.stats,
        "validation_sequences": trainer.data.validation_count,
        "validation": trainer.data.validation.description if trainer.data.validation is not None else {},
        "parameters": parts.counts,
        "trained_parameters": trainer.count_model_parameters(trainer.functions.abstract_state.params),
        "flops_per_token": parts.flops_per_token,
        "flops_per_token_causal": parts.flops_per_token_causal,
        "flops_formula": flops_formula(trainer),
        "mfu_peak": mfu_peak(trainer, parts.model),
        "total_flops": trainer.calculate_number_total_flops(),
        "optimizer": optimizer_groups(trainer),
        "steps": trainer.steps,
        "tokens": trainer.steps * trainer.tokens_per_step,
        "accumulate_steps": trainer.functions.accumulate_steps,
        "devices": topology,
        "determinism": "bit-exact" if topology["deterministic"] else "fast (not bit-repeatable)",
        "versions": versions(),
        "start_up": trainer.startup.facts(),
    }


def optimizer_groups(trainer: BaseTrainer) -> list[dict[str, Any]]:
    """Peak rate, decay at step 0 and betas of each group of parameters, as it is trained."""
    rows = trainer.functions.optimizer.describe(trainer.functions.abstract_state.params)
    return [
        {
            "group": row.group,
            "tensors": row.tensors,
            "parameters": row.parameters,
            "lr": None if row.lr != row.lr else row.lr,  # nan: inside an optax transformation
            "weight_decay": row.decay,
            "betas": list(row.betas),
        }
        for row in rows
    ]


def derivation(trainer: BaseTrainer) -> dict[str, Any]:
    """Derived numbers with their reasons. A resumed run finds most of them in its configuration and derives them no
    more: the rows of its first start stay, as long as they are the same numbers."""
    try:
        saved = read_json(trainer.run_directory.derived)
    except (OSError, ValueError):  # a first start, or a file that is damaged
        saved = {}
    rows = saved.items() if isinstance(saved, dict) else ()
    return trainer.derived | {name: row for name, row in rows if still_holds(trainer, name, row)}


def still_holds(trainer: BaseTrainer, name: str, row: Any) -> bool:
    """Whether this start says no more about the number than that it is given, and it is the same."""
    if not isinstance(row, dict) or "value" not in row:
        return False
    if (now := trainer.derived.get(name)) is not None:
        return bool(now["reason"].endswith("given") and now["value"] == row["value"])
    return bool(name not in trainer.config or plain(trainer.config[name]) == row["value"])


def write_facts(trainer: BaseTrainer, **more: Any) -> None:
    facts = run_facts(trainer) | more
    atomic_write(trainer.run_directory.facts, json.dumps(facts, indent=1, default=str))


def validation_text(trainer: BaseTrainer) -> bytes | None:
    """The held-out bytes the validation measures, in their order; None without text or when there are too many."""
    held_out, tokenizer = trainer.data.validation, trainer.tokenizer
    if held_out is None or tokenizer is None:
        return None
    order = np.lexsort((held_out.rows.index, held_out.rows.source))
    pieces, size = [], 0
    for position in order:
        targets = held_out.read(int(position), 1)["target_ids"][0]
        text = tokenizer.decode(targets[targets >= 0].tolist()).encode("utf-8", errors="replace")
        pieces.append(text)
        size += len(text)
        if size > BASELINE_BYTES:
            return None
    return b"".join(pieces)


def compressor_baselines(trainer: BaseTrainer) -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9e on the validation text; empty when it is not known."""
    text = None if teaches_chat(trainer) else validation_text(trainer)
    return baselines(text) if text else {}
