"""The words of the doctor: one finding a fact, and the diagnosis they add up to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. An `error` keeps `resume` from going on; `remedy` says what to do."""

    area: str
    level: Level
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.text} {self.remedy}".strip()


@dataclass
class Diagnosis:
    """`step` and `checkpoint` are what resume would start from; both None when it starts from the beginning."""

    run: str
    state: str
    findings: list[Finding] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    checkpoint: str | None = None
    resumable: bool = False
    verdict: str = ""
    exit_code: int = 0

    def add(self, area: str, level: Level, text: str, remedy: str = "") -> None:
        self.findings.append(Finding(area, level, text, remedy))

    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
