"""Sweeps, cells and cost tables in MLflow.

    experiment benchmarks/<model>   a sweep is a parent run, each measurement a nested run
    experiment cost-tables          a run holds one table as parquet and JSON
    any other                       `log_run`, for reports and decisions

Logging always goes from disk to MLflow: a sweep keeps its cells in a `ResultsFolder`, and `log_pending` brings
over what is missing there. So a server that is down costs nothing but time, and a call that is repeated, or was
cut off in the middle, finds its runs by their ids and makes no second ones.
"""

from workbench.tracking.inputs import Inputs
from workbench.tracking.live import LiveRun
from workbench.tracking.tracker import Logged, Tracker

__all__ = ["Inputs", "LiveRun", "Logged", "Tracker"]
