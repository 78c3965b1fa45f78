"""`bessemer dash`: the runs of a directory in a browser."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import Any

import click

from bessemer.cli.options import say


@click.command("dash")
@click.argument("directory", default="runs", metavar="[DIR]")
@click.option("--port", type=int, default=8080, show_default=True, help="0 picks a free one.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="On any other address, reading needs the token too."
)
@click.option("--token-file", help="File with the token; default: $BESSEMER_API_TOKEN, else a new one each time.")
@click.option("--private", is_flag=True, help="Require the token for reading too, on a machine with other users.")
@click.option("--chat-on", metavar="PLATFORM", help="Where chat models run: cpu leaves the GPU to training.")
@click.option("--browser/--no-browser", default=None, help="Open a browser; default: if there is a display.")
def command(directory: str, token_file: str | None, browser: bool | None, **options: Any) -> None:
    """Watch the runs in DIR (default: runs) in a browser: live curves, overlays, settings side by side, samples,
    checkpoints, evaluations, a chat with any checkpoint, stop and resume.

    Nothing leaves this machine: the page and its charts are part of the package. The printed address ends with a token
    that allows stopping and resuming runs and loading models. Ctrl-C ends the page, never a run.

    \b
    Examples:
      bessemer dash
      bessemer dash /data/runs --port 0
      bessemer dash --host 0.0.0.0            # for other machines; reading needs the token too
    From your laptop, for runs on a server (no --host needed):
      ssh -L 8080:127.0.0.1:8080 SERVER       # then open the printed address here
    """
    from bessemer.dash.app import DashOptions, dash
    from bessemer.serve.net import TOKEN_VARIABLE, read_token

    token = read_token(token_file, os.environ.get(TOKEN_VARIABLE))
    server = DashOptions(token=token, **options)
    wanted = _has_screen() if browser is None else browser
    with contextlib.ExitStack() as stack:

        def show(address: str) -> None:
            if wanted:
                folder = tempfile.TemporaryDirectory(prefix="bessemer-dash-", ignore_cleanup_errors=True)
                page = redirect_page(address, Path(stack.enter_context(folder)))
                # some browsers return only when they are closed, and this thread serves the page
                threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()

        dash(directory, server, say, show)


def _has_screen() -> bool:
    """Return whether there is a terminal and a local display, not one at the far end of ssh."""
    display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(display) and sys.stderr.isatty() and "SSH_CONNECTION" not in os.environ


def redirect_page(address: str, folder: Path) -> str:
    """Write a page that redirects to `address`, readable by this user only, and return its file:// URL.

    Every user of the machine can read a browser's command line with `ps`. The address ends with the token, so the
    browser gets the path of this page instead.
    """
    path = folder / "open.html"
    target = html.escape(address, quote=True)
    text = (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
        f'<title>Bessemer</title><a href="{target}">Open the page</a>\n'
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path.as_uri()
