"""The data.* settings, and the paths that they name."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bessemer.config import field
from bessemer.data.plan.mixture import FADES, Sampling
from bessemer.data.rows.store import is_store
from bessemer.registry import datasets
from bessemer.storage.files import home
from bessemer.storage.remote import is_remote, refuse_remote


@dataclass
class DataSettings:
    """data/*: where data lives and how it is made into batches."""

    root: str | None = field(
        "data/root", default=None, help="directory of the stores; default BESSEMER_HOME or the user cache"
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
    prefetch: int = field("data/prefetch", default=2, minimum=0, help="batches prepared ahead; 0 = none")
    truncation: str = field(
        "data/truncation",
        default="keep_end",
        choices=("keep_end", "keep_start"),
        help="which end of an overlong PADDED example to keep",
    )
    on_empty: str = field(
        "data/on_empty",
        default="fail",
        choices=("fail", "skip"),
        help="a PADDED or CONTRASTIVE example without a trained token in a row: fail, or skip and count",
    )
    crossfade: str = field(
        "data/crossfade", default="none", choices=FADES, help="how the mixture of one stage changes into the next"
    )
    crossfade_share: float = field(
        "data/crossfade_share",
        default=0.1,
        minimum=0.0,
        maximum=1.0,
        help="width of a cross-fade, as a share of the shorter neighboring stage",
    )


def data_root(root: str | Path | None = None) -> Path:
    """Return where prepared stores and trained tokenizers are kept."""
    refuse_remote(
        root, "stores are mapped into memory, so data.root must be local", "texts may come from s3:// or gs://"
    )
    return Path(root).expanduser() if root else home()


# Paths in settings. When a run starts, relative paths become full paths in config.yaml. If a saved path is gone because
# the whole folder was moved, its longest tail below the current directory is used.


Find = Callable[[str], str]


def full_path(name: str) -> str:
    """Return the full path of a local file; anything else (s3://…, ~/x, a registered name) as it is."""
    if Path(name).is_absolute() or not is_there(name):
        return name
    here = str(Path.cwd())
    if Path(name).exists():
        return str(Path(here, name))
    return name if ":" in here else str(Path(glob.escape(here), name))  # a colon means code: module:attribute


def found_again(name: str) -> str:
    """Return a full path that is gone, as the longest tail of it that is below the current directory; else as it is."""
    parts = Path(name).parts
    if not Path(name).is_absolute() or is_there(name):
        return name
    tails = (str(Path(*parts[start:])) for start in range(1, len(parts)))
    return full_path(next(filter(is_there, tails), name))


def is_there(name: str) -> bool:
    """Return whether a file, a directory, or at least one match of a pattern exists."""
    if not name.strip():
        return False
    return Path(name).exists() or (glob.has_magic(name) and any(glob.iglob(name, recursive=True)))


def relocated(sampling: Sampling, find: Find) -> Sampling:
    """Return the sampling with its name resolved by `find`. A registered name stays, unless a store has that name."""
    whole = sampling.name + sampling.suffix
    if sampling.name in datasets and not is_store(Path(whole)):
        return sampling
    found = find(whole)
    if found == whole:
        return sampling
    return dataclasses.replace(sampling, name=found.removesuffix(sampling.suffix))


def relocated_root(root: str, find: Find) -> str:
    """data.root as `find` finds it: a full path even of what is not there, as it is made then; an address is refused
    elsewhere. A directory that holds no stores is another one."""
    if is_remote(root):
        return root
    whole = str(Path(root).expanduser().absolute())
    found = find(whole)
    return found if (Path(found) / "stores").is_dir() else whole
