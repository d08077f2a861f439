"""Who may ask for what, and changes of the directory as pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.core.errors import BadRequest, Forbidden, NotFound
from serving.core.state import Tier
from serving.core.tenancy import (
    ApiKey,
    GuardrailPolicy,
    Issuer,
    Limits,
    Principal,
    Scope,
    Tenant,
    TenantDirectory,
    authorize,
)
from serving.core.tenant_edits import (
    add_tenant,
    check,
    differences,
    key_of,
    put_issuer,
    put_key,
    put_tenant,
    remove_issuer,
    remove_tenant,
    revoke_key,
    rotate_key,
    tenant_of,
)

NOW_S = 1_000_000.0
SHA = "0123456789abcdef" * 4
ACME = Tenant("acme", models=("m", "n"), adapters=("polite",), tiers=(Tier.DEFAULT, Tier.BATCH))
KEY = ApiKey("key1", "acme", SHA, created_at_s=NOW_S, label="ci")
ISSUER = Issuer("https://login.example.com", "workbench", jwks_url="https://login.example.com/jwks.json")
DIRECTORY = TenantDirectory(3, NOW_S, (ACME, Tenant("lab")), (KEY,), (ISSUER,))


def test_a_new_tenant_may_do_nothing() -> None:
    nobody = Principal(Tenant("new"), "key1")
    with pytest.raises(NotFound):
        authorize(nobody, "m", Tier.DEFAULT)
    assert not nobody.is_admin


@pytest.mark.parametrize(
    ("principal", "asked", "error"),
    [
        (Principal(ACME, "k"), {"model": "m"}, None),
        (Principal(ACME, "k"), {"model": "m", "tier": Tier.BATCH, "adapter": "polite"}, None),
        (Principal(ACME, "k"), {"model": "other"}, NotFound),
        (Principal(ACME, "k", models=("n",)), {"model": "m"}, NotFound),
        (Principal(ACME, "k", models=("n", "other")), {"model": "other"}, NotFound),
        (Principal(replace(ACME, models=("*",)), "k"), {"model": "whatever"}, None),
        (Principal(replace(ACME, models=("*",)), "k", models=()), {"model": "m"}, NotFound),
        (Principal(ACME, "k"), {"model": "m", "adapter": "rude"}, NotFound),
        (Principal(ACME, "k"), {"model": "m", "tier": Tier.INTERACTIVE}, Forbidden),
        (Principal(ACME, "k", scopes=frozenset((Scope.ADMIN,))), {"model": "m"}, Forbidden),
        (Principal(ACME, "k", scopes=frozenset()), {"model": "m"}, Forbidden),
        (Principal(ACME, "k", scopes=frozenset(Scope)), {"model": "m"}, None),
    ],
)
def test_what_is_not_granted_is_refused(principal: Principal, asked: dict[str, Any], error: type[Exception] | None):
    asked = {"tier": Tier.DEFAULT, **asked}
    if error is None:
        authorize(principal, **asked)
        return
    with pytest.raises(error):
        authorize(principal, **asked)


def test_a_refusal_names_what_may_be_used_and_nothing_else() -> None:
    with pytest.raises(NotFound) as refused:
        authorize(Principal(ACME, "k", models=("n",)), "m", Tier.DEFAULT, served=["m", "n", "secret"])
    assert refused.value.message == "no model 'm'; there are: n"
    assert refused.value.param == "model"


def test_cache_groups_of_tenants_and_groups_never_meet() -> None:
    tenants = [Tenant("a"), Tenant("b"), Tenant("c", sharing_group="a"), Tenant("d", sharing_group="a")]
    groups = [tenant.cache_group for tenant in tenants]
    assert groups[2] == groups[3]
    assert len(set(groups)) == 3


def test_tenants_are_added_changed_and_removed_with_their_keys() -> None:
    with pytest.raises(BadRequest, match="tenants update"):
        add_tenant(DIRECTORY, Tenant("acme"))
    changed = put_tenant(DIRECTORY, replace(ACME, disabled=True))
    assert [tenant.disabled for tenant in changed.tenants] == [True, False]
    removed = remove_tenant(changed, "acme")
    assert [tenant.tenant_id for tenant in removed.tenants] == ["lab"]
    assert removed.keys == ()
    with pytest.raises(NotFound, match="there are: lab"):
        tenant_of(removed, "acme")
    with pytest.raises(NotFound):
        remove_tenant(removed, "acme")


def test_a_key_is_found_by_its_id_or_its_label_and_never_by_half() -> None:
    assert key_of(DIRECTORY, "key1") == key_of(DIRECTORY, "ci") == KEY
    with pytest.raises(NotFound):
        key_of(DIRECTORY, "key")
    twins = put_key(DIRECTORY, replace(KEY, key_id="key2"))
    with pytest.raises(BadRequest, match="key1, key2"):
        key_of(twins, "ci")
    assert key_of(revoke_key(twins, "key1", NOW_S), "ci").key_id == "key2"
    with pytest.raises(NotFound):
        put_key(DIRECTORY, replace(KEY, tenant_id="nobody"))


def test_a_revocation_keeps_its_first_time() -> None:
    once = revoke_key(DIRECTORY, "ci", NOW_S + 5)
    assert once.keys[0].revoked_at_s == NOW_S + 5
    assert revoke_key(once, "key1", NOW_S + 9) == once


def test_a_rotation_hands_on_grants_and_lets_the_old_key_end() -> None:
    old = replace(KEY, models=("m",), limits=Limits(tokens_per_day=5), expires_at_s=NOW_S + 100.0)
    made = ApiKey("key2", "", "f" * 64, created_at_s=NOW_S + 40.0)
    rotated = rotate_key(put_key(DIRECTORY, old), "ci", made, overlap_s=10.0)
    ended, new = rotated.keys
    assert (ended.expires_at_s, ended.label) == (NOW_S + 50.0, "ci (rotated)")
    assert (new.tenant_id, new.models, new.limits, new.label) == ("acme", old.models, old.limits, "ci")
    assert new.expires_at_s == NOW_S + 140.0  # it lives as long as its predecessor was to
    assert check(rotated) == []
    late = rotate_key(put_key(DIRECTORY, old), "ci", made, overlap_s=1e6)
    assert late.keys[0].expires_at_s == old.expires_at_s  # never longer than it would have
    with pytest.raises(BadRequest, match="revoked"):
        rotate_key(revoke_key(DIRECTORY, "ci", NOW_S), "key1", made, 10.0)


def test_issuers_are_kept_by_name_and_audience() -> None:
    both = put_issuer(DIRECTORY, replace(ISSUER, audience="other"))
    assert len(put_issuer(both, replace(ISSUER, leeway_s=0.0)).issuers) == 2
    assert len(remove_issuer(both, ISSUER.issuer, "other").issuers) == 1
    assert remove_issuer(both, ISSUER.issuer).issuers == ()
    with pytest.raises(NotFound, match=ISSUER.issuer):
        remove_issuer(both, "https://elsewhere.example.com")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tenants": (Tenant("a"), Tenant("a"))}, "twice"),
        ({"tenants": (Tenant("Ä"),)}, "a tenant's id"),
        ({"tenants": (Tenant("a", models=("M 1",)),)}, "models: 'M 1'"),
        ({"tenants": (Tenant("a", models=("m@1",)),)}, "without a version"),
        ({"tenants": (Tenant("a", sharing_group=""),)}, "sharing group"),
        ({"tenants": (Tenant("a", retention_days={"replays": 0.0}),)}, "retention_days"),
        ({"tenants": (Tenant("a", limits=Limits(max_streams=-1)),)}, "max_streams"),
        ({"tenants": (Tenant("a", limits=Limits(usd_per_hour=float("nan"))),)}, "usd_per_hour"),
        ({"tenants": (Tenant("a", guardrails=GuardrailPolicy({"emial": "flag"})),)}, "did you mean 'email'"),
        ({"keys": (replace(KEY, sha256="secret"),)}, "sha256"),
        ({"keys": (replace(KEY, tenant_id="nobody"),)}, "no tenant 'nobody'"),
        ({"keys": (replace(KEY, key_id="X"),)}, "a key's id"),
        ({"keys": (KEY, KEY)}, "twice"),
        ({"keys": (replace(KEY, label="a\nb"),)}, "label"),
        ({"issuers": (replace(ISSUER, jwks_url="http://login.example.com/jwks"),)}, "https://"),
        ({"issuers": (replace(ISSUER, jwks_url="https://user:secret@example.com/"),)}, "https://"),
        ({"issuers": (replace(ISSUER, jwks_url="file:///etc/passwd"),)}, "https://"),
        ({"issuers": (replace(ISSUER, jwks_url=None),)}, "jwks_url or a jwks"),
        ({"issuers": (replace(ISSUER, algorithms=("RS256", "HS256")),)}, "algorithms"),
        ({"issuers": (replace(ISSUER, algorithms=("none",)),)}, "algorithms"),
        ({"issuers": (replace(ISSUER, algorithms=()),)}, "algorithms"),
        ({"issuers": (replace(ISSUER, audience=""),)}, "audience"),
        ({"issuers": (replace(ISSUER, leeway_s=1e9),)}, "leeway_s"),
        ({"issuers": (replace(ISSUER, max_lifetime_s=float("nan")),)}, "max_lifetime_s"),
        ({"issuers": (ISSUER, ISSUER)}, "twice"),
    ],
)
def test_a_wrong_directory_is_not_published(wrong: dict[str, Any], named: str) -> None:
    assert check(DIRECTORY) == []
    mistakes = check(replace(DIRECTORY, **wrong))
    assert any(named in mistake for mistake in mistakes), mistakes


def test_differences_show_what_changed_and_no_hash() -> None:
    new = put_tenant(DIRECTORY, replace(ACME, limits=Limits(max_streams=3), models=("m",)))
    new = put_key(new, replace(KEY, sha256="f" * 64))
    new = replace(put_issuer(remove_tenant(new, "lab"), replace(ISSUER, jwks="{}")), epoch=9)
    lines = differences(DIRECTORY, put_key(new, replace(KEY, key_id="key2")))
    assert lines == [
        "- tenant lab",
        "~ tenant acme: models: [m, n] -> [m]",
        "~ tenant acme: limits: none -> max_streams 3",
        "~ key key1: sha256: changed",
        "+ key key2",
        "~ issuer https://login.example.com for workbench: jwks: changed",
    ]
    assert differences(new, new) == []
