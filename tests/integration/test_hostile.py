"""Hostile bodies, headers and tokens, and whatever the gateway's own description allows, against a running worker.

Whatever comes: no 5xx but a documented 503, no hang, nothing of another tenant's, and the worker lives.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import pytest_asyncio
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from serving.core.errors import ErrorCode
from serving.core.state import Model, RoutingTable, Task
from serving.core.tenancy import ApiKey, Issuer, Tenant, TenantDirectory
from serving.store.api_keys import key_sha256, new_key
from serving.store.connection import connect
from serving.store.routing_table import StoreRoutingTable
from serving.store.server import StoreServer
from serving.store.tenants import StoreTenantDirectory
from tests.gateway.fleets import EMBEDDER, MODEL, a_pool
from tests.integration.hostile import BASES, CHAT, Came, Hostile, exchange, whole
from tests.integration.hostile import requests as hostile_requests
from tests.integration.processes import Process, fake_engine, free_port, gateway_worker
from tests.issuers import AUDIENCE, NAME, Signer, b64, jwks

SECRET_MODEL = "secret-model"  # granted to the other tenant alone
PLANTED = "planted-word-of-the-other-tenant"
DOCUMENTED_503 = {ErrorCode.NO_REPLICA, ErrorCode.STORE_UNAVAILABLE, ErrorCode.GUARDRAIL_UNAVAILABLE}
SHORT, LONG = 300, 10_000  # requests
FEW, MANY = 6, 500  # an operation and mode
QUIET = settings(
    deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@dataclass
class Front:
    """The worker, and who may ask."""

    port: int
    worker: Process
    ours: bytes
    theirs: bytes
    other_keys: dict[str, bytes]
    signer: Signer = field(default_factory=Signer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tokens(self) -> dict[str, bytes]:
        """Every way of not being let in."""
        now_s = time.time()
        good = self.signer.token(now_s, tenant="acme")
        head, claims, signature = good.split(b".")
        stranger = Signer(number=7)  # a key of the same name that the issuer does not have
        return {
            "expired": self.signer.token(now_s - 5000),
            "not yet valid": self.signer.token(now_s, nbf=int(now_s) + 5000),
            "wrong audience": self.signer.token(now_s, aud="somebody-else"),
            "wrong issuer": self.signer.token(now_s, iss="https://evil.example.com"),
            "lives too long": self.signer.token(now_s, exp=int(now_s) + 10**6),
            "no expiry": self.signer.token(now_s, exp=None),
            "unknown tenant": self.signer.token(now_s, tenant="nobody"),
            "alg none": b".".join([b64({"alg": "none", "typ": "JWT"}), claims, b""]),
            "signed by a stranger": stranger.token(now_s),
            "signature cut": b".".join([head, claims, signature[:-8]]),
            "claims changed": b".".join([head, claims[:-4] + b"AAAA", signature]),
            "a key of no such id": new_key("0123456789ab").encode(),
            "a key with another's secret": self.ours[:-8] + b"00000000",
            "garbage": b"\xff\xfe\x00",
            "nothing": b"",
            **self.other_keys,
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("hostile")
    store = StoreServer(folder / "store")
    signer, port = Signer(), free_port()
    async with AsyncExitStack() as parts:
        await store.start()
        parts.push_async_callback(store.stop)
        options = ("--ttft-ms", "0", "--itl-ms", "0", "--default-output-tokens", "2", "--max-model-len", "2048")
        urls = {
            name: await parts.enter_async_context(fake_engine(folder, "--model", name, *options))
            for name in (MODEL, EMBEDDER, SECRET_MODEL)
        }
        keys = await _publish(store.url, urls, signer)
        env = {"REDIS_URL": store.url, "AUTH": "required", "CACHE_SALT_SECRET": "secret"}
        env = {f"WORKBENCH_GATEWAY_{name}": value for name, value in env.items()}
        worker = await parts.enter_async_context(gateway_worker(port, folder / "worker.log", env))
        refused = {f"a key that is {why}": keys[why] for why in ("revoked", "expired", "of a disabled tenant")}
        yield Front(port, worker, keys["ours"], keys["theirs"], refused, signer)


async def _publish(store_url: str, urls: dict[str, str], signer: Signer) -> dict[str, bytes]:
    """Two tenants, of which each has a model of its own, and keys of every kind; returns the keys."""
    now_s = time.time()
    tenants = (
        Tenant("acme", models=(MODEL, EMBEDDER)),
        Tenant("other", models=(MODEL, SECRET_MODEL)),
        Tenant("gone", models=("*",), disabled=True),
    )
    owners = {"ours": "acme", "theirs": "other", "revoked": "acme", "expired": "acme", "of a disabled tenant": "gone"}
    keys, kept = {}, []
    for number, (name, tenant) in enumerate(owners.items()):
        key = new_key(f"key{number:09d}")
        keys[name] = key.encode()
        kept.append(
            ApiKey(
                f"key{number:09d}", tenant, key_sha256(key), now_s - 100,
                expires_at_s=now_s - 1 if name == "expired" else None,
                revoked_at_s=now_s - 1 if name == "revoked" else None,
            )
        )  # fmt: skip
    issuer = Issuer(NAME, AUDIENCE, jwks=jwks(signer.entry))
    tasks = {name: Task.EMBED if name == EMBEDDER else Task.GENERATE for name in urls}
    models = tuple(Model(name, task, "1", ("1",), tokens_per_byte=0.25) for name, task in tasks.items())
    pools = tuple(a_pool(name, {f"{name}-0": url}, model=name, task=tasks[name]) for name, url in urls.items())
    client = connect(store_url)
    await StoreRoutingTable(client).publish(RoutingTable(1, now_s, models, pools))
    await StoreTenantDirectory(client).publish(TenantDirectory(1, now_s, tenants, tuple(kept), (issuer,)))
    await client.aclose()
    return keys


def bearer(key: bytes) -> bytes:
    return b"Bearer " + key


def judge(front: Front, request: Hostile, came: Came) -> None:
    """What holds whatever was sent."""
    assert came.statuses or came.closed, (request, came)
    has_deadline = b"x-request-timeout-ms" in request.raw.lower()
    for status in came.statuses:
        if status < 500 or (status == 504 and has_deadline):
            continue
        code = re.search(rb'"code": ?"(\w+)"', came.data)
        assert status == 503 and code and code[1].decode() in DOCUMENTED_503, (request, came)
    if request.is_ambiguous:
        assert len(came.statuses) <= 1, (request, came)
    assert PLANTED.encode() not in came.data
    # Its own key may name it, and /metrics names every pool: that page is the operator's, to be kept from apps.
    if front.theirs not in request.raw and b" /metrics " not in request.raw:
        assert SECRET_MODEL.encode() not in came.data or SECRET_MODEL.encode() in request.raw, (request, came)


def is_well(front: Front) -> None:
    """The worker lives, and a good request gets its answer."""
    assert front.worker.child.returncode is None
    os.kill(front.worker.pid, 0)
    came = exchange(front.port, whole(CHAT, BASES[CHAT], bearer(front.ours)))
    assert came.statuses == [200]


def fuzz(front: Front, num_requests: int) -> None:
    tokens = [bearer(front.ours)] * 8 + [bearer(front.theirs)] + [bearer(token) for token in front.tokens().values()]
    tokens += [b"Basic " + front.ours, front.ours, b"Bearer", b"bearer  " + front.ours, b"Bearer " + b"a" * 5000]

    # The short form sends the same requests each time; the long one others.
    @settings(QUIET, max_examples=num_requests, derandomize=num_requests == SHORT)
    @given(request=hostile_requests(tokens))
    def send(request: Hostile) -> None:
        judge(front, request, exchange(front.port, request))

    send()
    is_well(front)


def test_hostile_requests(front: Front) -> None:
    fuzz(front, SHORT)


@pytest.mark.long
def test_ten_thousand_hostile_requests(front: Front) -> None:
    fuzz(front, LONG)


def test_no_token_but_a_good_one_is_let_in(front: Front) -> None:
    good = front.signer.token(time.time(), tenant="acme")
    assert exchange(front.port, whole(CHAT, BASES[CHAT], bearer(good))).statuses == [200]
    for name, token in front.tokens().items():
        came = exchange(front.port, whole(CHAT, BASES[CHAT], bearer(token)))
        assert came.statuses and came.statuses[0] in (400, 401, 403), (name, came)
        assert b"choices" not in came.data, (name, came)


def test_another_tenants_model_is_one_that_is_not_there(front: Front) -> None:
    def ask(model: str) -> bytes:
        came = exchange(front.port, whole(CHAT, {**BASES[CHAT], "model": model}, bearer(front.ours)))
        assert came.statuses == [404]
        return came.data.partition(b"\r\n\r\n")[2].replace(model.encode(), b"NAME")

    assert ask(SECRET_MODEL) == ask("no-such-model")
    listed = requests.get(
        f"{front.url}/v1/models", headers={"authorization": f"Bearer {front.ours.decode()}"}, timeout=10
    )
    assert SECRET_MODEL not in listed.text
    theirs = exchange(front.port, whole(CHAT, {**BASES[CHAT], "model": SECRET_MODEL}, bearer(front.theirs)))
    assert theirs.statuses == [200]


def test_another_tenants_answer_is_not_replayed(front: Front) -> None:
    theirs = {**BASES[CHAT], "messages": [{"role": "user", "content": PLANTED}]}
    for body, key in ((theirs, front.theirs), (theirs, front.ours), (BASES[CHAT], front.ours)):
        came = exchange(front.port, whole(CHAT, body, bearer(key), idempotency_key="shared-by-chance"))
        assert came.statuses[0] in (200, 422)
        assert b"idempotent-replayed: true" not in came.data.lower()


# ---- by the gateway's own description


def by_description(front: Front, max_examples: int) -> None:
    """Every operation with bodies that its schema allows and ones that it forbids."""
    schema = schemathesis.openapi.from_url(f"{front.url}/openapi.json")
    headers = {"authorization": f"Bearer {front.ours.decode()}"}
    num_operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        num_operations += 1
        for mode in GenerationMode:
            _check_operation(front, operation, mode, headers, max_examples)
    assert num_operations >= 5
    is_well(front)


def _check_operation(front: Front, operation: Any, mode: GenerationMode, headers: dict[str, str], num: int) -> None:
    documented = {str(status) for status in operation.definition.raw["responses"]}

    @settings(QUIET, max_examples=num, derandomize=num == FEW)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.headers = {**(case.headers or {}), **headers}
        answer = case.call(timeout=10)
        status = answer.status_code
        assert status < 500 or status == 503, (case.as_curl_command(), answer.text)
        if status >= 400:
            error = orjson.loads(answer.content)["error"]
            assert error["code"] in set(ErrorCode) and error["message"], answer.text
        known = documented | {"400", "401", "403", "404", "405", "413", "415", "422", "429"}
        assert str(status) in known, (status, case.as_curl_command())

    try:
        check()
    except Exception as error:
        if "Unsatisfiable" in type(error).__name__ or "Impossible to generate" in str(error):
            return  # an operation without parameters has nothing that could be wrong
        raise


def test_the_description_holds(front: Front) -> None:
    by_description(front, FEW)


@pytest.mark.long
def test_the_description_holds_at_length(front: Front) -> None:
    by_description(front, MANY)
