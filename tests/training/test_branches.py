"""`resume --change`: a run goes on from a branch point with other settings or data; run and report say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.training.test_training_resume import StopAt, assert_same, rows

from bessemer.checkpoint.files import read_manifest, write_manifest
from bessemer.doctor import diagnose
from bessemer.errors import InputError, Stopped
from bessemer.job import RunDirectory
from bessemer.training import launch
from bessemer.training.persistence.checkpoints import read_branches

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def short(tiny: dict[str, object]) -> dict[str, object]:
    return {**tiny, "training.steps": 4, "logging.checkpoint_interval": 2, "logging.validation_interval": 2}


Saved = tuple[Path, Path]
"""A run, and a copy of it as it was."""


@pytest.fixture(scope="module")
def runs(short: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """A finished run of four steps, and one that was stopped after two. They are trained once."""
    root = tmp_path_factory.mktemp("branches")
    launch.build_trainer("quickstart", short, name="a", root=root / "done").run()
    stopped({**short, "optimization.lr_multiplier": 1.0}, root / "halfway", 2)
    names = ("done", "halfway")
    return {n: (root / n / "a", shutil.copytree(root / n / "a", root / n / "copy")) for n in names}


def as_it_was(saved: Saved) -> Path:
    run, copy = saved
    shutil.rmtree(run, ignore_errors=True)
    return shutil.copytree(copy, run)


@pytest.fixture
def done(runs: dict[str, Saved]) -> Path:
    """A finished run of four steps."""
    return as_it_was(runs["done"])


@pytest.fixture
def halfway(runs: dict[str, Saved]) -> Path:
    """A run of four steps that was stopped after two."""
    return as_it_was(runs["halfway"])


def stopped(settings: dict[str, object], root: Path, step: int) -> Path:
    trainer = launch.build_trainer("quickstart", settings, name="a", root=root, callbacks=[StopAt(step)])
    with pytest.raises(Stopped):
        trainer.run()
    return root / "a"


@pytest.mark.slow
def test_a_finished_run_is_extended_only_with_change_and_says_so(done: Path) -> None:
    with pytest.raises(InputError, match=r"training\.steps cannot be changed on resume.*add --change"):
        launch.reopen(done, {"training.steps": 6})
    again = launch.reopen(done, {"training.steps": 6}, change=True)
    assert again.step == 4 and again.steps == 6
    again.run()
    found = rows(done)
    assert [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4, 5, 6]
    [branch] = json.loads((done / "branches.json").read_text())
    assert branch["step"] == 4 and "data" not in branch
    assert branch["changes"] == {"training.steps": {"from": 4, "to": 6}}
    meta = json.loads((done / "checkpoints/step_00000006/meta.json").read_text())
    assert meta["branches"] == [branch], "a checkpoint knows under which settings its past was made"
    report = (done / "report.md").read_text()
    assert "## Branch points" in report and "| 4 | training.steps | 4 | 6 |" in report
    log = (done / "log.txt").read_text()
    assert "from step 4 on: training.steps 4 → 6" in log
    assert "resume     from the checkpoint of step 4 of 6" in log
    assert "finishing  all steps are done; now the last checkpoint, validation, weights, report" in log
    assert launch.is_finished(done) and not launch.changes_finished(done, {}, change=True)


@pytest.mark.slow
def test_a_run_extended_before_its_end_is_the_longer_run_where_rates_agree(
    short: dict[str, object], tmp_path: Path
) -> None:
    """With a constant rate the horizon changes nothing but the end, so both come to the same weights."""
    settings = {**short, "optimization.name": "adamw", "optimization.schedule": "constant"}
    whole = launch.build_trainer("quickstart", {**settings, "training.steps": 6}, name="w", root=tmp_path)
    whole.run()
    run = stopped(settings, tmp_path, 3)
    assert "stopped after step 3 of 4 with a checkpoint. Continue with: bessemer" in (run / "log.txt").read_text()
    again = launch.reopen(run, {"training.steps": 6}, change=True)
    again.run()
    assert_same(whole, again)


@pytest.mark.slow
def test_a_branch_survives_a_kill_before_its_first_checkpoint(halfway: Path, corpus: Path, tmp_path: Path) -> None:
    """config.yaml is then not that of the checkpoint, and branches.json says why."""
    run = halfway
    other = tmp_path / "other.jsonl"
    other.write_text("".join(corpus.read_text().splitlines(keepends=True)[::-1]))
    change = {"training.dataset": str(other), "optimization.lr_multiplier": 0.5}
    first = launch.reopen(run, change, change=True, callbacks=[Killed()])
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert [branch.step for branch in read_branches(RunDirectory(run))] == [2]
    findings = diagnose(RunDirectory(run)).findings
    assert not [one for one in findings if one.level == "warning" and "is not what" in one.text]
    again = launch.reopen(run)
    assert again.step == 2 and again.config["training/dataset"][0][0].name == str(other)
    again.run()
    [branch] = read_branches(RunDirectory(run))
    assert set(branch.changes) == {"training.dataset", "optimization.lr_multiplier", "data.tokenizer"}
    assert branch.data is not None and branch.data["from"] != branch.data["to"]


class Killed(StopAt):
    """Ends the process's run without a checkpoint."""

    def __init__(self) -> None:
        super().__init__(99)

    def on_batch_begin(self, loop: Any) -> None:
        raise KeyboardInterrupt


def test_what_has_a_state_of_its_own_is_not_switched_on_by_a_branch(halfway: Path) -> None:
    with pytest.raises(InputError, match=r"training\.ema cannot be switched on by a resume.*init=RUN"):
        launch.reopen(halfway, {"training.ema": 0.9}, change=True)


@pytest.mark.slow
def test_other_data_keeps_the_runs_tokenizer_and_forgets_the_best(halfway: Path, tmp_path: Path) -> None:
    run = halfway
    other = tmp_path / "other.txt"
    other.write_text("0123456789 9876543210 " * 400)
    before = launch.reopen(run)
    again = launch.reopen(run, {"training.dataset": str(other)}, change=True)
    assert again.tokenizer is not None and again.tokenizer.hash == before.tokenizer.hash  # not trained anew
    assert before.loop_state.best_val_loss is not None and again.loop_state.best_val_loss is None


@pytest.mark.slow
def test_data_that_changed_on_disk_needs_change_and_keeps_the_tokenizer(
    short: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(corpus.read_text())
    run = stopped({**short, "training.dataset": str(data)}, tmp_path, 2)
    data.write_text(corpus.read_text() + '{"text": "zebra zebra zebra quagga"}\n')
    with pytest.raises(InputError, match=r"made with another tokenizer .* and another training data .*--change"):
        launch.reopen(run)
    again = launch.reopen(run, change=True)
    [branch] = again.branches
    assert branch.data is not None and list(branch.changes) == ["data.tokenizer"]


@pytest.mark.slow
def test_a_checkpoint_before_a_branch_point_needs_change_again(done: Path) -> None:
    launch.reopen(done, {"training.steps": 6}, change=True).run()
    with pytest.raises(InputError, match=r"before the branch point at step 4 .*add --change"):
        launch.reopen(done, step=2)
    again = launch.reopen(done, step=2, change=True)
    again.run()
    [branch] = read_branches(RunDirectory(done))
    assert branch.step == 2 and branch.changes == {"training.steps": {"from": 4, "to": 6}}


@pytest.mark.parametrize(
    ("setting", "value"), [("model.depth", 3), ("training.batch_size", 16), ("optimization.name", "adamw")]
)
def test_what_the_state_depends_on_cannot_be_changed(done: Path, setting: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{setting} cannot be changed on resume, not even with --change"):
        launch.reopen(done, {setting: value}, change=True)


def test_a_horizon_that_is_over_is_refused(done: Path) -> None:
    with pytest.raises(InputError, match="give a longer horizon"):
        launch.reopen(done, {"training.steps": 3}, change=True)
    with pytest.raises(InputError, match="give a longer horizon"):
        launch.reopen(done, {"optimization.lr_multiplier": 0.5}, change=True)


@pytest.mark.slow
def test_one_horizon_replaces_another(short: dict[str, object], tmp_path: Path) -> None:
    settings = {key: value for key, value in short.items() if key != "training.steps"}
    launch.build_trainer("quickstart", {**settings, "training.tokens": 4 * 128}, name="a", root=tmp_path).run()
    found = launch.resume(tmp_path / "a", change=True, **{"training.steps": 5})
    assert found.status["step"] == 5
    assert launch.reopen(tmp_path / "a").config["training/tokens"] is None


EDITS = {
    "max_grad_norm: 1.0": ("max_grad_norm: 0.5", "training.max_grad_norm is 0.5 and was 1.0"),
    "lr_multiplier: 1.0": ("lr_multiplier: 3.0", "optimization.lr_multiplier is 3.0 and was 1.0"),
    "seed: 1337": ("seed: 1338", "seed is 1338 and was 1337"),
    "\n  max_grad_norm: 1.0": ("", None),  # the default, as it was
}


@pytest.mark.parametrize("line", EDITS)
def test_a_config_edited_since_the_checkpoint_is_refused_with_both_values(line: str, halfway: Path) -> None:
    run = halfway
    text, (new, words) = (run / "config.yaml").read_text(), EDITS[line]
    assert text.count(line) == 1
    (run / "config.yaml").write_text(text.replace(line, new))
    if words is None:
        assert launch.reopen(run).step == 2
        return
    for change in (False, True):  # the flag alone names no setting
        with pytest.raises(InputError) as refused:
            launch.reopen(run, change=change)
        assert words in str(refused.value) and "--change" in str(refused.value)
    copy = run / "checkpoints/step_00000002/config.yaml"
    assert f"cp {copy} {run / 'config.yaml'}" in str(refused.value)
    (run / "config.yaml").write_bytes(copy.read_bytes())
    assert launch.reopen(run).step == 2


def test_an_edit_given_with_change_is_a_branch_point_from_what_was_trained_with(halfway: Path) -> None:
    run = halfway
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_grad_norm: 1.0", "max_grad_norm: 0.5"))
    again = launch.reopen(run, {"training.max_grad_norm": 0.5}, change=True)
    [branch] = again.branches
    assert branch.changes == {"training.max_grad_norm": {"from": 1.0, "to": 0.5}}


def test_what_cannot_change_the_run_may_be_edited_in_its_config(halfway: Path) -> None:
    run = halfway
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("keep_last: 20", "keep_last: 5"))
    assert launch.reopen(run).logging.keep_last == 5


def test_a_checkpoint_without_a_copy_of_its_config_still_resumes(halfway: Path) -> None:
    """As the earliest versions saved them."""
    run = halfway
    step = run / "checkpoints/step_00000002"
    (step / "config.yaml").unlink()
    write_manifest(step, 2, read_manifest(step).tree)
    assert launch.reopen(run).step == 2
