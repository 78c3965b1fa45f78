"""A server on this machine that speaks the part of the Hugging Face hub's protocol that datasets need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 100  # bytes from which a file is listed by its sha256, as the hub lists what is stored with LFS


def commit_of(files: dict[str, bytes]) -> str:
    content = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())})
    return hashlib.sha1(content.encode()).hexdigest()


@dataclass
class Repository:
    """Files by commit, and names of commits. `card` is what its README says in YAML."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)

    def push(self, files: dict[str, bytes], reference: str = "main") -> str:
        commit = commit_of(files)
        self.commits[commit] = files
        self.references[reference] = commit
        return commit

    def find(self, revision: str) -> str | None:
        whole = self.references.get(revision, revision)
        return next((commit for commit in self.commits if commit.startswith(whole)), None)


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None  # bytes after which the next download breaks off, once
    altered: set[str] = field(default_factory=set)  # files whose content is not what is listed
    served: list[tuple[str, str]] = field(default_factory=list)  # method and path of every request
    ranges: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler, head_only: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.served.append((handler.command, path))
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3])
        repository = self.repositories.get(name)
        if repository is None:
            return self.refuse(handler, 404, "RepoNotFound")
        if name in self.gated:
            return self.refuse(handler, 403, "GatedRepo")
        if parts[0] == "api":
            return self.info(handler, name, repository, "/".join(parts[5:]) or "main")
        self.file(handler, repository, parts[4], "/".join(parts[5:]), head_only)

    def info(self, handler: BaseHTTPRequestHandler, name: str, repository: Repository, revision: str) -> None:
        commit = repository.find(revision)
        if commit is None:
            return self.refuse(handler, 404, "RevisionNotFound")
        siblings = []
        for path, data in repository.commits[commit].items():
            listed: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _git_sha1(data)}
            if len(data) >= LARGE:
                listed["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(listed)
        body = {"id": name, "sha": commit, "siblings": siblings, "cardData": repository.card, "tags": []}
        self.send(handler, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def file(
        self, handler: BaseHTTPRequestHandler, repository: Repository, revision: str, path: str, head_only: bool
    ) -> None:
        commit = repository.find(revision)
        if commit is None or path not in repository.commits[commit]:
            return self.refuse(handler, 404, "EntryNotFound")
        data = repository.commits[commit][path]
        tag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE else _git_sha1(data)
        if path in self.altered:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        start, status = 0, 200
        if wanted := handler.headers.get("Range"):
            start, status = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if not head_only:
                self.ranges.append(wanted)
        self.send(handler, data[start:], headers, status, head_only)

    def send(
        self,
        handler: BaseHTTPRequestHandler,
        data: bytes,
        headers: dict[str, str],
        status: int = 200,
        head_only: bool = False,
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if head_only:
            return
        if self.cut_after is not None and len(data) > self.cut_after:
            data, self.cut_after = data[: self.cut_after], None
            handler.close_connection = True
        handler.wfile.write(data)

    def refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.send(handler, b"", {"X-Error-Code": code, "X-Error-Message": code}, status)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self, head_only=False)

        def do_HEAD(self) -> None:
            hub.answer(self, head_only=True)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
