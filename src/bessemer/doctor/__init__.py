"""Checks of a run directory and the verdict on resuming it; nothing is changed."""

from bessemer.doctor.checks import Diagnosis, Finding, remove_stale
from bessemer.doctor.diagnose import diagnose, examine

__all__ = ["Diagnosis", "Finding", "diagnose", "examine", "remove_stale"]
