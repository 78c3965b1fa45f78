"""Plans for hardware that is not here: names, memory against a real GPU, flat traffic, advice, sweep, prices."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import InputError
from bessemer.plan.absent_plan import Compiled, document, estimated, has_compiler, make_absent_plan, make_sweep, tried
from bessemer.plan.document import render_absent
from bessemer.plan.estimate import Choice, estimate, terms_of
from bessemer.plan.trainer import balanced, parse_target
from bessemer.topology import AXES

GIB = 2**30
SCANNED = "architecture.scan_layers=true"  # traced in a fraction of the time
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("name", "chip", "devices", "slices", "grid"),
    [
        ("v5e:4x4", "TPU v5e", 16, 1, (4, 4)),
        ("v5p:2x2x4", "TPU v5p", 16, 1, (2, 2, 4)),
        ("v5p:64", "TPU v5p", 64, 1, (4, 4, 4)),
        ("2xv6e:16x16", "TPU v6e", 512, 2, (16, 16)),
        ("v7x:2x2x1", "TPU v7x", 8, 1, (2, 2, 1)),
        ("h200:8", "H200", 8, 1, (8,)),
        ("H100:64", "H100", 64, 1, (64,)),
        ("a100-80gb:16", "A100 80GB", 16, 1, (16,)),
        ("rtx4090:2", "RTX 4090", 2, 1, (2,)),
    ],
)
def test_names(name: str, chip: str, devices: int, slices: int, grid: tuple[int, ...]) -> None:
    target = parse_target(name)
    assert (target.chip.name, target.devices, target.slices, target.grid) == (chip, devices, slices, grid)


def test_names_that_are_refused() -> None:
    for name, words in {
        "v5e": "CHIP:COUNT",
        "v9z:4": "not in the table",
        "v5e:4x4x4": "two|2 dimensions",
        "v5e:512": "several slices",
        "h200:2x4": "h200:8",
        "h100:0": "no chips",
    }.items():
        with pytest.raises(InputError, match=words):
            parse_target(name)
    assert balanced(32, 3) == (2, 4, 4) and balanced(256, 2) == (16, 16) and balanced(6, 2) == (2, 3)


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (["model.depth=12"], 18.3),
        pytest.param(["model.depth=20"], 49.9, marks=pytest.mark.slow),
        pytest.param(["model.depth=20", "architecture.precision=fp8"], 50.7, marks=pytest.mark.long),
    ],
    ids=["12", "20", "20-fp8"],
)
def test_peak_memory_is_that_of_a_real_h200(words: list[str], measured: float) -> None:
    """The allocator's peak of the step on an H200, 32 × 2,048 tokens × 4, vocabulary 32,768 (benchmarks/LOG.md)."""
    more = ["training.batch_size=128", "model.window_short=0.25"]
    planned = estimated("pretrain", [*words, *more], parse_target("h200:1"))
    assert planned.estimate.accumulate == 4 and planned.estimate.choice.rows == 32
    assert planned.estimate.memory.peak / GIB == pytest.approx(measured, rel=0.1)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Depth 26 on 512 H100, one sequence a device."""
    words = ["model.depth=26", "training.batch_size=512", "topology.fsdp=8", SCANNED]
    return estimated("pretrain", words, parse_target("h100:512"))


def test_bytes_sent_stay_flat_in_fsdp_and_data(deep: Any) -> None:
    """Per device and step at one pass a step: 64 times the devices change them by less than a fifth."""

    def sent(data: int, fsdp: int) -> float:
        choice = Choice(dict.fromkeys(AXES, 1) | {"data": data, "fsdp": fsdp}, 512 // (data * fsdp), ("none",))
        made = estimate(deep.facts, choice, deep.terms)
        assert made.accumulate == 1
        return sum(one.sent for one in made.collectives)

    wide = [sent(1, 8), sent(1, 64), sent(8, 64)]
    joined = [sent(size // 8, 8) for size in (8, 64, 512)]
    assert max(wide) < 1.2 * min(wide) and max(joined) < 1.2 * min(joined), (wide, joined)


def test_what_the_torus_makes_of_the_mesh_is_a_note_of_the_plan(deep: Any) -> None:
    plan = document("pretrain", deep, Compiled(None, (), 1.0, message="no room", notes=("two mesh axes share a side",)))
    assert "two mesh axes share a side" in plan["notes"]
    assert "note       two mesh axes share a side" in render_absent(plan)


def test_memory_follows_the_mesh(deep: Any) -> None:
    def memory(rows: int = 4, remat: str = "none", **axes: int) -> Any:
        sizes = dict.fromkeys(AXES, 1) | axes
        made = tried(deep.facts, Choice(sizes, rows, (remat,)), deep.terms)
        assert made is not None
        return made.memory

    one, eight = memory(), memory(fsdp=8)
    assert eight.parameters == pytest.approx(one.parameters / 8, rel=0.01)
    assert eight.optimizer == pytest.approx(one.optimizer / 8, rel=0.01)
    more = memory(rows=8).activations / one.activations
    assert 1.5 < more <= 2.0, "a scan also keeps the layers' stacked weights, which do not grow"
    assert memory(context=2).activations < 0.7 * one.activations
    assert one.activations / 2 < memory(tensor=2).activations < one.activations
    kept = [memory(remat=remat, fsdp=8).activations for remat in ("block", "none")]
    assert kept[0] < kept[1] / 4
    wrong = Choice(dict.fromkeys(AXES, 1) | {"fsdp": 5}, 1, ("none",))
    assert tried(deep.facts, wrong, deep.terms) is None, "a width that 5 does not divide"


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "heads": (("topology.tensor=8", "model.depth=4", "model.width=384", "model.head_dim=64"), "topology.tensor=8.*6"),
    "stages": (("topology.pipeline=8", "model.depth=4"), "topology.pipeline=8.*model.depth=4"),
    "delta layers": (
        ("topology.context=8", "model.family=qwennext", "model.depth=4", "model.delta_layers=DF"),
        "topology.context=8.*delta layer",
    ),
    "sinks": (
        ("topology.context=8", "model.family=gptoss", "model.depth=2", "model.experts=4"),
        "topology.context=8.*sinks",
    ),
    "stages that differ": (
        ("topology.pipeline=2", "topology.context=4", "model.depth=3"),
        "topology.pipeline=2 with topology.context=4",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_plan_refuses_the_meshes_that_training_does(name: str) -> None:
    words, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        estimated("pretrain", ["training.batch_size=64", *words], parse_target("h200:8"))


@pytest.mark.slow
def test_quantized_bytes_are_counted() -> None:
    """Of frozen matrices: 2 bytes per weight in bfloat16, 0.516 in nf4; on several chips a share of the codes."""
    words = ["model.family=llama", "model.depth=2", "model.width=1024", "model.head_dim=128", "lora.rank=8"]

    def held(quantize: str, chips: str = "h200:1", *more: str) -> tuple[float, int]:
        planned = estimated("pretrain", [*words, f"lora.quantize={quantize}", *more], parse_target(chips))
        boxed, split = planned.facts.step.plan.model.boxed, planned.facts.step.plan.model.split
        return planned.estimate.memory.frozen, split.quantized_parameters(boxed)

    (plain, _), (quantized, weights) = held("none"), held("nf4")
    assert weights > 20_000_000
    assert plain - quantized == pytest.approx((2 - 0.5161) * weights, rel=1e-3)
    split, _ = held("nf4", "h200:4", "topology.fsdp=4")
    plain, _ = held("none", "h200:4", "topology.fsdp=4")
    assert plain - split == pytest.approx((2 / 4 - 0.5 / 4 - 1 / 64) * weights, rel=5e-2)


@pytest.mark.slow
def test_what_does_not_fit_says_what_to_change() -> None:
    words = ["model.depth=4", "training.batch_size=4096", "training.per_device_batch_size=512"]
    small = make_absent_plan("pretrain", words, topology="rtx4090:8", compiles=False)
    memory = small["memory"]
    assert memory["fits"] is False and memory["remedies"]
    for remedy in memory["remedies"]:
        again = make_absent_plan("pretrain", _with(words, remedy["settings"]), topology="rtx4090:8", compiles=False)
        assert again["memory"]["fits"] is True, remedy
    assert "to fit" in render_absent(small) and "DOES NOT FIT" in render_absent(small)


def _with(words: list[str], changes: list[str]) -> list[str]:
    table = dict(word.split("=", 1) for word in [*words, *changes])
    return [f"{key}={value}" for key, value in table.items()]


def test_a_recipes_micro_batch_is_lowered_and_one_that_was_asked_for_is_not() -> None:
    plan = make_absent_plan("pretrain", ["model.depth=12", SCANNED], topology="v5e:4x4", compiles=False)
    assert plan["horizon"]["per_device_batch_size"] < 32
    assert "in place of 32" in plan["derived"]["training.per_device_batch_size"]["reason"]
    with pytest.raises(InputError, match=r"training\.per_device_batch_size from"):
        words = ["model.depth=12", "training.per_device_batch_size=32"]
        make_absent_plan("pretrain", words, topology="v5e:4x4", compiles=False)
    with pytest.raises(InputError, match="cannot be shared by 1,024"):
        make_absent_plan("pretrain", ["model.depth=12"], topology="h100:1024")


def test_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert terms_of("TPU v7x").dollars_hour is None and "edited" in terms_of("H200").source
    own = tmp_path / "own.yaml"
    own.write_text("H200: {dollars_hour: 1.5}\n")
    assert terms_of("H200", own).dollars_hour == 1.5 and terms_of("H200", own).node == 8
    monkeypatch.setenv("BESSEMER_HOME", str(tmp_path))
    (tmp_path / "prices.yaml").write_text("H100: {node: 4}\n")
    assert terms_of("H100").node == 4 and terms_of("H100").source.endswith("prices.yaml")
    for text, words in {
        "H300: {node: 4}": "did you mean",
        "H100: {nodes: 4}": "unknown key 'nodes'",
        "H100: {dollars_hour: free}": "number above 0",
    }.items():
        own.write_text(text)
        with pytest.raises(InputError, match=words):
            terms_of("H200", own)


@pytest.mark.slow
def test_sweep_ends_with_a_plan_that_fits() -> None:
    said: list[str] = []
    plan = make_sweep("pretrain", ["model.depth=8", SCANNED], topology="h100:64", compiles=False, say=said.append)
    assert plan["memory"]["fits"] is True and plan["sweep"]["fit"] > 3 and said
    assert plan["command"].startswith(f"bessemer train pretrain model.depth=8 {SCANNED} topology.")
    again = make_absent_plan("pretrain", plan["command"].split()[3:], topology="h100:64", compiles=False)
    assert again["time"] == plan["time"] and again["memory"] == plan["memory"]
    slower = [row["step_seconds"] for row in plan["sweep"]["best"]]
    assert slower[0] <= 1.05 * min(slower)
    with pytest.raises(InputError, match="by itself"):
        make_sweep("pretrain", ["topology.fsdp=2"], topology="h100:64")
    with pytest.raises(InputError, match="none of"):
        make_sweep("pretrain", ["model.depth=2", "model.width=16384"], topology="rtx4090:1")


def test_one_json_document_through_the_command_line(cli: Cli, tmp_path: Path) -> None:
    words = ("plan", "pretrain", "model.depth=12", SCANNED, "--json", "--placement")
    result = cli(*words, "--topology", "h200:8", "--no-compile", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["method"] == "analytic" and plan["memory"]["fits"] is True and plan["devices"]["devices"] == 8
    assert plan["cost"]["dollars"] > 0 and plan["time"]["days"] > 0 and plan["collectives"]
    assert plan["model"]["parameters"]["total"] == 286_261_730 and not list(tmp_path.iterdir())
    names = {row["name"] for row in plan["placement"]}
    assert {"embedding", "blocks_0/q"} <= names
    assert "split over" in render_absent(plan, with_placement=True)


def test_without_the_compiler_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"\[tpu-plan\].*--no-compile"):
        make_absent_plan("pretrain", ["model.depth=12"], topology="v5e:4x4")


@pytest.mark.long
@pytest.mark.skipif(not has_compiler("tpu"), reason="needs libtpu: pip install 'bessemer[tpu-plan]'")
def test_a_real_compilation_for_tpus(cli: Cli, tmp_path: Path) -> None:
    """A fresh process: libtpu stays loaded, and is not for tests beside it."""
    words = ["pretrain", "model.depth=4", "topology.fsdp=4", "training.batch_tokens=65536"]
    result = cli("plan", *words, "--topology", "v5e:2x2", "--quick", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["method"] == "compiled" and plan["memory"]["fits"] is True
    kinds = {row["kind"] for row in plan["collectives"]}
    assert "all-gather" in kinds and all(row["devices"] == 4 for row in plan["collectives"])
    assert plan["memory"]["peak"] == pytest.approx(plan["memory"]["estimated_peak"], rel=0.5)
