"""The page in a real Chromium: a run watched while it trains, stopped, resumed and talked to; curves, settings, phones,
keys; and hostile runs, whose words stay words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import words
from tests.dash import pictures
from tests.dash.live import TOKEN, histogram, make_run, row, serving, until

pytestmark = pytest.mark.slow

EVIL = "</td><script>window.evil=1</script><img src=x onerror='window.evil=2'><b>bold</b>"
LUMINANCE = """(name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).map((part) => part / 255);
  probe.remove();
  const [r, g, b] = parts.map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}"""
SEEN = """(name) => {
  const { left, right } = document.querySelector(name).getBoundingClientRect();
  return left >= 0 && right <= innerWidth;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a[href], [tabindex='0']")].filter(
  (one) => !one.textContent.trim() && !one.getAttribute("aria-label") && !one.labels?.length && !one.title
).map((one) => one.outerHTML)"""
TEXT = "ink/card ink/back muted/card muted/back muted/soft accent/card accent-ink/accent good/good-soft bad/bad-soft "
TEXT += "warn/warn-soft done/done-soft"


def too_faint(page: Any) -> list[str]:
    """Pairs of the theme's colours below WCAG's 4.5 for text, or below 2.5 for the lines of curves."""

    def contrast(pair: str) -> float:
        a, b = (page.evaluate(LUMINANCE, f"--{name}") for name in pair.split("/"))
        return (max(a, b) + 0.05) / (min(a, b) + 0.05)

    lines = [f"curve-{number}/card" for number in range(1, 9)]
    return [pair for pair in TEXT.split() if contrast(pair) < 4.5] + [p for p in lines if contrast(p) < 2.5]


def newest(page: Any, title: str = "Loss") -> float:
    """The number beside a chart's first curve."""
    text = page.text_content(f"figure[data-title='{title}'] .legend .value")
    return float(text.replace(",", ""))


def read_step(page: Any) -> int:
    return int(page.text_content(".wide-steps .number").split("/")[0].replace(",", "").strip())


def test_a_run_is_watched_stopped_resumed_and_talked_to(
    watched: Callable[..., Any], tiny: dict[str, object], tmp_path: Path, home: Path
) -> None:
    """One real training process, and all that the page can do with it."""
    settings = {
        **tiny,
        "training.steps": 200_000,
        "architecture.block_size": 64,
        "logging.report_interval": 20,
        "logging.validation_interval": 100,
        "logging.checkpoint_interval": 500,
        "logging.keep_last": 2,
    }
    root = tmp_path / "runs"
    root.mkdir()
    variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "bessemer", "train", *words(settings), "--name", "watched", "--runs", str(root)]
    page = watched().page
    with serving(root) as live:
        page.goto(f"{live.address}/#token={TOKEN}")
        page.get_by_text("No runs here yet").wait_for()
        assert "token" not in page.url, "the token leaves the address bar"
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            page.locator("tr[data-run=watched] .pill.running").wait_for(timeout=300_000)
            page.get_by_role("link", name="watched").click()
            page.locator("figure[data-title=Loss] canvas").wait_for(timeout=300_000)
            before, loss = read_step(page), newest(page)
            until(lambda: read_step(page) > before + 100 and newest(page) != loss)
            assert "primary" not in (page.get_attribute("#act", "class") or "")
            page.get_by_role("button", name="Stop").click()
            page.get_by_role("button", name="Stop it").click()
            assert process.wait(120) == 75, "it saved, and can be resumed"
            page.locator(".state .pill.stopped").wait_for()
        finally:
            process.kill()
            process.wait()
        stopped = read_step(page)
        assert stopped < 200_000
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("button", name="Resume it").click()
        page.locator(".state .pill.running").wait_for(timeout=300_000)
        resumed = live.dash.actions.known("watched")
        assert resumed is not None
        try:
            until(lambda: read_step(page) > stopped)
        finally:
            os.kill(resumed["pid"], signal.SIGTERM)
        page.locator(".state .pill.stopped").wait_for(timeout=300_000)
        until(lambda: live.dash.actions.known("watched")["exit_code"] == 75)
        until(lambda: live.get("/api/run?run=watched")["resumed"]["exit_code"] == 75)
        page.wait_for_timeout(1500)
        assert "ended with code" not in page.text_content(".notes"), "a normal stop is no failure"
        page.get_by_role("tab", name="Chat").click()
        page.fill("#most", "12")
        page.fill("#message", "the red fox")
        page.press("#message", "Enter")
        page.locator(".talk .assistant .words[data-done]").wait_for(timeout=300_000)
        answer = page.text_content(".talk .assistant .words")
        assert answer and "failed" not in (page.get_attribute(".talk .assistant .words", "class") or ""), answer
        [model] = live.dash.models.states()
        assert model["run"] == "watched" and model["ready"]
        chat = next(iter(live.dash.models._known.values()))
    assert chat.process.poll() is not None, "the model's server ends with the page's"


def test_overlay_zoom_settings_side_by_side_and_keys(watched: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    make_run(root, "one")
    two = make_run(root, "two", rate=0.01)
    two.config.write_text(two.config.read_text().replace("{lr: 0.01}", "{lr: 0.01, beta1: 0.9}"))
    with serving(root) as live:
        page = watched(color_scheme="light").page
        page.goto(live.address)
        for name in ("one", "two"):
            page.get_by_label(f"Choose {name}").check()
        page.get_by_role("button", name="Overlay 2").click()
        chart = page.locator("figure[data-title='Loss: loss']")
        chart.locator("canvas").wait_for()
        assert chart.locator(".legend .label").all_text_contents() == ["one", "two"]
        page.select_option("#axis", "tokens")
        page.fill("#smoothing", "3")
        until(lambda: any("smooth=0.9" in url and "x=tokens" in url for url in _asked(page)))
        box = chart.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
        page.mouse.up()
        until(lambda: any("from=" in url for url in _asked(page)))
        assert page.locator("#reset").is_enabled()
        chart.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        until(lambda: "one" in (chart.locator("[aria-live]").text_content() or ""))
        page.keyboard.press("0")
        until(lambda: page.locator("#reset").is_disabled())
        page.get_by_role("button", name="Log values").click()
        chart.get_by_role("button", name="numbers").click()
        assert chart.locator(".numbers tbody tr").count() == 2
        assert page.evaluate(NAMELESS) == []
        page.get_by_role("link", name="Compare settings").click()
        page.get_by_role("heading", name="Settings that differ").wait_for()
        page.locator(".diff tbody tr").wait_for()
        assert page.locator(".diff tbody tr").all_text_contents() == ["optimization.lr0.020.01"]
        page.get_by_text("In some of the runs only: 1 setting").wait_for()
        assert not page.get_by_text("optimization.beta1").is_visible()
        page.get_by_text("The same in all: 2 settings").click()
        page.get_by_text("training.steps").wait_for()
        assert too_faint(page) == []
        page.get_by_label("Change between dark and light").click()
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
        assert too_faint(page) == []
        with open(root / "one" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**row(510), "loss": 7.77}) + "\n")
        page.goto(f"{live.address}/#/run/one")
        page.locator("figure[data-title=Loss] canvas").wait_for()
        until(lambda: page.evaluate("localStorage.getItem('bessemer-view')") and newest(page) > 0)
        page.get_by_role("tab", name="Curves").press("ArrowRight")
        page.get_by_text("def add(a, b):").wait_for()
        assert page.get_by_role("tab", name="Samples").get_attribute("aria-selected") == "true"
        _weights(page, root / "one" / "weights.jsonl")


def test_the_list_sorts_by_every_column_and_names_recipe_objective_and_result(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    make_run(root, "a-text", rows=30)
    for name, objective, rows, metric in (
        ("b-pairs", "dpo", 40, {"val_pref_acc": 0.75}),
        ("c-reward", "grpo", 20, {"val_reward": 0.5}),
    ):
        run = make_run(root, name, rows=rows)
        run.config.write_text(f"objective: {objective}\nprovenance: {{objective: recipe {objective}}}\n")
        run.metrics.write_text(
            "".join(
                json.dumps({key: value for key, value in json.loads(line).items() if "val_" not in key}) + "\n"
                for line in run.metrics.read_text().splitlines()
            )
            + json.dumps({"step": rows * 10, **metric})
            + "\n"
        )
    with serving(root) as live:
        page = watched().page
        page.goto(live.address)
        page.locator("tr[data-run=a-text]").wait_for()

        def order() -> list[str]:
            return page.eval_on_selector_all("tr[data-run]", "rows => rows.map((row) => row.dataset.run)")

        def cell(run: str, title: str) -> str:
            return page.text_content(f"tr[data-run={run}] td[data-title='{title}']") or ""

        assert order() == ["c-reward", "b-pairs", "a-text"], "the most recently active first"
        page.get_by_role("button", name="Run", exact=True).click()
        assert order() == ["a-text", "b-pairs", "c-reward"]
        page.get_by_role("button", name="Step", exact=True).click()
        assert order() == ["b-pairs", "a-text", "c-reward"], "the largest first"
        page.get_by_role("button", name="Step", exact=True).click()
        assert order() == ["c-reward", "a-text", "b-pairs"]
        assert page.get_attribute("th[data-title=Step]", "aria-sort") == "ascending"
        page.get_by_role("button", name="Recipe", exact=True).click()
        assert order() == ["b-pairs", "c-reward", "a-text"]
        assert [cell("b-pairs", title) for title in ("Recipe", "Objective", "Size", "Result")] == [
            "dpo",
            "dpo",
            "12.3M",
            "75.0% pref. acc.",
        ]
        assert cell("c-reward", "Result") == "0.5 reward" and cell("a-text", "Result") == "1.233 ± 0.01 bpb"
        page.reload()
        page.locator("tr[data-run=a-text]").wait_for()
        assert order() == ["b-pairs", "c-reward", "a-text"], "the page remembers it"


def test_hover_reads_the_step_under_the_cursor(watched: Callable[..., Any], tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "one")  # a row every 10 steps, a validation every 50
    with serving(tmp_path / "runs") as live:
        page = watched().page
        page.goto(f"{live.address}/#/run/one")
        chart = page.locator("figure[data-title=Loss]")
        chart.locator("canvas").wait_for()
        assert chart.locator(".where").text_content() == "step 500", "the newest, without a cursor"
        box = chart.locator(".u-over").bounding_box()
        for over, step in ((204, 200), (206, 210), (10, 10), (499, 500)):
            page.mouse.move(box["x"] + box["width"] * (over - 10) / 490, box["y"] + 40)
            until(lambda step=step: chart.locator(".where").text_content() == f"step {step}")
            values = chart.locator(".legend .value").all_text_contents()
            assert values[:2] == [f"{row(step)[name]:.4f}".rstrip("0") for name in ("loss", "loss_smooth")]
            validated = step // 50 * 50
            assert values[2] == ("2.5" if validated else "–")
            early = chart.locator(".legend .early").all_text_contents()
            assert early == ["", "", "" if validated in (0, step) else f"at {validated}"]
        chart.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        until(lambda: (chart.locator("[aria-live]").text_content() or "").startswith("step 490: loss "))


def test_of_many_charts_only_those_near_the_screen_are_painted(watched: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "one")
    rows = [{"step": step, **{f"m{n:02}": step + n for n in range(60)}} for step in (1, 2, 3)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in rows))
    with serving(tmp_path / "runs") as live:
        page = watched().page
        page.goto(f"{live.address}/#/run/one")
        page.locator("details[data-section=Details] figure[data-title=m00] canvas").wait_for()
        values = page.locator("figure .legend .value").all_text_contents()
        assert values == [str(3 + n) for n in range(60)], "all are read, for those who listen"
        assert page.locator("figure canvas").count() < 20
        last = page.locator("figure[data-title=m59]")
        last.scroll_into_view_if_needed()
        last.locator("canvas").wait_for()


def test_groups_of_the_learning_rate_are_one_panel_in_an_overlay(watched: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name, scale in (("one", 1.0), ("two", 2.0)):
        run = make_run(root, name)
        rates = {f"lr/{group}": scale * place for place, group in enumerate(("matrix", "head", "embedding"), 1)}
        with open(run.metrics, "a") as file:
            file.write(json.dumps({**row(600), **rates}) + "\n")
    with serving(root) as live:
        page = watched().page
        page.goto(f"{live.address}/#/overlay/one,two")
        chart = page.locator("figure[data-title='Learning rate']")
        chart.locator("canvas").wait_for()
        assert page.locator("figure[data-title^='Learning rate']").count() == 1
        assert chart.locator(".legend .value").all_text_contents() == ["0.02", "0.02"]
        chart.locator("select").select_option("lr/head")
        until(lambda: chart.locator(".legend .value").all_text_contents() == ["2", "4"])


def _weights(page: Any, path: Path) -> None:
    """The tab without the file, then with it: a heat map in the theme's colour, and the same in numbers."""
    page.get_by_role("tab", name="Weights").click()
    page.get_by_text("callbacks=[weight_distribution]").wait_for()
    rows = [histogram(step, name) for step in (0, 100, 400) for name in ("embedding", "head")]
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    page.locator("figure[data-title=embedding] canvas").wait_for()
    shades = """() => new Set(
      document.querySelector("#panel canvas").getContext("2d").getImageData(200, 0, 1, 400).data
    ).size"""
    until(lambda: page.evaluate(shades) > 20)
    page.get_by_label("Parameter").select_option("head")
    chart = page.locator("figure[data-title=head]")
    chart.get_by_role("button", name="numbers").click()
    newest = chart.locator(".numbers tbody tr").first.locator("td").all_text_contents()
    assert newest[:4] == ["400", "0.4", "0.5", "-0.9"] and newest[6] < newest[7] == "0.5"
    assert page.evaluate(NAMELESS) == []


def _asked(page: Any) -> list[str]:
    return page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")


def test_hostile_runs_stay_text_and_a_phone_fits(watched: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = make_run(root, "evil")
    run.config.write_text(f"training:\n  steps: 10\n  note: {json.dumps(EVIL)}\n? {json.dumps(EVIL)}\n: 1\n")
    run.status.write_text(json.dumps({"state": "failed", "step": 5, "message": EVIL, "host": EVIL, "heartbeat": 1}))
    run.derived.write_text(json.dumps({EVIL: {"value": EVIL, "reason": EVIL}}))
    run.samples.write_text(json.dumps({"step": 1, "prompt": EVIL, "completion": EVIL}) + "\n")
    table = f"| {EVIL} | b |\n|---|---|\n| {EVIL} | [x](javascript:alert(1)) |"
    run.report.write_text(f"# {EVIL}\n\n{EVIL}\n\n{table}\n\n```text\n{EVIL}\n```\n")
    run.log.write_text(EVIL)
    odd = [{**histogram(2, EVIL), "min": None}, {**histogram(3, EVIL), "max": 1e30}]
    lines = ["nonsense", *map(json.dumps, [histogram(1, EVIL), *odd, histogram(1, "a/" * 90)])]
    run.weights.write_text("".join(line + "\n" for line in lines))
    result = {"task": EVIL, "metric": EVIL, "value": 1, "step": 1, "tasks": {EVIL: {"accuracy": 1}}}
    (run.eval / "evil.json").write_text(json.dumps(result))
    with open(run.metrics, "a") as file:
        file.write(json.dumps({"step": 600, EVIL[:90]: 1.0, "loss": 1e300}) + "\nnonsense\n")
    with serving(root) as live:
        device = {
            "viewport": {"width": 390, "height": 800},
            "has_touch": True,
            "is_mobile": True,
            "device_scale_factor": 2,
        }
        page = watched(**device).page
        page.goto(f"{live.address}/#token={TOKEN}")
        page.get_by_role("link", name="evil").wait_for()
        for tab in ("curves", "samples", "evaluations", "weights", "settings", "report", "log", "checkpoints", "chat"):
            page.goto(f"{live.address}/#/run/evil/{tab}")
            page.locator(f"#tab-{tab}[aria-selected=true]").wait_for()
            page.locator(".note").first.wait_for()
            if tab == "weights":
                assert page.locator("#panel .title").text_content() == EVIL
            elif tab not in ("checkpoints", "chat"):
                page.locator("#panel").get_by_text("<script>").first.wait_for()
            assert page.evaluate("window.evil") is None
            assert page.locator("main script, main img, main b, main iframe").count() == 0
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{tab} is {wide} pixels wider than the phone"
            until(lambda tab=tab: page.evaluate(SEEN, f"#tab-{tab}"))
        assert page.locator(".note").first.text_content() == EVIL
        page.goto(f"{live.address}/#/diff/evil,{EVIL.replace('/', '%2F')}")
        page.get_by_text("There is no such run").wait_for()


def test_a_closed_page_asks_for_the_token_and_a_lost_server_is_said(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    make_run(root, "mine")
    page = watched().page
    with serving(root, closed=True) as live:
        page.goto(live.address)
        page.get_by_role("button", name="Enter the token").click()
        page.fill("#token", TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("link", name="mine").wait_for()
        assert re.search(r"Token ✓", page.text_content("#key") or "")
    page.get_by_text("does not answer").wait_for()
    assert page.locator("tr[data-run=mine]").count() == 1, "what was known stays on the screen"


@pytest.mark.long
def test_the_pictures_of_the_documentation_can_be_taken(chromium: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = make_run(tmp_path / "runs", name)
        run.weights.write_text("".join(json.dumps(histogram(step)) + "\n" for step in (0, 100, 200)))
    with serving(tmp_path / "runs") as live:
        taken = pictures.take(chromium, live.address, ["one", "two"], tmp_path)
    assert all(path.stat().st_size > 5_000 for path in taken)
    kept = {path.name for path in pictures.IMAGES.glob("dash*.png")}
    assert kept == {path.name for path in taken}, "the documentation shows each of them"
