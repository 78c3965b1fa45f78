"""Check what people read: `python -m docs.prose` prints every finding as path:line, and `make check` runs it.
`python -m docs.prose --wrap` (`make format`) wraps the lines that are too long.

It reads the Markdown of the repository without its code, and of Python files the docstrings and the texts of `help=`.
It looks for the phrases and British spellings of prose.yaml, and in Markdown for lines of more than 120 characters, but
for tables, headings and code. Generated pages are read where they come from.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
RULES = ROOT / "docs" / "prose.yaml"
WIDTH = 120
FENCE = re.compile(r"^\s*(```|~~~)")
PLAIN = re.compile(r"\s*(?![\s|#<>!=]|\[\^?[^\]]*\]:|---|===)\S")
ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")
UNBROKEN = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]+>")


class Finding(NamedTuple):
    path: Path
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{relative(self.path)}:{self.line}: {self.problem}"


def relative(path: Path) -> str:
    """Return the path as prose.yaml names it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


class Rules(NamedTuple):
    """Forms of phrases and of British words → what to write instead; words that are allowed; pages that are exempt."""

    phrases: dict[str, str]
    british: dict[str, str]
    allowed: frozenset[str]
    wide: frozenset[str]
    unchecked: frozenset[str]


@cache
def rules() -> Rules:
    """Return the rules of prose.yaml."""
    found: dict[str, Any] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    phrases = {form.replace(" ", r"\s+"): instead for form, instead in found["phrases"].items()}
    wide, unchecked = (frozenset(found[name] or ()) for name in ("wide", "unchecked"))
    return Rules(phrases, found["british"], frozenset(found["allowed"].split()), wide, unchecked)


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line from 0, problem) of prose; a phrase may go over the end of a line."""
    for form, instead in rules().phrases.items():
        for match in re.finditer(form, text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()), f"'{' '.join(match[0].split())}': write '{instead}'"
    for match in re.finditer(r"[A-Za-z]+", text):
        if instead := british(match[0].lower()):
            yield text.count("\n", 0, match.start()), f"'{match[0]}': {instead} (American spelling)"


def british(word: str) -> str | None:
    """Return what to do about a word that is spelled as in Britain; None for any other."""
    if word in rules().allowed:
        return None
    return next((instead for form, instead in rules().british.items() if re.fullmatch(form, word)), None)


def markdown(path: Path) -> Iterator[Finding]:
    """Yield the findings of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    lines = ["" if code else CODE.sub("`", line) for line, code in in_code(text)]
    if relative(path) not in rules().wide and (wrapped := wrap(text)) != text:
        pairs = zip(text.splitlines(), wrapped.splitlines(), strict=False)
        first = next(number for number, (old, new) in enumerate(pairs, start=1) if old != new)
        yield Finding(path, first, f"lines wrap at {WIDTH}: run `make format`")
    for number, problem in problems("\n".join(lines)):
        yield Finding(path, number + 1, problem)


def in_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of Markdown, and whether it is code or a fence. A block ends with the fence it began with."""
    opened = ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        mark = fence[1] if fence else ""
        yield line, bool(opened or mark)
        if mark and not opened:
            opened = mark
        elif mark and mark == opened:
            opened = ""


def wrap(text: str) -> str:
    """Return Markdown whose paragraphs and list items have no line beyond WIDTH. Code, tables, headings and whatever
    else depends on its lines stay as they are, and so do paragraphs without such a line."""
    out: list[str] = []
    block: list[str] = []
    for line, code in in_code(text):
        if code or PLAIN.match(line) is None or ITEM.match(line):
            out += wrapped(block)
            block = []
        if code or PLAIN.match(line) is None:
            out.append(line)
        else:
            block.append(line)
    return "\n".join(out + wrapped(block)) + "\n"


def wrapped(block: list[str]) -> list[str]:
    """Return the lines of one paragraph or list item; code and links are not broken."""
    if all(len(line) <= WIDTH for line in block) or any(line.endswith(("  ", "\\")) for line in block):
        return block
    first = re.match(r"\s*((?:[-*+]|\d+\.)\s+)?", block[0])
    assert first is not None
    indent = " " * len(first[0])
    joined = " ".join(line.strip() for line in block)[len(first[0].strip()) :].strip()
    held = UNBROKEN.sub(lambda found: found[0].replace(" ", "\0"), joined)
    held = re.sub(r" (?=([-+*#>|=]|\d+[.)])( |$))", "\0", held)  # would begin a list or a heading on a line of its own
    lines = textwrap.wrap(held, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [(first[0] if number == 0 else indent) + line.replace("\0", " ") for number, line in enumerate(lines)]


def python(path: Path) -> Iterator[Finding]:
    """Yield the findings of a module: its docstrings, those of attributes too, and texts of `help=`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        texts: list[ast.AST] = []
        if isinstance(node, ast.Expr):
            texts = [node.value]
        elif isinstance(node, ast.keyword) and node.arg == "help":
            texts = list(ast.walk(node.value))
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                for number, problem in problems(CODE.sub("`", text.value)):
                    yield Finding(path, text.lineno + number, problem)


def pages() -> list[Path]:
    """Return the Markdown files that people write."""
    folders = (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / ".github" / "ISSUE_TEMPLATE")
    found = sorted(path for folder in folders for path in folder.glob("*.md"))
    return [path for path in found if relative(path) not in rules().unchecked]


def findings() -> list[Finding]:
    """Return all findings in the texts of the repository."""
    modules = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "docs").glob("*.py")]
    found = [one for path in pages() for one in markdown(path)]
    return found + [one for path in sorted(modules) for one in python(path)]


def main(words: list[str]) -> int:
    """Check, or with --wrap write; return the exit code."""
    if words == ["--wrap"]:
        for path in pages():
            text = path.read_text(encoding="utf-8")
            if relative(path) not in rules().wide and wrap(text) != text:
                path.write_text(wrap(text), encoding="utf-8")
                print(f"wrapped {relative(path)}")
        return 0
    found = findings()
    print("\n".join(map(str, found)) or "prose: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
