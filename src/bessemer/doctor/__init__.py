"""What a run directory can still be used for: every part of it is checked, and nothing is changed."""

from bessemer.doctor.diagnose import diagnose, examine
from bessemer.doctor.files import remove_stale
from bessemer.doctor.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "examine", "remove_stale"]
