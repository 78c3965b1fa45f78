"""A hook of mkdocs: pages that live in the root of the repository are pages of the site too, and links to them work."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
FILES = r"\]\((?:\.\./)*(benchmarks|examples|tests|src)/[^)\s]*\)"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, under their names in lower case."""
    for name in PAGES:
        files.append(File.generated(config, name.lower(), content=from_docs((ROOT / name).read_text(encoding="utf-8"))))
    return files


def from_docs(text: str) -> str:
    """Return the text of a root page with its links as they are seen from docs/."""
    return re.sub(r"\]\(docs/", "](", re.sub(rf"\]\(({'|'.join(PAGES)})\b", r"](../\1", text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to root pages to those of the site; files of the repository, which it lacks, become plain text."""
    markdown = re.sub(rf"\]\((?:\.\./)+({'|'.join(PAGES)})\b", lambda found: f"]({found[1].lower()}", markdown)
    return re.sub(r"\[([^\]]*)" + FILES, r"\1", markdown)
