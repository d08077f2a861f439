"""A run with nested ones that is logged as a whole: an SLO search with its cells, a tuning with its trials.

Both are kept on disk and may go on later, so that logging one again adds to the runs of before what is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient

from workbench.provenance import git_commit
from workbench.run_fields import PARENT_RUN, RunFields
from workbench.tracking.values import log_values

TAG_FAMILY = "family"
TAG_MEMBER = "family.member"


def log_family(
    client: MlflowClient,
    experiment_id: str,
    parent: RunFields,
    children: Sequence[RunFields],
    files: Mapping[str, Sequence[Path]],
) -> str:
    """Logs the parent with its newest figures and files, and each child that is not there yet; its run id."""
    found = client.search_runs([experiment_id], f"tags.{TAG_FAMILY} = '{parent.key}'", max_results=1)
    if found:
        parent_id = str(found[0].info.run_id)
        for name, value in parent.tags.items():
            client.set_tag(parent_id, name, value)
    else:
        tags = {"commit": git_commit(), TAG_FAMILY: parent.key, **parent.tags}
        parent_id = str(client.create_run(experiment_id, run_name=parent.name, tags=tags).info.run_id)
    log_values(client, parent_id, {} if found else parent.params, parent.metrics)
    siblings = client.search_runs([experiment_id], f"tags.`{PARENT_RUN}` = '{parent_id}'", max_results=1000)
    known = {run.data.tags.get(TAG_MEMBER) for run in siblings if run.info.status != "RUNNING"}
    for child in (child for child in children if child.key not in known):
        tags = {PARENT_RUN: parent_id, TAG_MEMBER: child.key, **child.tags}
        run_id = str(client.create_run(experiment_id, run_name=child.name, tags=tags).info.run_id)
        log_values(client, run_id, child.params, child.metrics)
        client.set_terminated(run_id, "FAILED" if child.is_failed else "FINISHED")
    for folder, paths in files.items():
        for path in paths:
            client.log_artifact(parent_id, str(path), folder)
    client.set_terminated(parent_id, "FAILED" if parent.is_failed else "FINISHED")
    return parent_id
