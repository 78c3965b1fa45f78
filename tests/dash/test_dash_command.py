"""The command itself: it says where the page is, guards it with the token it printed, and ends at a signal."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.dash.live import make_run, until

import bessemer
from bessemer.job.process import module_command


def test_the_command_serves_its_page_and_stops_at_a_signal(tmp_path: Path, home: Path) -> None:
    make_run(tmp_path / "runs")
    words = [sys.executable, "-m", "bessemer", "dash", str(tmp_path / "runs"), "--port", "0", "--no-browser"]
    variables = {**os.environ, "BESSEMER_HOME": str(home)}
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = "".join(process.stderr.readline() for _ in range(3))
        found = re.search(r"open http://127\.0\.0\.1:(\d+)/#token=(\S+)", said)
        assert found, said
        connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)), timeout=60)
        for token, status in (("wrong", 401), (found.group(2), 409)):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
            connection.request("POST", "/api/stop", '{"run": "mine"}', headers)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "jaxlib" not in loaded, "a page that shows files loads no model's libraries"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0 and process.stderr.read().strip() == "stopped."
    finally:
        process.kill()
        process.wait()


OPENER = """#!{python}
import json, pathlib, sys, urllib.parse, urllib.request
page = pathlib.Path(urllib.request.url2pathname(urllib.parse.urlsplit(sys.argv[1]).path))
seen = [sys.argv[1], page.read_text(), oct(page.stat().st_mode & 0o777), str(page)]
pathlib.Path({out!r}).write_text(json.dumps(seen))
"""


def test_the_browser_gets_the_token_without_its_command_line_showing_it(tmp_path: Path, home: Path) -> None:
    """`ps` shows every user's command lines to every other user."""
    make_run(tmp_path / "runs")
    opener, out = tmp_path / "opener", tmp_path / "seen.json"
    opener.write_text(OPENER.format(python=sys.executable, out=str(out)))
    opener.chmod(0o755)
    variables = {**os.environ, "BESSEMER_HOME": str(home), "BROWSER": str(opener)}
    words = module_command("bessemer", "dash", str(tmp_path / "runs"), "--port", "0", "--browser")
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = "".join(process.stderr.readline() for _ in range(3))
        found = re.search(r"open (http://\S+)#token=(\S+)", said)
        assert found, said
        until(lambda: out.exists() and out.read_text())
        address, page, mode, path = json.loads(out.read_text())
        assert found.group(2) not in address and address.startswith("file://")
        assert f"url={found.group(1)}#token={found.group(2)}" in page and mode == "0o600"
        assert found.group(2) not in Path(f"/proc/{process.pid}/cmdline").read_text()
        urllib.request.urlopen(found.group(1), timeout=60).read()  # it serves, so it handles signals
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0 and not Path(path).exists()
    finally:
        process.kill()
        process.wait()


def test_a_module_in_the_working_directory_is_never_run(tmp_path: Path, home: Path) -> None:
    """`bessemer dash .` in a directory of runs from elsewhere, with every process that the page starts."""
    runs = tmp_path / "runs"
    make_run(runs, "long", rows=20_000)
    marker = tmp_path / "marker"
    for name in ("json", "signal", "numpy", "runpy", "jax"):
        (runs / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\nraise SystemExit(1)\n")
    variables = {**os.environ, "BESSEMER_HOME": str(home)}
    words = module_command("bessemer", "dash", ".", "--port", "0", "--no-browser")
    process = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True, cwd=runs)
    try:
        assert process.stderr is not None
        said = "".join(process.stderr.readline() for _ in range(3))
        found = re.search(r"open http://127\.0\.0\.1:(\d+)/#token=(\S+)", said)
        assert found, said
        connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)), timeout=300)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {found.group(2)}"}

        def ask(method: str, path: str, body: dict[str, object] | None = None) -> str:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection.getresponse().read().decode()

        ask("POST", "/api/resume", {"run": "long"})
        chat = ask("POST", "/api/chat", {"run": "long", "messages": [{"role": "user", "content": "hi"}]})
        assert "could not be loaded" in chat, chat
        until(lambda: json.loads(ask("GET", "/api/run?run=long"))["resumed"]["exit_code"] is not None)
        until(lambda: list((home / "dash").glob("*.columns")))  # the process that reads ahead was there too
        assert not marker.exists(), marker.read_text()
    finally:
        process.kill()
        process.wait()


def test_every_process_of_the_package_is_started_in_one_place() -> None:
    """A new `python -m` elsewhere would miss the isolation."""
    package = Path(bessemer.__file__).parent
    starting = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\[\s*sys\.executable", path.read_text(encoding="utf-8"))
    ]
    assert sorted(starting) == ["cli/options.py", "job/process.py"], "allocator: this process again, as it was started"
