"""What a run in MLflow was measured on: its prompts as a dataset, the version of the model as a model.

MLflow then shows every run of one version side by side, and says which runs had the same prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlflow import MlflowClient
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

CONTEXT = "benchmark"
DIGEST_LENGTH = 16
_NOT_IN_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "_"))


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was measured on what.

    Attributes:
        model, version: as registered.
        dataset: the workload's short form.
        made_from: all that the prompts follow from, such as their seed; equal values are equal prompts.
        facts: of the model, such as its engine's fingerprint.
    """

    model: str
    version: str
    dataset: str
    made_from: Mapping[str, object]
    facts: Mapping[str, str] = field(default_factory=dict)


def log_inputs(client: MlflowClient, experiment_id: str, run_id: str, inputs: Inputs) -> None:
    """Adds both to the run; logging them again changes nothing."""
    client.log_inputs(
        run_id,
        datasets=[DatasetInput(_dataset(inputs), [InputTag(MLFLOW_DATASET_CONTEXT, CONTEXT)])],
        models=[LoggedModelInput(_model_id(client, experiment_id, inputs))],
    )


def _dataset(inputs: Inputs) -> Dataset:
    made_from = {name: str(value) for name, value in inputs.made_from.items()}
    text = json.dumps([inputs.dataset, made_from], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
    source = CodeDatasetSource(tags={"workload": inputs.dataset, **made_from})
    return Dataset(**MetaDataset(source, name=inputs.dataset[:500], digest=digest).to_dict())


def _model_id(client: MlflowClient, experiment_id: str, inputs: Inputs) -> str:
    """The version as a model of the experiment: found by its name, else made."""
    name = f"{inputs.model}@{inputs.version}".translate(_NOT_IN_NAMES)
    found = client.search_logged_models([experiment_id], filter_string=f"name = '{name}'", max_results=1)
    if found:
        return str(found[0].model_id)
    tags = {"model": inputs.model, "version": inputs.version, **inputs.facts}
    made = client.create_logged_model(experiment_id, name=name, tags=tags)
    client.finalize_logged_model(made.model_id, "READY")
    return str(made.model_id)
