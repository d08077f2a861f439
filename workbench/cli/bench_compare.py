"""`workbench bench compare|ab|import`: saved results, two models in turns, results of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.bench_options import (
    ApiKeyEnvOption,
    ConcurrencyOption,
    LoadOption,
    TokenizerOption,
    WorkloadOption,
    api_key,
    load_of,
)
from workbench.cli.common import MAX_REQUESTS, ConfigOption, JsonOption, emit, epilog, err, heavy, out, run, settings
from workbench.cli.compare import CODES as COMPARE_CODES
from workbench.cli.compare import compare, show_comparison
from workbench.cli.exits import CommandFailed, Exit
from workbench.wiring import layout

AB_CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING, Exit.INTERRUPTED)
A_HELP = "The baseline: a served model, NAME or NAME@VERSION, or the address of an endpoint."


def add_comparisons(app: typer.Typer) -> None:
    """Adds the three commands."""
    app.command(
        "compare",
        epilog=epilog(
            "workbench bench compare 3f2a91c0 9b1c77de --allow engine",
            "workbench bench compare 3f2a91c0 9b1c77de --metric ttft_s/p50 --fail-on-worse --json",
            codes=COMPARE_CODES,
        ),
    )(compare)
    app.command(
        "ab",
        epilog=epilog(
            "workbench bench ab smollm2-135m@1 smollm2-135m@2 --pairs 8",
            "workbench bench ab http://box-a:8000 http://box-b:8000 --model my-model --tokenizer hf:ORG/NAME --json",
            codes=AB_CODES,
        ),
    )(ab)
    app.command(
        "import",
        epilog=epilog(
            "workbench bench import vllm-result.json --hardware h100-80g --units 2",
            "workbench bench import artifacts/profile_export_aiperf.json --model my-model@3 --json",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING),
        ),
    )(import_results)


def ab(
    baseline: Annotated[str, typer.Argument(metavar="A", help=A_HELP)],
    candidate: Annotated[str, typer.Argument(metavar="B", help="What is set against it, named in the same ways.")],
    model: Annotated[str | None, typer.Option(help="The model's name at addresses.")] = None,
    api_key_env: ApiKeyEnvOption = None,
    tokenizer: TokenizerOption = None,
    load: LoadOption = None,
    workload: WorkloadOption = None,
    concurrency: ConcurrencyOption = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each run; 8 a user, 32 at least.", min=1, max=MAX_REQUESTS)
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of runs; three metrics need 7.", min=1, max=200)] = 8,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A metric instead of throughput and the medians of TTFT and TPOT; may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the coin that says who begins each pair; any when left out.")] = (
        None
    ),
    fail_on_worse: Annotated[bool, typer.Option("--fail-on-worse", help="Exit with 1 when B is worse.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures A and B in turns, each run with fresh prompts and a cold cache, and says whether B is better."""
    module, comparing = heavy("workbench.benchmark.turns"), heavy("workbench.comparison.cells")
    needs_stack = config is not None or not all("://" in name for name in (baseline, candidate))
    loaded = settings(config) if needs_stack else None
    more = {
        "load": load_of(load, concurrency, None),
        "workload": workload,
        "num_requests": requests,
        "api_key": api_key(api_key_env),
        "tokenizer": tokenizer,
    }
    try:
        asked = [module.request_of(name, model, **more) for name in (baseline, candidate)]
        pair = run(module.in_turns(loaded, *asked, num_pairs=pairs, seed=seed, on_run=_tell))
        compared = module.judged(pair, metrics=metric)
    except comparing.NotComparable as error:
        raise CommandFailed(str(error)) from None
    except (module.SpecError, comparing.UnknownMetric) as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    except module.WorkloadError as error:
        raise CommandFailed(str(error)) from None
    runs = [[one.to_json() for one in side] for side in (pair.baseline, pair.candidate)]
    emit(compared.to_json() | {"a": runs[0], "b": runs[1]}, as_json, lambda: show_comparison(compared))
    if not compared.has_verdict:
        raise CommandFailed("nothing could be compared; the reasons stand above")
    if fail_on_worse and compared.is_worse:
        raise CommandFailed("B is worse than A")


def _tell(number: int, total: int, side: str, result: Any) -> None:
    rate = result.metrics.get("output_tokens_per_s_per_gpu") or result.metrics.get("prompt_tokens_per_s_per_gpu")
    figure = result.invalid or ("no rate" if rate is None else f"{rate:.1f} tokens/s")
    err.print(f"[{number}/{total}] {side}: {figure}", highlight=False, markup=False)


def import_results(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="vLLM's result JSON or AIPerf's profile export; several are one result."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="NAME or NAME@VERSION; the file's own name when left out.")] = None,
    hardware: Annotated[str, typer.Option(help="The hardware class that was measured.")] = "unknown",
    units: Annotated[int, typer.Option(help="GPUs behind it, for figures a GPU.", min=1, max=4096)] = 1,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes results of other load generators, for `bench compare` and `report page`, marked as what they are."""
    loaded, module = settings(config), heavy("workbench.imported.cells")
    slo = loaded.slo.of(hardware)
    about = module.About(model, hardware, units, module.Slo(slo.ttft_p99_s, slo.tpot_p99_s))
    try:
        folder = module.import_files(files, layout(loaded).results_dir, about)
        cells = folder.cells()
    except (module.NotImportable, heavy("workbench.sweeps.results").ResultsNotWritten) as error:
        raise CommandFailed(str(error)) from None
    data = {"digest": folder.sweep_digest, "folder": str(folder.path), "cells": [cell.to_json() for cell in cells]}
    emit(data, as_json, lambda: _show_imported(folder, cells))


def _show_imported(folder: Any, cells: list[Any]) -> None:
    for cell in cells:
        rate = cell.metrics.get("output_tokens_per_s_per_gpu")
        told = "no rate" if rate is None else f"{rate:.1f} output tokens/s/GPU"
        out.print(f"{cell.spec.cell_id} from {cell.provenance}: {cell.invalid or told}", highlight=False, markup=False)
        for note in cell.notes:
            out.print(f"  {note}", style="dim", highlight=False, markup=False)
    out.print(f"{folder.sweep_digest} in {folder.path}", highlight=False, markup=False, soft_wrap=True)
