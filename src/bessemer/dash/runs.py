"""What the page shows of runs besides curves: the list, the parts of one run, a comparison of settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.dash.files import MOST_BYTES, Folder, Gone, Remembered, parsed
from bessemer.job import RunDirectory
from bessemer.job.directory import step_of_name
from bessemer.report.summary import (
    ALL_STEPS,
    OLDER_NAMES,
    RESULTS,
    Summary,
    disk_size,
    flatten_settings,
    headline,
    is_number,
)
from bessemer.report.tables import differing_settings

NEWEST = {
    "loss": "loss_smooth",
    "tok_per_s": "time/tok_per_s",
    "mfu": "time/mfu",
    "eta": "time/eta",
    "tokens": "tokens",
    "seconds": ALL_STEPS,
}
LOOKED_FOR = tuple(name for metric, _, _ in RESULTS for name in (metric, f"{metric}_se"))
END = 256 << 10  # bytes at the end of a file that are searched for the newest values
STATES = ("running", "done", "stopped", "failed")
DEEPEST, MOST = 20, 20_000  # levels and values of a config.yaml
MOST_SAMPLES, LONGEST_TEXT = 400, 4000


@dataclass
class Runs:
    """The runs of a folder; a file is read again only when it has changed."""

    folder: Folder
    _seen: Remembered = field(default_factory=Remembered)

    def listed(self) -> dict[str, Any]:
        """Return every run, the most recently active first."""
        ids, outside = self.folder.ids()
        rows = []
        for name in ids:
            try:
                rows.append(self.row(name))
            except Gone:
                continue  # deleted meanwhile
        rows.sort(key=lambda row: (row["beat"] is None, -(row["beat"] or 0.0), row["id"]))
        return {"folder": str(self.folder.root), "runs": rows, "outside": outside}

    def row(self, name: str) -> dict[str, Any]:
        run = self.folder.run(name)
        summary = self.summary(run)
        newest = self._remember(run.metrics, "newest", self._newest)
        step = max((s for s in (summary.step, newest.get("step")) if s is not None), default=None)
        return {
            "id": name,
            "state": self.state(summary),
            "step": step,
            "steps": summary.total_steps,
            "recipe": short(summary.recipe, 200) or None,
            "objective": short(summary.config.get("objective", summary.config.get("job")), 100) or None,
            "parameters": _parameters(summary.facts),
            **{label: newest.get(metric, newest.get(OLDER_NAMES.get(metric))) for label, metric in NEWEST.items()},
            "loss": newest.get("loss_smooth", newest.get("loss")),
            "result": found._asdict() if (found := headline(newest.get)) else None,
            "began": _number(summary.status.get("began")),
            "beat": _number(summary.status.get("heartbeat")),
            "message": short(summary.status.get("message"), 500),
        }

    def state(self, summary: Summary) -> str:
        """Return the state as in `bessemer runs`, whatever a foreign status or lock file holds."""
        state = summary.status.get("state")
        if state != "running":
            return state if state in STATES else "unknown"
        try:
            return summary.state if self.folder.signature(summary.run.lock) else "crashed"
        except (ValueError, TypeError, OSError, OverflowError):
            return "crashed"

    def summary(self, run: RunDirectory) -> Summary:
        """Return status, settings and facts, without rows."""
        config, provenance, problem = self._remember(run.config, "config", self._config)
        return Summary(
            run,
            status=self._mapping(run.status),
            config=config,
            provenance=provenance,
            derived=self._mapping(run.derived),
            facts=self._mapping(run.facts),
            problems=[problem] if problem else [],
        )

    def detail(self, name: str) -> dict[str, Any]:
        """Return one run: its row of the list, and everything small."""
        run = self.folder.run(name)
        summary = self.summary(run)
        derived = [{"name": short(key, 200), **_decision(value)} for key, value in list(summary.derived.items())[:500]]
        return {
            **self.row(name),
            "facts": {key: summary.facts.get(key) for key in FACTS if key in summary.facts},
            "config": {short(key, 200): show(value) for key, value in summary.config.items()},
            "origins": {short(key, 200): short(value, 200) for key, value in summary.provenance.items()},
            "derived": derived,
            "checkpoints": self.checkpoints(run),
            "evaluations": self.evaluations(run),
            "problems": [short(problem, 500) for problem in summary.problems],
            "host": short(summary.status.get("host"), 100),
        }

    def difference(self, names: list[str]) -> dict[str, Any]:
        """Return settings that differ (`rows`), those that only some runs have (`partial`), and those that are equal.

        Settings are partial where runs have different objectives, optimizers or models.
        """
        summaries = [self.summary(self.folder.run(name)) for name in names]
        different = differing_settings(summaries)
        found: dict[str, list[dict[str, Any]]] = {"rows": [], "partial": []}
        for key, row in sorted(different.items()):
            values = [show(value) if known else None for known, value in row]
            found["rows" if all(known for known, _ in row) else "partial"].append(
                {"key": short(key, 200), "values": values}
            )
        same = [
            {"key": short(key, 200), "value": show(value)}
            for key, value in sorted(summaries[0].config.items())
            if key not in different
        ]
        return {"runs": names, **found, "same": same}

    def samples(self, name: str) -> list[dict[str, Any]]:
        """Return the newest previews, oldest first, with long texts cut."""
        return self._remember(self.folder.run(name).samples, "samples", self._samples)

    def text(self, name: str, what: str) -> str | None:
        """Return the report, or the end of the log."""
        run = self.folder.run(name)
        path, tail = (run.report, False) if what == "report" else (run.log, True)
        data = self.folder.read(path, (64 << 10) if tail else (2 << 20), tail=tail)
        return None if data is None else data.decode("utf-8", errors="replace")

    def checkpoints(self, run: RunDirectory) -> list[dict[str, Any]]:
        """Return committed checkpoints, newest first. They never change, so their size is computed once."""
        found = []
        if not self.folder.holds(run.checkpoints) or not run.checkpoints.is_dir():
            return []
        for path in sorted(run.checkpoints.iterdir(), reverse=True)[:1000]:
            step, sign = step_of_name(path.name), self.folder.signature(path / "COMMIT")
            if step is not None and sign is not None:
                size = self._seen.get((path, "size"), sign, lambda path=path: disk_size(path))  # type: ignore[misc]
                found.append({"step": step, "bytes": size, "saved": sign[2] / 1e9})
        return sorted(found, key=lambda entry: -entry["step"])

    def evaluations(self, run: RunDirectory) -> list[dict[str, Any]]:
        if not self.folder.holds(run.eval) or not run.eval.is_dir():
            return []
        found: list[dict[str, Any]] = []
        for path in sorted(run.eval.glob("*.json"))[:500]:
            document = self._remember(path, "json", self.folder.json)
            for one in document if isinstance(document, list) else [document]:
                if isinstance(one, dict):
                    found.append(_result(one))
        return found

    def _remember(self, path: Path, kind: str, read: Any) -> Any:
        signature = self.folder.signature(path)
        size = 0 if signature is None or kind == "newest" else min(signature[1], MOST_BYTES)
        return self._seen.get((path, kind), signature, lambda: read(path), size)

    def _mapping(self, path: Path) -> dict[str, Any]:
        found = self._remember(path, "json", self.folder.json)
        return found if isinstance(found, dict) else {}

    def _config(self, path: Path) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        data = self.folder.read(path, 1 << 20)
        if data is None:
            return {}, {}, f"{path.name} is too long or not a file of this directory." if path.exists() else None
        return flat_settings(data)

    def _newest(self, path: Path) -> dict[str, float]:
        """Return the newest value of each metric in the list, from the end of the file alone."""
        data = self.folder.read(path, END, tail=True) or b""
        found: dict[str, float] = {}
        for name in ("step", "loss", *NEWEST.values(), *OLDER_NAMES.values(), *LOOKED_FOR):
            end = len(data)
            while end > 0 and (place := data.rfind(b'"%s":' % name.encode(), 0, end)) >= 0:
                line = data[data.rfind(b"\n", 0, place) + 1 : (data + b"\n").find(b"\n", place)]
                row = parsed(line) if len(line) < END else None
                if isinstance(row, dict) and is_number(row.get(name)):
                    found[name] = row[name]
                    break
                end = place
        return found

    def _samples(self, path: Path) -> list[dict[str, Any]]:
        data = self.folder.read(path, 2 << 20, tail=True) or b""
        rows = [row for line in data.split(b"\n") if isinstance(row := parsed(line), dict)]
        return [
            {
                "step": _number(row.get("step")),
                **{key: short(row.get(key), LONGEST_TEXT) for key in ("prompt", "completion")},
            }
            for row in rows[-MOST_SAMPLES:]
        ]


FACTS = (
    "parameters",
    "trained_parameters",
    "tokens",
    "steps",
    "flops_per_token",
    "total_flops",
    "mfu_peak",
    "devices",
    "determinism",
    "versions",
    "baselines",
)


def short(value: Any, limit: int) -> str:
    """Return text of at most `limit` characters, and how many were cut off."""
    text = "" if value is None else value if isinstance(value, str) else show(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def show(value: Any) -> str:
    """Return a setting's value as one line of text."""
    if isinstance(value, str):
        return short(value, LONGEST_TEXT)
    try:
        return short(json.dumps(value, ensure_ascii=False, default=str), LONGEST_TEXT)
    except (ValueError, RecursionError):
        return "?"


def plain(value: Any, depth: int = 0) -> Any:
    """Return JSON that a browser can read: no NaN, no endless text or tree."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return short(value, 1 << 20)
    if depth > 12:
        return "…"
    if isinstance(value, dict):
        return {short(str(k), 200): plain(v, depth + 1) for k, v in list(value.items())[:10_000]}
    if isinstance(value, list):
        return [plain(v, depth + 1) for v in value[:10_000]]
    return value


def _parameters(facts: dict[str, Any]) -> float | None:
    groups = facts.get("parameters")
    return _number(groups.get("total")) if isinstance(groups, dict) else None


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def _decision(value: Any) -> dict[str, str]:
    known = value if isinstance(value, dict) else {"value": value}
    return {"value": show(known.get("value")), "reason": short(known.get("reason"), 1000)}


def _result(one: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table of evaluations, with its parts."""
    parts = one.get("tasks")
    return {
        "task": short(one.get("task"), 200),
        "step": _number(one.get("step")),
        "metric": short(one.get("metric"), 200),
        "value": _number(one.get("value")),
        "parts": [
            {"task": short(name, 200), "value": _number(part.get("accuracy")), "centred": _number(part.get("centred"))}
            for name, part in (list(parts.items())[:200] if isinstance(parts, dict) else ())
            if isinstance(part, dict)
        ],
    }


def flat_settings(data: bytes) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Return the settings of a config.yaml ({"training.steps": 10, …}), their origins, and what is wrong or None.

    The file is not trusted: no references, no tags, no trees that grow when read.
    """
    import yaml

    try:
        text = data.decode("utf-8")
        _check(yaml.parse(text, Loader=yaml.CSafeLoader))
        tree = yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, {}, f"config.yaml could not be read ({str(error).splitlines()[0][:200]})."
    if not isinstance(tree, dict):
        return {}, {}, "config.yaml holds no settings."
    origins = tree.pop("provenance", None)
    known = {str(key): value for key, value in origins.items()} if isinstance(origins, dict) else {}
    return flatten_settings(tree), known, None


def _check(events: Any) -> None:
    """Raise ValueError for aliases, which ours do not have: nine lines of them can describe a billion values."""
    import yaml

    depth = 0
    for number, event in enumerate(events):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has a YAML alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST or number > MOST:
            raise ValueError("it is nested too deeply or too long")
