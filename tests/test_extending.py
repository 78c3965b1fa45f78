"""docs/extending.md, as written: its file of parts, its commands, and a run with code of its own resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.documented import ROOT, blocks, commands, make_files, run, said, shorten

PAGE = ROOT / "docs" / "extending.md"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every command of the page has been run, in order."""
    folder = tmp_path_factory.mktemp("extending")
    make_files(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my_parts.py").write_text("\n\n".join(blocks(PAGE, "python")))
    for command in commands(PAGE):
        result = run(shorten(command), folder, home)
        assert result.returncode == 0, said(result)
    return folder


def rows(folder: Path, name: str) -> list[dict]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/"))} for row in kept]


def saved(folder: Path, name: str) -> dict:
    return yaml.safe_load((folder / "runs" / name / "config.yaml").read_text())


def test_each_part_was_used(folder: Path) -> None:
    assert saved(folder, "my-model")["model"]["family"] == "gru"
    assert "nll" in rows(folder, "my-objective")[-2]
    rates = [row["lr"] for row in rows(folder, "my-optimizer") if "lr" in row]
    assert rates == pytest.approx([1e-3 / 2**n for n in range(4)])  # 4 steps, 4 halvings
    assert "< 5" in (folder / "runs/my-data/log.txt").read_text()
    assert "eval/brevity" in rows(folder, "my-evaluation")[-1]
    assert saved(folder, "my-trainer")["training"]["forget"] == 2


def test_what_a_recipe_said_of_another_model_is_named(folder: Path) -> None:
    log = (folder / "runs/my-model/log.txt").read_text()
    assert "recipe quickstart: model.depth, model.head_dim, model.window left out" in log


def test_a_trainer_used_from_python_is_found_again(folder: Path) -> None:
    config = saved(folder, "from-python")
    assert config["job"] == "my_parts:ForgetfulTrainer" and config["model"]["family"] == "gru"
    assert config["plugins"] == [str((folder / "my_parts.py").resolve())]


@pytest.mark.parametrize("name", ["my-model", "my-trainer"])
def test_resuming_a_run_with_plugins_is_the_same_run(folder: Path, home: Path, name: str) -> None:
    whole = rows(folder, name)
    result = run(f"bessemer resume runs/{name} --step 2", folder, home)
    assert result.returncode == 0, said(result)
    assert rows(folder, name) == whole


def test_a_run_from_elsewhere_asks_for_trust(folder: Path, home: Path) -> None:
    """Its code must not even be imported: the file leaves a mark when it is."""
    mark = "import pathlib\npathlib.Path('imported').touch()\n"
    (folder / "my_parts.py").write_text(mark + "\n\n".join(blocks(PAGE, "python")))
    (folder / "runs/my-optimizer/origin.json").write_text(
        json.dumps({"run": "0" * 32, "mac": "0" * 64})  # as good as anybody else can make one
    )
    result = run("bessemer resume runs/my-optimizer --step 2", folder, home)
    assert result.returncode == 2 and "--trust" in result.stderr and "my_parts.py" in result.stderr, said(result)
    assert not (folder / "imported").exists()
    result = run("bessemer resume runs/my-optimizer --step 2 --trust", folder, home)
    assert result.returncode == 0, said(result)
    assert (folder / "imported").exists()


def test_a_model_without_axis_names_on_a_mesh(folder: Path, home: Path) -> None:
    mesh = "topology.fsdp=2 topology.data=1"
    command = f"bessemer train quickstart plugins=[my_parts.py] model.family=gru {mesh} --name mesh"
    result = run(f"JAX_NUM_CPU_DEVICES=2 {shorten(command)}", folder, home)
    assert result.returncode == 0, said(result)
    assert rows(folder, "mesh")[-1]["val_loss"] == pytest.approx(rows(folder, "my-model")[-1]["val_loss"], rel=1e-3)


def test_a_plugin_that_cannot_be_imported_is_not_called_our_bug(folder: Path, home: Path) -> None:
    (folder / "broken.py").write_text("import bessemer\n\nbessemer.nothing_of_that_name\n")
    result = run("bessemer config quickstart plugins=[broken.py]", folder, home)
    assert result.returncode == 2 and "broken.py' line 3" in result.stderr, said(result)
