"""What the documentation says is true: its commands run, its settings exist, its links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documented import (
    MINUTES,
    NOT_RUN,
    PAGES,
    ROOT,
    RUN_ELSEWHERE,
    Pages,
    blocks,
    commands,
    make_files,
    not_run,
    reason_not_run,
    said,
    starts_a_run,
)
from tests.tiny_run import make_run

import bessemer
from bessemer.cli import COMMANDS
from bessemer.config import declared, dotted
from bessemer.config.aliases import ALIASES, answer
from bessemer.data import DataSettings
from bessemer.models.lora import LoraSettings
from bessemer.registry import SELECTORS, settings_classes
from bessemer.topology import TopologySettings
from bessemer.training.settings import BaseTrainerConfig, GuardSettings, LoggingSettings

PYTHON = ["README.md"] + [
    f"docs/{name}.md"
    for name in (
        "checkpoints",
        "configuration",
        "data",
        "data-plans",
        "generation",
        "getting-started",
        "models",
        "reference/python",
        "reference/exit-codes",
        "topology",
    )
]
SMALLER = {
    r'bm\.train\("quickstart".*\)': 'bm.Run("mine")',
    r"runs/first": "runs/mine",
    r'"python-stdlib"': '"my.txt"',
    r"train:4096": "train:300",
}
CODE = r"(?<!`)`([^`\n]+)`(?!`)"


def identity(page: Path) -> str:
    return page.name


def runnable(page: Path) -> list[str]:
    return [line for line in commands(page) if line.startswith(("bessemer", "cmp")) and reason_not_run(line) is None]


@pytest.fixture(scope="module")
def pages(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("trained"), home)


def run_page(page: Path, folder: Path, pages: Pages) -> None:
    make_files(folder)
    for command in runnable(page):
        result = pages.run(command, folder)
        # a time limit ends with 75, unless the shortened run is done before it
        allowed = (0, 75) if "training.time_limit=" in command and " train " in command else (0,)
        assert result.returncode in allowed, said(result)


RUN_HERE = [page for page in PAGES if page.name not in RUN_ELSEWHERE and runnable(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in RUN_HERE if p.name not in MINUTES], ids=identity)
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path, pages: Pages) -> None:
    run_page(page, tmp_path, pages)


@pytest.mark.long
@pytest.mark.parametrize("page", [p for p in RUN_HERE if p.name in MINUTES], ids=identity)
def test_the_commands_of_a_long_page_run_in_order(page: Path, tmp_path: Path, pages: Pages) -> None:
    run_page(page, tmp_path, pages)


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_commands_refer_to_what_exists(page: Path) -> None:
    """Commands by name, make targets, scripts; a run that is resumed was made earlier on the same page."""
    made: set[str] = set()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in commands(page):
        words = line.split()
        if words[0] == "make":
            assert set(words[1:]) <= targets, line
        elif words[0] == "python" and words[1].startswith("benchmarks/"):
            assert (ROOT / words[1]).is_file(), line
        elif words[0] == "bessemer" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in COMMANDS, line
        if words[0] == "bessemer" and starts_a_run(line) and "--name" in words:
            made.add(words[words.index("--name") + 1])
        resumed = words[2] if words[:2] == ["bessemer", "resume"] else ""
        if words[:3] == ["bessemer", "launch", "local"] and "--resume" in words:
            resumed = words[words.index("--resume") + 1]
        if resumed and page.name not in RUN_ELSEWHERE:
            assert Path(resumed).name in made, f"{line}: no command with `--name` above it starts this run"


def test_what_is_not_run_is_still_shown_and_its_reason_holds() -> None:
    """Every reason names a test that exists, or a target. The end of the session prints the list (conftest.py)."""
    shown = [line for page in PAGES for line in commands(page)]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for form, reason in NOT_RUN.items():
        assert any(re.fullmatch(form, line) for line in shown), form
        tests = re.findall(r"\w[\w/]*\.py", reason)
        assert tests or set(re.findall(r"make ([\w-]+)", reason)) & targets, reason
        for test in tests:
            assert list((ROOT / "tests").rglob(Path(test).name)), reason
    assert {page.name for page in PAGES} >= set(RUN_ELSEWHERE)
    listed = {command for _, command, _ in not_run()}
    assert all(line in listed for line in shown if line.startswith("bessemer") and reason_not_run(line))


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_a_page_starts_with_a_goal_and_a_command(page: Path) -> None:
    """A title, a sentence or two, and then a block to copy, within the first screen."""
    title, *lines = page.read_text(encoding="utf-8").splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    first = lines[fences[0]] if fences else ""
    sections = [number for number, line in enumerate(lines) if line.startswith("## ")]
    assert title.startswith("# ") and first in ("```bash", "```python"), f"{page.name}: {first}"
    assert fences[0] < 25 and all(fences[0] < number for number in sections), f"{page.name}: line {fences[0] + 2}"
    prose = [line for line in lines[: fences[0]] if line and not line.startswith(("<!--", "|", "!["))]
    assert prose and prose[0][0].isalpha(), f"{page.name}: no sentence before the first command"


def every_setting() -> set[str]:
    """All keys of all parts, whatever is selected."""
    classes = [BaseTrainerConfig, LoggingSettings, GuardSettings, DataSettings, TopologySettings, LoraSettings]
    for table in SELECTORS.values():
        classes += [cls for entry in table for cls in settings_classes(entry)]
    return {dotted(setting.key) for cls in classes for setting in declared(cls).values()}


def named_settings(text: str, sections: set[str]) -> set[str]:
    """Words like training.steps or training.steps=4 in `code`; file names and calls are something else."""
    words = {word for code in re.findall(CODE, text) for word in re.split(r"[\s,;|]+", code)}
    names = {word.partition("=")[0] for word in words if "(" not in word.partition("=")[0]}
    names |= {name for word in words for name in re.findall(r"\$\{([a-z_.]+)\}", word)}
    dotted_names = {name for name in names if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+(\.\*)?|[a-z_]+\.\*", name)}
    return {
        name
        for name in dotted_names
        if name.split(".")[0] in sections and not re.search(r"\.(py|md|json|jsonl|yaml|txt|bin|png|safetensors)$", name)
    }


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "settings.md"], ids=identity)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    known = every_setting()
    sections = {key.split(".")[0] for key in known if "." in key}
    named = named_settings(page.read_text(encoding="utf-8"), sections)
    wrong = [
        name
        for name in named
        if name not in known and not any(key.startswith(name.removesuffix("*")) for key in known if "*" in name)
    ]
    assert not wrong, f"{page.name} names settings that no part declares: {sorted(wrong)}"


def test_settings_are_found_in_text() -> None:
    """The search itself: it would be easy for it to find nothing."""
    text = "`training.steps=4`, `logging.*` and `a.b`, `data.md`, `topology.shardings(tree)`, `x='${data.root}'`"
    assert named_settings(text, {"training", "logging", "data", "topology"}) == {
        "training.steps",
        "logging.*",
        "data.root",
    }
    assert {"training.steps", "optimization.matrix_lr", "optimization.min_rate", "model.depth"} <= every_setting()


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, one after the other, beside a run `runs/mine`; training is that run, and data and tokenizer small."""
    make_files(tmp_path)
    make_run(tmp_path, "mine").metrics.write_text('{"step": 20, "loss": 2.0}\n')
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for text in blocks(ROOT / page, "python"):
        if page != "README.md" and not text.startswith(("import", "from")):
            continue  # a part of something larger, such as a trainer
        for form, small in SMALLER.items():
            text = re.sub(form, small, text)
        exec(compile(text, page, "exec"), names)


def test_editors_see_the_names_that_the_package_gives() -> None:
    """The imports for type checkers, the table that is used at run time, and `__all__` are the same names."""
    tree = ast.parse((ROOT / "src" / "bessemer" / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {(name.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == set(bessemer._HOME.items()) and {*bessemer._HOME, "__version__"} == set(bessemer.__all__)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]:
        for target, anchor in re.findall(r"\]\(([^)#\s]+)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            found = page.parent / target
            assert found.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower() for text in headings]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text).strip()) for text in plain}


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    pages = list(tmp_path.glob("*.html"))
    assert {page.stem for page in PAGES if page.parent == ROOT / "docs"} <= {page.stem for page in pages}
    assert {"security", "contributing", "changelog"} <= {page.stem for page in pages}
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:https?:)?//[^>]*>", page.read_text())
        assert not loaded, f"{page.name}: {loaded}"


def resolved(name: str) -> object:
    """`bessemer.room.Thing.method`, by importing as far as there are modules."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def test_python_names_on_coming_from_exist() -> None:
    """Ours as `bessemer.…` or `bm.…`; and those that are said to be the same, under the place that is named."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    ours = re.findall(r"`(?:bessemer|bm)((?:\.\w+)+)", page)
    same = re.findall(r"^\| ([^|]+) \| (?:the )?same (?:\w+ )*(?:in|on) `([\w.]+)`", page, re.M)
    assert len(ours) > 8 and len(same) > 3
    for name in ours:
        assert resolved("bessemer" + name) is not None, name
    for cell, place in same:
        where = resolved(place if place.startswith("bessemer") else f"bessemer.{place}")
        for name in re.findall(CODE, cell):
            assert hasattr(where, name), f"{place} has no {name}"


def test_flags_that_are_explained_on_coming_from_are_those_the_command_line_knows() -> None:
    """`--max-lr` on that page is also what `bessemer train --max-lr` answers."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"`--([a-z][\w-]*)`", page)) - {"name", "runs", "step", "trust"}
    assert flags and {flag.replace("-", "_") for flag in flags} <= set(ALIASES)


def test_names_of_levanter_maxtext_and_torchtitan_on_coming_from_are_answered() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = page.partition("## Levanter")[2].partition("\n## ")[0]
    names = [name for row in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 30 and [name for name in names if name != "steps" and answer(name) is None] == []
