"""Options of `workbench bench`, and how they are read together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.common import MAX_CONCURRENCY, MAX_RATE_RPS, MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, number
from workbench.cli.exits import CommandFailed, Exit

USUAL_CONCURRENCY = 4


def _seconds(text: str) -> Any:
    return typer.Option(help=text, min=0.0001, max=MAX_SECONDS, callback=number)


ServedArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="A served model, NAME or NAME@VERSION.")]
UrlOption = Annotated[str | None, typer.Option(help="An endpoint instead of the stack, with or without /v1.")]
ModelOption = Annotated[str | None, typer.Option(help="The model's name there.")]
ApiKeyEnvOption = Annotated[
    str | None, typer.Option(metavar="VAR", help="The environment variable that holds the endpoint's key.")
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="The model's tokenizer: a folder, hf:ORG/NAME, or `none` with prompts of your own."
    ),
]
ExtrasOption = Annotated[
    bool | None,
    typer.Option(
        "--extras/--no-extras", help="Whether the endpoint takes vLLM's extras (ignore_eos); else it is found out."
    ),
]
UnitsOption = Annotated[int, typer.Option(help="GPUs behind the endpoint, for figures a GPU.", min=1, max=4096)]
UsdPerHourOption = Annotated[
    float | None, typer.Option(help="What the endpoint costs, all GPUs together.", min=0, callback=number)
]
LoadOption = Annotated[str | None, typer.Option(metavar="SPEC", help="When requests come, such as gamma:rate=4,cv=2.")]
WorkloadOption = Annotated[
    str | None, typer.Option(metavar="SPEC", help="What they are, such as chat:prompt=64,output=32.")
]
PromptTokensOption = Annotated[int | None, typer.Option(help="Tokens of each prompt; 64.", min=1, max=MAX_TOKENS)]
OutputTokensOption = Annotated[int | None, typer.Option(help="Tokens of each answer; 32.", min=1, max=MAX_TOKENS)]
ConcurrencyOption = Annotated[
    int | None, typer.Option(help="Requests in flight (closed loop); 4.", min=1, max=MAX_CONCURRENCY)
]
RateOption = Annotated[
    float | None,
    typer.Option(help="Requests a second instead (Poisson arrivals).", min=0.001, max=MAX_RATE_RPS, callback=number),
]
RequestsOption = Annotated[
    int | None,
    typer.Option(
        help="Requests to send at most; all that the schedule holds, or 8 a user, 32 at least.",
        min=1,
        max=MAX_REQUESTS,
    ),
]
SecondsOption = Annotated[
    float, typer.Option(help="Seconds after which no request is sent.", min=0.1, max=MAX_SECONDS, callback=number)
]
TtftOption = Annotated[float | None, _seconds("TTFT of a good request; the configuration's SLO when left out.")]
TpotOption = Annotated[float | None, _seconds("TPOT of a good request; the same.")]
TargetOption = Annotated[str, typer.Option(help="`gateway`, or `engine` for a replica itself.")]
ClientProcessesOption = Annotated[
    int | None,
    typer.Option(help="Processes that share the load; one, or more where load and cores ask for it.", min=1, max=64),
]
PageOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write one self-contained HTML page of the run; with --log also there."),
]
LogOption = Annotated[bool, typer.Option("--log", help="Log the run and its records to MLflow.")]


def load_of(load: str | None, concurrency: int | None, rate: float | None) -> str:
    """The load's short form. Raises CommandFailed where it is given twice."""
    if load is not None and (concurrency is not None or rate is not None):
        raise CommandFailed("--load says when requests come; --concurrency and --rate are its short forms", Exit.USAGE)
    if load is not None:
        return load
    return f"poisson:rate={rate}" if rate is not None else f"closed:concurrency={concurrency or USUAL_CONCURRENCY}"


def api_key(variable: str | None) -> str | None:
    """The endpoint's key. Raises CommandFailed where the variable is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise CommandFailed(
            f"the environment variable {variable} is not set: it should hold the endpoint's key", Exit.USAGE
        )
    return os.environ[variable]
