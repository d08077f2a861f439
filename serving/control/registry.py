"""The model registry: MLflow's registered models, and the one writer of their alias `champion`.

    registered model   the served name
    version            one set of weights; source `runs:/<registration run>/manifest`
    tags of a version  weights.source, weights.digest, task
    alias champion     what a request without a version gets; set here and nowhere else

Everything here blocks on HTTP: call it from a thread. A server that is down fails in seconds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow.exceptions
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from serving.control.registered import (
    ChampionExists,
    Manifest,
    RegisteredVersion,
    RegistryRefused,
    RegistryUnavailable,
    answers,
)
from serving.core.approval import CHAMPION, TAG_WEIGHTS, is_reserved
from serving.core.errors import BadRequest, NotFound
from serving.core.state import Task

TAG_SOURCE = "weights.source"
TAG_DIGEST = TAG_WEIGHTS
TAG_TASK = "task"
REGISTRATIONS = "operations"
FIRST_EXPERIMENT = "0"
MANIFEST_FOLDER = "manifest"
NAME_PATTERN = re.compile(r"[a-z0-9._-]+")
MAX_ARTIFACT_BYTES = 16 * 2**20

_BUSY_CODES = ("TEMPORARILY_UNAVAILABLE", "DEADLINE_EXCEEDED", "REQUEST_LIMIT_EXCEEDED")

# The client's own defaults hang for minutes when the server is down.
CLIENT_ENV = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # It prints links when a run ends, into the JSON of our commands.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def mlflow_client(tracking_uri: str) -> MlflowClient:
    """A client that gives up on a dead server in seconds, not minutes.

    Raises:
        RegistryUnavailable: an http(s) server does not answer its health check.
    """
    for name, value in CLIENT_ENV.items():
        os.environ.setdefault(name, value)
    if tracking_uri.startswith(("http://", "https://")) and not answers(tracking_uri):
        raise RegistryUnavailable(
            f"MLflow does not answer at {tracking_uri}: start the stack (workbench up), "
            "or set stores.mlflow_tracking_uri"
        )
    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


class Registry:
    """Registered models and their versions, in the MLflow server at `tracking_uri`."""

    def __init__(self, tracking_uri: str) -> None:
        self._tracking_uri = tracking_uri
        self._connected: MlflowClient | None = None

    def register(
        self,
        name: str,
        source: str,
        weights_digest: str,
        *,
        task: Task,
        first: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """The version that holds these weights, registered now unless it already is.

        Args:
            name: the served name.
            source: where the weights come from, as in `workbench.yaml`.
            weights_digest: of the weights themselves; the same digest is the same version.
            task: what the model does.
            first: make it champion, which only a first version becomes without a rollout.
            tags: more tags of the version.

        Raises:
            BadRequest: the name cannot be one.
            ChampionExists: `first`, and a version with other weights is champion.
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise BadRequest(f"model name {name!r}: use a-z, 0-9, '.', '_' and '-' alone", param="name")
        with mlflow_errors(self._tracking_uri):
            client = self._client()
            _ensure_model(client, name, task)
            known = self.details(name)
            found = next((v for v in known if v.digest == weights_digest), None)
            if first:
                self._refuse_second_champion(client, name, found)
            if found is None:
                manifest = Manifest(name, source, weights_digest, task, dict(tags or {}))
                found = _unfinished(client, known, manifest) or _create_version(client, manifest)
            if first:
                client.set_registered_model_alias(name, CHAMPION, found.version)
            return found.version

    def champions(self) -> dict[str, str]:
        """Version of the alias `champion` by model, of the models that have one.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            found: dict[str, str] = {}
            token = None
            while True:
                page = self._client().search_registered_models(max_results=100, page_token=token)
                found |= {model.name: str(model.aliases[CHAMPION]) for model in page if CHAMPION in model.aliases}
                token = page.token
                if not token:
                    return found

    def identity(self) -> str:
        """What tells this registry from any other, also from one that began anew at the same address.

        Empty where it has not the experiment that every MLflow begins with.

        Raises:
            RegistryUnavailable: MLflow is down.
        """
        try:
            with mlflow_errors(self._tracking_uri):
                return f"mlflow since {self._client().get_experiment(FIRST_EXPERIMENT).creation_time}"
        except RegistryRefused:
            return ""

    def said_champion(self, name: str) -> str | None:
        """The version that the alias `champion` names, None where there is none.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            said = self._client().get_registered_model(name).aliases.get(CHAMPION)
            return None if said is None else str(said)

    def set_champion(self, name: str, version: str) -> None:
        """Makes the alias `champion` name the version, by the word of the release book.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            self._client().set_registered_model_alias(name, CHAMPION, version)

    def tags(self, name: str, version: str) -> dict[str, str]:
        """All tags of a version.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            return dict(self._client().get_model_version(name, version).tags)

    def write_tags(self, name: str, version: str, tags: Mapping[str, str | None]) -> None:
        """Sets tags of a version; takes those away whose value is None.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            for key, value in tags.items():
                if value is None:
                    self._client().delete_model_version_tag(name, version, key)
                else:
                    self._client().set_model_version_tag(name, version, key, value)

    def describe(self, name: str, version: str, heading: str, text: str) -> None:
        """Makes `text` the part of a version's description below its own heading; what stands above it stays.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri):
            said = self._client().get_model_version(name, version).description or ""
            above = said.partition(heading)[0].rstrip()
            self._client().update_model_version(
                name, version, "\n\n".join(filter(None, (above, f"{heading}\n\n{text}")))
            )

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """The bytes of a run's artifact as they are now; None where there is none, or one of over 16 MiB.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri), TemporaryDirectory(prefix="workbench-artifact-") as folder:
            try:
                listed = self._client().list_artifacts(run_id, str(Path(path).parent))
            except mlflow.exceptions.MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise
            if not any(one.path == path and (one.file_size or 0) <= MAX_ARTIFACT_BYTES for one in listed):
                return None
            return Path(self._client().download_artifacts(run_id, path, folder)).read_bytes()

    def write_artifact(self, run_id: str, path: str, data: bytes) -> None:
        """Makes `data` the run's artifact.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        with mlflow_errors(self._tracking_uri), TemporaryDirectory(prefix="workbench-artifact-") as folder:
            file = Path(folder) / Path(path).name
            file.write_bytes(data)
            self._client().log_artifact(run_id, str(file), str(Path(path).parent))

    def versions(self, name: str) -> tuple[str, ...]:
        """Versions of the model, oldest first; none for an unknown name.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        return tuple(version.version for version in self.details(name))

    def details(self, name: str) -> tuple[RegisteredVersion, ...]:
        """Versions of the model with what their tags say, oldest first; none for an unknown name.

        Raises:
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        if not NAME_PATTERN.fullmatch(name):
            return ()
        with mlflow_errors(self._tracking_uri):
            found: list[ModelVersion] = []
            token = None
            while True:
                page = self._client().search_model_versions(f"name='{name}'", max_results=100, page_token=token)
                found.extend(page)
                token = page.token
                if not token:
                    break
        return tuple(_registered(version) for version in sorted(found, key=lambda version: int(version.version)))

    def get(self, name: str, version: str | None = None) -> RegisteredVersion:
        """A version; the champion when none is named.

        Raises:
            NotFound: no such model or version, or no champion; the message names those that there are.
            RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        """
        known = self.details(name)
        wanted = version or self.champions().get(name)
        for candidate in known:
            if candidate.version == wanted:
                return candidate
        have = ", ".join(candidate.version for candidate in known) or "none"
        asked = f"{name}@{version}" if version else f"a champion of {name}"
        raise NotFound(f"{asked} is not registered (versions: {have}); workbench register {name} --source … --first")

    def _client(self) -> MlflowClient:
        if self._connected is None:
            self._connected = mlflow_client(self._tracking_uri)
        return self._connected

    def _refuse_second_champion(self, client: MlflowClient, name: str, wanted: RegisteredVersion | None) -> None:
        champion = client.get_registered_model(name).aliases.get(CHAMPION)
        if champion is None or (wanted is not None and wanted.version == str(champion)):
            return
        raise ChampionExists(
            f"{name}@{champion} is champion already and holds other weights; register without --first, "
            f"then a rollout makes the new version champion"
        )


def _ensure_model(client: MlflowClient, name: str, task: Task) -> None:
    try:
        client.create_registered_model(name, tags={TAG_TASK: task.value})
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _create_version(client: MlflowClient, manifest: Manifest) -> RegisteredVersion:
    """A registration run that holds the manifest, then the version on it, then its tags."""
    run_tags = {"kind": "registration", TAG_SOURCE: manifest.source, TAG_DIGEST: manifest.weights_digest}
    run = client.create_run(experiment(client, REGISTRATIONS), run_name=f"register {manifest.name}", tags=run_tags)
    run_id = run.info.run_id
    client.log_text(run_id, json.dumps(asdict(manifest), indent=1), f"{MANIFEST_FOLDER}/manifest.json")
    client.set_terminated(run_id)
    created = client.create_model_version(manifest.name, source=f"runs:/{run_id}/{MANIFEST_FOLDER}", run_id=run_id)
    return _tag_version(client, str(created.version), run_id, manifest)


def _unfinished(
    client: MlflowClient, known: Sequence[RegisteredVersion], manifest: Manifest
) -> RegisteredVersion | None:
    """The version of an earlier registration of these weights that died before its tags, now with them."""
    for version in known:
        if version.digest is not None or version.run_id is None:
            continue
        if client.get_run(version.run_id).data.tags.get(TAG_DIGEST) == manifest.weights_digest:
            return _tag_version(client, version.version, version.run_id, manifest)
    return None


def _tag_version(client: MlflowClient, version: str, run_id: str, manifest: Manifest) -> RegisteredVersion:
    """Tags set after creation, because those in the create call bypass MLflow's permission on tags.

    The digest comes last: a version that has it is complete.
    """
    tags = {**manifest.tags, TAG_SOURCE: manifest.source, TAG_TASK: manifest.task.value}
    for key, value in {**tags, TAG_DIGEST: manifest.weights_digest}.items():
        client.set_model_version_tag(manifest.name, version, key, value)
    return RegisteredVersion(manifest.name, version, manifest.source, manifest.weights_digest, manifest.task, run_id)


def experiment(client: MlflowClient, name: str) -> str:
    """Id of the experiment, created when it is not there, also when two create it at once."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except mlflow.exceptions.MlflowException as error:
        found = client.get_experiment_by_name(name)
        if found is None or error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return str(found.experiment_id)


def _registered(version: ModelVersion) -> RegisteredVersion:
    tags = dict(version.tags)
    task = tags.get(TAG_TASK)
    return RegisteredVersion(
        name=version.name,
        version=str(version.version),
        source=tags.get(TAG_SOURCE),
        digest=tags.get(TAG_DIGEST),
        task=Task(task) if task in list(Task) else None,
        run_id=version.run_id or None,
        claims={tag: str(value) for tag, value in tags.items() if is_reserved(tag)},
    )


@contextmanager
def mlflow_errors(tracking_uri: str) -> Iterator[None]:
    """MLflow's exceptions as ours: an answer with an error is not the same as no answer."""
    try:
        yield
    except (mlflow.exceptions.MlflowException, OSError) as error:
        if is_answer(error):
            raise RegistryRefused(f"MLflow at {tracking_uri} refused: {error}") from error
        raise RegistryUnavailable(f"MLflow at {tracking_uri} does not answer: {error}") from error


def is_answer(error: Exception) -> bool:
    """Whether MLflow answered with this error; else nobody answered, or one that is too busy to."""
    code = getattr(error, "error_code", None)
    if code in _BUSY_CODES:
        return False
    # Without a connection MLflow raises its base exception with its default code, which a server's answer has not.
    return isinstance(error, mlflow.exceptions.RestException) or code not in (None, "INTERNAL_ERROR")
