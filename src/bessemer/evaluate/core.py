"""CORE: the mean over 22 tasks for base models of (accuracy − baseline) / (1 − baseline), from a bundle (`core:DIR`).

Tasks without a file are listed as missing, and the metric's name then says how many it covers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.evaluate.tasks import read_bundle, run_task
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations


@evaluations.register("core")
def core(
    loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None, source: str | None = None
) -> dict[str, Any]:
    """Return CORE and the result of each task. `source`: the bundle, by default the run's eval.core_bundle. `limit`:
    examples per task."""
    directory = source or _configured(loaded)
    listed = read_bundle(directory)
    missing = [task.name for task in listed if task.path is None]
    results: dict[str, dict[str, Any]] = {}
    for task in listed:
        if task.path is not None:
            begun = time.monotonic()
            found = run_task(loaded, task.read(), limit=limit, batch_size=batch_size)
            results[task.name] = {"kind": task.kind, **found, "seconds": time.monotonic() - begun}
    over = f" over {len(results)} of {len(listed)}" if missing else ""
    return {
        "metric": f"CORE{over}",
        "value": sum(found["centred"] for found in results.values()) / len(results),
        "tasks": results,
        "missing": missing,
        "bundle": str(Path(directory)),
        "limit": limit,
    }


def _configured(loaded: LoadedModel) -> str:
    section = loaded.config.get("eval")
    found = section.get("core_bundle") if isinstance(section, dict) else None
    if not found:
        raise InputError(
            "CORE needs its tasks: write core:DIR with the directory of the bundle, or set eval.core_bundle in the run."
        )
    loaded.check_opened({"eval": {"core_bundle": found}})
    return str(found)
