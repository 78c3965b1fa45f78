"""lm-evaluation-harness on any run: `harness:TASK,TASK` (extra `eval`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.errors import InputError, to_install
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations

PREFERRED = ("acc_norm", "acc", "exact_match", "bits_per_byte", "word_perplexity")


@evaluations.register("harness")
def harness(
    loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None, source: str | None = None
) -> dict[str, Any]:
    """Return the mean of the tasks' main metrics. `source`: the harness's task names, or paths of its YAML files."""
    names = [name.strip() for name in (source or "").split(",") if name.strip()]
    if not names:
        raise InputError("name the tasks of lm-evaluation-harness: harness:TASK, or harness:TASK,TASK.")
    try:
        from lm_eval import simple_evaluate

        from bessemer.evaluate.harness.model import HarnessModel
    except ImportError as error:
        raise InputError(
            f"lm-evaluation-harness is not installed ({error}). Install it with: {to_install('eval')}"
        ) from error
    # an absolute path: its directory is the base of what a YAML file includes
    files: list[Any] = [str(Path(name).resolve()) if name.endswith((".yaml", ".yml")) else name for name in names]
    model = HarnessModel(loaded, batch_size=batch_size)
    try:
        found = simple_evaluate(model, tasks=files, limit=limit, log_samples=False, bootstrap_iters=0)
    except (ValueError, KeyError, FileNotFoundError, ConnectionError) as error:
        raise InputError(f"lm-evaluation-harness cannot run {', '.join(names)}: {error}") from error
    assert found is not None
    tasks = {name: _plain(result) for name, result in found["results"].items()}
    main = {name: metric for name, result in tasks.items() if (metric := _main(result))}
    values = [tasks[name][metric] for name, metric in main.items()]
    kinds = sorted(set(main.values()))
    return {
        "metric": f"mean of {' and '.join(kinds)}",
        "value": sum(values) / max(1, len(values)),
        "tasks": tasks,
        "cropped": model.cropped,
    }


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a result, with `acc,none` as `acc`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in name
    }


def _main(result: dict[str, Any]) -> str | None:
    return next((name for wanted in PREFERRED for name in result if name.partition(",")[0] == wanted), None)
