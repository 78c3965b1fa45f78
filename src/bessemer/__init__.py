"""Bessemer: train language models, from raw text to a preference-tuned chat model, on JAX.

import bessemer as bm
run = bm.train("quickstart")

Names are loaded when they are first used, so that importing the package costs nothing and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; at run time `_HOME` says where each name lives
    from bessemer.config import configuration, configure, field
    from bessemer.data.plan.mixture import Sampling
    from bessemer.data.rows.rows import DatasetStyle
    from bessemer.data.tokenize.tokenizer import Tokenizer
    from bessemer.evaluate import Evaluator
    from bessemer.job import BasicJob, CheckpointedJob, ExecutionSpec, RestoreableJob
    from bessemer.models.protocol import LanguageModel
    from bessemer.objectives.kl import KLConfig
    from bessemer.rl.trainer import GRPOTrainer, GRPOTrainerConfig
    from bessemer.training.callbacks.base import Callback
    from bessemer.training.kl_trainer import KLDivergenceTrainer, KLDivergenceTrainerConfig, KLDivergenceTrainState
    from bessemer.training.launch import Run, resume, train
    from bessemer.training.settings import BaseTrainerConfig
    from bessemer.training.state import TrainState
    from bessemer.training.trainer import BaseTrainer

__version__ = "0.2.0"

_HOME = {
    "train": "bessemer.training.launch",
    "resume": "bessemer.training.launch",
    "Run": "bessemer.training.launch",
    "BaseTrainer": "bessemer.training.trainer",
    "BaseTrainerConfig": "bessemer.training.settings",
    "KLDivergenceTrainer": "bessemer.training.kl_trainer",
    "KLDivergenceTrainerConfig": "bessemer.training.kl_trainer",
    "KLDivergenceTrainState": "bessemer.training.kl_trainer",
    "KLConfig": "bessemer.objectives.kl",
    "GRPOTrainer": "bessemer.rl.trainer",
    "GRPOTrainerConfig": "bessemer.rl.trainer",
    "TrainState": "bessemer.training.state",
    "Callback": "bessemer.training.callbacks.base",
    "LanguageModel": "bessemer.models.protocol",
    "ExecutionSpec": "bessemer.job",
    "BasicJob": "bessemer.job",
    "CheckpointedJob": "bessemer.job",
    "RestoreableJob": "bessemer.job",
    "Sampling": "bessemer.data.plan.mixture",
    "DatasetStyle": "bessemer.data.rows.rows",
    "Tokenizer": "bessemer.data.tokenize.tokenizer",
    "Evaluator": "bessemer.evaluate",
    "field": "bessemer.config",
    "configure": "bessemer.config",
    "configuration": "bessemer.config",
}

__all__ = [
    "BaseTrainer",
    "BaseTrainerConfig",
    "BasicJob",
    "Callback",
    "CheckpointedJob",
    "DatasetStyle",
    "Evaluator",
    "ExecutionSpec",
    "GRPOTrainer",
    "GRPOTrainerConfig",
    "KLConfig",
    "KLDivergenceTrainState",
    "KLDivergenceTrainer",
    "KLDivergenceTrainerConfig",
    "LanguageModel",
    "RestoreableJob",
    "Run",
    "Sampling",
    "Tokenizer",
    "TrainState",
    "__version__",
    "configuration",
    "configure",
    "field",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bessemer' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
