"""Object stores: names such as s3://bucket/texts/*.jsonl, read and written through the clients that pyarrow brings.

Credentials, region and endpoint are found as the clouds' own tools find them: AWS_* variables and profiles
(AWS_ENDPOINT_URL for other servers that speak S3), Google's application default credentials (STORAGE_EMULATOR_HOST for
an emulator).
Whatever has to be locked, renamed, mapped or appended to stays on a local disk: `refuse_remote` says so.
"""

from __future__ import annotations

import functools
import io
import os
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from bessemer.errors import InputError, StorageError

SCHEMES = ("s3", "gs")
BUFFER = 4 << 20  # bytes of one request when a file is read in order
BLOCK = 16 << 20  # bytes held while a file is copied
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.*)", re.S)  # pathlib makes one slash of two


class Entry(NamedTuple):
    """A file in a store."""

    name: str  # s3://bucket/key
    size: int
    modified: int  # nanoseconds


def is_remote(name: str | Path) -> bool:
    """Return whether a name is a URL; those of a kind that cannot be used are refused where they are opened."""
    return _URL.match(str(name)) is not None and not Path(name).exists()


def refuse_remote(name: str | Path | None, why: str, remedy: str) -> None:
    if name is not None and is_remote(name):
        raise InputError(f"'{name}': {why}; {remedy}.")


def open_read(name: str) -> BinaryIO:
    """Open a local or remote file for reading bytes anywhere in it."""
    if not is_remote(name):
        return open(name, "rb")
    return cast(BinaryIO, io.BufferedReader(arrow_source(name), BUFFER))


def arrow_source(name: str) -> Any:
    """Return what Arrow's readers take: the path of a local file, or an open remote one."""
    if not is_remote(name):
        return name
    system, path = _system(name)
    return system.open_input_file(path)


def find(name: str) -> list[Entry]:
    """Return the files a name stands for, sorted: a file, all below a directory, or those matching (*, ?, [ab], **)."""
    from pyarrow.fs import FileSelector, FileType

    system, path = _system(name)
    prefix = name[: len(name) - len(path)] if name.endswith(path) else f"{name.partition('://')[0]}://"
    with reaching(name):
        base = path
        if magic := re.search(r"[*?[]", path):
            base = path[: magic.start()].rpartition("/")[0]
        else:
            about = system.get_file_info(path)
            if about.type == FileType.File:
                return [Entry(name, about.size, about.mtime_ns or 0)]
        infos = system.get_file_info(FileSelector(base, recursive=True, allow_not_found=True))
        bucket = path.partition("/")[0]
        if not infos and system.get_file_info(bucket).type == FileType.NotFound:
            raise FileNotFoundError(f"there is no bucket '{bucket}', or it may not be seen")
    wanted = pattern(path) if magic else None
    files = [info for info in infos if info.type == FileType.File and (wanted is None or wanted.fullmatch(info.path))]
    return sorted(Entry(prefix + info.path, info.size, info.mtime_ns or 0) for info in files)


def pattern(path: str) -> re.Pattern[str]:
    """Return a glob as a regular expression: *, ? and [ab] stay within a name, ** crosses directories."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translated(word: str) -> str:
        if re.fullmatch(r"\[[^]]+\]", word):
            return word.replace("[!", "[^", 1).replace("\\", "\\\\")
        return parts.get(word, re.escape(word))

    words = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", path)
    return re.compile("".join(map(translated, words)), re.S)


def read_bytes(name: str) -> bytes | None:
    """Return a small file whole; None when there is none."""
    system, path = _system(name)
    with reaching(name):
        try:
            with system.open_input_stream(path, compression=None) as file:
                return file.read()
        except FileNotFoundError:
            return None


def upload(path: Path, name: str) -> None:
    """Upload a local file; it appears in the store as a whole."""
    system, target = _system(name)
    with reaching(name), open(path, "rb") as source, system.open_output_stream(target, compression=None) as out:
        while block := source.read(BLOCK):
            out.write(block)


def download(name: str, path: Path) -> None:
    system, source = _system(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with reaching(name), system.open_input_stream(source, compression=None) as file, open(path, "wb") as out:
        while block := file.read(BLOCK):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


def check_writable(name: str) -> None:
    """Write and delete an empty file below `name`, so that a right that is missing is known before it is needed."""
    system, path = _system(f"{name}/.writable")
    with reaching(name):
        system.open_output_stream(path).close()
        system.delete_file(path)


def remove(name: str) -> None:
    """Delete a file; one that is not there is no error."""
    system, path = _system(name)
    with reaching(name):
        try:
            system.delete_file(path)
        except FileNotFoundError:
            return


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Turn an error of the object store into one that says what to check."""
    try:
        yield
    except OSError as error:
        text = " ".join(str(error).split())[:300]
        raise StorageError(
            f"'{name}' cannot be reached or used: {text}. Check the bucket's name, the credentials (AWS_* variables or "
            "profile; Google's application default credentials) and the network."
        ) from error


def _system(name: str) -> tuple[Any, str]:
    """Return the client of a URL's store, and the path (bucket/key) in it."""
    match = _URL.match(name)
    assert match is not None, name
    scheme, path = match.groups()
    if scheme not in SCHEMES:
        raise InputError(
            f"'{name}': {scheme}:// is not supported; {', '.join(f'{known}://' for known in SCHEMES)} are. "
            "Copy the files to a local disk first."
        )
    if not path.strip("/"):
        raise InputError(f"'{name}' names no bucket.")
    endpoint = _endpoint(scheme)
    return _client(scheme, path.partition("/")[0], endpoint), path.rstrip("/")


def _endpoint(scheme: str) -> str | None:
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if scheme == "s3" else ("STORAGE_EMULATOR_HOST",)
    return next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)


@functools.cache
def _client(scheme: str, bucket: str, endpoint: str | None) -> Any:
    from pyarrow import fs

    options: dict[str, Any] = {}
    if endpoint is not None:
        parts = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        options = {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    if scheme == "gs":
        return fs.GcsFileSystem(**options, **({"anonymous": True} if endpoint else {}))
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        with reaching(f"s3://{bucket}"):
            region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(region=region or "us-east-1", **options)
