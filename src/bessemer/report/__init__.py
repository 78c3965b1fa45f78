"""What a run measured and how it is shown: the metrics file, plots, the report, lists of runs."""

from bessemer.report.markdown import write_report
from bessemer.report.metrics import MetricsFile
from bessemer.report.summary import Summary, baselines, summarise

__all__ = ["MetricsFile", "Summary", "baselines", "summarise", "write_report"]
