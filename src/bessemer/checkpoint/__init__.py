"""Checkpoints: saved asynchronously, committed by one rename, verified by checksum, restored strictly."""

from bessemer.checkpoint.store import Checkpoints

__all__ = ["Checkpoints"]
