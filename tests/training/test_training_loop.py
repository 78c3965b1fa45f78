"""Promise 6: one compilation, device values read by `fetch` alone and only when due; exactly `steps` steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.training.reads import Reads, device_reads

from bessemer.errors import InputError, TrainingError
from bessemer.report.summary import training_seconds
from bessemer.topology import make_topology
from bessemer.training import feed as fetching
from bessemer.training import launch, output
from bessemer.training import loop as loop_module
from bessemer.training import metrics as report_module
from bessemer.training.callbacks.base import Callback
from bessemer.training.callbacks.builtin import MetricLogger
from bessemer.training.loop import Loop
from bessemer.training.setup.horizon import report_interval

pytestmark = pytest.mark.usefixtures("on_one_device")


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


class Witness(Callback):
    """Counts hooks and keeps each step's loss as the step returned it."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.losses: dict[int, jax.Array] = {}

    def on_train_begin(self, loop: Any) -> None:
        self.hooks.append("train_begin")

    def on_optimizer_step(self, loop: Any) -> None:
        self.hooks.append(f"step {loop.step}")

    def on_validation(self, loop: Any, row: dict[str, Any]) -> None:
        self.hooks.append(f"validation {row['step']}")

    def on_checkpoint(self, loop: Any, step: int) -> None:
        self.hooks.append(f"checkpoint {step}")

    def on_epoch_begin(self, loop: Any) -> None:
        self.hooks.append("epoch_begin")

    def on_train_end(self, loop: Any) -> None:
        self.hooks.append("train_end")


@pytest.mark.slow
def test_steps_hooks_and_rows(tiny: dict[str, object], tmp_path: Path) -> None:
    witness = Witness()
    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path, callbacks=[witness])
    losses = {}
    original = type(trainer).on_step_end

    def keep(self: Any, state: Any, meta: Any, step: int) -> Any:
        losses[step] = meta["loss"]
        return original(self, state, meta, step)

    trainer.on_step_end = keep.__get__(trainer)  # type: ignore[method-assign]
    trainer.run()
    assert int(trainer.state.step) == 10
    steps = [row for row in metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 11))
    for row in steps:
        assert row["loss"] == float(losses[row["step"]])
        assert row["tokens"] == row["step"] * 8 * 16
    validations = [row["step"] for row in metrics(tmp_path / "a") if "val_loss" in row]
    assert validations == [0, 4, 8, 10]
    hooks = witness.hooks
    assert hooks[0] == "train_begin" and hooks[-1] == "train_end"
    assert hooks.count("epoch_begin") >= 2
    assert hooks.index("step 4") < hooks.index("validation 4") < hooks.index("step 5")
    assert hooks.index("checkpoint 10") < hooks.index("validation 10"), "final save before the final evaluation"
    assert [int(h.split()[1]) for h in hooks if h.startswith("checkpoint")] == [3, 6, 9, 10]
    for name in (
        "config.yaml",
        "derived.json",
        "status.json",
        "log.txt",
        "model/model.safetensors",
        "model/config.json",
    ):
        assert (tmp_path / "a" / name).is_file(), name
    assert json.loads((tmp_path / "a/status.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_fetch_only_at_report_points_and_one_compilation(tiny: dict[str, object], tmp_path: Path) -> None:
    settings = {
        **tiny,
        "training.steps": 20,
        "training.validation": False,
        "logging.report_interval": 5,
        "logging.checkpoint_interval": -1,
        "logging.preview_interval": -1,
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    step = trainer.functions.train_step  # the jitted function, before it is compiled ahead of time
    assert trainer.compile_aot() is True and trainer.compile_aot() is False
    before = fetching.calls
    trainer.run()
    # rows 5, 10, 15 and 20; at the end the preview, and each weight as it is written
    assert fetching.calls - before == 5 + len(jax.tree.leaves(trainer.state.params))
    assert [row["step"] for row in metrics(tmp_path / "a")] == [5, 10, 15, 20]
    assert step._cache_size() == 0, "the loop used the executable compiled ahead"


@pytest.mark.parametrize(
    ("steps", "interval"),
    [
        (1, 1),
        (10, 1),
        (49, 1),
        (99, 1),
        (100, 2),
        (160, 2),
        (400, 5),
        (1000, 20),
        (2000, 40),
        (10**5, 2000),
        (10**6, 20_000),
    ],
)
def test_reports_adapt_to_the_length_of_the_run(steps: int, interval: int) -> None:
    derived = report_interval(steps)
    assert derived.value == interval and str(steps // interval) in derived.reason.replace(",", "")
    assert 50 <= steps // interval <= 100 if interval > 1 else steps < 100


def test_every_run_has_50_to_100_rows_or_one_per_step() -> None:
    for steps in range(1, 30_000):
        interval = report_interval(steps).value
        assert 50 <= steps // interval <= 100 or (interval == 1 and steps < 100), steps


def test_the_interval_of_reports_is_derived_once_and_kept(tiny: dict[str, object], tmp_path: Path) -> None:
    """The rows of a resumed run are those of the uninterrupted one."""
    settings = {key: value for key, value in tiny.items() if key != "logging.report_interval"}
    trainer = launch.build_trainer("quickstart", {**settings, "training.steps": 120}, name="a", root=tmp_path)
    assert trainer.logging.report_interval == trainer.config["logging/report_interval"] == 2
    assert "120 steps: 60 rows" in trainer.derived["logging.report_interval"]["reason"]
    given = {**settings, "training.steps": 120, "logging.report_interval": -1}
    trainer = launch.build_trainer("quickstart", given, name="b", root=tmp_path)
    assert trainer.logging.report_interval == -1 and "logging.report_interval" not in trainer.derived


class VirtualDevice:
    """Runs a real step, but says that each takes a second of a clock of its own, whenever it was dispatched."""

    def __init__(self, train_step: Any):
        self.train_step, self.now, self.free = train_step, 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def __call__(self, state: Any, batch: Any, key: Any) -> Any:
        state, _, meta = self.train_step(state, batch, key)
        self.now += 0.01  # of the host, to dispatch it
        self.free = max(self.free, self.now) + 1.0
        return state, VirtualLoss(self, self.free), meta


class VirtualLoss:
    def __init__(self, device: VirtualDevice, done: float):
        self.device, self.done = device, done

    def is_ready(self) -> bool:
        return self.device.now >= self.done

    def block_until_ready(self) -> VirtualLoss:
        self.device.now = max(self.device.now, self.done)
        return self


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 4])
def test_step_time_runs_from_completion_to_completion(
    interval: int, tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are dispatched ahead of the device, and validation and saving wait for it: neither shows in a row."""
    settings = {**tiny, "logging.report_interval": interval, "logging.checkpoint_interval": 5}
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    trainer.compile_aot()
    device = VirtualDevice(trainer.functions.train_step)
    trainer.functions = trainer.functions._replace(train_step=device)
    for module in (loop_module, report_module):
        monkeypatch.setattr(module, "time", device)
    trainer.run()
    rows = [row for row in metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == [*range(interval, 11, interval)] + [10] * (10 % interval > 0)
    # a step that follows a pause, or the start, is not dispatched ahead: its dispatch shows
    assert all(999.9 <= row["time/step_ms"] <= 1010.1 for row in rows)
    assert training_seconds(rows) == pytest.approx(10, rel=0.01)


def test_a_short_run_says_how_long_it_took() -> None:
    """time/total leaves the first ten steps of a process out, so a run of eight has none."""
    rows = [
        {"step": step, "tokens": 41_000 * step, "time/tok_per_s": 65_000, "time/step_ms": 630, "time/total": 0}
        for step in (4, 8)
    ]
    assert output.speed_lines(rows) == ["  328k tokens in 5s of training, 65k tokens/s"]


READS: dict[str, Callable[[jax.Array], object]] = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "np.stack": lambda array: np.stack([array, array]),
    "float": float,
    "bool": bool,
    "item": lambda array: array.item(),
    "tolist": lambda array: array.tolist(),
    "a comparison": lambda array: bool(array > 1),
    "a format": lambda array: f"{array:.3f}",
    "repr": repr,
    "jax.device_get": jax.device_get,
    "a shard": lambda array: np.asarray(array.addressable_shards[0].data),
    "addressable_data": lambda array: np.asarray(array.addressable_data(0)),
}


@pytest.mark.parametrize("way", READS)
def test_every_way_to_read_a_device_value_is_counted(way: str) -> None:
    replicated = jax.NamedSharding(jax.make_mesh((8,), ("all",)), jax.P())
    made = jax.jit(lambda: jnp.float32(2), out_shardings=replicated)
    with device_reads() as reads:
        READS[way](made())
    assert reads.elsewhere and not reads.fetched
    with device_reads() as reads:
        fetching.fetch(made())
    assert reads.fetched == 1 and not reads.elsewhere


def test_nothing_but_fetch_reads_device_values_between_two_steps(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step to the last, in the loop, its callbacks and the prefetch thread: one `fetch` per report."""
    seen: list[tuple[Reads, int]] = []
    steps = Loop._steps

    def watched(loop: Loop, batches: Any) -> None:
        before = fetching.calls
        with device_reads() as reads:
            steps(loop, batches)
        seen.append((reads, fetching.calls - before))

    monkeypatch.setattr(Loop, "_steps", watched)
    monkeypatch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:2]))
    settings = {
        **tiny,
        "training.steps": 20,
        "training.validation": False,
        "logging.report_interval": 5,
        "logging.checkpoint_interval": -1,
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    assert trainer.topology.mesh.size == 2, "on one device numpy reads unseen"
    trainer.run()
    [(reads, fetches)] = seen
    assert reads.elsewhere == [], "\n".join(reads.elsewhere[:1])
    assert fetches == 4 and reads.fetched > 20


def test_jit_cache_holds_one_program_after_twenty_steps(tiny: dict[str, object], tmp_path: Path) -> None:
    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path)
    with trainer.topology.scope():
        batches = trainer.prefetcher(0)
        for step in range(20):
            trainer.state, _, _ = trainer.functions.train_step(trainer.state, batches.get(step), trainer.key)
        batches.close()
    assert trainer.functions.train_step._cache_size() == 1


@pytest.mark.slow
def test_non_finite_steps_end_the_run_with_exit_3(tiny: dict[str, object], tmp_path: Path) -> None:
    class Poison(Callback):
        def on_batch_begin(self, loop: Any) -> None:
            if loop.step == 5:
                params = dict(loop.trainer.state.params)
                params["head"] = params["head"] * float("nan")
                loop.trainer.state = loop.trainer.state.replace(params=params)

    trainer = launch.build_trainer("quickstart", tiny, name="a", root=tmp_path, callbacks=[Poison()])
    with pytest.raises(TrainingError) as caught:
        trainer.run()
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "after step 6 " in text and "the weights hold NaN" in text, text
    assert "The last good checkpoint is step 3." in text and "optimization.lr" in text
    assert trainer.run_directory.read_status()["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("interval", [-1, 1000])
def test_a_bad_run_ends_within_34_steps_however_rare_its_reports_are(
    interval: int, tiny: dict[str, object], tmp_path: Path
) -> None:
    """Of 10^6 steps every 20,000th is reported; a run that diverges must not use up a GPU until then."""

    class Poison(Callback):
        def on_batch_begin(self, loop: Any) -> None:
            if loop.step == 5:
                loop.trainer.state = loop.trainer.state.replace(
                    params={**loop.trainer.state.params, "head": loop.trainer.state.params["head"] * float("nan")}
                )

    settings = {
        **tiny,
        "training.steps": 200,
        "training.validation": False,
        "logging.report_interval": interval,
        "logging.checkpoint_interval": -1,
        "logging.preview_interval": -1,
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path, callbacks=[Poison()])
    with pytest.raises(TrainingError, match=r"after step 6 .*the weights hold NaN"):
        trainer.run()
    assert trainer.step == 34, "32 steps are read when two more have been dispatched"
    assert not (tmp_path / "a/metrics.jsonl").exists(), "no report was due"


def test_the_status_has_the_step_though_no_row_is_due(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricLogger, "PATIENCE", 0.0)
    seen = {}

    class Look(Callback):
        def on_optimizer_step(self, loop: Any) -> None:
            seen[loop.step] = loop.trainer.run_directory.read_status()["step"]

    settings = {**tiny, "logging.report_interval": -1, "logging.checkpoint_interval": -1, "training.validation": False}
    launch.build_trainer("quickstart", settings, name="a", root=tmp_path, callbacks=[Look()]).run()
    assert [seen[step] for step in (2, 6, 10)] == [1, 5, 9]
    assert [row["step"] for row in metrics(tmp_path / "a")] == [10]


def test_early_end_and_best_checkpoint(tiny: dict[str, object], tmp_path: Path) -> None:
    settings = {
        **tiny,
        "optimization.matrix_lr": 0.0,
        "optimization.lr_multiplier": 0.0,
        "callbacks": ["early_stopping", "best_checkpoint"],
        "training.patience": 2,
        "logging.validation_interval": 2,
        "logging.checkpoint_interval": -1,
    }
    trainer = launch.build_trainer("quickstart", settings, name="a", root=tmp_path)
    trainer.run()
    assert trainer.step == 4, "two validations without a better loss"
    assert "no better" in trainer.run_directory.read_status()["message"]
    assert launch.reopen(tmp_path / "a").done
    with pytest.raises(InputError, match="early_stopping"):
        launch.reopen(tmp_path / "a", {"logging.validation_interval": 3})
