"""The runs of the invariance tests: one recipe, two small datasets, weights that let every gradient through."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.invariance.classes import Member, Settings
from tests.invariance.compare import Arrays, saved_arrays
from tests.processes import TIMEOUT, free_port
from tests.tiny_run import random_params, tiny_tokenizer

from bessemer.checkpoint import Checkpoints
from bessemer.job import RunDirectory
from bessemer.models.gpt import GPT

BLOCK, STEPS = 32, 6
DEPTH = 3  # with two layers the backout is a factor before a norm, and its scale has no gradient

RECIPE = """\
title: six steps
model: {{family: gpt, depth: {depth}, width: 64, head_dim: 16, kv_heads: 4, window: L}}
architecture: {{block_size: {block}, precision: float32, loss_chunks: 1}}
training: {{dataset: '{data}', batch_size: 8, per_device_batch_size: 8, steps: {steps}, validation: false}}
data: {{tokenizer: '{tokenizer}', val_fraction: 0, prefetch: 0}}
logging: {{report_interval: 1, checkpoint_interval: 2, keep_last: 20, progress: none,
          plots: false, preview_interval: 0}}
plugins: ['{recorder}']
callbacks: [record_batches]
"""

PAIRS = [25, 7, 23, 9, 20, 12, 16, 16, 14, 10, 8, 11]
"""(input, target) pairs of each document: best fit makes rows 25+7, 23+9, 20+12, 16+16, 14+11, 10+8 of them."""


def masked_documents(rng: random.Random, vocab: int) -> Iterator[dict[str, list[int]]]:
    """Documents of 4 … 33 tokens of which one … all are trained: no row weighs as much as its neighbor."""
    for number in range(40):
        length = rng.randint(4, BLOCK + 1)
        trained = 1 if number % 3 == 0 else rng.randint(2, length - 1)
        mask = [0] * (length - trained) + [1] * trained
        yield {"input_ids": [rng.randrange(10, vocab) for _ in range(length)], "loss_mask": mask}


def whole_documents(rng: random.Random, vocab: int) -> Iterator[dict[str, list[int]]]:
    for pairs in PAIRS:
        yield {"input_ids": [rng.randrange(10, vocab) for _ in range(pairs + 1)]}


@dataclass
class Runs:
    """Trains members by the command line; a run that was made once is found again."""

    root: Path
    home: Path
    data: dict[str, Path]
    made: dict[Any, Path] = field(default_factory=dict)
    weights: dict[tuple[int, int], Path] = field(default_factory=dict)

    def recipe(self, data: str) -> Path:
        path = self.root / f"{data}.yaml"
        if not path.exists():
            tiny_tokenizer().save(self.root / "tokenizer")
            path.write_text(
                RECIPE.format(
                    depth=DEPTH,
                    block=BLOCK,
                    steps=STEPS,
                    data=f"{self.data[data]}:PADDED",
                    tokenizer=self.root / "tokenizer",
                    recorder=Path(__file__).with_name("recorder.py"),
                )
            )
        return path

    def start(self, settings: Settings) -> Path:
        """A run directory whose only checkpoint holds random weights: a fresh model has matrices of zeros, behind
        which no gradient flows."""
        depth, experts = settings.get("model.depth", DEPTH), settings.get("model.experts", 0)
        if (depth, experts) not in self.weights:
            tokenizer = tiny_tokenizer()
            shape: dict[str, Any] = {"depth": depth, "width": 64, "head_dim": 16, "kv_heads": 4, "window": "L"}
            if experts:
                shape |= {"experts": experts, "experts_shared": settings["model.experts_shared"]}
            balance = settings.get("architecture.experts.balance", "bias")
            model = GPT(**shape, vocab_size=tokenizer.vocab_size, block_size=BLOCK, precision="float32").clone(
                expert_balance=balance
            )
            run = RunDirectory(self.root / f"start-{depth}-{experts}").create()
            about: dict[str, Any] = {"job": "BaseTrainer", "model": {"family": "gpt", **shape}}
            if experts:
                about["architecture"] = {"experts": {"balance": balance}}
            config = json.dumps(about)
            run.config.write_text(config)
            checkpoints = Checkpoints(run.checkpoints)
            state = {"params": random_params(model, seed=depth, scale=0.1)}
            files = {"config.yaml": config, "tokenizer.json": tokenizer.to_json()}
            checkpoints.save(1, state, files=files, meta={"tokenizer_hash": tokenizer.hash}, wait=True)
            checkpoints.close()
            self.weights[depth, experts] = run.path
        return self.weights[depth, experts]

    def start_arrays(self, settings: Settings) -> Arrays:
        return saved_arrays(self.start(settings))

    def train(self, data: str, settings: Settings, member: Member, platform: str = "cpu") -> Path:
        """The finished run of a member; members that come to the same settings share one."""
        settings = {**settings, **member.settings}
        settings = {"init": self.start(settings), **settings}
        words = [f"{key}={value}".format_map(self.data) for key, value in settings.items()]
        words += [f"topology.platform={platform}"]
        key = (data, frozenset(words), member.devices, member.processes)
        if key not in self.made:
            name = f"run-{len(self.made)}"
            recipe = str(self.recipe(data))
            where = ["--runs", str(self.root), "--name", name]
            self.call("train", recipe, *words, *where, member=member, platform=platform)
            self.made[key] = self.root / name
        return self.made[key]

    def call(self, *arguments: str, member: Member, code: int = 0, platform: str = "cpu") -> str:
        """The command in as many processes as the member has; every one must exit with `code`."""
        shared = {
            **os.environ,
            "BESSEMER_HOME": str(self.home),
            "JAX_NUM_CPU_DEVICES": str(member.devices),
            "JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform),
        }
        if member.processes > 1:
            shared["BESSEMER_COORDINATOR"] = f"127.0.0.1:{free_port()}"
            shared["BESSEMER_PROCESSES"] = str(member.processes)
        processes = []
        for number in range(member.processes):
            own = {"BESSEMER_PROCESS_ID": str(number)} if member.processes > 1 else {}
            command = [sys.executable, "-m", "bessemer", *arguments]
            processes.append(
                subprocess.Popen(
                    command, env={**shared, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()  # nothing to a process that has ended
        assert [process.returncode for process in processes] == [code] * member.processes, "\n".join(outputs)
        return outputs[0]


@pytest.fixture(scope="session")
def runs(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("invariance")
    vocab = tiny_tokenizer().vocab_size
    data = {}
    makers: dict[str, Callable[..., Iterator[dict[str, list[int]]]]] = {
        "uneven": masked_documents,
        "documents": whole_documents,
    }
    for name, make in makers.items():
        data[name] = root / f"{name}.jsonl"
        lines = [json.dumps(document) for document in make(random.Random(name), vocab)]
        data[name].write_text("\n".join(lines) + "\n")
    return Runs(root, home, data)
