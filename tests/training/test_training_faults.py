"""Out of memory, and other data on resume: the right exit code, the right words, nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.training.test_guard import STEPS, Record, _no_report, guarded, rows, run  # noqa: F401 -- fixtures

from bessemer.errors import InputError, Stopped, TrainingError
from bessemer.registry import evaluations
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback

pytestmark = pytest.mark.usefixtures("on_one_device")

hungry_at = -1


def exhaust_memory() -> None:
    """A petabyte: the runtime's own error, not one of ours."""
    jax.block_until_ready(jnp.zeros(2**48, jnp.float32))


@evaluations.register("hungry")
def hungry(loaded: Any, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    if loaded.step == hungry_at:
        exhaust_memory()
    return {"metric": "nothing", "value": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, STEPS])
def test_an_evaluation_out_of_memory_is_named_and_loses_nothing(
    step: int,
    guarded: dict[str, object],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of training, and after the last step, where the final save came first."""
    monkeypatch.setitem(globals(), "hungry_at", step)
    settings = {**guarded, "callbacks": ["evaluation"], "eval.evaluations": ["hungry"]}
    with pytest.raises(TrainingError) as caught:
        run(settings, tmp_path, "a")
    assert caught.value.exit_code == 3
    saved = {7: 4, STEPS: STEPS}[step]
    for part in (f"evaluation 'hungry' at step {step}", f"checkpoint is step {saved}", "eval.limit", "resume"):
        assert part in str(caught.value), str(caught.value)
    again = launch.reopen(tmp_path / "a", {"eval.evaluations": []})
    assert again.step == saved and again.run_directory.read_status()["exit_code"] == 3
    again.run()
    assert [row["step"] for row in rows(tmp_path / "a") if "loss" in row] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_out_of_memory_in_the_loop_says_what_to_lower(
    guarded: dict[str, object],  # noqa: F811
    tmp_path: Path,
) -> None:
    class Hungry(Callback):
        def on_batch_begin(self, loop: Any) -> None:
            if loop.step == 5:
                exhaust_memory()

    trainer = launch.build_trainer("quickstart", guarded, name="a", root=tmp_path, callbacks=[Hungry()])
    with pytest.raises(TrainingError, match=r"training\.per_device_batch_size=4") as caught:
        trainer.run()
    assert "checkpoint is step 4" in str(caught.value)


@pytest.mark.slow
def test_other_data_on_resume_needs_a_permission_and_is_recorded(
    guarded: dict[str, object],  # noqa: F811
    corpus: Path,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(corpus.read_text())
    settings = {**guarded, "training.dataset": str(data)}
    with pytest.raises(Stopped):
        run(settings, tmp_path, "a", Record(stop_at=5))
    data.write_text("\n".join(corpus.read_text().splitlines()[::-1]) + "\n")
    with pytest.raises(InputError, match=r"training data \(\w+ then, .*allow_data_change"):
        launch.reopen(tmp_path / "a")
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text())
    with pytest.raises(InputError, match=r"training\.dataset cannot be changed"):
        launch.reopen(tmp_path / "a", {"training.dataset": str(other)})
    permitted = {"training.allow_data_change": True, "training.dataset": str(other)}
    again = launch.reopen(tmp_path / "a", permitted)
    assert again.step == 5
    again.run()
    assert "from step 5 on other data" in again.run_directory.read_status()["data_change"]
    assert again.run_directory.log.read_text().count("not the same run any more") == 1
