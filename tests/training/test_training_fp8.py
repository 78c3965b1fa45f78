"""A run in fp8: refused without the units, said what is converted, full-precision validation, exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from bessemer.errors import InputError, Stopped
from bessemer.generate.load import load_model
from bessemer.topology import CHIPS, Topology
from bessemer.training import launch
from bessemer.training.callbacks.base import Callback
from bessemer.training.persistence.checkpoints import saved_tree
from bessemer.training.setup.model import compiler_options, flops_share, mfu_peak

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def settings(tiny: dict[str, object]) -> dict[str, object]:
    fp8 = {"architecture.precision": "fp8", "architecture.fp8.emulate": True}
    small = {"model.width": 128, "model.head_dim": 64, "model.depth": 1, "optimization.name": "adamw"}
    return {**tiny, **fp8, **small, "training.steps": 4}


@pytest.fixture(scope="module")
def finished(settings: dict[str, object], on_one_device: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = launch.build_trainer("quickstart", settings, name="whole", root=tmp_path_factory.mktemp("fp8"))
    trainer.run()
    return trainer


def test_refused_on_a_chip_without_float8(settings: dict[str, object], tmp_path: Path) -> None:
    without = {key: value for key, value in settings.items() if key != "architecture.fp8.emulate"}
    with pytest.raises(InputError, match=r"needs float8 units.*architecture\.fp8\.emulate=true") as error:
        launch.build_trainer("quickstart", without, name="refused", root=tmp_path)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


@pytest.mark.slow
def test_the_start_says_what_is_converted(finished: Any) -> None:
    path = finished.run_directory.path
    reason = json.loads((path / "derived.json").read_text())["architecture.precision"]["reason"]
    assert reason.startswith("converted 6 of 9 matrices, skipped 3: ") and "tensorwise, emulated" in reason
    assert reason in (path / "log.txt").read_text()


def test_validation_is_that_of_the_same_weights_without_fp8(
    finished: Any, settings: dict[str, object], tmp_path: Path
) -> None:
    plain = {k: v for k, v in settings.items() if not k.startswith(("architecture.precision", "architecture.fp8"))}
    other = launch.build_trainer("quickstart", plain, name="plain", root=tmp_path)
    other.state = other.state.replace(params=jax.tree.map(jnp.copy, finished.state.params))
    assert other.validate()["val_loss"] == finished.validate()["val_loss"]


def test_state_and_checkpoints_are_float32(finished: Any) -> None:
    leaves = jax.tree.leaves(saved_tree(finished.state))
    assert {str(leaf.dtype) for leaf in leaves} <= {"float32", "int32"}
    loaded = load_model(finished.run_directory)  # needs no float8 units: evaluation does not use them
    assert loaded.model.precision == "fp8" and loaded.step == 4
    weights = load_file(finished.run_directory.model / "model.safetensors")
    assert {str(w.dtype) for w in weights.values()} == {"float32"}


@pytest.mark.slow
def test_resume_is_the_same_run(finished: Any, settings: dict[str, object], tmp_path: Path) -> None:
    class StopAt(Callback):
        def on_batch_end(self, loop: Any) -> None:
            if loop.step == 2:
                loop.request_stop("test")

    first = launch.build_trainer("quickstart", settings, name="part", root=tmp_path, callbacks=[StopAt()])
    with pytest.raises(Stopped):
        first.run()
    second = launch.reopen(tmp_path / "part")
    second.run()
    for one, other in zip(*(jax.tree.leaves(saved_tree(t.state)) for t in (second, finished)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_mfu_is_of_the_float8_peak_and_says_so(finished: Any) -> None:
    """FLOPs are the model's, as in bf16; the denominator is the published dense float8 peak, not the bf16 one."""
    topology, parts, model = finished.topology, finished.model_parts, finished.model
    assert mfu_peak(topology, model) is None and flops_share(topology, parts, False) is None
    on_h200 = Topology(finished.mesh, CHIPS["H200"], topology.settings)
    assert flops_share(on_h200, parts, False) == model.flops_per_token() / 1978.9e12
    assert mfu_peak(on_h200, model) == "the fp8 peak of the H200, 1,979 TFLOP/s"
    assert compiler_options(on_h200, model) is None  # this mesh is a CPU's


def test_a_gpu_is_told_to_leave_float8_products_to_cublas(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topology's options and the precision's together: either alone lets bf16 copies be multiplied."""
    monkeypatch.setattr(Topology, "platform", "gpu")
    assert compiler_options(finished.topology, finished.model) == {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
