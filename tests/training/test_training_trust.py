"""Which code a saved run names, and how a trainer class used from Python is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

import bessemer as bm
from bessemer.config import PYTHON, Config, resolve
from bessemer.job.trust import named_code
from bessemer.training.setup.schema import record_class, trainer_schema


class Own(bm.BaseTrainer[bm.BaseTrainerConfig, bm.LanguageModel]):
    pass


@pytest.mark.parametrize(
    "tree",
    [
        {"plugins": ["evil"]},
        {"job": "evil:Job"},
        {"objective": "evil:loss"},
        {"callbacks": ["preview", "evil:Callback"]},
        {"model": {"family": "evil:Model"}},
        {"optimization": {"name": "evil:optimizer"}},
        {"optimization": {"schedule": "evil:schedule"}},
        {"training": {"dataset": [[{"name": "evil:texts", "rate": 1.0}]]}},
        {"training": {"dataset": "evil:texts"}},
    ],
    ids=str,
)
def test_code_is_seen_wherever_it_can_be_named(tree: dict) -> None:
    assert [word for word in named_code(tree) if "evil" in word]


def test_shipped_parts_are_not_code_of_the_users(tmp_path: Path) -> None:
    odd = tmp_path / "a:b.txt"
    odd.touch()
    tree = {"job": "BaseTrainer", "model": {"family": "gpt"}, "training": {"dataset": [[{"name": str(odd)}]]}}
    assert named_code({**tree, "plugins": [], "callbacks": ["preview"], "optimization": None}) == []


def config_of(trainer: type) -> Config:
    return resolve(lambda values: trainer_schema(trainer, values), source=PYTHON)


def test_a_class_used_directly_is_written_down() -> None:
    config = config_of(Own)
    record_class(config, Own)
    assert config["job"] == f"{Path(__file__).stem}:Own"
    assert config["plugins"] == [str(Path(__file__).resolve())]
    assert config["model/family"] == "bessemer.models.protocol:LanguageModel"


def test_the_base_class_is_known_by_its_name() -> None:
    config = config_of(bm.BaseTrainer)
    record_class(config, bm.BaseTrainer)
    assert (config["job"], config["plugins"], config["model/family"]) == ("BaseTrainer", [], "gpt")
