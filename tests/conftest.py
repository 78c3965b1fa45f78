"""One place that says what the tests run on: the CPU, eight virtual devices, one home for prepared data."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.documented import not_run
from tests.processes import TIMEOUT
from tests.quick import OLDER_LOOPS
from tests.skips import SkipLedger

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

from bessemer.topology import Topology, make_topology

# By default an example that takes 200 ms is a failure, and so are examples that come slowly: a busy machine has both.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

WORDS = ["the", "a", "red", "blue", "green", "fox", "dog", "cat", "runs", "jumps", "sleeps", "over", "under"]
WORDS += ["near", "river", "hill", "tree", "quickly", "and", "then"]

LONGEST = {"test_docs", "test_grpo_process", "test_elastic", "test_invariance", "test_invariance_mesh"}
LONGEST |= {
    "test_launch_local",
    "test_training_processes",
    "test_training_init",
    "test_training_phases",
    "test_hygiene",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nothing-missing", action="store_true", help="a test skipped for a missing package fails")


def pytest_configure(config: pytest.Config) -> None:
    """`-m gpu` runs on a GPU, whatever the shell says, here and in the processes that are started: on a CPU some of
    these tests would pass and show nothing."""
    if config.option.markexpr == "gpu":
        if shutil.which("nvidia-smi") is None:
            raise pytest.UsageError("-m gpu needs an NVIDIA GPU and its driver (nvidia-smi was not found).")
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # the first is the default; one test compares the two
    config.pluginmanager.register(SkipLedger(config.getoption("--nothing-missing")))
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if os.environ["JAX_PLATFORMS"] == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of a minute and more come first (`make slow` keeps this order): one that began last would be waited for."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared data and compiled programs of the tests live."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session", autouse=True)
def _private_home(home: Path) -> Iterator[None]:
    """Also for what fixtures of a module make: runs are marked with the secret in there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        yield


@pytest.fixture
def newer_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused loops as users get them: the older ones round by what stands beside a sum, so two programs that share it
    may differ in a last bit."""
    if OLDER_LOOPS in os.environ.get("XLA_FLAGS", ""):
        wanted = {OLDER_LOOPS.removeprefix("--").partition("=")[0]: True}
        monkeypatch.setattr(Topology, "compiler_options", property(lambda self: wanted))


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs as users get them, where something is learned in many steps: `make test` asks the compiler for less."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "").replace(OLDER_LOOPS, ""))
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def on_one_device(home: Path) -> Iterator[None]:
    """Trainers made in this process use one of the eight devices, also those of a module's own fixtures."""
    from bessemer.training import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BESSEMER_HOME", str(home))
        patch.setattr(launch, "make_topology", lambda settings: make_topology(devices=jax.devices()[:1]))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small documents: an epoch of the tiny run below ends within its ten steps."""
    path = tmp_path_factory.mktemp("corpus") / "tiny.jsonl"
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(10, 30))) + "." for _ in range(20)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> dict[str, object]:
    """Settings of a run that takes seconds: two layers, ten steps, two micro-batches each, everything logged."""
    return {
        "training.dataset": str(corpus),
        "training.batch_size": 8,
        "training.per_device_batch_size": 4,
        "training.steps": 10,
        "training.validation_steps": 12,
        "data.tokenizer": "train:300",
        "data.val_fraction": 0.2,
        "model.depth": 2,
        "model.width": 32,
        "model.head_dim": 16,
        "architecture.block_size": 16,
        "optimization.name": "muon",
        "logging.report_interval": 1,
        "logging.validation_interval": 4,
        "logging.checkpoint_interval": 3,
        "logging.keep_last": 20,
        "logging.progress": "none",
        "logging.plots": False,  # a second each, and the previews two: for tests that look at them
        "logging.preview_interval": 0,
    }


def words(settings: dict[str, object]) -> list[str]:
    """Settings as command-line words."""
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture
def cli(home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command line in a fresh process."""

    def call(*arguments: str, devices: int = 1, env: dict[str, str] | None = None, **options: object):
        variables = {**os.environ, "BESSEMER_HOME": str(home), "JAX_NUM_CPU_DEVICES": str(devices), **(env or {})}
        command = [sys.executable, "-m", "bessemer", *arguments]
        return subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            **options,  # type: ignore[call-overload]
        )

    return call


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which documented commands are not run, wherever the tests of the documentation ran."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if any(getattr(report, "nodeid", "").startswith("tests/test_docs.py") for report in reports):
        terminalreporter.section("documented commands that CI does not run as they are shown")
        for page, command, reason in not_run():
            terminalreporter.write_line(f"{page}: {command}  ({reason})")
