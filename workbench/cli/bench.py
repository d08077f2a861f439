"""`workbench bench` (`bench run`): one load on a model of the stack, or on any endpoint that speaks the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from serving.core.errors import ServingError
from workbench.cli.bench_compare import add_comparisons
from workbench.cli.bench_options import (
    ApiKeyEnvOption,
    ClientProcessesOption,
    ConcurrencyOption,
    ExtrasOption,
    LoadOption,
    LogOption,
    ModelOption,
    OutputTokensOption,
    PageOption,
    PromptTokensOption,
    RateOption,
    RequestsOption,
    SecondsOption,
    ServedArgument,
    TargetOption,
    TokenizerOption,
    TpotOption,
    TtftOption,
    UnitsOption,
    UrlOption,
    UsdPerHourOption,
    WorkloadOption,
    api_key,
    load_of,
)
from workbench.cli.common import (
    ConfigOption,
    JsonOption,
    emit,
    epilog,
    err,
    heavy,
    out,
    run,
    settings,
    table,
)
from workbench.cli.default_command import DEFAULT, RunsByDefault
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import mlflow_uri

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING, Exit.INTERRUPTED)
PROGRESS_EVERY_S = 2.0


app = typer.Typer(
    cls=RunsByDefault, no_args_is_help=True, help="One load on a model or any endpoint, and comparisons of such runs."
)
add_comparisons(app)


@app.command(
    DEFAULT,
    epilog=epilog(
        "workbench bench smollm2-135m --concurrency 8 --requests 64",
        "workbench bench smollm2-135m --rate 2 --seconds 30 --target engine --json",
        "workbench bench smollm2-135m --load gamma:rate=4,cv=2 --workload sessions:turns=4 --seconds 60 --log",
        "workbench bench --url http://gpu-box:8000 --model my-model --tokenizer hf:ORG/NAME --load poisson:rate=2",
        "workbench bench --url https://host/v1 --model NAME --api-key-env KEY --workload file:prompts.jsonl",
        codes=CODES,
    ),
)
def bench(
    served: ServedArgument = None,
    url: UrlOption = None,
    model: ModelOption = None,
    api_key_env: ApiKeyEnvOption = None,
    tokenizer: TokenizerOption = None,
    extras: ExtrasOption = None,
    units: UnitsOption = 1,
    usd_per_hour: UsdPerHourOption = None,
    load: LoadOption = None,
    workload: WorkloadOption = None,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    requests: RequestsOption = None,
    seconds: SecondsOption = 120.0,
    ttft_s: TtftOption = None,
    tpot_s: TpotOption = None,
    target: TargetOption = "gateway",
    client_processes: ClientProcessesOption = None,
    log: LogOption = False,
    page: PageOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Puts one load on a model and prints what came out, each figure with its interval; others may use it meanwhile."""
    name = _name(served, url, model)
    module = heavy("workbench.benchmark.run")
    needs_config = url is None or config is not None or log
    loaded = settings(config) if needs_config else None
    try:
        request = module.BenchRequest(
            model=name,
            load=load_of(load, concurrency, rate),
            workload=_workload(workload, prompt_tokens, output_tokens),
            num_prompt_tokens=prompt_tokens or 64,
            num_output_tokens=output_tokens or 32,
            num_requests=requests,
            max_duration_s=seconds,
            target=module.TargetKind(target),
            url=url,
            api_key=api_key(api_key_env),
            tokenizer=tokenizer,
            takes_extras=extras,
            num_units=units,
            usd_per_hour=usd_per_hour,
            slo=_slo(loaded, ttft_s, tpot_s),
            client_processes=client_processes,
        )
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    following = _following(loaded, request) if log and loaded else None
    result = _measured(module, loaded, request, following)
    run_id, trouble = _logged(result, following)
    emit(result.to_json() | {"mlflow_run_id": run_id}, as_json, lambda: _show(result, run_id))
    trouble = _paged(result, page, following, run_id) or trouble
    _judge(result, trouble)


def _paged(result: Any, page: Path | None, following: Any, run_id: str | None) -> str | None:
    """Writes the page, and adds it to the run where there is one; why MLflow did not take it."""
    if page is None:
        return None
    try:
        heavy("workbench.benchmark.cell").write_page(result, page)
    except OSError as error:
        raise CommandFailed(f"{page} is not made: {error}") from None
    err.print(f"page: {page}", highlight=False, markup=False, soft_wrap=True)
    if run_id is None:
        return None
    try:
        following.add(page)
    except ServingError as error:
        return error.message
    return None


def _judge(result: Any, trouble: str | None) -> None:
    """Raises CommandFailed where the figures do not count, or are not where they should be."""
    if result.is_interrupted:
        raise CommandFailed("interrupted; the figures are of what had been measured by then", Exit.INTERRUPTED)
    if result.invalid is not None:
        raise CommandFailed(f"the figures do not count: {result.invalid}")
    if trouble is not None:
        raise CommandFailed(f"measured, but MLflow did not take it: {trouble}")


def _following(config: WorkbenchConfig, request: Any) -> Any:
    tracker = heavy("workbench.tracking").Tracker(mlflow_uri(config))
    return heavy("workbench.benchmark.logged").Following(tracker, request)


def _logged(result: Any, following: Any) -> tuple[str | None, str | None]:
    """The run's id, or why MLflow did not take it."""
    if following is None:
        return None, None
    try:
        return following.log(result), None
    except ServingError as error:
        return None, error.message


def _measured(module: Any, config: WorkbenchConfig | None, request: Any, following: Any) -> Any:
    """The result, also of a run that Ctrl-C ended."""
    kept: list[Any] = []
    measuring = module.abench(
        config,
        request,
        on_progress=requests_printer(request.model),
        keep=kept.append,
        open_run=None if following is None else following.open_run,
        on_trouble=lambda trouble: err.print(f"MLflow does not follow it: {trouble}", highlight=False, markup=False),
    )
    try:
        with module.keeping(kept):
            run(measuring)
    except module.SpecError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    except module.WorkloadError as error:
        raise CommandFailed(str(error)) from None
    return kept[0]


def _name(served: str | None, url: str | None, model: str | None) -> str:
    if served is not None and model is not None and served != model:
        raise CommandFailed(f"two models, {served!r} and {model!r}: name one", Exit.USAGE)
    name = served or model
    if name is None:
        raise CommandFailed("name a model: `workbench bench MODEL`, or --url with --model NAME", Exit.USAGE)
    return name


def _workload(workload: str | None, prompt_tokens: int | None, output_tokens: int | None) -> str | None:
    if workload is not None and (prompt_tokens is not None or output_tokens is not None):
        raise CommandFailed(
            "--workload says what is sent; --prompt-tokens and --output-tokens are its short forms", Exit.USAGE
        )
    return workload


def _slo(config: WorkbenchConfig | None, ttft_s: float | None, tpot_s: float | None) -> Any:
    """None where the target's own counts."""
    if ttft_s is None and tpot_s is None:
        return None
    usual = heavy("workbench.config").Slo() if config is None else config.slo.default
    return heavy("workbench.loadgen").Slo(ttft_s or usual.ttft_p99_s, tpot_s or usual.tpot_p99_s)


def requests_printer(model: str) -> Callable[[int, int], None]:
    """Prints how many requests have ended, every few seconds."""
    printed_s = time.monotonic()

    def on_requests(done: int, total: int) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= PROGRESS_EVERY_S:
            printed_s = time.monotonic()
            err.print(f"{model} {done} of {total} requests", highlight=False)

    return on_requests


def _show(result: Any, run_id: str | None) -> None:
    rows = [list(row) for row in result.rows()]
    out.print(table(f"{result.load}, {result.workload}", ["metric", "value", "95 % interval"], rows, right=(1,)))
    for line in [*result.lines(), *([f"MLflow run {run_id}"] if run_id else [])]:
        out.print(line, style="dim", highlight=False, markup=False)
