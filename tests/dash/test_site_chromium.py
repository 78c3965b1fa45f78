"""The documentation in the same browser: opened from the disk, with no server and no network, its search finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


def test_the_search_works_from_the_disk(chromium: Any, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    page = chromium.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.goto(f"file://{tmp_path}/index.html")
    page.fill("input[name=q]", "rollback")
    page.keyboard.press("Enter")
    page.locator("#mkdocs-search-results article a").first.click()
    page.get_by_text("rollback").first.wait_for()
    assert page.url.startswith(f"file://{tmp_path}/") and not wrong, wrong
    page.close()
