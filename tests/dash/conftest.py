"""A real browser: the system's Chromium, which can reach nothing but this machine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
FLAGS = [
    "--no-sandbox",  # the tests may run as root
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def program() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@contextlib.contextmanager
def opened_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")  # no longer: while it is open, this thread has a running event loop
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if program() is None:
        pytest.skip("no Chromium on this machine (`make slow` installs Debian's as root)")
    with opened_browser() as browser:
        yield browser


class Watched:
    """A page whose requests, errors and dialogs are all noted."""

    def __init__(self, browser: Any, **options: Any):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        self.requests: list[str] = []
        self.wrong: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page = self.context.new_page()
        self.page.set_default_timeout(180_000)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(f"console: {message.text}")


@pytest.fixture
def watched(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """Make pages; at the end none of them has had an error, a dialog, or asked anybody but 127.0.0.1."""
    made: list[Watched] = []

    def make(**options: Any) -> Watched:
        made.append(Watched(chromium, **options))
        return made[-1]

    yield make
    for one in made:
        one.context.close()
        assert not one.wrong, one.wrong
        assert one.requests and all(url.startswith("http://127.0.0.1:") for url in one.requests), one.requests
