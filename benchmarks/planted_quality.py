"""How much worse a planted fault answers, asked through the stack's gateway as production does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.planted_engines import FOLDER, MODEL
from benchmarks.planted_trials import SEED, Found, slices
from evals import readings
from evals.compare import TOLERANCE, PairedItem, compare_paired
from evals.endpoint import Endpoint
from evals.harness import ask
from evals.results import ItemResult
from evals.suite_compare import compare_suites
from evals.tasks import Item
from serving.core.sequential import PairedTest, Verdict
from workbench.config import WorkbenchConfig
from workbench.evaluation import EvalRequest, evaluate_on_stack
from workbench.wiring import gateway_url

_RESULTS = TypeAdapter(tuple[ItemResult, ...])


def quality_in_full(config: WorkbenchConfig, champion: str, candidate: str, tokenizer: Path) -> Found:
    """All of suite `gate`, as `workbench eval run` and `eval compare` do it."""
    first, second = (
        evaluate_on_stack(config, EvalRequest(f"{MODEL}@{version}", suite="gate")).evaluation
        for version in (champion, candidate)
    )
    found = compare_suites(first, second)
    return Found(found.verdict, found.pool.effect, found.pool.interval, found.pool.num_items)


def quality_stopped_early(config: WorkbenchConfig, champion: str, candidate: str, tokenizer: Path) -> Found:
    """One item of each source, those of suite `smoke` first, until a test that may be looked at any time can tell.

    Where none could, all items are compared once more, as a whole.
    """
    url = gateway_url(config)
    sides = [Endpoint(url, f"{MODEL}@{version}", tokenizer) for version in (champion, candidate)]
    test, pairs = PairedTest(TOLERANCE), list[PairedItem]()
    for items in slices():
        # Each has a core of its own, so both are asked at once.
        with ThreadPoolExecutor() as threads:
            mine, theirs = threads.map(_asked, (items, items), sides, (True, False))
        pairs += [PairedItem(a.id, a.source, a.score, b.score) for a, b in zip(mine, theirs, strict=True)]
        for pair in pairs[-len(items) :]:
            test.add([pair.challenger - pair.champion])
        if test.verdict is not Verdict.INCONCLUSIVE:
            break
    report = test.report()
    if test.verdict is Verdict.INCONCLUSIVE:
        whole = compare_paired(pairs)
        return Found(whole.verdict, whole.effect, whole.interval, len(pairs))
    return Found(report.verdict, report.mean or 0.0, report.interval, len(pairs))


def _asked(items: list[Item], endpoint: Endpoint, is_kept: bool) -> tuple[ItemResult, ...]:
    """The champion's answers are kept: every candidate is compared with the same ones."""
    key = readings.digest([endpoint.model, endpoint.concurrency, [item.id for item in items]])
    path = FOLDER / "slices" / f"{key[:24]}.json"
    if is_kept and path.is_file():
        return _RESULTS.validate_json(path.read_bytes())
    found = tuple(ask(items, endpoint, seed=SEED)[0])
    if is_kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_RESULTS.dump_json(found))
    return found
