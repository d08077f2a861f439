"""How experiments and artifacts are called in MLflow."""

from __future__ import annotations

BENCHMARKS = "benchmarks/"
COST_TABLES = "cost-tables"
CELL_FOLDER = "cell"
CELL_FILE = "cell.json"
RECORDS_FILE = "records.parquet"
SWEEP_FOLDER = "sweep"
COST_TABLE_FOLDER = "cost_table"
