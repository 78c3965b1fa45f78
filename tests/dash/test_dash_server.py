"""The page's server: what it answers, to whom, and that nothing outside its directory can be reached through it."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.dash.live import TOKEN, Live, histogram, make_run, row, serving, until

import bessemer
from bessemer.dash import metrics as growing
from bessemer.dash import processes as actions_module
from bessemer.dash.app import DashOptions, open_folder
from bessemer.dash.charts import MOST_BINS, MOST_PARAMETERS, MOST_STEPS, RunWeights
from bessemer.dash.files import Folder
from bessemer.dash.processes import Actions, Models
from bessemer.dash.runs import Runs
from bessemer.errors import InputError

SECRET = "outside the directory"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("dash") / "runs"
    make_run(root)
    make_run(root, "other", rows=30, rate=0.01, state="stopped")
    with serving(root) as server:
        yield server


def test_the_list_and_a_run_say_what_their_files_say(live: Live) -> None:
    listed = live.get("/api/runs")
    mine = next(run for run in listed["runs"] if run["id"] == "mine")
    assert {run["id"] for run in listed["runs"]} == {"mine", "other"} and listed["outside"] == 0
    assert (mine["state"], mine["step"], mine["steps"], mine["mfu"]) == ("done", 500, 1000, 0.412)
    assert mine["tok_per_s"] == row(500)["time/tok_per_s"] and mine["seconds"] == row(500)["time/all_steps"]
    assert (mine["result"]["metric"], mine["result"]["value"], mine["result"]["unit"]) == ("val_bpb", 1.22, "bpb")
    assert mine["result"]["error"] == 0.01
    assert (mine["recipe"], mine["objective"], mine["parameters"]) == ("quickstart", None, 12_345_678)
    run = live.get("/api/run?run=mine")
    assert run["config"]["optimization.lr"] == "0.02" and run["origins"]["training.steps"] == "command line"
    assert run["derived"] == [{"name": "training.batch_size", "value": "8", "reason": "fits in memory"}]
    assert run["health"]["good"] and run["health"]["words"].startswith("Improving: bits per byte went from ")
    assert run["checkpoints"][0]["step"] == 500 and run["checkpoints"][0]["bytes"] == 5002
    assert run["evaluations"][0]["value"] == 1.2345 and run["problems"] == []
    assert [sample["step"] for sample in live.get("/api/samples?run=mine")["samples"]] == [100, 200, 300, 400, 500]
    assert live.get("/api/report?run=mine")["text"].startswith("# mine")
    assert live.get("/api/log?run=mine")["text"] == "a line of the log\n"


def test_a_run_from_before_the_time_of_all_steps_has_a_training_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.metrics.write_text(json.dumps({"step": 30, "time/total": 2.5}) + "\n")
    assert Runs(Folder(tmp_path)).row("mine")["seconds"] == 2.5


def test_curves_of_several_runs_and_what_has_not_changed_is_not_sent_again(live: Live) -> None:
    path = "/api/curves?run=mine&run=other&name=loss&name=val_bpb&x=tokens&smooth=0.9"
    status, found, headers = live.call("GET", path)
    assert status == 200 and [(c["run"], c["name"]) for c in found["curves"]] == [
        ("mine", "loss"),
        ("mine", "val_bpb"),
        ("other", "loss"),
        ("other", "val_bpb"),
    ]
    assert found["curves"][0]["x"][-1] == 500 * 2048 and len(found["curves"][0]["smooth"]["y"]) == 50
    assert live.call("GET", path, headers={"If-None-Match": headers["ETag"]})[0] == 304
    metrics = live.dash.folder.run("mine").metrics
    before = metrics.read_bytes()
    with open(metrics, "a") as file:
        file.write(json.dumps(row(510)) + "\n")
    try:
        status, found, _ = live.call("GET", path, headers={"If-None-Match": headers["ETag"]})
        assert status == 200 and found["curves"][0]["x"][-1] == 510 * 2048
        assert live.get("/api/run?run=mine")["step"] == 510
    finally:
        metrics.write_bytes(before)
    titles = [chart["title"] for chart in live.get("/api/charts?run=mine&run=other")["charts"]]
    assert titles[:2] == ["Loss", "Bits per byte"] and "Gradient norm" in titles


def test_settings_that_differ(live: Live) -> None:
    found = live.get("/api/diff?run=mine&run=other")
    assert found["rows"] == [{"key": "optimization.lr", "values": ["0.02", "0.01"]}] and found["partial"] == []
    assert found["same"] == [{"key": "training.batch_size", "value": "8"}, {"key": "training.steps", "value": "1000"}]


@pytest.mark.parametrize(
    "query", ["x=nothing", "points=many", "from=nan", "smooth=inf", "run=" + "&run=".join(map(str, range(30)))]
)
def test_a_wrong_question_is_an_error_with_its_name(live: Live, query: str) -> None:
    status, found, _ = live.call("GET", f"/api/curves?run=mine&name=loss&{query}")
    assert status == 400 and found["error"]["param"] in ("x", "points", "from", "smooth", "run")


def test_actions_need_the_token_and_our_own_page(live: Live) -> None:
    body = {"run": "mine"}
    for path in ("/api/stop", "/api/resume", "/api/chat"):
        assert live.post(path, body, token=None)[0] == 401
        assert live.post(path, body, token="wrong")[0] == 401
        assert live.post(path, body, Origin="http://evil.example")[0] == 403
        assert live.post(path, body, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert live.call("GET", path)[0] in (404, 405)
        status, _, _ = live.call("POST", path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert status == 415, "a form of another site cannot send JSON"
        assert live.post(path, ["not", "an object"])[0] == 400
        assert live.post(path, {"run": "../../etc"})[0] == 404
    assert live.post("/api/stop", body)[0] == 409, "nothing runs there"


def test_another_sites_page_cannot_read_either(live: Live) -> None:
    assert live.call("GET", "/api/runs", headers={"Host": "evil.example"})[0] == 421, "DNS rebinding"
    assert live.call("GET", "/", headers={"Host": "evil.example:80"})[0] == 421
    assert live.call("GET", "/api/runs", headers={"Origin": "http://evil.example"})[0] == 403
    assert live.call("GET", "/api/runs", headers={"Sec-Fetch-Site": "same-site"})[0] == 403
    status, _, headers = live.call("GET", "/api/runs", headers={"Host": f"localhost:{live.port}"})
    assert status == 200 and "Access-Control-Allow-Origin" not in headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and "Set-Cookie" not in headers


def test_with_a_closed_door_nothing_is_said_without_the_token(live: Live) -> None:
    with serving(live.dash.folder.root, closed=True) as shut:
        paths = ("runs", "run?run=mine", "curves?run=mine&name=loss", "report?run=mine", "models", "diff?run=mine")
        for path in paths:
            assert shut.call("GET", f"/api/{path}")[0] == 401
        assert shut.get("/api/session") == {"version": bessemer.__version__, "may_read": False, "may_act": False}
        assert len(shut.get("/api/runs", token=TOKEN)["runs"]) == 2
        assert "Bessemer" in shut.get("/"), "the page itself holds nothing: it asks for the token"
    assert DashOptions(host="0.0.0.0").closed and DashOptions(private=True).closed and not DashOptions().closed


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/js/../../app.py",
        "/%2e%2e/app.py",
        "/js/%2e%2e%2f%2e%2e%2fapp.py",
        "//etc/passwd",
        "/js",
        "/.env",
    ],
)
def test_static_files_are_ours_alone(live: Live, path: str) -> None:
    assert live.call("GET", path)[0] == 404


def test_no_path_leads_out_of_the_directory(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", tmp_path / "outside"
    run = make_run(root, "real")
    other = make_run(outside, "secret")
    other.log.write_text(SECRET)
    (root / "linked").symlink_to(other.path)
    for path, target in (
        (run.log, other.log),
        (run.report, other.log),
        (run.samples, other.samples),
        (run.metrics, other.metrics),
        (run.facts, other.facts),
    ):
        path.unlink()
        path.symlink_to(target)
    (run.eval / "evil.json").symlink_to(other.eval / "bpb_step500.json")
    (run.checkpoints / "step_00000600").symlink_to(other.checkpoints / "step_00000500")
    run.derived.unlink()
    os.mkfifo(run.derived)
    with serving(root) as live:
        listed = live.get("/api/runs")
        assert [one["id"] for one in listed["runs"]] == ["real"] and listed["outside"] == 1
        found = live.get("/api/run?run=real")
        assert found["rows"] == 0 and found["loss"] is None and found["facts"] == {} and found["derived"] == []
        assert [entry["step"] for entry in found["checkpoints"]] == [500]
        assert len(found["evaluations"]) == 1
        assert live.get("/api/log?run=real")["text"] is None and live.get("/api/report?run=real")["text"] is None
        assert live.get("/api/samples?run=real")["samples"] == []
        for name in (
            "linked",
            "..",
            "../outside/secret",
            "%2e%2e/outside/secret",
            "real/phases/..",
            "real/",
            "",
            "/etc",
        ):
            status, answer, _ = live.call("GET", f"/api/log?run={name}")
            assert status == 404 and SECRET not in json.dumps(answer), name


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">{{7*7}}\x00\u202e'


def test_hostile_contents_are_answered_with_gaps_never_with_a_crash(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = make_run(root, "evil")
    bomb = "a: &a [x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(20)
    )
    nested = "[" * 5000
    run.status.write_text(
        '{"state": "<b>x</b>", "step": 1e999, "heartbeat": "never", "message": ' + json.dumps(HOSTILE) + "}"
    )
    run.facts.write_text('{"steps": ' + "9" * 3000 + ', "parameters": NaN, "versions": [1]}')
    run.derived.write_text(nested)
    (run.eval / "x.json").write_text(json.dumps([{"task": HOSTILE, "value": "x", "tasks": {"a": {"accuracy": []}}}, 3]))
    (run.eval / "y.json").write_text("nonsense")
    run.samples.write_text(json.dumps({"step": 1, "prompt": HOSTILE, "completion": "z" * (1 << 20)}) + "\n[]\nx\n")
    run.log.write_bytes(b"\xff\xfe" * 100_000)
    for config in (bomb, nested, "a: " * 5000, "!!python/object/apply:os.system ['x']", "\x00", HOSTILE):
        run.config.write_text(config)
        with serving(root) as live:
            [listed] = live.get("/api/runs")["runs"]
            assert listed["state"] == "unknown" and listed["message"] == HOSTILE
            found = live.get("/api/run?run=evil")
            assert found["config"] == {} and "config.yaml" in found["problems"][0]
            assert len(live.get("/api/samples?run=evil")["samples"][0]["completion"]) < 5000
            assert len(found["evaluations"]) == 2
            live.get("/api/log?run=evil"), live.get("/api/diff?run=evil")
            assert live.call("GET", "/api/run?run=evil")[2].get_content_type() == "application/json"
    run.status.write_text('{"state": "running"}')
    run.lock.write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "heartbeat": "x", "process_start": 1}))
    with serving(root) as live:
        assert live.get("/api/runs")["runs"][0]["state"] == "crashed"
        assert live.post("/api/stop", {"run": "evil"})[0] == 409, "a lock that claims pid 1 stops nobody"


def test_distributions_of_weights_and_watched_parameters(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "mine")
    with serving(tmp_path / "runs") as live:
        address = "/api/weights?run=mine"
        nothing = live.get(address)
        assert (nothing["names"], nothing["name"], nothing["rows"]) == ([], None, [])
        good = [histogram(step, name) for step in range(0, 3000, 10) for name in ("embedding", "head")]
        run.weights.write_text("".join(json.dumps(line) + "\n" for line in good) + '{"step": 30')
        status, found, headers = live.call("GET", f"{address}&name=head")
        assert status == 200 and (found["names"], found["name"]) == (["embedding", "head"], "head")
        steps = [line["step"] for line in found["rows"]]
        assert len(steps) <= MOST_STEPS and found["seen"] == 300
        assert steps[0] == 0 and steps[-1] == 2990 and max(b - a for a, b in pairwise(steps)) <= 40
        assert found["rows"][0] == {k: v for k, v in histogram(0, "head").items() if k != "name"}
        assert live.call("GET", f"{address}&name=head", headers={"If-None-Match": headers["ETag"]})[0] == 304
        scalar = {**histogram(0, "a_scale"), "counts": [0, 1, 0]}
        run.weights.write_text("".join(json.dumps(line) + "\n" for line in [scalar, *good]))
        assert live.get(address)["name"] == "embedding", "the one with the most values says most"

        gap = {**histogram(3001), "mean": None, "min": math.nan, "max": 1e300}
        wide = {**histogram(1, "wide"), "counts": [1] * (MOST_BINS + 1)}
        below = {**histogram(3002), "counts": [1, -1, None, "x", [], 10**400]}
        no_rows = [wide, {"step": "x", "name": "x", "counts": [1]}, {**histogram(1), "name": ["x"]}, [], 3, None]
        lines = [json.dumps(line) for line in [gap, below, *no_rows]]
        lines += ["[" * 100_000, '{"step": 1e999, "name": "x", "counts": [1]}', "z" * (1 << 18), "\x00"]
        lines += [json.dumps(histogram(0, f"{HOSTILE}{number}")) for number in range(MOST_PARAMETERS)]
        run.weights.write_text(json.dumps(good[0]) + "\n" + "\n".join(lines) + "\n")
        status, found, _ = live.call("GET", address, headers={"If-None-Match": headers["ETag"]})
        assert status == 200 and len(found["names"]) == MOST_PARAMETERS and found["left_out"]
        assert found["names"][1].startswith(HOSTILE) and found["bad"] == len(no_rows) + 4
        assert [(line["step"], line["counts"] == []) for line in found["rows"]] == [
            (0, False),
            (3001, True),
            (3002, True),
        ]
        assert found["rows"][1]["min"] is None and found["rows"][1]["max"] is None
        run.weights.unlink()
        run.weights.symlink_to("/etc/hostname")
        assert live.get(address)["names"] == [] and live.call("GET", "/api/weights?run=..")[0] == 404

        with open(run.metrics, "a") as file:
            file.write(json.dumps({**row(510), "watch/head": 0.25}) + "\n")
        assert ["watch/head"] in [chart["names"] for chart in live.get("/api/charts?run=mine")["charts"]]
        [curve] = live.get("/api/curves?run=mine&name=watch/head")["curves"]
        assert (curve["x"], curve["y"]) == ([510], [0.25])


def test_a_long_file_of_weights_is_read_in_several_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "CHUNK", 1 << 12)
    monkeypatch.setattr(RunWeights, "most", 1 << 13)
    run = make_run(tmp_path / "runs", "mine")
    run.weights.write_text("".join(json.dumps(histogram(step)) + "\n" for step in range(100)))
    weights = RunWeights(Folder(tmp_path / "runs"), run.weights)
    versions, looks = set(), 0
    while not looks or weights.left:
        version, make = weights.shown("")
        versions.add(version)
        looks += 1
    assert looks == len(versions) == 3 and make()["seen"] == 100 and make()["unread"] == 0


HOLD = """
import fcntl, json, os, signal, socket, sys, time
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
owner = {"pid": int(sys.argv[2]) or os.getpid(), "host": socket.gethostname(), "heartbeat": time.time()}
os.write(handle, json.dumps(owner).encode())
print("held", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("honest", [True, False])
def test_stop_signals_the_process_that_holds_the_run_and_no_other(tmp_path: Path, honest: bool) -> None:
    run = make_run(tmp_path / "runs", state="running")
    bystander = subprocess.Popen(["sleep", "600"])
    claimed = "0" if honest else str(bystander.pid)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.lock), claimed], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with serving(tmp_path / "runs") as live:
            assert live.get("/api/run?run=mine")["state"] == "running"
            assert live.post("/api/resume", {"run": "mine"})[0] == 409, "it is in use"
            status, answer = live.post("/api/stop", {"run": "mine"})
            if honest:
                assert (status, answer["pid"]) == (200, process.pid)
                assert process.wait(120) == -signal.SIGTERM
            else:
                assert status == 409 and process.poll() is None and bystander.poll() is None
    finally:
        for one in (process, bystander):
            one.kill()
            one.wait()


def test_resume_is_a_process_of_its_own_and_its_words_are_kept(live: Live) -> None:
    status, answer = live.post("/api/resume", {"run": "other"})
    assert status == 200 and answer["exit_code"] is None

    def ended() -> dict[str, object] | None:
        found = live.get("/api/run?run=other")["resumed"]
        return found if found["exit_code"] is not None else None

    found = until(ended)
    assert found["exit_code"] != 0 and "error" in found["said"], "a run written by hand has nothing to go on from"


def test_runs_of_equal_names_in_two_directories_have_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    monkeypatch.setattr(
        actions_module,
        "module_command",
        lambda *words: [sys.executable, "-c", "import sys; print(sys.argv[1])", words[2]],
    )
    said = []
    for folder in ("a", "b"):
        make_run(tmp_path / folder, "mine")
        actions = Actions(Folder(tmp_path / folder), logs)
        actions.resume("mine")
        said.append((actions, tmp_path / folder / "mine"))
    for actions, path in said:
        until(lambda actions=actions: actions.known("mine")["exit_code"] is not None)
        assert actions.known("mine")["said"] == str(path.resolve())
    assert len(list(logs.iterdir())) == 2


def test_a_model_that_cannot_be_loaded_is_an_event_with_the_reason_and_room_is_bounded(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "a")
    models = Models(Folder(tmp_path / "runs"), most=1)
    try:
        with models.use("a", 500) as model:
            [refused] = models.answer("a", 400, {"messages": []})
            assert b"answering already" in refused, "the one that is used is not taken away"
            assert model.process.poll() is None or model.port is None
        events = b"".join(models.answer("a", 500, {"messages": []}))
        assert b"could not be loaded" in events
    finally:
        models.close()
    assert model.process.poll() is not None


def test_a_model_ends_with_its_parent_however_that_ends() -> None:
    """The child's standard input is a pipe to us: when it closes, it goes."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import bessemer.job.process as c, signal; c.end_with_parent(); print(1, flush=True); signal.pause()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"1\n"
    process.stdin.close()
    assert process.wait(120) == -signal.SIGTERM


def test_the_directory_is_one_of_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(InputError, match="is a run"):
        open_folder(str(run.path))
    with pytest.raises(InputError, match="no directory"):
        open_folder(str(tmp_path / "nothing"))
    assert open_folder(str(tmp_path)).ids() == (["mine"], 0)


def test_phases_are_listed_below_their_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, "road")
    make_run(run.path / "phases", "sft")
    with serving(tmp_path) as live:
        assert {one["id"] for one in live.get("/api/runs")["runs"]} == {"road", "road/phases/sft"}
        assert live.get("/api/run?run=road/phases/sft")["step"] == 500
        assert live.post("/api/resume", {"run": "road/phases/sft"})[0] == 409


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No address of another machine in any file of ours; the vendored library names its home in a comment."""
    from bessemer.dash.app import STATIC

    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert len(files) >= 14 and (STATIC / "vendor" / "uPlot.LICENSE").is_file()
    for path in files:
        text = path.read_text()
        if path.parent.name != "vendor":
            assert "http://" not in text and "https://" not in text, path.name
            assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, path.name
