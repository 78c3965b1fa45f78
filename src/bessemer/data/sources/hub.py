"""Datasets of the Hugging Face hub, by name: hf:OWNER/NAME[:config][@revision][/split].

The files of the split are found in the repository (by its card, else by their names) or among the hub's conversions to
parquet, downloaded into the hub's own cache, and verified by the checksums that the hub lists. What a name resolved to
is recorded in the user's cache: a resumed run reads the same files after the repository changed, and works offline.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from bessemer import console
from bessemer.data.sources.files import Files, find_files
from bessemer.errors import InputError, StorageError, to_install
from bessemer.registry import datasets
from bessemer.storage.files import atomic_write, home

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps its own conversion of a repository
READABLE = re.compile(r"\.(parquet|(jsonl|ndjson|json|txt)(\.(gz|zst|xz|bz2))?)$")
KNOWN_SPLITS = ("train", "validation", "valid", "val", "dev", "test")

REGISTERED = {
    "fineweb": "hf:HuggingFaceFW/fineweb:sample-10BT",
    "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
    "climbmix": "hf:OptimalScale/ClimbMix",
    "smoltalk": "hf:HuggingFaceTB/smoltalk:all",
    "ultrafeedback": "hf:HuggingFaceH4/ultrafeedback_binarized/train_prefs",
    "gsm8k": "hf:openai/gsm8k:main",
    "tulu3": "hf:allenai/tulu-3-sft-mixture",
}
"""Short names of datasets that people ask for."""


@dataclass(frozen=True)
class HubName:
    """The parts of hf:OWNER/NAME[:config][@revision][/split]."""

    repository: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        config, revision = (f":{self.config}" if self.config else ""), (f"@{self.revision}" if self.revision else "")
        return f"{PREFIX}{self.repository}{config}{revision}{'' if self.split == 'train' else '/' + self.split}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, with the checksum that the hub lists: sha256 (LFS), or git's sha1 of a small file."""

    path: str
    size: int
    sha256: str | None = None
    sha1: str | None = None


@dataclass(frozen=True)
class Resolved:
    """What a name stood for when it was first used."""

    name: str
    commit: str
    files: tuple[HubFile, ...]
    license: str = "not stated"


def is_hub_dataset(name: str) -> bool:
    return name.startswith(PREFIX)


def parse(name: str) -> HubName:
    """Return the parts of a name; a slash in a revision is written %2F, as in the hub's own addresses."""
    form = r"hf:(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?(?:@([\w.%-]+))?(?:/([\w.-]+))?"
    found = re.fullmatch(form, name)
    if found is None:
        raise InputError(
            f"dataset '{name}' is not hf:OWNER/NAME[:config][@revision][/split], such as hf:openai/gsm8k:main/test."
        )
    repository, config, revision, split = found.groups()
    return HubName(repository, config, revision.replace("%2F", "/") if revision else None, split or "train")


def hub_files(name: str) -> Files:
    """Return the local files of a dataset on the hub, downloaded and verified where they are not yet."""
    wanted = parse(name)
    record = _record(wanted)
    known = _recorded(record)
    try:
        latest = _offline(known) or resolve(wanted)
    except StorageError as error:
        if known is None:
            raise
        _say(f"{name}: {error} Using commit {known.commit[:12]}, which was downloaded before.")
        latest = known
    if known is not None and known.commit != latest.commit:
        _say(
            f"{name} has changed: commit {latest.commit[:12]} is newer than {known.commit[:12]}, which was used before "
            f"and is used again. For the new one: {replace(wanted, revision=latest.commit[:12])}"
        )
    chosen = known or latest
    paths = _download(wanted, chosen)
    if known is None:
        record.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(record, json.dumps(asdict(chosen), indent=1) + "\n")
    return replace(find_files(paths), label=f"{wanted} at {chosen.commit[:12]}")


def find_named(names: str | Path | Sequence[str | Path]) -> Files:
    """Return the files of names: datasets of the hub, and what `find_files` takes."""
    listed = [names] if isinstance(names, (str, Path)) else list(names)
    parts = [hub_files(str(name)) if is_hub_dataset(str(name)) else find_files(name) for name in listed]
    if len(parts) <= 1 or not any(is_hub_dataset(str(name)) for name in listed):
        return parts[0] if len(parts) == 1 else find_files(listed)
    left_out = tuple(reason for part in parts for reason in part.left_out)
    return Files(tuple(file for part in parts for file in part.files), ", ".join(p.label for p in parts), left_out)


def must_download(name: str) -> bool:
    """Return whether using this dataset would fetch files from the hub; no request is made."""
    name = REGISTERED.get(name, name)
    if not is_hub_dataset(name):
        return False
    wanted = parse(name)
    known = _recorded(_record(wanted))
    return known is None or any(_cached(wanted, known, file) is None for file in known.files)


def resolve(wanted: HubName) -> Resolved:
    """Return the commit and the files that a name stands for, from the hub."""
    info = _info(wanted, wanted.revision)
    card = info.card_data.to_dict() if info.card_data else {}
    listed = [_file(sibling) for sibling in info.siblings or ()]
    readable = [file for file in listed if READABLE.search(file.path.lower())]
    licensed = card.get("license") or "not stated"
    licensed = ", ".join(licensed) if isinstance(licensed, list) else str(licensed)
    if card.get("configs"):
        files = _by_card(wanted, card["configs"], readable)
    elif readable:
        files = _by_name(wanted, readable)
    else:  # code that makes the data, which is never run: take the hub's conversion
        info = _info(wanted, CONVERTED)
        files = _by_name(
            wanted, [_file(sibling) for sibling in info.siblings or () if READABLE.search(sibling.rfilename)]
        )
    return Resolved(str(wanted), info.sha, tuple(files), licensed)


def _by_card(wanted: HubName, configs: Sequence[dict[str, Any]], files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files of a split as the dataset card lists them."""
    names = [str(config.get("config_name", "default")) for config in configs]
    defaults = [name for name, config in zip(names, configs, strict=True) if config.get("default")]
    chosen = wanted.config or next(
        iter(defaults), "default" if "default" in names else names[0] if len(names) == 1 else None
    )
    if chosen not in names:
        example = replace(wanted, config=names[0])
        wrong = f"has no config '{chosen}'" if chosen else "has several configs"
        raise InputError(f"dataset {wanted} {wrong}: {', '.join(names)}. Name one, as in {example}.")
    given = configs[names.index(chosen)].get("data_files") or "**"
    entries = given if isinstance(given, list) else [given]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, path = (entry.get("split", "train"), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        splits.setdefault(str(split), []).extend(path if isinstance(path, list) else [str(path)])
    if wanted.split not in splits:
        raise _no_split(wanted, splits)
    patterns = [str(pattern).replace("**/", "*") for pattern in splits[wanted.split]]
    found = [file for file in files if any(fnmatchcase(file.path, pattern) for pattern in patterns)]
    if not found:
        raise InputError(f"dataset {wanted}: its card names {', '.join(patterns)}, but no such readable file is there.")
    return found


def _by_name(wanted: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files of a split by their paths: the config is a directory, the split a word of the path."""
    if wanted.config:
        folders = sorted({file.path.split("/")[0] for file in files if "/" in file.path})
        files = [file for file in files if file.path.startswith(f"{wanted.config}/")]
        if not files:
            there = f"it has {', '.join(folders)}" if folders else "it has none"
            raise InputError(f"dataset {wanted} has no config '{wanted.config}'; {there}.")
    splits: dict[str, list[HubFile]] = {}
    for file in files:
        splits.setdefault(_split_in(file.path, wanted.split), []).append(file)
    if wanted.split in splits:
        return splits[wanted.split]
    if set(splits) == {""} and wanted.split == "train":
        return splits[""]
    raise _no_split(wanted, [name for name in splits if name])


def _split_in(path: str, wanted: str) -> str:
    """The split that a path names: `train`, `train_prefs`, or the end of `texts_train`; "" where it names none."""
    words = re.split(r"[/.-]", path)
    if wanted in words:
        return wanted
    for word in words:
        first, last = word.split("_")[0], word.split("_")[-1]
        if first in KNOWN_SPLITS:
            return word
        if last in KNOWN_SPLITS:
            return last
    return ""


def _no_split(wanted: HubName, splits: Iterable[str]) -> InputError:
    names = sorted(splits)
    if not names:
        return InputError(
            f"dataset {wanted}: no readable file of split '{wanted.split}' is there (parquet, JSON lines, text)."
        )
    return InputError(
        f"dataset {wanted} has no split '{wanted.split}'; it has {', '.join(names)}. Name one, as in "
        f"{replace(wanted, split=names[0])}."
    )


def _file(sibling: Any) -> HubFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    return HubFile(sibling.rfilename, sibling.size or 0, sha256, None if sha256 else sibling.blob_id)


def _record(wanted: HubName) -> Path:
    key = hashlib.sha256(str(wanted).encode()).hexdigest()[:16]
    return home() / "hub" / f"{wanted.repository.replace('/', '--')}-{key}.json"


def _recorded(path: Path) -> Resolved | None:
    try:
        found = json.loads(path.read_text("utf-8"))
        return Resolved(
            found["name"], found["commit"], tuple(HubFile(**file) for file in found["files"]), found["license"]
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{path}: this record of a dataset is damaged ({error}); delete it to resolve the name again."
        ) from error


def _offline(known: Resolved | None) -> Resolved | None:
    """Return the record, where the user asked not to use the network."""
    return known if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on") else None


def _client(name: object) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError(f"{name} needs the extra `hf`: {to_install('hf')}. Or download the files yourself.") from error
    return huggingface_hub


def _asked(wanted: HubName, ask: Callable[[], Any]) -> Any:
    """The hub's answer; its errors in our words."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        raise InputError(
            f"dataset {wanted} is gated: accept its terms on its page, and set HF_TOKEN to a token that may read it."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"dataset {wanted}: the hub has no revision '{wanted.revision or CONVERTED}' of it."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"dataset {wanted}: the hub has no dataset '{wanted.repository}', or it is private: check the name, or set "
            "HF_TOKEN."
        ) from error
    except Exception as error:  # the client passes on the errors of several transport libraries
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise StorageError(
            f"dataset {wanted} cannot be fetched: {reason}. Check the network and HF_HUB_OFFLINE; the same command "
            "continues an interrupted download."
        ) from error


def _info(wanted: HubName, revision: str | None) -> Any:
    hub = _client(wanted)
    return _asked(wanted, lambda: hub.HfApi().dataset_info(wanted.repository, revision=revision, files_metadata=True))


def _download(wanted: HubName, chosen: Resolved) -> list[Path]:
    """Return local paths of the files. Downloads are verified before they are used."""
    hub = _client(wanted)
    fetch = partial(hub.hf_hub_download, wanted.repository, repo_type="dataset", revision=chosen.commit)
    paths, missing = {}, []
    for file in chosen.files:
        cached = _cached(wanted, chosen, file)
        if cached is None:
            missing.append(file)
        else:
            paths[file.path] = cached
    if missing:
        size = console.size(sum(file.size for file in missing))
        _say(f"downloading {wanted}: {console.counted(len(missing), 'file')}, {size}; license {chosen.license}")
    for file in missing:
        path = Path(_asked(wanted, partial(fetch, file.path)))
        if not _is_intact(path, file):
            blob = path.resolve()
            path.unlink()
            blob.unlink(missing_ok=True)
            raise StorageError(
                f"dataset {wanted}: {file.path} does not have the checksum that the hub lists; download it again."
            )
        paths[file.path] = path
    return [paths[file.path] for file in chosen.files]


def _cached(wanted: HubName, chosen: Resolved, file: HubFile) -> Path | None:
    find = _client(wanted).try_to_load_from_cache
    found = find(wanted.repository, file.path, repo_type="dataset", revision=chosen.commit)
    return Path(found) if isinstance(found, str) else None


def _is_intact(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    if file.sha256:
        with open(path, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
    content = path.read_bytes()
    return file.sha1 in (None, hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest())


def _say(text: str) -> None:
    print(f"note       {text}", file=sys.stderr, flush=True)


for _short, _name in REGISTERED.items():
    datasets.register(_short)(partial(hub_files, _name))
