"""The report and the lists: complete from a full run, honest about a bare one, never a crash."""

import json

import pytest
from click.testing import CliRunner

from bessemer.console import compact, duration, size, table
from bessemer.errors import InputError
from bessemer.job import RunDirectory, RunLock
from bessemer.report import baselines, summarize, write_report
from bessemer.report.plots import _learning_rate, new_figure
from bessemer.report.tables import comparison, remarks, run_rows, runs_table


def full_run(root, name="full", lr=0.02):
    run = RunDirectory(root / name).create()
    run.config.write_text(
        f"training: {{steps: 40, batch_size: 8}}\noptimization: {{lr: {lr}}}\nlogging: {{watch: []}}\n"
        "provenance: {training.steps: command line, optimization.lr: recipe quickstart}\n"
    )
    run.derived.write_text(json.dumps({"training.batch_size": {"value": 8, "reason": "fits | in memory"}}))
    facts = {
        "data": {"cats": {"documents": 100, "tokens": 5000, "truncated": 2, "padding_share": 0.0123}},
        "parameters": {"matrix": 900, "embedding": 100, "total": 1000},
        "flops_per_token": 6e6,
        "flops_per_token_causal": 5e6,
        "total_flops": 3e10,
        "steps": 40,
        "tokens": 5120,
        "devices": {"platform": "cpu", "devices": 1},
        "versions": {"jax": "0.10.2"},
        "determinism": "bit-exact",
        "baselines": {"gzip": 2.5, "xz": 2.25},
    }
    (run.path / "facts.json").write_text(json.dumps(facts))
    rows = []
    for step in range(10, 41, 10):
        loss = 4 - step / 20
        rows.append(
            {
                "step": step,
                "loss": loss,
                "loss_smooth": loss + 0.1,
                "lr": lr,
                "grad_norm": 1.0,
                "tokens": step * 128,
                "time/tok_per_s": 1e4 * step,
                "time/mfu": 0.5,
                "time/mfu_causal": 0.4,
                "time/total": 45.0,
                "time/step_ms": 1625.0,
            }
        )
        rows.append({"step": step, "val_loss": loss, "val_bpb": 2.0 if step == 30 else 3.0})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"step": step, "prompt": "a ```b```", "completion": f" text {step}\nmore"} for step in (20, 40)]
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in samples))
    (run.eval / "bpb_step40.json").write_text(
        json.dumps({"task": "bpb", "step": 40, "metric": "bits per byte", "value": 3.0})
    )
    run.write_status(state="done", step=40, exit_code=0, message="")
    return run


def test_a_full_report_says_everything(tmp_path):
    run = full_run(tmp_path)
    path = write_report(run)
    text = path.read_text()
    assert "**3.0000 bits per byte** on held-out text after 40 of 40 steps (lowest 2.0000 at step 30)" in text
    for part in (
        "gzip 2.5000, xz 2.2500",
        "| minimum bits per byte | 2.0000 (step 30) |",
        "| final validation loss, nats per token | 2.0000 |",
        "| tokens : parameters | 5.12 |",
        "| FLOPs per token | 6M |",
        "| MFU (attention counted in full) | 50.0% |",
        "| MFU (causal attention only) | 40.0% |",
        "| training time of all steps | 1m05s |",
        "| peak memory of a device | not reported by a CPU; `bessemer plan` shows what the step needs |",
        "| devices | 1 × cpu |",
        "| training.steps | 40 | command line |",
        "<details><summary>All settings</summary>",
        "fits \\| in memory",
        "| padding share | 1.23% |",
        "| dropped | not recorded |",
        "| embedding | 100 |",
        "| version of jax | 0.10.2 |",
        "| determinism | bit-exact |",
        "````text\na ```b```▸ text 40\nmore\n````",
        "| bpb | 40 | bits per byte | 3.0000 |",
    ):
        assert part in text, part
    assert "text 20" not in text
    names = ("loss", "bits_per_byte", "learning_rate", "grad_norm", "throughput")
    for name in names:
        assert f"(plots/{name}.png)" in text
        assert (run.plots / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_chip_without_a_known_peak_has_a_reason_and_no_mfu(tmp_path):
    run = full_run(tmp_path)
    facts = json.loads((run.path / "facts.json").read_text())
    axes = {"data": 2, "fsdp": 1}
    facts["devices"] = {"axes": axes, "device_kind": "abacus", "devices": 2, "processes": 2, "x64": False}
    (run.path / "facts.json").write_text(json.dumps(facts))
    run.metrics.write_text('{"step": 1, "loss": 2.0, "time/mfu": null}\n')
    text = write_report(run).read_text()
    assert "| MFU | unknown: the peak of a abacus is not in the table of chips |" in text
    assert "| devices | 2 × abacus, mesh data 2 × fsdp 1, 2 processes, x64 false |" in text
    run.metrics.write_text('{"step": 1, "loss": 0.7, "loss_smooth": 0.7, "pref_acc": 0.5}\n')
    assert "| final training loss, smoothed | 0.7000 |" in write_report(run).read_text(), "it is of pairs"


def test_rates_of_groups_that_differ_much_are_drawn_on_a_log_axis(tmp_path):
    """Else all but the largest is one flat line."""
    run = full_run(tmp_path)
    row = {"step": 1, "lr": 0.02, "lr/matrix": 0.02, "lr/embedding": 1.0}
    run.metrics.write_text(json.dumps(row) + "\n")
    _, axes = new_figure()
    assert _learning_rate(axes, summarize(run)) and axes.get_yscale() == "log"
    assert axes.get_legend_handles_labels()[1] == ["embedding", "matrix"]


def test_a_bare_or_damaged_run_is_reported_with_gaps(tmp_path):
    run = RunDirectory(tmp_path / "bare").create()
    text = write_report(run).read_text()
    assert "No result yet" in text and text.count("not recorded") > 15 and not run.plots.exists()
    run.derived.write_text("{broken")
    run.config.write_text("a: [b\n")
    run.metrics.write_text('nonsense\n{"step": 1, "loss": 2.0}\n')
    run.status.write_text("[]")
    text = write_report(run).read_text()
    assert "derived.json could not be read" in text and "config.yaml could not be read" in text
    assert "line 1 is not a JSON object" in text


def test_a_run_with_nulls_and_one_point(tmp_path):
    run = RunDirectory(tmp_path / "one").create()
    run.metrics.write_text(
        '{"step": 1, "loss": null, "time/mfu": null, "grad_norm": 3.0}\n{"step": 1, "val_loss": 2.5}\n'
    )
    text = write_report(run).read_text()
    assert "**Loss 2.5000** after 1 of ? steps; bits per byte: not recorded." in text
    assert "plots/grad_norm.png" in text and "plots/throughput.png" not in text


def test_the_list_tells_running_from_crashed(tmp_path):
    full_run(tmp_path)
    alive, dead = (RunDirectory(tmp_path / name).create() for name in ("alive", "dead"))
    dead.write_status(state="running", step=3)
    (tmp_path / "not-a-run").mkdir()
    with RunLock(alive):
        alive.write_status(state="running", step=5)
        rows = {row["name"]: row for row in run_rows(tmp_path)}
    assert {name: row["state"] for name, row in rows.items()} == {"full": "done", "alive": "running", "dead": "crashed"}
    assert rows["full"]["steps"] == 40 and rows["full"]["tok_per_s"] == 3e5 and rows["full"]["size_bytes"] > 1000
    assert 0 <= rows["dead"]["age_seconds"] < 60
    (line,) = remarks(list(rows.values()))
    assert line.startswith("crashed (resume continues): dead.")
    (line,) = remarks([rows["alive"] | {"age_seconds": 125.0}])
    assert "alive has had no heartbeat for 2m05s" in line


def test_the_table_fits_eighty_columns(tmp_path):
    row = {
        "state": "stopped",
        "step": 120_000,
        "steps": 200_000,
        "loss": 12.345,
        "result": {"metric": "val_bpb", "value": 1.23456, "unit": "bpb"},
        "tok_per_s": 1_234_567,
        "age_seconds": 90_000,
        "size_bytes": 123_456_789,
    }
    rows = [{"name": "quickstart-20250101-120000", **row}, {"name": "a", **row}]
    narrow, wide = runs_table(rows, 80), runs_table(rows)
    assert max(map(len, narrow.splitlines())) <= 80 and "-120000" in narrow.splitlines()[1]
    assert "quickstart-20250101-120000" in wide


@pytest.mark.parametrize(
    ("newest", "shown"),
    [
        ({"val_loss": 0.5, "val_bpb": 1.25}, "1.2500 bpb"),
        ({"val_loss": 0.5, "val_pref_acc": 0.9609, "pref_acc": 1.0}, "96.1% pref. acc."),
        ({"reward": 0.2, "val_reward": 0.6953}, "0.6953 reward"),
        ({"reward": 0.25}, "0.2500 reward, train"),
        ({"loss": 3.0}, "-"),
    ],
)
def test_every_objective_has_its_result_in_the_list(tmp_path, newest, shown):
    run = RunDirectory(tmp_path / "mine").create()
    run.write_status(state="done", step=5)
    run.metrics.write_text(json.dumps({"step": 5, **newest}) + "\n")
    (row,) = run_rows(tmp_path)
    assert shown in runs_table([row]).splitlines()[1]


def test_the_runs_command(tmp_path):
    from bessemer.cli.runs import command

    full_run(tmp_path / "runs")
    shown = CliRunner().invoke(command, [str(tmp_path / "runs")], catch_exceptions=False)
    assert "full" in shown.stdout and "40/40" in shown.stdout and "3.0000" in shown.stdout
    rows = json.loads(CliRunner().invoke(command, [str(tmp_path / "runs"), "--json"]).stdout)
    assert rows[0]["name"] == "full"
    (tmp_path / "empty").mkdir()
    assert "no runs" in CliRunner().invoke(command, [str(tmp_path / "empty")]).stdout
    assert isinstance(CliRunner().invoke(command, [str(tmp_path / "nowhere")]).exception, InputError)


def test_comparing_runs(tmp_path, monkeypatch):
    from bessemer.cli.compare import command

    one, two = full_run(tmp_path / "runs", "one"), full_run(tmp_path / "runs", "two", lr=0.05)
    text = comparison([summarize(one), summarize(two)])
    assert "optimization.lr" in text and "0.05" in text and "training.steps" not in text
    assert "lowest bits per byte" in text
    assert "The settings are the same." in comparison([summarize(one), summarize(one)])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["one", "two"], catch_exceptions=False)
    assert "curves: compare.png" in result.stdout and (tmp_path / "compare.png").stat().st_size > 1000
    assert isinstance(CliRunner().invoke(command, ["one"]).exception, InputError)


def test_the_report_command(tmp_path):
    from bessemer.cli.report import command

    run = full_run(tmp_path)
    result = CliRunner().invoke(command, [str(run.path)], catch_exceptions=False)
    assert result.stdout.strip() == str(run.report) and run.report.is_file()


def test_compressors_as_baselines():
    text = b"the cat sat on the mat, and then the cat sat on another mat. " * 50
    whole, pieces = baselines(text), baselines([text[:100], text[100:]])
    assert whole == pieces and 0 < whole["gzip"] < 2 and 0 < whole["xz"] < 2
    noise = bytes(range(256)) * 4
    assert baselines(noise[:256])["gzip"] > 8
    assert baselines([]) == {}


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (compact, 1_234_567, "1.23M"),
        (compact, 12, "12"),
        (compact, None, "-"),
        (duration, 45, "45s"),
        (duration, 725, "12m05s"),
        (duration, 12_000, "3h20m"),
        (duration, 187_200, "2d04h"),
        (duration, None, "-"),
        (size, 512, "512B"),
        (size, 1536, "1.5K"),
        (size, 20 << 30, "20G"),
        (size, None, "-"),
    ],
)
def test_short_forms(function, value, expected):
    assert function(value) == expected


def test_columns_are_aligned():
    assert table(("name", "n"), [("a", "1"), ("long", "100")]) == "name    n\na       1\nlong  100"
