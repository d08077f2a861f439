"""`workbench hardware`: what figures are measured on here, and what the device can give at most."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.absent import Absent
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, number, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.hardware.classes import UnknownHardware, sizes
from workbench.hardware.cpu import read_cpu, usable_cores
from workbench.hardware.identity import CPU_CLASS, HardwareFingerprint, fingerprint
from workbench.hardware.machine import Fact, describe
from workbench.hardware.probe import DEFAULT_BUDGET_S, ProbeFailed, keep, last_kept, probe, request_for
from workbench.wiring import layout, running_stack

MIN_SECONDS, MAX_SECONDS = 2.0, 120.0


class Device(StrEnum):
    """Which device of this machine."""

    CPU = "cpu"
    GPU = "gpu"


class Dtype(StrEnum):
    """Number format of the matrices, by torch's names."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    examples = ("workbench hardware", "workbench hardware --probe --json", "workbench hardware --probe --seconds 5")
    app.command(epilog=epilog(*examples, codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING)))(hardware)


def hardware(
    probes: Annotated[
        bool, typer.Option("--probe", help="Measure copy bandwidth and matrix rate; keep the result.")
    ] = False,
    device: Annotated[
        Device | None, typer.Option(help="The GPU where there is one, else the CPU, unless said.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the matrices; else the one the device is fast in.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Cores to probe; else all usable.")] = None,
    seconds: Annotated[
        float, typer.Option(min=MIN_SECONDS, max=MAX_SECONDS, callback=number, help="How long the probe measures.")
    ] = DEFAULT_BUDGET_S,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows the hardware, its class and its fingerprint; with --probe also what memory and arithmetic can give."""
    loaded = settings(config)
    stack = running_stack(loaded)
    engines = {} if stack is None else {pool: facts.engine_covers for pool, facts in stack.pools.items()}
    facts = describe(engines)
    identity, remark = _identity(loaded, device)
    num_threads = min(threads or usable_cores(), usable_cores())
    kept = layout(loaded).data_dir / "hardware"
    found, path = last_kept(identity.digest, kept), None
    if probes:
        found, path = _probed(loaded, identity, num_threads, seconds, dtype, kept)
    data = {
        "hardware_class": identity.hardware_class,
        "fingerprint": identity.digest,
        "covers": identity.covers(),
        "remark": remark,
        "facts": [fact.to_json() for fact in facts],
        "published": _published(loaded, identity.hardware_class),
        "measured": found,
        "file": None if path is None else str(path),
    }
    emit(data, as_json, lambda: _show(data, facts))


def _identity(config: WorkbenchConfig, device: Device | None) -> tuple[HardwareFingerprint, str | None]:
    """The fingerprint of one unit; a GPU that no class fits is shown as such, with what to do."""
    try:
        found = fingerprint(CPU_CLASS if device is Device.CPU else None, memory_gb=sizes(config.hardware))
    except UnknownHardware as error:
        return fingerprint("unknown"), str(error)
    if device is Device.GPU and found.gpu is None:
        raise CommandFailed("there is no NVIDIA GPU here, or no driver", Exit.MISSING)
    return found, None


def _probed(
    config: WorkbenchConfig,
    identity: HardwareFingerprint,
    num_threads: int,
    seconds: float,
    dtype: Dtype | None,
    folder: Path,
) -> tuple[dict[str, Any] | None, Path | None]:
    on_gpu = identity.gpu is not None
    request = request_for(on_gpu, read_cpu(), num_threads, seconds, None if dtype is None else dtype.value)
    err.print(f"probing {identity.device} in {request.dtype} for {seconds:.0f} s", highlight=False, markup=False)
    try:
        found = probe(request, identity, config.hardware.get(identity.hardware_class))
    except ProbeFailed as error:
        raise CommandFailed(str(error), Exit.MISSING if error.is_missing else Exit.FAILED) from None
    return found.to_json(), keep(found, folder)


def _published(config: WorkbenchConfig, hardware_class: str) -> dict[str, Any] | None:
    """One unit as the class's table has it; never a measurement."""
    known = config.hardware.get(hardware_class)
    return None if known is None else known.model_dump(mode="json") | {"provenance": "published"}


def _show(data: dict[str, Any], facts: list[Fact]) -> None:
    if data["remark"]:
        err.print(data["remark"], highlight=False, markup=False, style="yellow")
    rows = [[fact.part, fact.name, _shown(fact.value)] for fact in facts]
    out.print(table(f"Class {data['hardware_class']}, fingerprint {data['fingerprint']}", ["part", "", ""], rows))
    measured = data["measured"]
    if measured is None:
        out.print("\nNo probe of this hardware is kept: workbench hardware --probe", highlight=False)
        return
    unit = "core" if data["hardware_class"] == CPU_CLASS else "GPU"
    rows = [
        ["copy bandwidth (read + written)", "TB/s", *_figures(measured, "bandwidth_tb_s", "bandwidth_frac")],
        [f"matrix rate, {measured['dtype']}", "TFLOP/s", *_figures(measured, "tflops", "tflops_frac")],
    ]
    columns = ["ceiling", "unit", "measured", "95 % interval", "repeats", "published", "share"]
    title = f"\nProbe of {measured['num_units']} {unit}(s), {measured['measured_at']}, torch {measured['torch']}"
    out.print(table(title, columns, rows, right=(2, 3, 4, 5, 6)))
    if measured["published_source"]:
        out.print(f"published: {measured['published_source']}", style="dim", highlight=False, markup=False)


def _shown(value: object) -> str:
    return f"[dim]{value}[/]" if isinstance(value, Absent) else str(value)


def _figures(measured: dict[str, Any], name: str, share: str) -> list[str]:
    rate, published, frac = measured[name], measured[f"published_{name}"], measured[share]
    has_interval = rate["low"] is not None
    return [
        f"{rate['median']:.4g}",
        f"{rate['low']:.4g} – {rate['high']:.4g}" if has_interval else "too few repeats",
        str(rate["num_repeats"]),
        "–" if published is None else f"{published:.4g}",
        "–" if frac is None else f"{frac:.0%}",
    ]
