"""`bessemer dash`: the socket, the page's address with its token, and an end that takes the loaded models along."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bessemer.dash.files import Folder
from bessemer.errors import InputError
from bessemer.job import RunDirectory
from bessemer.serve.net import BACKLOG, address_of, check_port, is_loopback, listen, server_of
from bessemer.storage.files import home

DEFAULT = "runs"  # need not be there yet: the first run makes it, and the page shows it then
FIRST = 2  # seconds that belong to the page's first questions
GRACE = 2  # seconds for open answers: a page asks again


@dataclass(frozen=True)
class DashOptions:
    """Where the page is served and who may see it; without a token one is made up."""

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    private: bool = False
    chat_on: str | None = None  # JAX's platform for models that are talked to

    def __post_init__(self) -> None:
        check_port(self.port)

    @property
    def closed(self) -> bool:
        """Reading needs the token too."""
        return self.private or not is_loopback(self.host)


def open_folder(directory: str) -> Folder:
    """The directory of runs; one run itself, or nothing at all, is an error that says what to give."""
    path = Path(directory)
    if not path.is_dir() and directory != DEFAULT:
        raise InputError(f"there is no directory {directory}. Give the directory that holds the runs.")
    if RunDirectory(path).exists():
        parent = path.absolute().parent
        raise InputError(f"{directory} is a run. Give the directory that holds it: bessemer dash {parent}")
    return Folder(path)


def dash(
    directory: str, options: DashOptions, say: Callable[[str], None], show: Callable[[str], None]
) -> None:
    """Serve the page until SIGTERM or Ctrl-C; `say` gets lines, `show` the address once it answers."""
    from bessemer.dash.app import Dash, Guard, make_app

    folder = open_folder(directory)
    token = options.token or secrets.token_urlsafe(24)
    bound = listen(options.host, options.port)
    with contextlib.closing(bound):
        cache = home() / "dash"
        state = Dash(folder, Guard(token, options.closed), cache, cache / "logs", options.chat_on)
        bound.listen(BACKLOG)
        address = f"http://{address_of(bound)}/"
        given = "" if options.token else f"#token={token}"  # a token of the user's own is not shown again
        who = (
            "with the token only" if options.closed else "this machine; stop, resume and chat need the token"
        )
        say(f"runs of {folder.root}\nopen {address}{given}\n({who}; Ctrl-C stops)")
        show(f"{address}{given}")
        try:
            state.ahead.start(lambda: [row["id"] for row in state.runs.listed()["runs"]], FIRST)
            server_of(make_app(state), GRACE).run(sockets=[bound])
        finally:
            state.ahead.close()
            state.models.close()
    say("stopped.")
