"""Settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bessemer.config import field
from bessemer.job.home import home
from bessemer.job.remote import refuse_remote


@dataclass
class DataSettings:
    """data/*: where data lives and how it is made into batches."""

    root: str | None = field(
        "data/root", default=None, help="where stores are kept; default BESSEMER_HOME or the user cache"
    )
    tokenizer: str = field(
        "data/tokenizer",
        default="auto",
        help="a directory or tokenizer.json; train:N trains one on the data; auto = the store's own",
    )
    val_fraction: float = field(
        "data/val_fraction",
        default=0.01,
        minimum=0.0,
        maximum=0.5,
        help="share of documents set apart for validation when a file or registered dataset is prepared",
    )
    text_key: str | None = field("data/text_key", default=None, help="column with the text; default text")
    on_error: str = field(
        "data/on_error",
        default="fail",
        choices=("fail", "skip"),
        help="a line that cannot be read: fail, or skip and count",
    )
    dedup: bool = field("data/dedup", default=False, help="drop exact duplicate documents (counted)")
    workers: int = field("data/workers", default=1, minimum=1, help="processes that prepare data")
    prefetch: int = field("data/prefetch", default=2, minimum=0, help="batches made ahead; 0 = none")
    truncation: str = field(
        "data/truncation",
        default="keep_end",
        choices=("keep_end", "keep_start"),
        help="which end of a too long PADDED example stays",
    )
    on_empty: str = field(
        "data/on_empty",
        default="fail",
        choices=("fail", "skip"),
        help="a PADDED or CONTRASTIVE example without a trained token in a row: fail, or skip and count",
    )
    crossfade: str = field(
        "data/crossfade",
        default="none",
        choices=("none", "linear", "cosine", "sigmoid"),
        help="how the mixture of one stage changes into the next",
    )
    crossfade_share: float = field(
        "data/crossfade_share",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="width of a cross-fade, as a share of the shorter neighbouring stage",
    )


def data_root(root: str | Path | None = None) -> Path:
    """Where prepared stores and trained tokenizers are kept."""
    refuse_remote(
        root,
        "stores are mapped into memory, so data.root must be local",
        "texts may come from s3:// or gs://",
    )
    return Path(root).expanduser() if root else home()
