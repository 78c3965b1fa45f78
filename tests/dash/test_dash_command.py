"""The command itself: it says where the page is, guards it with the token it printed, and ends at a signal."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.dash.live import make_run


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
