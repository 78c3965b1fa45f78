"""Judging models: the Evaluator job and the evaluations, one file each."""

from bessemer.evaluate.evaluator import Evaluator, check_tasks, split_tasks

__all__ = ["Evaluator", "check_tasks", "split_tasks"]
