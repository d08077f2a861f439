"""Keeps a gate's record, and tells MLflow and the control plane of it.

1. record and page below the data folder, by digest
2. a run of `canaries/MODEL` with both, and the files that figures were taken from
3. the release book: from here on the evidence counts (workbench/releases.py)
4. tags and description of the version, for people
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.control.registry import Registry
from serving.core import gate_record
from serving.core.approval import tags_of
from serving.core.gate_record import EVIDENCE_FILE, FOLDER, REPORT_FILE, GateRecord
from serving.core.policies.gate import Verdicts
from serving.core.releases import Evidence
from workbench.config import WorkbenchConfig
from workbench.gates.gather import Gathered
from workbench.gates.page import SIGNS, approve_command, write_page
from workbench.releases import record_evidence
from workbench.sync import run_sync
from workbench.tracking import Tracker
from workbench.wiring import layout

EXPERIMENT = "canaries/"
SOURCES_FOLDER = f"{FOLDER}/sources"
HEADING = "## Gate"


@dataclass(frozen=True, slots=True)
class Written:
    """A record on disk: its bytes, their digest, and the page beside it."""

    data: bytes
    digest: str
    evidence: Path
    page: Path


def write(config: WorkbenchConfig, gathered: Gathered) -> Written:
    """Keeps record and page below the data folder. Raises OSError."""
    record = gathered.record
    data = record.as_bytes()
    digest = gate_record.digest(data)
    name = f"{record.model}-v{record.candidate.version}-{digest[: gate_record.MIN_APPROVAL_DIGITS]}"
    folder = layout(config).data_dir / "gates" / name
    folder.mkdir(parents=True, exist_ok=True)
    evidence, page = folder / EVIDENCE_FILE, folder / REPORT_FILE
    partial = evidence.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(evidence)
    write_page(gathered, data, page)
    return Written(data, digest, evidence, page)


def publish(config: WorkbenchConfig, uri: str, gathered: Gathered, written: Written) -> Evidence:
    """Brings a written record to MLflow and to the control plane. Blocks.

    Raises:
        RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        StoreUnavailable, BrokenDocument, StaleEpoch: the release book could not be written; the run is there.
    """
    record = gathered.record
    said = record.verdicts()
    run_id = _log(uri, gathered, written, said)
    version = record.candidate.version
    evidence = run_sync(
        lambda: record_evidence(
            config,
            record.model,
            version,
            written.data,
            run_id,
            {gate.tag: found.verdict for gate, found in said.gates.items()},
            weights_digest=record.candidate.weights_digest,
        )
    )
    registry = Registry(uri)
    registry.write_tags(record.model, version, tags_of(evidence))
    registry.describe(record.model, version, HEADING, description(record, said, evidence))
    return evidence


def description(record: GateRecord, said: Verdicts, evidence: Evidence) -> str:
    """Markdown for the version's page in MLflow: verdict, digest, links."""
    gates = "\n".join(
        f"| {gate.value} | {SIGNS[found.verdict]} {found.verdict} | {_cell(found.reason)} |"
        for gate, found in said.gates.items()
    )
    return (
        f"**{said.verdict.upper()}** against champion @{record.champion.version}, judged {record.gathered_at}.\n\n"
        f"| gate | verdict | why |\n|---|---|---|\n{gates}\n\n"
        f"Digest of the evidence: `{evidence.digest}`. [The report](#/runs/{evidence.run_id}) is its artifact "
        f"`{FOLDER}/{REPORT_FILE}`.\n\nTo approve it: set the tag `approval` to the digest's first "
        f"{gate_record.MIN_APPROVAL_DIGITS} digits, or `{approve_command(record, evidence.digest)}`."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _log(uri: str, gathered: Gathered, written: Written, said: Verdicts) -> str:
    record = gathered.record
    metrics = {
        f"{gate.value}/worse/{index}": figure.worse
        for gate, evidence in record.evidence.items()
        for index, figure in enumerate(evidence.figures)
        if figure.worse is not None
    }
    files: Mapping[str, tuple[Path, ...]] = {FOLDER: (written.evidence, written.page), SOURCES_FOLDER: gathered.files}
    return Tracker(uri).log_run(
        EXPERIMENT + record.model,
        f"gate of {record.model}@{record.candidate.version}",
        tags={
            "kind": "gate",
            "gate.verdict": said.verdict.value,
            gate_record.TAG_EVIDENCE: written.digest,
            "version": record.candidate.version,
        },
        params={
            "model": record.model,
            "version": record.candidate.version,
            "champion": record.champion.version,
            "engine": record.candidate.engine,
            "policy": record.policy.digest,
        },
        metrics=metrics,
        files={folder: paths for folder, paths in files.items() if paths},
    )
