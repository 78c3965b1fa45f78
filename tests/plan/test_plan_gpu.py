"""Plans that compile the step for GPUs that are not here: chips, kernels, cuDNN's scratch, notes, compilations."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bessemer.cli.options import skip_cuda_checks
from bessemer.kernels.attention import absent_flash, document_slots, flash_scratch
from bessemer.kernels.grouped import choose_padded
from bessemer.models.layers import rematerialized
from bessemer.plan.absent_plan import document, estimated, make_absent_plan, memory_of
from bessemer.plan.compiled import GENERATIONS, GPUS, Compiled, has_compiler, target_config
from bessemer.plan.document import render_absent
from bessemer.plan.trainer import parse_target
from bessemer.topology import CHIPS, planned_for, traced_device
from bessemer.training.setup.microbatch import StepMemory

Cli = Callable[..., subprocess.CompletedProcess[str]]
GIB = 2**30
COMPILES = pytest.mark.skipif(
    not has_compiler("gpu"), reason="needs XLA's GPU compiler: pip install 'bessemer[gpu-plan]'"
)
TINY = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "rms_norm_eps": 1e-5}
TINY |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
LORA = ["lora.rank=8", "architecture.block_size=512", "training.batch_size=4", "training.per_device_batch_size=4"]
LORA += ["training.steps=4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return f"init={folder}"


def test_every_gpu_of_the_table_is_described() -> None:
    assert set(GPUS) == {name for name in CHIPS if not name.startswith("TPU")}
    assert {gpu.capability for gpu in GPUS.values()} == set(GENERATIONS)
    for name in GPUS:
        text = target_config(CHIPS[name])
        fields = dict(re.findall(r"^  (\w+): (\S+)$", text, re.MULTILINE))
        assert int(fields["device_memory_size"]) == CHIPS[name].memory_gib * GIB
        assert int(fields["memory_bandwidth"]) == int(CHIPS[name].hbm_bytes_s)
        assert int(fields["shared_memory_per_core"]) - int(fields["shared_memory_per_block_optin"]) == 1024
        assert float(fields["clock_rate_ghz"]) > 1 and int(fields["core_count"]) > 100
    h200 = target_config(CHIPS["H200"])
    assert "major: 9 minor: 0 feature_extension: ACCELERATED" in h200 and "core_count: 132" in h200
    assert "ACCELERATED" not in target_config(CHIPS["RTX 4090"])


def test_kernels_ask_the_device_that_is_traced_for() -> None:
    hopper = SimpleNamespace(compute_capability="9.0", core_count=132)
    with planned_for("gpu", hopper):
        assert traced_device() is hopper
        assert choose_padded(1 << 18, 32, jnp.bfloat16, 768, 768) == "mosaic"
    with planned_for("gpu"):
        assert traced_device() is None and choose_padded(1 << 18, 32, jnp.bfloat16, 768, 768) == "batched"
    assert traced_device() == jax.devices()[0]


def test_what_stands_for_cudnn_keeps_the_sums_of_every_slot() -> None:
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.bfloat16) for heads in (4, 2))

    def kept(slots: int) -> list[tuple[int, ...]]:
        layer = rematerialized(lambda q, k: absent_flash(q, k, k, None, slots), ("mlp_hidden",))
        found = jax.eval_shape(lambda q, k: jax.vjp(layer, q, k)[1], q, k)
        return [leaf.shape for leaf in jax.tree.leaves(found)]

    assert (6, 4, 64) in kept(6) and (2, 4, 64) in kept(0)


def test_documents_take_scratch_by_their_slots(tiny: str) -> None:
    """Four rows: one slot each while their number is unknown, with a note; else as many as cuDNN's table has."""

    def planned(*words: str) -> Any:
        return estimated("sft", [tiny, *LORA, *words], parse_target("h200:1"))

    def scratch(made: Any) -> float:
        return made.estimate.memory.attention

    unknown, known = planned(), planned("architecture.max_documents=6")
    assert document_slots(4, 24) == 24 and document_slots(4, 5) == 8
    assert scratch(unknown) == flash_scratch(4, 512, 4, 64) == 4 * 4 * 512 * 4 * 66
    assert scratch(known) == 6 * scratch(unknown)
    assert known.estimate.memory.peak > unknown.estimate.memory.peak
    assert any("max_documents=N" in note for note in document("sft", unknown, None)["notes"])
    assert not any("max_documents" in note for note in document("sft", known, None)["notes"])
    assert scratch(planned("architecture.document_mask=false")) == 0
    assert scratch(estimated("sft", [tiny, *LORA], parse_target("v5e:1"))) == 0


def test_a_compiled_step_and_what_its_compiler_does_not_count(tiny: str) -> None:
    """A GPU's compiler does not fail for memory: whether a step fits follows from its size."""
    planned = estimated("sft", [tiny, *LORA, "architecture.max_documents=6"], parse_target("rtx4090:1"))
    scratch = round(planned.estimate.memory.attention)
    for gib, fits in ((20, True), (23, False)):
        memory = memory_of(planned, Compiled(StepMemory(2 * GIB, 2 * GIB, 2 * GIB, (gib - 2) * GIB), (), 1.0))
        assert (memory["peak"], memory["fits"]) == (gib * GIB + scratch, fits)
        assert memory["attention"] == scratch and memory["activations"] is None


def test_without_the_compiler_a_note_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.plan.absent_plan.has_compiler", lambda platform: False)
    words = ["model.depth=2", "model.width=128"]
    plan = make_absent_plan("pretrain", words, topology="h200:1")
    assert plan["method"] == "analytic" and plan["compiler"] is None
    assert "gpu-plan]" in plan["notes"][0] and "gpu-plan]" in render_absent(plan)
    plan = make_absent_plan("pretrain", words, topology="h200:1", compiles=False)
    assert not any("gpu-plan" in note for note in plan["notes"])


@pytest.mark.parametrize(("devices", "wanted"), [((), "1"), (("/dev/nvidiactl",), None)])
def test_missing_cuda_libraries_are_passed_over_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], wanted: str | None
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path in devices)
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "")
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    skip_cuda_checks()
    assert os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == wanted


# --- real compilations, each in a process of its own ---
def compiled(cli: Cli, folder: Path, *words: str) -> dict[str, Any]:
    result = cli("plan", *words, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    assert (plan["method"], plan["compiler"]) == ("compiled", "XLA's GPU compiler")
    assert plan["memory"]["fits"] is True and plan["memory"]["temporaries"] > 0
    return plan


@COMPILES
@pytest.mark.slow
def test_a_real_compilation_for_a_gpu(cli: Cli, tmp_path: Path) -> None:
    plan = compiled(cli, tmp_path, "quickstart", "--topology", "h200:1")
    assert plan["collectives"] == [] and plan["memory"]["limit"] == 141 * GIB
    assert plan["memory"]["peak"] == pytest.approx(plan["memory"]["estimated_peak"], rel=0.5)


@COMPILES
@pytest.mark.slow
def test_adapters_compile_for_a_consumer_card(cli: Cli, tiny: str, tmp_path: Path) -> None:
    plan = compiled(cli, tmp_path, "sft", tiny, *LORA, "architecture.max_documents=6", "--topology", "rtx4090:1")
    memory = plan["memory"]
    assert memory["attention"] == flash_scratch(24, 512, 4, 64)
    assert memory["frozen"] > 0 and memory["peak"] == pytest.approx(memory["estimated_peak"], rel=0.5)


@COMPILES
@pytest.mark.slow
def test_stages_with_experts_compile_for_gpus(cli: Cli, tmp_path: Path) -> None:
    """Nodes of 8: the tensor and expert axes stay inside, the others cross them."""
    mesh = [f"topology.{axis}=2" for axis in ("data", "pipeline", "expert", "tensor")] + ["topology.fsdp=4"]
    sizes = ["model.depth=4", "model.window=L", "model.experts=8", "model.experts_active=2", "optimization.name=adamw"]
    rows = ["training.batch_size=128", "training.per_device_batch_size=4", "architecture.scan_layers=true"]
    plan = compiled(cli, tmp_path, "pretrain", *sizes, *mesh, *rows, "--topology", "h200:64")
    sent: dict[tuple[str, ...], int] = {}
    for row in plan["collectives"]:
        sent[row["kind"], *row["axes"]] = row["bytes_sent"]
    estimate = estimated("pretrain", [*sizes, *mesh, *rows], parse_target("h200:64")).estimate
    permuted = next(one for one in estimate.collectives if one.kind == "collective-permute")
    assert sent["collective-permute", "pipeline"] == pytest.approx(permuted.sent, rel=0.05)
    assert sent["ragged-all-to-all", "expert"] > 0 and sent["all-gather", "fsdp"] > 0
    assert sent["reduce-scatter", "fsdp"] > 0 and sent["all-reduce", "tensor"] > 0
    nodes = {tuple(row["axes"]): row["nodes"] for row in plan["collectives"]}
    assert nodes["expert",] == nodes["tensor",] == 1 and nodes["pipeline",] == 2
