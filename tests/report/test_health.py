"""The sentence at the top of a report: improving, level, worse since its best, and what slows or damages a run."""

import json

import pytest

from bessemer.job import RunDirectory
from bessemer.report import write_report
from bessemer.report.summary import judge_health


def judged(**metrics):
    """Each metric's values at steps 0, 10, 20, …"""
    found = {name.replace("__", "/"): values for name, values in metrics.items()}
    return judge_health(lambda name: [(10 * place, value) for place, value in enumerate(found.get(name, ()))])


@pytest.mark.parametrize(
    ("values", "good", "words"),
    [
        ((4.0, 3.0, 2.0), True, "Improving: validation loss went from 4 to 2, its lowest value, at step 20."),
        ((4.0, 2.0, 2.01), True, "Level: validation loss is 2.01, lowest 2 at step 10."),
        ((4.0, 2.0, 2.3), False, "Worse since step 10: validation loss is 2.3, lowest 2. The model may overfit."),
        ((11.0, 3.0, 3.5), False, "Worse since step 10: validation loss is 3.5, lowest 3. The model may overfit."),
        ((4.0, 4.0), False, "No improvement yet: validation loss was 4 at the start and is 4."),
    ],
)
def test_a_validation_loss_is_judged_by_its_lowest_value(values, good, words):
    health = judged(val_loss=values)
    assert (health.good, health.words) == (good, words)


def test_a_reward_is_better_when_higher():
    assert judged(val_reward=(0.1, 0.5)).words.startswith(
        "Improving: held-out reward went from 0.1 to 0.5, its highest"
    )
    assert not judged(val_reward=(0.1, 0.5, 0.3)).good


def test_before_the_second_validation_the_training_loss_is_judged():
    assert judged() is None and judged(val_loss=(3.0,)) is None
    assert judged(val_loss=(3.0,), loss_smooth=(3.0, 2.5)).good
    assert not judged(loss_smooth=(2.5, 3.0)).good


def test_damage_and_waiting_are_named_beside_an_improvement():
    health = judged(val_bpb=(3, 2), skipped_steps=(0, 2), rollbacks=(0, 1), time__data_wait_pct=(30.0, 40.0, 50.0))
    assert not health.good
    assert health.words.endswith(
        "2 steps skipped: the gradient was NaN or infinite. Rolled back to a checkpoint 1 time. "
        "40% of the time is spent waiting for data."
    )


def test_a_report_opens_with_what_was_trained_how_good_it_is_and_how_to_use_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "mine").create()
    run.config.write_text("objective: pretrain\nmodel: {family: gpt}\nprovenance: {}\n")
    facts = {"parameters": {"total": 1000}, "trained_parameters": 1000, "data": {"my/PMD": {"tokens": 9}}, "steps": 20}
    (run.path / "facts.json").write_text(json.dumps(facts))
    rows = [{"step": 10, "tokens": 100, "val_bpb": 3.0}, {"step": 20, "tokens": 200, "val_bpb": 2.0}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_status(state="running", step=20, exit_code=0, message="")
    assert "## Use it" not in write_report(run, curves=False).read_text()
    run.write_status(state="done", step=20, exit_code=0, message="")
    start = write_report(run, curves=False).read_text().split("## Curves")[0]
    assert "A gpt model of 1k parameters. Data: my (200 tokens). Objective: pretrain." in start
    assert "Improving: bits per byte went from 3 to 2" in start and "bessemer chat runs/mine" in start


@pytest.mark.parametrize("step", [10**400, -(10**400), "x", None, True, [1]])
@pytest.mark.parametrize("metric", ["val_loss", "loss_smooth", "val_reward"])
def test_steps_that_are_no_numbers_are_left_out_of_the_report(step, metric, tmp_path):
    run = RunDirectory(tmp_path / "runs" / "foreign").create()
    run.config.write_text("objective: pretrain\n")
    rows = [{"step": step, metric: value, "skipped_steps": step} for value in (4.0, 2.0, 3.0)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_report(run, curves=False).is_file()


def test_rewards_that_never_differ_are_a_trouble() -> None:
    """The loss of such a run says nothing, and its held-out reward may not exist."""
    health = judged(reward=(0.0, 0.0), flat_groups=(1.0, 1.0), loss_smooth=(1e-9, 1e-8))
    assert not health.good and "nothing to learn" in health.words
    assert health.words.startswith("The reward of sampled answers was 0 at the start and is 0")
    assert judged(reward=(0.1, 0.5), flat_groups=(1.0, 0.8)).good
