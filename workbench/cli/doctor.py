"""`workbench doctor`: is this machine fit for it, and what is lost where it is not?"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal

import psutil
import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, settings, table
from workbench.cli.exits import Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import layout, running_stack

GIB = 1024**3


class Verdict(StrEnum):
    """`warning` costs something; `failed` keeps the stack from starting."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=epilog("workbench doctor", "workbench doctor --json"))(doctor)


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Checks this machine: cores, memory, disk, allocator, engine, store, MLflow, ports. Exit 1 if one fails."""
    loaded = settings(config)
    findings = [check(loaded) for check in CHECKS]
    findings += _ports(loaded)
    failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}

    def show() -> None:
        rows = [[f"[{colours[f.verdict]}]{f.verdict}[/]", f.check, f.found, f.advice] for f in findings]
        out.print(table(None, ["", "check", "found", "what to do"], [list(row) for row in rows]))

    emit({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, as_json, show)
    if failed:
        raise typer.Exit(int(Exit.FAILED))


def _python(_: WorkbenchConfig) -> Finding:
    return Finding("python", Verdict.OK, "{}.{}.{}".format(*sys.version_info[:3]))


def _cores(config: WorkbenchConfig) -> Finding:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    bound = {core for pool in config.pools for cores in pool.cores or () for core in cores}
    missing = sorted(bound - set(usable))
    if missing:
        return Finding("cores", Verdict.FAILED, f"{len(usable)}", f"pools name cores {missing}: change pools.*.cores")
    return Finding("cores", Verdict.OK, str(len(usable)))


def _memory(config: WorkbenchConfig) -> Finding:
    free_gib = psutil.virtual_memory().available / GIB
    replicas = sum(pool.replicas for pool in config.pools if pool.start == "with_stack" and pool.hardware == "cpu")
    wanted_gib = 2 + 4 * replicas
    if free_gib < wanted_gib:
        return Finding(
            "memory", Verdict.WARNING, f"{free_gib:.1f} GiB free", f"{replicas} replicas may take {wanted_gib}"
        )
    return Finding("memory", Verdict.OK, f"{free_gib:.1f} GiB free")


def _disk(config: WorkbenchConfig) -> Finding:
    folder = next(parent for parent in (config.data_dir, *config.data_dir.parents) if parent.exists())
    free_gib = shutil.disk_usage(folder).free / GIB
    verdict = Verdict.OK if free_gib >= 5 else Verdict.WARNING
    return Finding(
        "disk", verdict, f"{free_gib:.1f} GiB free at {folder}", "" if free_gib >= 5 else "models take 2 GiB"
    )


def _allocator(_: WorkbenchConfig) -> Finding:
    if ctypes.util.find_library("tcmalloc_minimal"):
        return Finding("tcmalloc", Verdict.OK, "found")
    return Finding(
        "tcmalloc", Verdict.WARNING, "missing", "CPU engines are 25 % slower: apt-get install libtcmalloc-minimal4"
    )


def _package(check: str, module: str, extra: str, verdict: Verdict) -> Callable[[WorkbenchConfig], Finding]:
    def look(_: WorkbenchConfig) -> Finding:
        if importlib.util.find_spec(module) is not None:
            return Finding(check, Verdict.OK, "installed")
        return Finding(check, verdict, "not installed", f"pip install 'llm-workbench[{extra}]'")

    return look


def _store(config: WorkbenchConfig) -> Finding:
    from serving.store.connection import StoreUnavailable
    from serving.store.server import find_server

    if config.stores.redis_url is not None:
        return Finding("store", Verdict.OK, f"by URL: {config.stores.redis_url}")
    try:
        return Finding("store", Verdict.OK, str(find_server()))
    except StoreUnavailable as error:
        return Finding("store", Verdict.FAILED, "no program", error.message)


def _mlflow(config: WorkbenchConfig) -> Finding:
    import asyncio

    uri = config.stores.mlflow_tracking_uri
    state = running_stack(config)
    if uri is None and state is not None:
        uri = state.urls.get("mlflow")
    if uri is None:
        return Finding("mlflow server", Verdict.OK, "the stack starts its own")
    if asyncio.run(_answers(uri)):
        return Finding("mlflow server", Verdict.OK, f"answers at {uri}")
    return Finding("mlflow server", Verdict.WARNING, f"no answer at {uri}", "runs are kept on disk and logged later")


async def _answers(uri: str) -> bool:
    from workbench.mlflow_server import is_healthy

    return await is_healthy(uri)


def _ports(config: WorkbenchConfig) -> list[Finding]:
    from workbench.stack.ports import PortTaken, check_port

    if running_stack(config) is not None:
        return [Finding("ports", Verdict.OK, f"held by the running stack of {layout(config).data_dir}")]
    findings = []
    wanted: list[tuple[str, int, str]] = [(config.gateway.host, config.gateway.port, "gateway.port")]
    if config.stores.mlflow_tracking_uri is None:
        wanted.append(("127.0.0.1", config.mlflow.port, "mlflow.port"))
    wanted.append(("127.0.0.1", config.lab.port, "lab.port"))
    for host, port, setting in wanted:
        try:
            check_port(host, port, setting)
            findings.append(Finding(setting, Verdict.OK, f"{host}:{port} is free"))
        except PortTaken as error:
            kind: Literal[Verdict.WARNING, Verdict.FAILED] = (
                Verdict.WARNING if setting == "lab.port" else Verdict.FAILED
            )
            findings.append(Finding(setting, kind, f"{port} is taken", str(error)))
    return findings


CHECKS: tuple[Callable[[WorkbenchConfig], Finding], ...] = (
    _python,
    _cores,
    _memory,
    _disk,
    _allocator,
    _package("vllm", "vllm", "cpu", Verdict.FAILED),
    _package("mlflow", "mlflow", "bench", Verdict.FAILED),
    _package("jupyterlab", "jupyterlab", "notebooks", Verdict.WARNING),
    _store,
    _mlflow,
)
