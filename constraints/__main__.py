"""`python -m constraints`: write constraints/X.Y.txt for the Python that runs it, from a clean resolve of all extras.

pip resolves without installing; the file pins every package it would install, and the Makefile passes it to pip. A
version of a local build (torch 2.13.0+cpu) is pinned as its public one, which both satisfy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
EXTRAS = "dash,test,test-scale,test-peers"


def resolved() -> dict[str, str]:
    """Package → version, as pip would install them into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), f".[{EXTRAS}]"], cwd=FOLDER.parent, check=True)
        found = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {one["name"].lower().replace("_", "-"): one["version"].partition("+")[0] for one in found}


def main() -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    pins = sorted((name, pin) for name, pin in resolved().items() if name != "bessemer")
    lines = [f"# Python {version}, Linux; written by `make constraints`.", *(f"{n}=={pin}" for n, pin in pins)]
    (FOLDER / f"{version}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"constraints/{version}.txt: {len(pins)} packages")


if __name__ == "__main__":
    main()
