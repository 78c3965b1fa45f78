"""Whether code that a run's configuration names may be imported without asking.

HOME/secret        32 random bytes of this user, mode 0600, made at first need
RUN/origin.json    a random id, and HMAC-SHA256(secret, id and the names of the code)

A run that was started here bears the mark; one from elsewhere cannot, whatever its files claim. The mark holds
for the names it was made for (plugin files by their full path), so a changed configuration asks again. Runs
that name no code need no mark.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.config.layers import Layer, merge, nest, read_yaml
from bessemer.config.recipes import recipe_names
from bessemer.errors import InputError
from bessemer.job.directory import RunDirectory
from bessemer.job.files import atomic_write, storage
from bessemer.job.home import home
from bessemer.job.remote import is_remote
from bessemer.selectors import SELECTORS


def saved_tree(path: Path) -> dict[str, Any]:
    """A saved config.yaml as a plain nested tree, with its references resolved; nothing it names is imported."""
    origin = f"saved configuration {path}"
    layer = Layer(origin, nest(read_yaml(path, "saved configuration"), origin))
    return merge([layer], resolve=True, is_section=lambda key: False)


def named_code(tree: Mapping[str, Any]) -> list[str]:
    """Plugins, and every `module:attribute` where a part or a dataset can be named."""
    words = [
        word
        for selector in SELECTORS
        for word in _texts(functools.reduce(_below, selector.split("/"), tree))
        if ":" in word
    ]
    datasets = [
        word
        for word in _texts(_below(_below(tree, "training"), "dataset"))
        if ":" in word and not Path(word).exists() and not is_remote(word)
    ]
    rewards = [word for word in _reward_names(_below(_below(tree, "grpo"), "rewards")) if ":" in word]
    return [*_texts(tree.get("plugins")), *words, *datasets, *rewards, *_of_phases(tree)]


def _reward_names(value: Any) -> list[str]:
    """Names in grpo/rewards, which are entries or plain names; what else an entry holds is no code."""
    entries = value if isinstance(value, list) else [value]
    return [word for entry in entries for word in _texts(_below(entry, "name") or entry if entry else None)]


def _of_phases(tree: Mapping[str, Any]) -> list[str]:
    """What the phases of a job name, and recipes of theirs that are files, which may name anything."""
    phases = tree.get("phases")
    named: list[str] = []
    for phase in phases.values() if isinstance(phases, Mapping) else ():
        if isinstance(phase, Mapping):
            recipes = [str(phase.get("recipe", "")), str(phase.get("init", "")).partition("recipe:")[2]]
            named += [recipe for recipe in recipes if recipe and recipe not in recipe_names()]
            named += named_code(nest(phase, "phases"))
    return named


def check_trust(run: RunDirectory, trust: bool = False, config: Path | None = None) -> None:
    """Refuse code named by `config` (default: the run's) unless the run was started here or `trust` is given."""
    named = named_code(saved_tree(config or run.config))
    if not named or trust or started_here(run, named):
        return
    raise InputError(
        f"{run.path} names code of its own ({', '.join(named)}), and it does not bear the mark of a run that this "
        "user started with that code. Look at the code; if you trust it, add --trust (trust=True in Python)."
    )


def started_here(run: RunDirectory, named: list[str]) -> bool:
    """Whether the run bears this user's mark for exactly this code."""
    try:
        mark = json.loads(run.origin.read_text(encoding="utf-8"))
        identity, code = str(mark["run"]), str(mark["mac"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    secret = _secret(create=False)
    return secret is not None and hmac.compare_digest(code.encode(), _mac(secret, identity, named).encode())


def mark_origin(run: RunDirectory, tree: Mapping[str, Any]) -> None:
    """Give the run the mark for the code its configuration names, if it names any."""
    named = named_code(tree)
    if not named or started_here(run, named):
        return
    secret = _secret(create=True)
    assert secret is not None
    identity = secrets.token_hex(16)
    mark = {"run": identity, "mac": _mac(secret, identity, named)}
    atomic_write(run.origin, json.dumps(mark, indent=1) + "\n")


def _mac(secret: bytes, identity: str, named: list[str]) -> str:
    message = json.dumps([identity, sorted(_located(word) for word in named)])
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def _located(word: str) -> str:
    """A plugin file by its full path: another file of the same name is other code."""
    return str(Path(word).resolve()) if word.endswith(".py") else word


def _secret(create: bool) -> bytes | None:
    path = home() / "secret"
    with storage("cannot keep the secret that marks this user's runs"):
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_new(path, secrets.token_bytes(32))
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


def _write_new(path: Path, data: bytes) -> None:
    """Whole or absent, and never over another process's."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, data)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def _below(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, Mapping) else None


def _texts(value: Any) -> list[str]:
    """Every text in a nested value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []
