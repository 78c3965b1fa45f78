"""Plans for fine-tuning an imported model: peaks as measured on an H200, and a config.json without weights."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from bessemer.errors import InputError
from bessemer.plan.absent_plan import Planned, estimated
from bessemer.plan.trainer import parse_target
from bessemer.training import launch

GIB = 2**30
SIZES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json of each size, and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    for size, shape in SIZES.items():
        (folder / size).mkdir()
        shared = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        shared |= {"vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
        shared |= {"tie_word_embeddings": size != "8b"}
        (folder / size / "config.json").write_text(json.dumps({**shared, **shape}))
    return folder


def planned(models: Path, size: str, rows: int, *words: str, recipe: str = "sft") -> Planned:
    batch = [f"training.batch_size={rows}", f"training.per_device_batch_size={rows}", "training.steps=16"]
    given = [f"init={models / size}", "architecture.block_size=2048", *batch, *words]
    return estimated(recipe, given, parse_target("h200:1"))


LORA = "lora.rank=16"
MEASURED = [  # GiB, benchmarks/README.md, 2026-11-16
    ("1b", 8, (), 36.9),
    ("1b", 8, (LORA,), 20.8),
    pytest.param("1b", 8, (LORA, "architecture.remat=none", "architecture.document_mask=false"), 22.2,
                 marks=pytest.mark.slow),
    pytest.param("8b", 4, (LORA, "architecture.remat=none"), 50.3, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("size", "rows", "words", "gib"), MEASURED)
def test_fine_tuning_takes_what_an_h200_measured(
    models: Path, size: str, rows: int, words: tuple[str, ...], gib: float
) -> None:
    assert planned(models, size, rows, *words).estimate.memory.peak / GIB == pytest.approx(gib, rel=0.1)


def test_narrow_state_is_counted_in_its_bytes(models: Path) -> None:
    wide = planned(models, "tiny", 1).estimate.memory
    narrow = planned(models, "tiny", 1, "training.param_dtype=bfloat16", "optimization.state_dtype=int8")
    memory = narrow.estimate.memory
    assert memory.parameters == pytest.approx(wide.parameters / 2, rel=0.001)
    # a row of 64 has a scale of 4 bytes: 1 + 4/64 bytes in place of 4
    assert memory.optimizer == pytest.approx(wide.optimizer * (1 + 4 / 64) / 4, rel=0.02)


def test_inputs_of_blocks_in_host_memory_are_not_counted(models: Path) -> None:
    """Two layers, two rows of 2,048 tokens, width 64, bf16."""
    block, offload = (
        planned(models, "tiny", 2, f"architecture.remat={remat}").estimate.memory.activations
        for remat in ("block", "offload")
    )
    assert block - offload == pytest.approx(2 * 2 * 2048 * 64 * 2, rel=0.01)


@pytest.mark.slow
def test_a_quantized_base_is_counted_in_its_bytes(models: Path) -> None:
    """The floor of 8B over NF4, one row with remat: at most 12 GiB."""
    words = ("lora.rank=16", "lora.quantize=nf4", "architecture.remat=block")
    assert planned(models, "8b", 1, *words).estimate.memory.peak / GIB < 12


def test_frozen_weights_are_counted_apart_in_their_dtype(models: Path) -> None:
    made = planned(models, "tiny", 1, LORA, "lora.base_dtype=bfloat16")
    memory, count = made.estimate.memory, made.facts.step.plan.model.counts["total"]
    assert memory.frozen == pytest.approx(2 * count, rel=0.01)
    assert memory.other < 100


def test_sampling_takes_two_caches_of_all_slots(models: Path) -> None:
    made = planned(models, "tiny", 4, LORA, "grpo.slots=16", recipe="grpo")
    cache = 16 * 2048 * SIZES["tiny"]["num_hidden_layers"] * 2 * 8 * 2 * jnp.dtype(jnp.bfloat16).itemsize
    adapters = made.estimate.memory.parameters / 2  # float32 matrices, cast for decoding
    assert made.estimate.memory.rollout == pytest.approx(2 * cache + adapters, rel=0.05)
    assert planned(models, "tiny", 4, LORA).estimate.memory.rollout == 0


def test_the_configuration_is_named_by_its_file_too_and_is_no_start_for_a_run(models: Path, tmp_path: Path) -> None:
    folder = models / "tiny"
    made = estimated("sft", [f"init={folder / 'config.json'}", "training.steps=1"], parse_target("h200:1"))
    assert any("no weights" in line for line in made.lines)
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        launch.build_trainer("sft", {"init": str(folder), "training.steps": 1}, name="no", root=tmp_path)
