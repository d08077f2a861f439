"""What an evaluation found, item by item, and the file that keeps it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evals.tasks import Scoring

# A task that generates counts in a gate only where the champion is neither at the floor nor at the ceiling.
COUNTS_FROM, COUNTS_TO = 0.15, 0.85


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One item's score.

    Attributes:
        score: 1.0 for right, else 0.0.
        answer: the generated text; None where none was generated.
        finish_reason: of the generated text, in the engine's word.
        log_likelihood: of the gold, in nats; None where text was generated.
    """

    id: str
    source: str
    task: str
    scoring: Scoring
    score: float
    answer: str | None = None
    finish_reason: str | None = None
    log_likelihood: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A suite's run against one model.

    Attributes:
        digest: of the items asked, `evals.suites.items_digest`.
        engine: the engine's fingerprint, which covers weights, template and flags.
        seconds: of each task.
        mlflow_run_id: where it was logged; None where it was not.
    """

    model: str
    version: str
    suite: str
    seed: int
    digest: str
    engine: str
    concurrency: int
    replica: str | None
    started_at: str
    seconds: Mapping[str, float]
    items: tuple[ItemResult, ...]
    mlflow_run_id: str | None = None

    def accuracy(self) -> dict[str, float]:
        """Mean score of each task, in [0, 1]."""
        scores: defaultdict[str, list[float]] = defaultdict(list)
        for item in self.items:
            scores[item.task].append(item.score)
        return {task: sum(of_task) / len(of_task) for task, of_task in scores.items()}

    def counts_in_gate(self) -> dict[str, bool]:
        """Of each task, with this as the champion: scored by likelihood, or of an accuracy from 15 to 85 %."""
        by_likelihood = {item.task: item.scoring.by_likelihood for item in self.items}
        return {
            task: by_likelihood[task] or COUNTS_FROM <= accuracy <= COUNTS_TO
            for task, accuracy in self.accuracy().items()
        }


def write(evaluation: Evaluation, path: Path) -> None:
    """Keeps an evaluation; the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(asdict(evaluation)), encoding="utf-8")
    unfinished.replace(path)


def read(path: Path) -> Evaluation:
    """An evaluation that was kept.

    Raises:
        ValueError: the file cannot be read, or holds no evaluation.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        items = tuple(ItemResult(**item | {"scoring": Scoring(item["scoring"])}) for item in fields.pop("items"))
        return Evaluation(**fields, items=items)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no evaluation: {error}") from error
