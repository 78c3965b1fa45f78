"""What a run, model folder, recipe or mirror that was not made here may do. Everything that reads one asks here.

Without --trust a run from elsewhere may not
    run code      plugins, module:attribute, file.py, recipes that are files, tasks of lm-eval that are files
    upload        logging.mirror, logging.wandb
    download      datasets and models of the hub (hf:…) and of buckets (s3://…, gs://…), with this user's credentials
    open a file   outside the working directory, the run itself, and the user's own cache
    connect       to the processes of another machine: topology.coordinator
    choose data.root: compiled programs are loaded from there and prepared data is written there
    follow a link that leaves its directory
and never, with --trust or without, is a `${resolver:…}` of a saved configuration resolved (config/bounded.py).

HOME/secret        32 random bytes of this user, mode 0600, made at first need
RUN/origin.json    a random id, and HMAC-SHA256(secret, id and request) for each request of the configuration

A run that was started here bears a mark for each thing it asks for; one from elsewhere cannot, whatever it claims. A
mark holds for exactly what was asked (files by their full path), so a changed configuration asks again. A run that
asks for nothing needs no mark.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bessemer import user_code
from bessemer.config.bounded import read_json, texts_in
from bessemer.config.recipes import is_shipped_recipe, nest, saved_tree
from bessemer.errors import InputError, StorageError
from bessemer.job.directory import RunDirectory
from bessemer.registry import SELECTORS, evaluations
from bessemer.storage.files import atomic_file, atomic_write, home, storage
from bessemer.storage.remote import is_remote

CODE, RECIPE, UPLOAD, DOWNLOAD, CONNECT = "code", "recipe", "upload", "download", "connect"
FILE, FOLDER, LINK = "file", "folder", "link"
VERBS = {
    CODE: "imports",
    RECIPE: "trains the recipe file",
    UPLOAD: "uploads to",
    DOWNLOAD: "downloads",
    CONNECT: "trains with the processes at",
    FILE: "opens",
    FOLDER: "keeps compiled programs and data in",
    LINK: "links to",
}
REMOTE = ("hf:", "s3:/", "gs:/")
"""Beginnings of words that name data or a model elsewhere."""
SECRET = "secret"
PEERS = "topology.coordinator"
WRITTEN = "data.root"
"""The setting that names a folder to write to. JAX loads the compiled programs in it, which are machine code."""
BASE = ("init", "distill.teacher")
"""Settings that name a base model, for which `resume` has --base."""
MOST_ENTRIES = 200_000
MOST_MARKS = 1000
CODE_SETTINGS = (*(key.replace("/", ".") for key in SELECTORS), "training.dataset", "grpo.rewards", "grpo.environment")
"""Settings whose every word with a colon names code; elsewhere it must look like a module and an attribute."""
_HUB_NAME = re.compile(
    r"hf:[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w.%-]+)?(/[\w.-]+)?(:[A-Z]+)?\Z"
)  # a dataset or model of the hub
_ATTRIBUTE = re.compile(r"[^\s:/\\\d][^\s:/\\]*:[^\s:/\\\d][^\s:/\\]*")
_PHASE = re.compile(r"(phases\.[^.]+\.)+")
_SCRIPT = re.compile(r".+\.py(:.*)?", re.S)
_HARNESS = re.compile(r"[\w-]+")
_MAGIC = re.compile(r"[*?\[]")


class Request(NamedTuple):
    """One thing that a run asks for: what kind, which setting (or file) names it, and the word that is there."""

    kind: str
    where: str
    word: str

    def __str__(self) -> str:
        return f"{VERBS[self.kind]} {_shown(self.word)} ({_shown(self.where)})"

    @property
    def located(self) -> str:
        """Return what is signed: a file by its full path, since another file of the same name is another request."""
        if self.kind in (FILE, FOLDER, RECIPE) or self.word.endswith(".py"):
            return str(_full(self.word.removeprefix("recipe:")))
        if _SCRIPT.fullmatch(self.word):  # file.py:attribute
            file, _, attribute = self.word.rpartition(":")
            return f"{_full(file)}:{attribute}"
        return user_code.located(self.word) if self.kind == CODE else self.word


def requests_of(tree: Mapping[str, Any]) -> list[Request]:
    """Return what a configuration asks for, wherever in it; a setting that is new tomorrow is covered, too."""
    tree = {name: value for name, value in tree.items() if name != "provenance"}
    found = [Request(CODE, "plugins", word) for _, word in texts_in(tree.get("plugins"))]
    for where, text in texts_in({name: value for name, value in tree.items() if name != "plugins"}):
        found += _requests_in(where, text)
    for where, text in _stores_in(tree.get("training")):
        found += _requests_in(where, text)
    logging = tree.get("logging")
    if isinstance(logging, Mapping):
        mirror = logging.get("mirror")
        found += [Request(UPLOAD, "logging.mirror", str(mirror))] if mirror else []
        found += [Request(UPLOAD, "logging.wandb", "Weights & Biases")] if logging.get("wandb") else []
    phases = tree.get("phases")
    for name, phase in phases.items() if isinstance(phases, Mapping) else ():
        if isinstance(phase, Mapping):  # its settings may be written in one word, as training.dataset
            found += [
                Request(request.kind, f"phases.{name}.{request.where}", request.word)
                for request in requests_of(nest(phase, "phases"))
            ]
    return list(dict.fromkeys(found))


def _stores_in(training: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, path) of datasets whose name and suffix together are the path of a store."""
    waiting = [training.get("dataset")] if isinstance(training, Mapping) else []
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            name, suffix = one.get("name"), one.get("suffix")
            if isinstance(name, str) and isinstance(suffix, str) and suffix:
                yield "training.dataset.name", name + suffix
        elif isinstance(one, list | tuple):
            waiting += one


def _requests_in(where: str, text: str) -> Iterator[Request]:
    setting = _PHASE.sub("", where)
    if setting in (WRITTEN, PEERS):
        yield Request(FOLDER if setting == WRITTEN else CONNECT, where, text)
        return
    recipe = text.removeprefix("recipe:")
    if recipe != text or setting in ("recipe", "extends"):
        if not is_shipped_recipe(recipe):
            yield Request(RECIPE, where, text)
        return
    names_code = any(setting == key or setting.startswith(f"{key}.") for key in CODE_SETTINGS)
    if _SCRIPT.fullmatch(text):
        yield Request(CODE, where, text)
    elif setting == "eval.evaluations":
        kind, _, source = text.partition(":")
        tasks = all(_HARNESS.fullmatch(one.strip()) for one in source.split(","))
        # the harness imports what a YAML file of tasks names; a word that is not an evaluation is a module
        if (kind == "harness" and not tasks) or (source and kind not in evaluations):
            yield Request(CODE, where, text)
    elif (":" in text if names_code else _ATTRIBUTE.fullmatch(text)) and not (
        _is_data(text) and (not names_code or setting.startswith("training.dataset"))  # a file comes before code there
    ):
        yield Request(CODE, where, text)
    source = text.partition(":")[2]
    for part in dict.fromkeys((text, source, *source.split(","))):
        if part.startswith(("/", "~")) or ".." in Path(part).parts:
            yield Request(FILE, where, part)
        elif part.startswith(REMOTE) and setting != "logging.mirror":  # a mirror is an upload
            yield Request(DOWNLOAD, where, part)


def _is_data(word: str) -> bool:
    try:
        return os.path.exists(word) or is_remote(word) or _HUB_NAME.match(word) is not None
    except ValueError:  # a name that no file can have
        return False


def named_code(tree: Mapping[str, Any]) -> list[str]:
    """Return the words of a configuration that name code, directly or in a recipe file."""
    return [request.word.removeprefix("recipe:") for request in requests_of(tree) if request.kind in (CODE, RECIPE)]


def check_trust(
    run: RunDirectory,
    trust: bool = False,
    config: Path | None = None,
    *,
    given: Collection[str] = (),
    mirror: str | None = None,
) -> None:
    """Raise InputError if `config` (default: the run's) asks for what only a run that was started here may do.

    `given` are settings (a/b) that the user gives now, so files, stores and peers that the run names there are not used
    (code is: its own settings are read first). `mirror` is the object store that the user has named.
    """
    if trust:
        return
    refused = refused_requests(run, saved_tree(config or run.config), given=given, mirror=mirror)
    base = " (of a base model: --base PATH)" * any(request.where in BASE for request in refused)
    _refuse(run, refused, f"add --trust (trust=True in Python), or give the setting yourself{base}.")


def check_opened(run: RunDirectory, tree: Mapping[str, Any]) -> None:
    """Raise InputError if files, folders or downloads that `tree`, a part of a run's configuration, names may not be
    used by a run from elsewhere: for commands that only read a run, which never run code that it names."""
    refused = [one for one in refused_requests(run, tree) if one.kind in (FILE, FOLDER, DOWNLOAD)]
    _refuse(run, refused, f"mark the run as trusted with: bessemer resume {run.word} --trust")


def _refuse(run: RunDirectory, refused: list[Request], remedy: str) -> None:
    if refused:
        listed = "; ".join(map(str, refused[:10])) + (f"; and {len(refused) - 10} more" * (len(refused) > 10))
        raise InputError(
            f"{run.path} was not started here, and its configuration {listed}. Look at each of these; if you trust "
            f"them all, {remedy}"
        )


def refused_requests(
    run: RunDirectory, tree: Mapping[str, Any], *, given: Collection[str] = (), mirror: str | None = None
) -> list[Request]:
    """Return what the configuration `tree` of a run asks for and is refused: it bears no mark of this user for it."""
    replaced = {key.replace("/", ".") for key in given}
    return [
        request
        for request in requests_of(tree)
        if not (request.kind in (FILE, FOLDER, UPLOAD, DOWNLOAD, CONNECT) and _setting_of(request.where) in replaced)
        and not (request.where == "logging.mirror" and request.word.rstrip("/") == mirror)
        and is_harmful(request, run)
        and not is_marked(run, request)
    ]


def _setting_of(where: str) -> str:
    """training.dataset.name, of an entry of a list, is part of the setting training.dataset."""
    return next((key for key in CODE_SETTINGS if where.startswith(f"{key}.")), where)


def names_own_code(run: RunDirectory, tree: Mapping[str, Any]) -> bool:
    """Return whether this user started the run with all of the code that `tree` names."""
    return all(is_marked(run, request) for request in requests_of(tree) if request.kind in (CODE, RECIPE))


def is_harmful(request: Request, run: RunDirectory) -> bool:
    """Return whether a run from elsewhere is refused the request: all but files that it may well open."""
    if request.kind != FILE:
        return True
    try:
        path = _full(request.word)
        while _MAGIC.search(str(path)):
            path = path.parent
        own = run.path.parent.parent if run.path.parent.name == "phases" else run.path
        zones = [zone.resolve() for zone in (Path.cwd(), own, home(), Path(__file__).parent.parent)]
        inside = any(path.is_relative_to(zone) for zone in zones) and path != (home() / SECRET).resolve()
        return path.exists() and not inside
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no home directory
        return False


def check_links(root: Path, *, within: Path | None = None, run: RunDirectory | None = None) -> None:
    """Raise InputError if anything below `root` is a link that leaves `within` (default: `root`), or no plain file.

    `run`: whose marks are looked at, so that an owner may keep checkpoints on another disk.
    """
    real = (within or root).resolve()
    for number, (path, kind) in enumerate(_entries(root)):
        if number >= MOST_ENTRIES:
            raise InputError(f"{root} holds more than {MOST_ENTRIES:,} files: it is not a run or a model.")
        if kind == "other":
            raise InputError(f"{path} is a pipe, socket or device, which nothing here makes. Remove it.")
        request = _link_outside(path, kind, root, real)
        if request is not None and (run is None or not is_marked(run, request)):
            raise InputError(
                f"{_shown(str(path))} links to {_shown(request.word)}, outside its directory, and is not followed: "
                "put the file itself there. In a run of your own: `bessemer resume RUN --trust`, once."
            )


WANDB = "wandb"
"""The folder of a run that wandb alone writes and reads. It links its logs into the user's cache."""


def check_folder(folder: Path) -> None:
    """Raise InputError if a model folder holds links that leave it, or pipes and devices.

    In the hub's cache a snapshot is all links, to the blobs of the same model: those are followed.
    """
    cached = folder.parent.name == "snapshots"
    check_links(folder, within=folder.parent.parent if cached else folder)


def _entries(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield links and special files below `root`, not following links; plain files as ("", "file"), to be counted."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    if folder == root and entry.name == WANDB and not entry.is_symlink():
                        continue
                    if entry.is_symlink():
                        yield Path(entry.path), "link"
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        yield root, "file"
                    else:
                        yield Path(entry.path), "other"
        except OSError:
            continue  # removed in the meantime, or not readable: reading it says so


def links_of(run: RunDirectory) -> list[Request]:
    """Return the links of a run that leave it."""
    found = (_link_outside(path, kind, run.path, run.path.resolve()) for path, kind in _entries(run.path))
    return [request for request in found if request is not None]


def _link_outside(path: Path, kind: str, root: Path, real: Path) -> Request | None:
    """Return the request of an entry of `root` that is a link out of `real`; None for any other."""
    if kind != "link" or path.resolve().is_relative_to(real):
        return None
    return Request(LINK, str(path.relative_to(root)), str(path.resolve()))


def is_marked(run: RunDirectory, request: Request) -> bool:
    """Return whether the run bears this user's mark for the request."""
    identity, marks = _read_mark(run)
    if identity is None or not marks:
        return False
    secret, known = _secret(create=False), [request]
    if request.kind == FOLDER:  # up to version 0.2.0 a folder was marked as a file
        known.append(request._replace(kind=FILE))
    return secret is not None and any(_mac(secret, identity, one) in marks for one in known)


def mark_origin(run: RunDirectory, tree: Mapping[str, Any]) -> str | None:
    """Mark the run for what its configuration asks for, if anything. Return why it could not be marked, or None."""
    asked = [*requests_of(tree), *links_of(run)]
    try:
        if all(is_marked(run, request) for request in asked):
            return None
        secret = _secret(create=True)
        assert secret is not None
        identity, before = _read_mark(run)
        identity = identity or secrets.token_hex(16)
        marks = {_mac(secret, identity, request) for request in asked}
        marks |= before if len(before) < MOST_MARKS else set()  # checkpoints before a change still ask for those
        atomic_write(run.origin, json.dumps({"run": identity, "marks": sorted(marks)}, indent=1) + "\n")
    except (InputError, StorageError) as error:
        return str(error)
    return None


def adopt(run: RunDirectory) -> None:
    """Mark a run, with its phases, as trusted by this user: --trust is given once."""
    for own in (run, *(RunDirectory(path) for path in sorted((run.path / "phases").glob("*")))):
        if own.config.is_file():
            mark_origin(own, saved_tree(own.config))


def _read_mark(run: RunDirectory) -> tuple[str | None, set[str]]:
    try:
        mark = read_json(run.origin)
        return str(mark["run"]), {str(one) for one in mark["marks"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None, set()


def _mac(secret: bytes, identity: str, request: Request) -> str:
    message = json.dumps([identity, request.kind, request.located])
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def _full(word: str) -> Path:
    return Path(word).expanduser().resolve()


def _shown(word: str) -> str:
    """Return a word of a run in one line of an error: no control characters, and not more than a line of it."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in word)
    return printable if len(printable) <= 120 else f"{printable[:117]}…"


def _secret(create: bool) -> bytes | None:
    path = home() / SECRET
    with storage("cannot keep the secret that marks this user's runs"):
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path, overwrite=False, mode=0o600) as file:
                file.write(secrets.token_bytes(32))
        try:
            about = path.stat()
        except FileNotFoundError:
            return None
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise InputError(
                f"{path} must belong to you and be readable by nobody else (chmod 600), since it proves which runs "
                "are yours. If others could have read it, delete it: runs with code of their own then ask for --trust."
            )
        return path.read_bytes()
