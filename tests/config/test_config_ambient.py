"""`configuration` and `configure`: hydrating classes from the configuration in force."""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import bessemer
from bessemer.config import PYTHON, configuration, configure, current, field, gather, resolve
from bessemer.errors import InputError


@dataclass
class Trainer:
    run: str
    batch: int = field("training/batch_size", default=512)
    words: list[str] = field("training/words", default_factory=list)


class Scale(nn.Module):
    depth: int = field("model/depth", default=2)

    @nn.compact
    def __call__(self, x):
        return x * self.depth


def config(**values):
    return resolve(lambda given: gather(Trainer, Scale), None, values, source=PYTHON)


def test_without_a_configuration_the_defaults_hold():
    assert current() is None
    assert configure(Trainer, run="a") == Trainer("a", 512, [])
    assert Scale(depth=3).depth == 3


def test_fields_come_from_the_configuration_and_overrides_win():
    with configuration(config(**{"training.batch_size": 4, "training.words": "a", "model.depth": 5})) as given:
        assert current() is given
        assert configure(Trainer, run="a") == Trainer("a", 4, ["a"])
        assert configure(Trainer, run="a", batch=7).batch == 7
        configure(Trainer, run="a").words.append("b")
        assert given["training/words"] == ["a"]
        model = configure(Scale)
        assert model.apply({}, jnp.ones(())) == 5.0
        assert jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones(()))) == {}
    assert current() is None


def test_blocks_nest_and_end_on_errors():
    with configuration(config(**{"model.depth": 1})):
        with pytest.raises(RuntimeError), configuration(config(**{"model.depth": 9})):
            raise RuntimeError
        assert configure(Scale).depth == 1
    assert current() is None


def test_a_class_outside_the_schema_keeps_its_defaults_and_its_types():
    @dataclass
    class Outside:
        other: int = field("other/key", default=3)

    class Wrong:
        pass

    with configuration(config()):
        assert configure(Outside).other == 3
        assert isinstance(configure(Wrong), Wrong)

    @dataclass
    class Clash:
        batch: str = field("training/batch_size", default="big")

    with configuration(config()), pytest.raises(InputError, match=r"training\.batch_size.*expected text"):
        configure(Clash)


def test_threads_never_see_each_others_configuration():
    barrier = threading.Barrier(4)
    seen: dict[int, list[int]] = {}
    strangers: list[object] = []

    def work(depth: int) -> None:
        strangers.append(current())
        with configuration(config(**{"model.depth": depth})):
            found = []
            for _ in range(20):
                barrier.wait(timeout=30)
                found.append(configure(Scale).depth)
            seen[depth] = found

    with configuration(config(**{"model.depth": 99})):
        threads = [threading.Thread(target=work, args=(depth,)) for depth in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert configure(Scale).depth == 99
    assert seen == {depth: [depth] * 20 for depth in range(1, 5)}
    assert strangers == [None] * 4


@pytest.mark.slow
def test_only_the_constructors_of_jobs_read_the_configuration_in_force():
    """Everything else is passed a Config, so what it does can be read from its arguments."""
    root = Path(bessemer.__file__).parent
    readers = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith("config/") or name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in ("bessemer.config", "bessemer.config.resolve"):
                readers |= {name for alias in node.names if alias.name in ("configure", "current")}
    assert readers == {"training/phases.py", "training/setup/schema.py"}
