"""Who asks: from the Authorization header to a principal.

    find           the hot path: SHA-256 of the header, one look-up, two times compared; knows who came before
    authenticate   everybody else: an API key against its hash, a token against its issuer's keys

What a directory says counts from the moment that it is taken up: everything known is forgotten then. A directory that
nobody could confirm for longer than `max_staleness_s` authenticates nobody: it might name a key that was revoked.

In open mode, who brings neither a key of ours nor a token of an issuer is the tenant `default`: the built-in one, which
may do everything, or the directory's tenant of that name.
"""

from __future__ import annotations

import hmac
import math
from hashlib import sha256

from serving.core.errors import ErrorCode, Unauthorized, Unavailable
from serving.core.ports import Clock
from serving.core.state import Tier
from serving.core.tenancy import ANY, ApiKey, AuthMode, Principal, Scope, Tenant, TenantDirectory
from serving.gateway.key_sets import KeySets
from serving.gateway.tokens import TokenVerifier, UnknownKeyId, Verified
from serving.store.api_keys import PREFIX, key_id_of, key_sha256

OPEN_TENANT = Tenant("default", models=(ANY,), adapters=(ANY,), tiers=tuple(Tier))
MAX_KNOWN = 20_000
STALE_RETRY_AFTER_S = 5.0

_KEY_PREFIX = PREFIX.encode()
_NO_SHA256 = "0" * 64


class Authenticator:
    """Knows the tenants, keys and issuers of one directory.

    Args:
        mode: whether a key is required.
        key_sets: the issuers' keys; None where no issuer is ever trusted.
        clock: for expiry and staleness.
        max_staleness_s: how long a directory counts that nobody could confirm.
    """

    def __init__(
        self, mode: AuthMode, clock: Clock, *, key_sets: KeySets | None = None, max_staleness_s: float = 3600.0
    ) -> None:
        self._mode = mode
        self._key_sets = key_sets
        self._now_s = clock.now_s
        self._max_staleness_s = max_staleness_s
        self._fresh_until_s = -math.inf
        self._known: dict[bytes, Verified] = {}
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, ApiKey] = {}
        self._tokens: TokenVerifier | None = None
        self._open = _open_principal(mode, None)

    def on_directory(self, directory: TenantDirectory) -> None:
        """Takes up a directory; what was known by the last one is forgotten."""
        self._tenants = {tenant.tenant_id: tenant for tenant in directory.tenants}
        self._keys = {key.key_id: key for key in directory.keys}
        self._open = _open_principal(self._mode, self._tenants.get(OPEN_TENANT.tenant_id))
        self._tokens = None
        if self._key_sets is not None:
            self._key_sets.on_issuers(directory.issuers)
            if directory.issuers:
                self._tokens = TokenVerifier(directory.issuers, self._tenants, self._key_sets.keys_of)
        self.forget()

    def on_confirmed(self, at_s: float) -> None:
        """The directory was known to be the newest at `at_s` (Unix seconds)."""
        self._fresh_until_s = at_s + self._max_staleness_s

    def forget(self) -> None:
        """Everybody has to be verified again: an issuer's keys have changed."""
        self._known.clear()

    def find(self, authorization: bytes | None) -> Principal | None:
        """Who sends this header, when that is known already; else None: `authenticate` finds out or refuses."""
        if authorization is None:
            return self._open
        known = self._known.get(sha256(authorization).digest())
        if known is None:
            return None
        now_s = self._now_s()
        return known.principal if now_s < known.until_s and now_s < self._fresh_until_s else None

    async def authenticate(self, authorization: bytes | None) -> Principal:
        """Who sends this header.

        Raises:
            Unauthorized: nobody that we know.
            Unavailable: the directory was not confirmed for too long, so nobody can tell.
        """
        found = self.find(authorization)
        if found is not None:
            return found
        if authorization is None:
            raise Unauthorized("no API key: send `Authorization: Bearer KEY`")
        credential = _credential(authorization)
        if credential.startswith(_KEY_PREFIX):
            self._check_fresh()
            verified = self._by_key(credential)
        elif self._tokens is not None and _looks_like_a_token(credential):
            self._check_fresh()
            verified = await self._by_token(credential)
        elif self._open is not None:
            return self._open
        else:
            raise Unauthorized("no key or token of this endpoint: send `Authorization: Bearer KEY`")
        self._remember(authorization, verified)
        return verified.principal

    def _check_fresh(self) -> None:
        if self._now_s() < self._fresh_until_s:
            return
        raise Unavailable(
            "nobody can be authenticated: the tenant directory was not confirmed for too long",
            code=ErrorCode.STORE_UNAVAILABLE,
            retry_after_s=STALE_RETRY_AFTER_S,
        )

    def _by_key(self, credential: bytes) -> Verified:
        key = self._keys.get(key_id_of(credential) or "")
        # Compared also when there is no such key: how long it takes tells nobody which ids there are.
        kept = _NO_SHA256 if key is None else key.sha256
        same = hmac.compare_digest(key_sha256(credential).encode(), kept.encode())
        tenant = None if key is None else self._tenants.get(key.tenant_id)
        until_s = math.inf if key is None or key.expires_at_s is None else key.expires_at_s
        if key is None or tenant is None or not same or _is_over(key, tenant) or self._now_s() >= until_s:
            raise Unauthorized("the API key is not valid: it is unknown, expired or revoked")
        return Verified(_key_principal(key, tenant), until_s)

    async def _by_token(self, token: bytes) -> Verified:
        try:
            return self._verify(token)
        except UnknownKeyId as unknown:
            if self._key_sets is None or not await self._key_sets.refresh(unknown.issuer):
                raise
        return self._verify(token)

    def _verify(self, token: bytes) -> Verified:
        if self._tokens is None:  # a directory without issuers came while their keys were fetched
            raise Unauthorized("the token's issuer is not trusted here")
        return self._tokens.verify(token, self._now_s())

    def _remember(self, authorization: bytes, verified: Verified) -> None:
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[sha256(authorization).digest()] = verified


def _credential(authorization: bytes) -> bytes:
    """What follows `Bearer`, nothing for another scheme. Raises Unauthorized for a key of ours without that word."""
    scheme, _, rest = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.startswith(_KEY_PREFIX):
        raise Unauthorized("send the key as `Authorization: Bearer KEY`")
    return b""


def _looks_like_a_token(credential: bytes) -> bool:
    return credential.count(b".") == 2


def _is_over(key: ApiKey, tenant: Tenant) -> bool:
    return key.revoked_at_s is not None or tenant.disabled


def _key_principal(key: ApiKey, tenant: Tenant) -> Principal:
    return Principal(
        tenant=tenant,
        key_id=key.key_id,
        scopes=frozenset(key.scopes),
        models=key.models,
        limits=key.limits,
        expires_at_s=key.expires_at_s,
    )


def _open_principal(mode: AuthMode, named: Tenant | None) -> Principal | None:
    """Who brings no key: nobody where one is required, or where the directory has disabled the tenant."""
    if mode is AuthMode.REQUIRED or (named is not None and named.disabled):
        return None
    tenant = named or OPEN_TENANT
    return Principal(tenant=tenant, key_id="open", scopes=frozenset(Scope))
