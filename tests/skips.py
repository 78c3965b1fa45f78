"""Which tests may be skipped, and why: a skip for any other reason fails the session (conftest.py).

`make test` and `make slow` run with the extra `test` alone, so tests that need another package are skipped there, and
listed. `make scale` installs every package that a test looks for and passes --nothing-missing, which forbids those
skips: `python -m tests.skips` prints the files it runs, which are those with a test that a package can be missing for.
With --services it prints those of `make services`, which CI runs: they need the extra `test-scale` alone.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

SERVICES = {
    r"could not import '(wandb|tensorboard[\w.]*)'": "trackers that are written to",
    r"needs the extra `ray`": "preparation on a Ray",
    r"needs the extra `hf`": "datasets of the hub, with its own client",
    r"needs moto": "a server that speaks S3",
    r"pip install kubernetes-validate": "job files against Kubernetes' schemas",
}
"""Reasons of skips for a missing service (extra `test-scale`), and what it is for."""

PEERS = {
    r"could not import '(torch|transformers|peft|trl|lm_eval)'": "compared with",
    r"torch is not installed": "an objective compared with torch",
    r"needs libtpu": "plans and kernels compiled for TPUs",
    r"needs XLA's GPU compiler": "plans compiled for GPUs",
}
"""Reasons of skips for a missing implementation of other people's (extra `test-peers`)."""

PACKAGES = SERVICES | PEERS
"""Reasons of skips for a missing package. Allowed without --nothing-missing."""

MACHINE = {
    r"no NVIDIA GPU here": "members of an invariance class that run on a GPU",
    r"there is a GPU here": "the error for a machine without one",
    r"needs the right to mount": "small file systems that fill up: needs root",
    r"no Chromium on this machine": "the page in a browser: `make slow` installs Debian's as root",
    r"needs a device that is always full": "/dev/full, which Linux has",
    r"root may delete anything": "a run that this user may not delete",
    r"wandb is installed here": "the hint for a missing tracker",
    r"no golden hashes for this machine type": "bits of golden runs: `python -m tests.golden store` records them",
}
"""Reasons that depend on the machine. Always allowed, and listed."""

SKIPPING = re.compile(r"importorskip|pytest\.skip|skipif|tests\.stores")


def why_allowed(reason: str, nothing_missing: bool) -> str | None:
    """What the skipped test is for, if it may be skipped for this reason."""
    known = MACHINE if nothing_missing else MACHINE | PACKAGES
    return next((use for form, use in known.items() if re.search(form, reason)), None)


def reasons_in(path: Path) -> list[str]:
    """The texts that name a missing package in a test file, as the reports of its skips would have them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip":
            found.append(f"could not import {ast.unparse(call.args[0])}")
    if "from tests.stores import" in path.read_text(encoding="utf-8"):
        found.append("needs moto")
    return found


def files_for_scale(services_only: bool = False) -> list[str]:
    """Test files with a test that is skipped where a package is missing. services_only: where a service is, and nothing
    of other people's to compare with."""
    candidates = (
        path for path in sorted(TESTS.rglob("test_*.py")) if SKIPPING.search(path.read_text(encoding="utf-8"))
    )
    wanted, unwanted = (SERVICES, PEERS) if services_only else (PACKAGES, {})
    return [
        str(path.relative_to(TESTS.parent))
        for path in candidates
        if _named_in(path, wanted) and not _named_in(path, unwanted)
    ]


def _named_in(path: Path, reasons: dict[str, str]) -> bool:
    return any(re.search(form, reason) for form in reasons for reason in reasons_in(path))


class SkipLedger:
    """A pytest plugin: lists the skips of a session by their reason, and fails it for one that is not expected.

    With xdist each worker sends its list to the controller at its end: skips of whole modules are not reported there.
    """

    def __init__(self, nothing_missing: bool):
        self.nothing_missing = nothing_missing
        self.skips: list[tuple[str, str]] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips.append((report.nodeid, text.removeprefix("Skipped: ")))

    def unexpected(self) -> list[tuple[str, str]]:
        return [skip for skip in self.skips if why_allowed(skip[1], self.nothing_missing) is None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.skips += [tuple(skip) for skip in getattr(node, "workeroutput", {}).get("skips", [])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.skips = sorted(set(self.skips))
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["skips"] = self.skips
        elif self.unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        allowed = Counter(reason for _, reason in self.skips if why_allowed(reason, self.nothing_missing))
        if allowed:
            terminalreporter.section("expected skips")
            for reason, count in allowed.items():
                terminalreporter.write_line(f"{count:>4}  {reason}")
        if unexpected := self.unexpected():
            terminalreporter.section("unexpected skips: add the reason to tests/skips.py, or what is missing here")
            for test, reason in unexpected:
                terminalreporter.write_line(f"{test}: {reason}", red=True)


if __name__ == "__main__":
    print(" ".join(files_for_scale("--services" in sys.argv)))
