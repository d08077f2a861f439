"""Measured, published and predicted figures of hardware beside each other: a row each, never two kinds in one.

    measured    the probe's ceilings on this machine; tokens a second from cells
    published   the class's table in the configuration (data sheets, prices)
    predicted   at most so many tokens a second for one stream: bandwidth over the bytes that a token has to read

A stream's every token reads all weights once, so one stream is bound by bandwidth (Pope et al., "Efficiently Scaling
Transformer Inference", 2022). The prediction is an upper bound: it leaves out the KV cache and all overheads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from workbench.config import HardwareClass, WorkbenchConfig
from workbench.connection import connected
from workbench.costs.schema import Provenance
from workbench.hardware.cpu import read_cpu
from workbench.hardware.identity import fingerprint
from workbench.hardware.machine import describe
from workbench.hardware.probe import keep, last_kept, probe, request_for
from workbench.wiring import layout, running_stack

COLUMNS = (
    "hardware_class", "provenance", "bandwidth_tb_s", "bandwidth_tb_s/ci_low", "bandwidth_tb_s/ci_high", "bf16_tflops",
    "fp32_tflops", "output_tokens_per_s_per_gpu", "usd_per_gpu_hour", "source",
)  # fmt: skip
SINGLE_STREAM = 1


def facts() -> pd.DataFrame:
    """What this machine says of itself: part, name, value; a fact that it does not tell is shown with the reason."""
    stack = running_stack(connected().config)
    engines = {} if stack is None else {pool: known.engine_covers for pool, known in stack.pools.items()}
    rows = [(fact.part, fact.name, str(fact.value)) for fact in describe(engines)]
    return pd.DataFrame(rows, columns=["part", "name", "value"])


def ceilings(seconds: float = 16.0) -> dict[str, Any]:
    """The probe of one core (or GPU) of this machine, measured now and kept; with 0 seconds the newest one kept.

    Raises:
        ProbeFailed: torch or the device is not there.
        LookupError: none is kept of this hardware.
    """
    config = connected().config
    identity, folder = fingerprint(), layout(config).data_dir / "hardware"
    if seconds <= 0:
        found = last_kept(identity.digest, folder)
        if found is None:
            raise LookupError("no probe of this hardware is kept: take some seconds, or `workbench hardware --probe`")
        return found
    # A row of the cost table is of one unit, and so is the probe beside it.
    request = request_for(identity.gpu is not None, read_cpu(), 1, seconds)
    measured = probe(request, identity, config.hardware.get(identity.hardware_class))
    keep(measured, folder)
    return measured.to_json()


def beside(measured: Mapping[str, Any], costs: pd.DataFrame, *, model: str, weights_gb: float) -> pd.DataFrame:
    """Rows of every hardware class, and of this machine what was measured.

    Args:
        measured: `ceilings()`.
        costs: cost rows; those of `model` with one stream are compared with the prediction.
        model: which.
        weights_gb: that a token has to read, in 1e9 bytes.

    Raises:
        ValueError: `weights_gb` is not above 0.
    """
    if not weights_gb > 0:
        raise ValueError(f"weights of {weights_gb} GB predict nothing")
    config = connected().config
    rows = [_measured(config, measured, costs, model)]
    for name, known in config.hardware.items():
        rows += [_published(name, known), _predicted(name, known.bandwidth_tb_s, weights_gb, known.source)]
    here = measured["hardware_class"]
    rows.append(_predicted(here, measured["bandwidth_tb_s"]["median"], weights_gb, "this machine's measured bandwidth"))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values(["hardware_class", "provenance"], ignore_index=True, kind="stable")


def _measured(config: WorkbenchConfig, found: Mapping[str, Any], costs: pd.DataFrame, model: str) -> dict[str, Any]:
    bandwidth, dtype = found["bandwidth_tb_s"], {"bfloat16": "bf16", "float32": "fp32"}.get(found["dtype"], "other")
    one = costs[(costs["model"] == model) & (costs["concurrency"] == SINGLE_STREAM)]
    rates: Sequence[float] = one["output_tokens_per_s_per_gpu"].dropna().tolist()
    return {
        "hardware_class": found["hardware_class"],
        "provenance": Provenance.MEASURED.value,
        "bandwidth_tb_s": bandwidth["median"],
        "bandwidth_tb_s/ci_low": bandwidth["low"],
        "bandwidth_tb_s/ci_high": bandwidth["high"],
        f"{dtype}_tflops": found["tflops"]["median"],
        "output_tokens_per_s_per_gpu": max(rates, default=None),
        "source": f"probe of {found['num_units']} unit(s), torch {found['torch']}; sweep with one stream",
    }


def _published(name: str, known: HardwareClass) -> dict[str, Any]:
    return {
        "hardware_class": name,
        "provenance": Provenance.PUBLISHED.value,
        "bandwidth_tb_s": known.bandwidth_tb_s,
        "bf16_tflops": known.tflops.get("bf16"),
        "fp32_tflops": known.tflops.get("fp32"),
        "usd_per_gpu_hour": known.usd_per_hour,
        "source": f"{known.source} ({known.date})",
    }


def _predicted(name: str, bandwidth_tb_s: float, weights_gb: float, source: str) -> dict[str, Any]:
    return {
        "hardware_class": name,
        "provenance": Provenance.PREDICTED.value,
        "output_tokens_per_s_per_gpu": 1000.0 * bandwidth_tb_s / weights_gb,
        "source": f"at most: bandwidth over {weights_gb:g} GB of weights; bandwidth from {source}",
    }
