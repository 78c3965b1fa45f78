"""`bessemer doctor`: a copy of a real run is damaged in every way it knows, and the verdict is read."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bessemer.checkpoint.files import read_manifest, write_manifest
from bessemer.cli import main
from bessemer.doctor import Diagnosis, diagnose, remove_stale
from bessemer.errors import InputError, Stopped, StorageError
from bessemer.job import RunDirectory, RunLock
from bessemer.storage.checksums import CHUNK, VerifiedFile
from bessemer.storage.weights import write_file
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback

NEWEST, OLDER = "step_00000005", "step_00000003"


class StopAt(Callback):
    def on_batch_end(self, loop: Any) -> None:
        if loop.step == 5:
            loop.request_stop("enough")


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_topology", one_device)


def one_device(settings: Any) -> Any:
    from bessemer.topology import make_topology

    return make_topology(settings, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def stopped(tiny: dict[str, object], home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 5, with checkpoints at 3 and 5."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", one_device)
        quick = {**tiny, "optimization.name": "adamw", "model.depth": 1}  # a short compilation
        trainer = launch.build_trainer("quickstart", quick, name="mine", root=root, callbacks=[StopAt()])
        with pytest.raises(Stopped):
            trainer.run()
    return root / "mine"


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(stopped, tmp_path / "mine")
    return RunDirectory(tmp_path / "mine")


def lines(found: Diagnosis, area: str, *levels: str) -> list[str]:
    return [f.line for f in found.findings if f.area == area and (not levels or f.level in levels)]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def recommit(run: RunDirectory, name: str) -> None:
    """COMMIT again over changed files: they are sound, and wrong."""
    folder = run.checkpoints / name
    write_manifest(folder, int(name[5:]), read_manifest(folder).tree)


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(path.rglob("*")) if p.is_file()}


# --- sound runs -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_sound_run_is_promised_and_nothing_is_touched(run: RunDirectory, home: Path) -> None:
    before, outside = contents(run.path), contents(home)
    found = diagnose(run)
    assert found.resumable and found.exit_code == 0 and found.step == 5 and found.checkpoint == NEWEST
    assert found.verdict.startswith(f"resume will continue at step 5 from checkpoint {NEWEST}.")
    assert {f.level for f in found.findings} == {"ok"}, found.findings
    areas = {f.area for f in found.findings}
    assert areas == {"status", "checkpoints", "config", "metrics", "disk", "data", "machine", "rehearsal"}
    assert contents(run.path) == before and contents(home) == outside


def test_a_finished_run(run: RunDirectory) -> None:
    edit(run.status, state="done")
    found = diagnose(run)
    assert "finished at step 5" in found.verdict and (found.exit_code, found.resumable) == (0, False)
    for name in (NEWEST, OLDER):
        (run.checkpoints / name / "COMMIT").unlink()
    assert diagnose(run).exit_code == 4  # finished, and nothing left of it


def test_weights_of_a_finished_run_are_verified(run: RunDirectory) -> None:
    run.model.mkdir()
    path = run.model / "model.safetensors"
    write_file(path, {"a": ("float32", (4,))}, lambda name: np.ones(4, np.float32), {"format": "bessemer"})
    assert lines(diagnose(run), "weights", "ok") == ["model/model.safetensors: every byte is as it was saved."]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "'a' does not match the checksum" in lines(diagnose(run), "weights", "warning")[0]


def test_a_crashed_run(run: RunDirectory) -> None:
    edit(run.status, state="running", step=9)
    found = diagnose(run)
    assert found.state == "crashed" and "no process holds its lock" in lines(found, "status")[0]
    assert "4 steps after it will be repeated" in found.verdict


def test_a_run_at_work(run: RunDirectory) -> None:
    with RunLock(run):
        found = diagnose(run)
        assert "in progress" in found.verdict and found.exit_code == 0 and "in use by pid" in lines(found, "status")[0]
        edit(run.status, heartbeat=time.time() - 300, state="running")
        assert "5m00s old" in lines(diagnose(run), "status", "warning")[0]
        with pytest.raises(InputError, match="in use"):
            remove_stale(run)


def test_before_the_first_checkpoint(run: RunDirectory) -> None:
    shutil.rmtree(run.checkpoints)
    found = diagnose(run)
    assert found.resumable and "start again from step 0" in found.verdict
    assert lines(found, "rehearsal", "ok")


# --- checkpoints ------------------------------------------------------------------------------------------
def flip(folder: Path) -> None:
    path = max((folder / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def another_step(folder: Path) -> None:
    edit(folder / "meta.json", step=4)
    write_manifest(folder, 5, read_manifest(folder).tree)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "sha256 differs"),
    "a truncated file": (lambda f: (f / "loop.json").write_text("{"), "loop.json has 1 bytes instead of"),
    "a missing file": (lambda f: (f / "meta.json").unlink(), "meta.json is missing"),
    "no COMMIT": (lambda f: (f / "COMMIT").unlink(), "never committed"),
    "a COMMIT of zeros": (lambda f: (f / "COMMIT").write_bytes(bytes(100)), "COMMIT is damaged"),
    "meta.json of another step": (another_step, "meta.json is of step 4"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_is_passed_over(run: RunDirectory, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(run.checkpoints / NEWEST)
    found = diagnose(run)
    assert words in lines(found, "checkpoints", "warning")[0] and NEWEST in lines(found, "checkpoints", "warning")[0]
    assert found.verdict.startswith(f"resume will continue at step 3 from checkpoint {OLDER}. 2 steps")
    assert [entry["sound"] for entry in found.checkpoints] == [False, True]


def test_resume_does_what_the_doctor_said(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run.checkpoints / NEWEST)
    said = diagnose(run).step
    capsys.readouterr()
    assert launch.reopen(run.path).step == said == 3
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and NEWEST in warnings[0] and f"{OLDER} is used instead" in warnings[0]


def test_a_checkpoint_under_a_wrong_name(run: RunDirectory) -> None:
    (run.checkpoints / NEWEST).rename(run.checkpoints / "step_00000008")
    found = diagnose(run)
    assert found.step == 3 and "COMMIT is of step 5" in lines(found, "checkpoints", "warning")[0]


def test_all_damaged_is_beyond_resume(run: RunDirectory) -> None:
    for name in (NEWEST, OLDER):
        flip(run.checkpoints / name)
    found = diagnose(run)
    assert found.exit_code == 4 and "none of the 2 checkpoints can be used" in found.verdict


def test_files_that_were_not_saved_are_named_and_harmless(run: RunDirectory) -> None:
    (run.checkpoints / NEWEST / "state" / ".DS_Store").write_text("x")
    found = diagnose(run)
    assert found.step == 5 and "state/.DS_Store" in lines(found, "checkpoints", "note")[0]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("loop.json", '{"of_another_version": 1}', "loop.json is not usable"),
        ("meta.json", '{"step": 5}', "does not have tokenizer_hash, data_fingerprint"),
        ("tokenizer.json", "{}", "not the one that meta.json names"),
    ],
)
def test_what_stands_beside_the_arrays(run: RunDirectory, file: str, text: str, words: str) -> None:
    (run.checkpoints / NEWEST / file).write_text(text)
    recommit(run, NEWEST)
    found = diagnose(run)
    assert found.exit_code == 4 and words in found.verdict and "--step" in found.verdict


def test_checkpoints_is_a_file(run: RunDirectory) -> None:
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("")
    found = diagnose(run)
    assert found.exit_code == 4 and "cannot list the checkpoints" in found.verdict


def test_leftovers_and_fix(run: RunDirectory) -> None:
    for name in ("step_00000007.tmp", "step_00000001.deleted", "step_00000009.aside"):
        shutil.copytree(run.checkpoints / OLDER, run.checkpoints / name)
    (run.path / ".status.json.123.tmp").write_text("{")
    (run.checkpoints / "notes").mkdir()
    found = diagnose(run)
    assert found.resumable and found.step == 5
    text = "\n".join(lines(found, "leftovers", "note"))
    assert all(name in text for name in ("7.tmp", "1.deleted", "9.aside", ".status.json.123.tmp"))
    status = run.status.read_bytes()
    assert len(remove_stale(run)) == 3 and run.status.read_bytes() == status
    kept = sorted(path.name for path in run.checkpoints.iterdir())
    assert kept == ["notes", OLDER, NEWEST, "step_00000009.aside"]
    assert len(lines(diagnose(run), "leftovers")) == 1


# --- status, configuration, code --------------------------------------------------------------------------
def test_a_damaged_status(run: RunDirectory) -> None:
    run.status.write_text("{")
    found = diagnose(run)
    assert found.exit_code == 4 and "Delete it" in found.verdict


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is missing"),
        ("training: [", "Correct the YAML"),
        ("training: {stepz: 3}\n", "training.stepz"),
        ("training: {steps: many}\n", "training.steps"),
    ],
)
def test_a_bad_config_names_the_copy_in_the_checkpoint(run: RunDirectory, text: str | None, words: str) -> None:
    if text is None:
        run.config.unlink()
    else:
        run.config.write_text(text)
    found = diagnose(run)
    assert found.exit_code == 4 and words in found.verdict
    copy = run.checkpoints / NEWEST / "config.yaml"
    assert f"cp {copy} {run.config}" in found.verdict
    shutil.copy(copy, run.config)
    assert diagnose(run).resumable


def test_a_config_edited_by_hand(run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("max_grad_norm: 1.0", "max_grad_norm: 0.5"))
    (line,) = lines(diagnose(run), "config", "error")
    assert "training.max_grad_norm is 0.5, was 1.0" in line and "another run" in line
    with pytest.raises(InputError, match=r"training\.max_grad_norm is 0\.5 and was 1\.0"):
        launch.reopen(run.path)


def test_named_code_is_not_imported(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_parts.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in (run.config, run.checkpoints / NEWEST / "config.yaml"):
        path.write_text(path.read_text().replace("plugins: []", "plugins: [named_parts]"))
    recommit(run, NEWEST)
    found = diagnose(run)
    assert "named_parts" not in sys.modules and found.resumable and found.step == 5
    assert "named_parts" in lines(found, "code", "note")[0] and "--trust" in found.verdict


# --- metrics ----------------------------------------------------------------------------------------------
def change_rows(run: RunDirectory, change: Callable[[list[str]], list[str]]) -> Diagnosis:
    run.metrics.write_text("\n".join(change(run.metrics.read_text().splitlines())) + "\n")
    return diagnose(run)


def step_is(line: str, step: int) -> bool:
    row = json.loads(line)
    return row["step"] == step and "loss" in row


def test_metrics_rows(run: RunDirectory) -> None:
    original = run.metrics.read_text()
    found = change_rows(run, lambda rows: [row for row in rows if not step_is(row, 2)])
    assert lines(found, "metrics", "warning") == ["rows are missing between steps 1 and 3."]
    run.metrics.write_text(original)
    found = change_rows(run, lambda rows: [row for row in rows if json.loads(row)["step"] < 3])
    assert lines(found, "metrics", "warning") == ["rows are missing between steps 2 and 5."]
    run.metrics.write_text(original)
    found = change_rows(run, lambda rows: [*rows, *(row for row in rows if step_is(row, 4))])
    assert lines(found, "metrics", "warning") == [
        "metrics.jsonl has duplicate rows for step 4.",
        "the steps in metrics.jsonl do not ascend.",
    ]
    run.metrics.write_text(original + '{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    found = diagnose(run)
    assert found.resumable and lines(found, "metrics", "note") == [
        "metrics.jsonl: its last line was cut off by a kill and is dropped.",
        "1 rows are beyond step 5. Resume removes them and writes them again.",
    ]
    found = change_rows(run, lambda rows: ["garbage", *rows[1:-1]])
    assert found.exit_code == 4 and "line 1" in found.verdict and "Remove that line" in found.verdict
    run.metrics.unlink()
    assert diagnose(run).resumable


# --- what lies outside ------------------------------------------------------------------------------------
@pytest.fixture
def elsewhere(run: RunDirectory, home: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of prepared data and tokenizer that a test may damage."""
    shutil.copytree(home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_prepared_data_is_gone(run: RunDirectory, elsewhere: Path) -> None:
    shutil.rmtree(elsewhere / "stores")
    found = diagnose(run)
    assert found.resumable and "prepares it again" in found.verdict
    shutil.rmtree(elsewhere / "tokenizers")
    found = diagnose(run)
    assert found.resumable and "trains it again" in found.verdict
    assert not (elsewhere / "stores").exists() and not (elsewhere / "tokenizers").exists()


def test_damaged_prepared_data(run: RunDirectory, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reads every byte; a run stops before it trains on a damaged chunk."""
    for tokens in elsewhere.glob("stores/*/train/tokens.bin"):
        content = bytearray(tokens.read_bytes())
        content[::CHUNK] = bytes(byte ^ 1 for byte in content[::CHUNK])  # in every chunk
        tokens.write_bytes(bytes(content))
    found = diagnose(run)
    assert not found.resumable and any("tokens.bin' is damaged" in line for line in lines(found, "data", "error"))
    monkeypatch.setattr(VerifiedFile, "sample", lambda self: None)  # as if the store were too large for it to be seen
    with pytest.raises(StorageError, match=r"tokens\.bin' is damaged") as caught:
        launch.reopen(run.path).run()
    assert caught.value.exit_code == 4 and sorted(run.checkpoints.iterdir())[-1].name == NEWEST


def test_other_data_and_another_tokenizer(run: RunDirectory) -> None:
    """The fingerprints of the checkpoint are not those of what is there now."""
    for key, words in (("data_fingerprint", "another training data"), ("tokenizer_hash", "tokenizer")):
        before = (run.checkpoints / NEWEST / "meta.json").read_text()
        edit(run.checkpoints / NEWEST / "meta.json", **{key: "0" * 64})
        recommit(run, NEWEST)
        found = diagnose(run)
        assert found.exit_code == 4 and words in found.verdict
        (run.checkpoints / NEWEST / "meta.json").write_text(before)


def test_the_source_is_gone(run: RunDirectory, corpus: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "gone.jsonl")
    for path in (run.config, run.checkpoints / NEWEST / "config.yaml"):
        path.write_text(path.read_text().replace(str(corpus), missing))
    recommit(run, NEWEST)
    found = diagnose(run)
    assert found.exit_code == 4 and "gone.jsonl" in found.verdict


def test_a_store_that_is_gone_is_named(run: RunDirectory, corpus: Path, tmp_path: Path) -> None:
    """A store brings its own tokenizer: without it the message was about data.tokenizer alone."""
    missing = str(tmp_path / "gone-store")
    for path in (run.config, run.checkpoints / NEWEST / "config.yaml"):
        text = path.read_text().replace(str(corpus), missing)
        path.write_text(re.sub(r"tokenizer: train:\d+", "tokenizer: auto", text))
    recommit(run, NEWEST)
    found = diagnose(run)
    assert found.exit_code == 4 and lines(found, "data", "error")
    assert f"training.dataset names {missing}, which is gone" in found.verdict
    with pytest.raises(InputError, match="gone-store' does not exist"):
        launch.reopen(run.path)


def test_parts_given_from_python(run: RunDirectory) -> None:
    edit(run.derived, **{launch.GIVEN: {"value": ["dataset_train", "callbacks"], "reason": ""}})
    found = diagnose(run)
    assert found.resumable and "bm.resume('mine', dataset_train=…)" in found.verdict
    run.derived.write_text("[")
    found = diagnose(run)
    assert found.exit_code == 4 and "derived.json is damaged" in found.verdict


def test_another_machine_is_a_note(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Here, and from resume itself, which goes on."""
    meta = run.checkpoints / NEWEST / "meta.json"
    saved = json.loads(meta.read_text())
    saved["versions"]["jax"] = saved["topology"]["jax"] = "0.9.0"
    saved["topology"]["cpu_threads"] = 64
    meta.write_text(json.dumps(saved))
    recommit(run, NEWEST)
    found = diagnose(run)
    notes = lines(found, "machine", "note")
    assert len(notes) == 2 and notes[0].startswith("jax 0.9.0 then") and notes[1].startswith("cpu_threads 64 then")
    assert "to rounding" in notes[0] and found.resumable
    assert launch.reopen(run.path).step == 5
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: bits can differ")]
    assert len(said) == 1 and "to rounding: jax 0.9.0 then" in said[0] and "cpu_threads 64 then" in said[0]


def test_a_mesh_that_does_not_fit_here(run: RunDirectory) -> None:
    run.config.write_text(run.config.read_text().replace("  fsdp: 1\n", "  fsdp: 3\n"))
    found = diagnose(run)
    assert found.resumable and "topology.*" in found.verdict
    assert "does not fit the 1 device(s)" in lines(found, "machine", "warning")[0]


def test_a_state_that_does_not_fit_the_model(run: RunDirectory) -> None:
    for path in (run.config, run.checkpoints / NEWEST / "config.yaml"):
        path.write_text(path.read_text().replace("  width: 32\n", "  width: 48\n"))
    recommit(run, NEWEST)
    found = diagnose(run)
    assert found.exit_code == 4 and "does not fit this model" in found.verdict


def test_the_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(run.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    found = diagnose(run)
    assert found.resumable and "Free space" in found.verdict
    monkeypatch.setattr("os.access", lambda path, mode: False)
    found = diagnose(run)
    assert found.exit_code == 4 and "cannot be written" in found.verdict


# --- the command ------------------------------------------------------------------------------------------
def test_the_command(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *words])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    code, out, _ = call(str(run.path))
    assert code == 0 and out.splitlines()[-1].startswith("mine: resume will continue at step 5")
    shutil.copytree(run.checkpoints / OLDER, run.checkpoints / "step_00000007.tmp")
    code, out, _ = call("mine", "--runs", str(tmp_path), "--json", "--fix")
    document = json.loads(out)
    assert code == 0 and document["step"] == 5 and document["removed"] == ["step_00000007.tmp"]
    for name in (NEWEST, OLDER):
        flip(run.checkpoints / name)
    code, out, _ = call(str(run.path), "--json")
    assert code == 4 and json.loads(out)["resumable"] is False
    (tmp_path / "nothing").mkdir()
    code, out, err = call(str(tmp_path / "nothing"))
    assert code == 2 and "no run" in err and not out
    (tmp_path / "nothing" / "model").mkdir()
    code, _, err = call(str(tmp_path / "nothing"))
    assert code == 2 and "a model but no run" in err
