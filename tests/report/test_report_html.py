"""report.html: one file with everything inside, and nothing in it that a run's words could turn into markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from click.testing import CliRunner
from tests.report.test_report_render import full_run

from bessemer.cli.compare import command as compare
from bessemer.cli.report import command as report
from bessemer.report.pages import reproduction, write_html
from bessemer.report.summary import summarize

EVIL = "<script>alert(1)</script>"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]


def test_one_file_holds_curves_tables_decisions_and_how_to_make_it_again(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    saved = run.checkpoints / "step_00000040"
    saved.mkdir()
    (saved / "COMMIT").write_text("{}")
    (saved / "meta.json").write_text(json.dumps({"tokenizer_hash": "abc123", "data_fingerprint": "def456"}))
    result = CliRunner().invoke(report, [str(run.path), "--html"], catch_exceptions=False)
    assert result.output.split() == [str(run.report), str(run.path / "report.html")]
    text = (run.path / "report.html").read_text()
    for part in ("<strong>3.0000 bits per byte</strong>", "fits | in memory", "<td>1m05s</td>", "abc123", "def456"):
        assert part in text, part
    assert "bessemer train quickstart training.steps=40" in text and "<summary>All settings</summary>" in text
    assert "<pre>a ```b```▸ text 40\nmore</pre>" in text
    elements = Elements()
    elements.feed(text)
    assert elements.tags.count("img") == 5 and "script" not in elements.tags
    assert all(source.startswith("data:image/png;base64,") for source in elements.sources)
    assert not re.search(r"https?://", text)
    assert dict(reproduction(summarize(run)))["newest checkpoint"] == "step_00000040"


def test_hostile_words_stay_words_and_a_bare_run_has_a_page(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    run.samples.write_text(
        json.dumps({"step": 40, "prompt": EVIL, "completion": f"</details>\n<details>{EVIL}"}) + "\n"
    )
    run.derived.write_text(json.dumps({EVIL: {"value": f"![x](plots/../secret.png) {EVIL}", "reason": "`" + EVIL}}))
    run.write_status(message=f"</p>{EVIL}")
    text = write_html(run).read_text()
    elements = Elements()
    elements.feed(text)
    assert "script" not in elements.tags and elements.tags.count("details") == 1
    for name in ("metrics.jsonl", "samples.jsonl", "facts.json", "derived.json", "config.yaml", "status.json"):
        (run.path / name).unlink()
    assert "not recorded" in write_html(run).read_text()


def test_compare_draws_against_what_is_asked(tmp_path: Path) -> None:
    for name in ("one", "two"):
        full_run(tmp_path, name)
    out = tmp_path / "curves.png"
    words = [str(tmp_path / "one"), str(tmp_path / "two"), "--against", "tokens", "--out", str(out)]
    result = CliRunner().invoke(compare, words, catch_exceptions=False)
    assert "bits per byte" in result.output and out.read_bytes()[:4] == b"\x89PNG"
