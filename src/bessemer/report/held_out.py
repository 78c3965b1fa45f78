"""What a run was judged on: whether it is enough, and whether it is the same for several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bessemer.report.summary import Row, Summary
from bessemer.report.table import counted, size

FEW_BYTES, FEW_DOCUMENTS = 32_768, 10
"""Below either a held-out set says little: bits per byte differ by several percent between such sets."""


def too_small(facts: Mapping[str, Any], error: float | None = None) -> str | None:
    """A warning if the held-out set, as `a run's facts` has it, is too small to judge a model by."""
    size, documents = facts.get("bytes"), facts.get("documents")
    if size is None or documents is None or (size >= FEW_BYTES and documents >= FEW_DOCUMENTS):
        return None
    known = f" (standard error of bits per byte: {error:.3f})" if error is not None else ""
    return (
        f"the held-out set has only {counted(documents, 'document')} in {size / 1000:.1f} KB, too little to judge a "
        f"model by{known}; hold out more with data.val_fraction, or give more data"
    )


def held_out_remarks(summaries: Sequence[Summary], labels: Sequence[str]) -> list[str]:
    """Why bits per byte cannot be compared, where the runs were not judged on the same held-out set."""
    judged = [(label, s) for label, s in zip(labels, summaries, strict=True) if s.last("val_bpb") is not None]
    sets = {label: summary.held_out for label, summary in judged}
    prints = {found.get("fingerprint") for found in sets.values()}
    if len(judged) < 2 or (len(prints) == 1 and None not in prints):
        return []
    sizes = "; ".join(f"{label}: {_set_size(found)}" for label, found in sets.items())
    reason = "Some runs do not say on what they were judged" if None in prints else "The held-out sets differ"
    names = " ".join(str(summary.run.word) for _, summary in judged)
    return [
        "",
        f"{reason}, so validation loss and bits per byte above do not rank these runs ({sizes}).",
        f"To judge all on the same text: bessemer compare {names} --common",
    ]


def _set_size(found: Row) -> str:
    if "fingerprint" not in found:
        return "not recorded"
    text = f", {size(found['bytes'])}" if "bytes" in found else ""
    return f"{counted(int(found['sequences']), 'sequence')}{text}"
