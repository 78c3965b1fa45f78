"""The pictures of the documentation, of real runs:

python -m tests.dash.pictures RUNS one,two,three      # docs/images/dash*.png; `one` has weights.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.dash.conftest import IMAGES, opened_browser
from tests.dash.live import TOKEN, serving

LARGE = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


def take(browser: Any, address: str, runs: list[str], folder: Path) -> list[Path]:
    """An overlay in light, a run in dark, its weights, and the list on a phone."""
    wanted = {
        "dash": (f"#/overlay/{','.join(runs)}", {**LARGE, "color_scheme": "light"}),
        "dash-dark": (f"#/run/{runs[0]}", {**LARGE, "color_scheme": "dark"}),
        "dash-weights": (f"#/run/{runs[0]}/weights", {**LARGE, "color_scheme": "light"}),
        "dash-phone": ("#/", {**PHONE, "color_scheme": "light"}),
    }
    taken = []
    for name, (place, options) in wanted.items():
        context = browser.new_context(**options)
        page = context.new_page()
        page.goto(f"{address}/#token={TOKEN}")
        page.locator("tr[data-run]").first.wait_for()
        page.goto(f"{address}/{place}")
        if place != "#/":
            page.locator("figure canvas").first.wait_for()
        if page.locator("#smoothing").count():
            page.fill("#smoothing", "3")
        page.wait_for_timeout(1500)
        page.evaluate("document.activeElement.blur()")
        taken.append(folder / f"{name}.png")
        page.screenshot(path=taken[-1])
        context.close()
    return taken


def main() -> None:
    root, runs = Path(sys.argv[1]), sys.argv[2].split(",")
    with serving(root) as live, opened_browser() as browser:
        for path in take(browser, live.address, runs, IMAGES):
            print(path)


if __name__ == "__main__":
    main()
