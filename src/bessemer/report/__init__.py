"""Results of runs: the metrics file, plots, reports, lists of runs."""

from bessemer.report.metrics import MetricsFile
from bessemer.report.pages import write_report
from bessemer.report.summary import baselines, summarize

__all__ = ["MetricsFile", "baselines", "summarize", "write_report"]
