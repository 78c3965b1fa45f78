"""Golden runs: every registered part is in one, comparison sees what differs, and stored bits still come out."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.golden.__main__ import parser, write
from tests.golden.cases import CASES, Case, Settings, replayed, settings_of, with_needs
from tests.golden.compare import compare, table
from tests.golden.data import write_data
from tests.golden.record import ROOT, environment, hashes, record, results, stored_file, tensors_in

from bessemer import registry
from bessemer.data import DatasetStyle

SETTINGS: list[Settings] = [settings_of(name) for name in CASES]


def values(key: str) -> set[str]:
    return {str(settings[key]) for settings in SETTINGS if key in settings}


def words_of(key: str) -> set[str]:
    """Return the words in all values of a setting: for one that holds a list of names."""
    return {word for value in values(key) for word in re.findall(r"[\w-]+", value)}


def ours(parts: registry.Registry[Any]) -> list[str]:
    """Return the names of what the package registers; other tests register more in the same process."""
    return [entry.name for entry in parts if entry.value.__module__.startswith("bessemer.")]


PARTS: dict[str, tuple[Iterable[str], set[str]]] = {
    "job": (ours(registry.jobs), values("job") | {"BaseTrainer"}),  # that of every case that names no other
    "model": (ours(registry.models), values("model.family")),
    "objective": (ours(registry.objectives), values("objective")),
    "optimizer": (ours(registry.optimizers), values("optimization.name")),
    "schedule": (ours(registry.schedules), values("optimization.schedule")),
    "reward": (ours(registry.rewards), words_of("grpo.rewards")),
    "environment": (ours(registry.environments), words_of("grpo.environment")),
    "row style": (DatasetStyle.__members__, words_of("training.dataset")),
}


@pytest.mark.parametrize("kind", list(PARTS))
def test_every_registered_part_is_in_a_golden_case(kind: str) -> None:
    registered, used = PARTS[kind]
    missing = sorted(set(registered) - used)
    assert not missing, f"add a case with each {kind} of {missing} to tests/golden/cases.py"


def test_cases_use_several_meshes_processes_and_interruptions() -> None:
    def some(condition: Any) -> list[Case]:
        return [case for case in CASES.values() if condition(case)]

    assert len(CASES) >= 16
    for axis in ("data", "pipeline", "fsdp", "expert", "tensor", "context"):
        assert any(int(size) > 1 for size in values(f"topology.{axis}")), axis
    assert some(lambda case: case.processes > 1) and some(lambda case: len(case.resumed) > 0)
    assert {case.interrupted.signal for case in CASES.values() if case.interrupted} == {"SIGKILL", "SIGTERM"}
    for switch in ("lora.rank", "training.ema", "architecture.fp8.emulate", "architecture.lookup.after_layers"):
        assert values(switch), switch


def test_a_case_comes_after_those_it_needs() -> None:
    order = list(CASES)
    for name, case in CASES.items():
        assert all(order.index(needed) < order.index(name) for needed in case.needs), name
    assert with_needs(["on-policy-distill"]) == ["gpt", "sft", "on-policy-distill"]


def test_data_is_the_same_every_time(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_data(folder)
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) >= 6
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)


def make_run(folder: Path, loss: float = 2.5, tensor: bytes = b"\0\0\x80\x3f") -> dict[str, Any]:
    """Return the record of a run with one row, one setting and one tensor, and a checkpoint that does not count."""
    run = folder / "runs" / "one"
    for name in ("model", "checkpoints/step_00000001"):
        (run / name).mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (run / "model/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + tensor)
    row = {"step": 1, "loss": loss, "grad_norm": float("nan"), "time/step_ms": id(folder), "mem/peak": id(run)}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    config = f"training: {{dataset: [{{name: {folder}/corpus.jsonl, list: []}}]}}\n"
    (run / "config.yaml").write_text(config + "provenance: {training.dataset: command line}\n")
    (run / "checkpoints/step_00000001/config.yaml").write_text("other: true\n")
    return {"cases": {"one": results(run, folder)}}


def first_difference(a: dict[str, Any], b: dict[str, Any], **options: Any) -> str | None:
    (outcome,) = compare(a, b, **options)
    return outcome.difference


def test_equal_runs_in_different_folders_are_equal(tmp_path: Path) -> None:
    """Paths, clocks and allocators do not count; NaN is equal to itself."""
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert first_difference(a, b) is None and "1 of 1 cases equal" in table(compare(a, b))
    assert set(a["cases"]["one"]["config"]) == {"config.yaml"}
    assert first_difference(hashes(a), hashes(b)) is None


def test_a_saved_record_is_equal_to_the_one_it_was_made_of(tmp_path: Path) -> None:
    """JSON sorts the keys of rows and settings, which must not count, nor change a stored hash."""
    found = make_run(tmp_path / "a")
    write(tmp_path / "saved.json", found)
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert first_difference(saved, found) is None
    assert first_difference(hashes(saved), hashes(found)) is None


def test_metadata_that_name_a_checkpoint_do_not_count(tmp_path: Path) -> None:
    found = []
    for origin in ("one", "another"):
        header = {"__metadata__": {"weights": origin}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        text = json.dumps(header).encode()
        path = tmp_path / origin / "adapters.safetensors"
        path.parent.mkdir()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        found.append(tensors_in(path))
    assert found[0] == found[1] and found[0].keys() == {"w", "file"}


def test_metadata_with_the_checksum_of_a_path_do_not_count(tmp_path: Path) -> None:
    found = []
    for config in ({"base": {"path": "one"}}, {"base": {"path": "another"}}, {}):
        header = {"__metadata__": {"checksums": json.dumps(config)}}
        header |= {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        text = json.dumps(header).encode()
        path = tmp_path / str(len(found)) / "model.safetensors"
        path.parent.mkdir()
        path.with_name("config.json").write_text(json.dumps(config))
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        found.append(tensors_in(path))
    assert found[0] == found[1] and found[0]["w"] == found[2]["w"] and found[0]["file"] != found[2]["file"]


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    loss, weight = make_run(tmp_path / "b", loss=2.5000001), make_run(tmp_path / "c", tensor=b"\1\0\x80\x3f")
    assert first_difference(a, loss) == "metrics.jsonl row 1 (step 1) loss: 2.5 | 2.5000001"
    assert (first_difference(a, weight) or "").startswith("model/model.safetensors w: ")
    assert "metrics.jsonl" in (first_difference(hashes(a), hashes(loss)) or "")
    assert "model.safetensors" in (first_difference(hashes(a), hashes(weight)) or "")
    assert first_difference(a, {"cases": {}}) == "only in the first record"
    assert "DIFFERENT" in table(compare(a, loss))


def test_renamed_settings_are_mapped(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for part in ("config", "provenance"):
        settings = b["cases"]["one"][part]["config.yaml"]
        settings["data.sources"] = settings.pop("training.dataset")
    assert "data.sources: absent" in (first_difference(a, b) or "")
    assert first_difference(a, b, renamed={"training.dataset": "data.sources"}) is None
    assert first_difference(a, b, ignored=["config", "provenance"]) is None


def test_a_record_of_another_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"environment": {**environment(), "jaxlib": "0.0.1"}, "cases": {}}))
    options = parser().parse_args(["check", str(file)])
    assert options.call(options) == 2
    assert "recorded elsewhere" in capsys.readouterr().err


@pytest.mark.slow
def test_replayed_cases_give_the_stored_bits() -> None:
    """A change of code that is not meant to change results has not. Where it is meant to: store them again."""
    file = stored_file()
    if not file.exists():
        pytest.skip(f"no golden hashes for this machine type ({file.name}): python -m tests.golden store")
    stored = json.loads(file.read_text(encoding="utf-8"))
    outcomes = compare(stored, hashes(record(ROOT, replayed(), quiet=True)))
    assert not any(one.difference for one in outcomes), (
        f"{table(outcomes)}\nWhat differs in detail: python -m tests.golden compare REVISION WORKTREE --cases NAME. "
        "If it is meant: python -m tests.golden store"
    )
