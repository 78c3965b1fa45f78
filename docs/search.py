"""A hook of mkdocs: the search's index also as a script, which a browser loads from the disk too (docs/search.js)."""

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority


@event_priority(-100)  # after the search has written its own
def on_post_build(config: Any) -> None:
    folder = Path(config["site_dir"]) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"window.searchIndex = {index};\n", encoding="utf-8")
