"""Who may ask for what: tenants, their keys, what they trust, and the one function that says yes or no.

    directory       published by the control plane, whole, with an epoch, like the routing table
    principal       a tenant by way of one key or token, as authentication found it
    authorize()     deny by default: a model, adapter, tier or region that is not granted is refused

A grant is a name or `*`. What a key or token narrows, its tenant must have granted too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from serving.core.errors import Forbidden, NotFound
from serving.core.state import Tier

TENANT_DIRECTORY_SCHEMA = 1
ANY = "*"


class AuthMode(StrEnum):
    """`open`: who brings no key of ours is the built-in tenant `default`. `required`: who brings none is refused."""

    OPEN = "open"
    REQUIRED = "required"


class Scope(StrEnum):
    """What a key is for. Admin calls pin replicas and read the router's reasons."""

    INFERENCE = "inference"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a tenant or of one key; None is no bound. A minute is a sliding window, a day is UTC's.

    `usd_per_request` refuses before any GPU time; `usd_per_hour` trips the tenant's cost breaker.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_streams: int | None = None
    usd_per_request: float | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class GuardrailPolicy:
    """What a tenant's guardrails do: the action of a check by its name, over the gateway's defaults.

    `actions` maps a check's name to `allow | flag | block | redact`; `blocklist` are the tenant's own words.
    """

    actions: dict[str, str] = field(default_factory=dict)
    blocklist: tuple[str, ...] = ()


class Consent(StrEnum):
    """What a tenant may allow its requests to be used for beyond their answers."""

    SHADOW = "shadow"  # mirrored to a candidate version, scored and discarded


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the endpoint.

    `sharing_group`: tenants of one group share cached prefixes; without one a tenant shares with nobody.
    `regions`: where its requests may run. `stores_content`: whether idempotent replays may be kept; `consents`: what
    else its content may be used for, nothing unless said. `retention_days` by kind of data, over the defaults.
    """

    tenant_id: str
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    tiers: tuple[Tier, ...] = (Tier.DEFAULT,)
    regions: tuple[str, ...] = (ANY,)
    limits: Limits = Limits()
    sharing_group: str | None = None
    guardrails: GuardrailPolicy = GuardrailPolicy()
    stores_content: bool = True
    consents: tuple[Consent, ...] = ()
    retention_days: dict[str, float] = field(default_factory=dict)
    disabled: bool = False

    @property
    def cache_group(self) -> str:
        """Whose cached prefixes it may hit: its group's or its own."""
        return f"tenant:{self.tenant_id}" if self.sharing_group is None else f"group:{self.sharing_group}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: its SHA-256 and what it may. The key itself is shown once and never stored."""

    key_id: str
    tenant_id: str
    sha256: str
    created_at_s: float
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)
    models: tuple[str, ...] = (ANY,)
    limits: Limits = Limits()
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Issuer:
    """Whose tokens are taken. `jwks_url` is fetched off the hot path; `jwks` is its last good answer (JSON).

    `tenant_claim` names the claim that holds the tenant's id; `scope_claim` that of the scopes, blank-separated.
    """

    issuer: str
    audience: str
    jwks_url: str | None = None
    jwks: str | None = None
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    tenant_claim: str = "tenant"
    scope_claim: str = "scope"
    max_lifetime_s: float = 3600.0
    leeway_s: float = 30.0


@dataclass(frozen=True, slots=True)
class TenantDirectory:
    """All that a worker needs to authenticate: it can start from a file copy of this alone."""

    epoch: int
    published_at_s: float
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    issuers: tuple[Issuer, ...] = ()
    schema: int = TENANT_DIRECTORY_SCHEMA


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant that asks, and what its key or token leaves of its grants. `key_id` is safe to log."""

    tenant: Tenant
    key_id: str
    scopes: frozenset[Scope] = frozenset((Scope.INFERENCE,))
    models: tuple[str, ...] = (ANY,)
    limits: Limits = Limits()
    expires_at_s: float | None = None

    @property
    def is_admin(self) -> bool:
        """Whether admin calls and the router's reasons are for it."""
        return Scope.ADMIN in self.scopes

    @property
    def has_bounds_on_cost(self) -> bool:
        """Whether what a request may cost counts for anything."""
        of_tenant, own = self.tenant.limits, self.limits
        return not (
            of_tenant.usd_per_request is None
            and of_tenant.usd_per_hour is None
            and own.usd_per_request is None
            and own.usd_per_hour is None
        )

    def may_use(self, model: str) -> bool:
        """Whether both the tenant and the key grant the served name."""
        return _granted(self.tenant.models, model) and _granted(self.models, model)

    def may_use_adapter(self, adapter: str) -> bool:
        """Whether the tenant grants the adapter of that name; which models it may use is another question."""
        return _granted(self.tenant.adapters, adapter)


def authorize(
    principal: Principal, model: str, tier: Tier, *, adapter: str | None = None, served: Iterable[str] = ()
) -> None:
    """Lets the request pass or raises. Regions are a routing filter, not a refusal.

    Args:
        principal: who asks.
        model: the served name.
        tier: of the request.
        adapter: its name, if one is asked for.
        served: the names that there are, for the message.

    Raises:
        NotFound: the model or adapter is not granted. Whether it exists is not told: the answer is that of an unknown
            name.
        Forbidden: another grant is missing.
    """
    tenant = principal.tenant
    require(principal, Scope.INFERENCE)
    if not principal.may_use(model):
        usable = ", ".join(sorted(name for name in served if principal.may_use(name))) or "none"
        raise NotFound(f"no model {model!r}; there are: {usable}", param="model")
    if adapter is not None and not principal.may_use_adapter(adapter):
        raise NotFound(f"no adapter {adapter!r} of {model}", param="model")
    if tier not in tenant.tiers:
        raise Forbidden(f"tenant {tenant.tenant_id} may not use service tier {tier.value!r}", param="service_tier")


def require(principal: Principal, scope: Scope) -> None:
    """Raises Forbidden when the key or token is not for that."""
    if scope not in principal.scopes:
        raise Forbidden(f"key {principal.key_id} is not for {scope.value}")


def _granted(grants: tuple[str, ...], name: str) -> bool:
    return ANY in grants or name in grants
