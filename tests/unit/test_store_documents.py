"""Documents: what is written is read back equal, what is broken is refused by name, files change in one step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.tenancy import ApiKey, TenantDirectory
from serving.settings import ControlSettings, GatewaySettings, UnknownSetting
from serving.store import documents
from serving.store.connection import BrokenDocument, StoreUnavailable, connect
from serving.store.documents import write_file
from serving.store.routing_table import decode, encode
from serving.store.tenants import TENANT_DIRECTORY
from tests.unit.core_examples import a_pool, a_replica, a_row, a_table

TABLE = a_table(a_pool("p", a_replica("r1")), rows=(a_row(), a_row(concurrency=4, ttft_p99_s=None)), epoch=7)


def test_a_table_is_read_back_equal() -> None:
    assert decode(encode(TABLE)) == TABLE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"epoch":7', b'"epoch":"7"', "epoch"),
        (b'"epoch":7,', b"", "epoch"),
        (b'"num_samples":2', b'"num_samples":2,"surprise":1', "policy.surprise"),
        (b'"state":"ready"', b'"state":"happy"', "pools.0.replicas.0.state"),
        (b'"schema":1', b'"schema":2', "schema 2, this program reads 1"),
        (b',"schema":1', b"", "schema None"),
        (b'"usd_per_hour":1.0', b'"usd_per_hour":NaN', "usd_per_hour"),
        (b"{", b"[", "not JSON"),
    ],
)
def test_a_broken_table_is_refused_and_the_field_named(old: bytes, new: bytes, message: str) -> None:
    data = encode(TABLE)
    assert old in data
    with pytest.raises(BrokenDocument, match=message):
        decode(data.replace(old, new, 1))


def test_what_readers_would_refuse_is_not_published() -> None:
    with pytest.raises(BrokenDocument, match="usd_per_hour"):
        encode(a_table(a_pool("p", usd_per_hour=math.nan)))


@pytest.mark.parametrize("never", [math.nan, math.inf])
def test_a_number_that_is_none_does_not_become_no_bound(never: float) -> None:
    key = ApiKey("key1", "acme", "0" * 64, created_at_s=0.0, expires_at_s=never)
    with pytest.raises(BrokenDocument, match=r"keys\.0\.expires_at_s"):
        TENANT_DIRECTORY.codec.encode(TenantDirectory(1, 0.0, keys=(key,)))


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    write_file(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(documents.os, "fsync", full)
    with pytest.raises(StoreUnavailable, match=r"table\.json: No space left"):
        write_file(path, b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", ""])
def test_a_url_that_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="scheme"):
        connect(url)


def test_settings_come_from_the_environment_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_GATEWAY_PORT", "8123")
    monkeypatch.setenv("WORKBENCH_CONTROL_ROUTING", '{"num_samples": 3}')
    assert GatewaySettings().port == 8123
    assert ControlSettings().routing == replace(TABLE.policy, num_samples=3)
    monkeypatch.setenv("WORKBENCH_GATEWAY_PROT", "1")
    with pytest.raises(UnknownSetting, match="did you mean WORKBENCH_GATEWAY_PORT"):
        GatewaySettings()
