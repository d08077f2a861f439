"""`workbench purge` on a real store: a tenant's stored answers go and other tenants' stay."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.replaying import JSON, TENANT, Client, Two, a_store, owned
from workbench.cli.app import run_app
from workbench.cli.exits import Exit


async def test_a_tenant_s_answers_are_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workbench.yaml").write_text('models: {tiny: {source: "/tiny"}}\n')
    monkeypatch.chdir(tmp_path)

    async def purge(*arguments: str) -> int:
        assert await asyncio.to_thread(run_app, ["purge", "--json", *arguments]) == Exit.OK
        found: int = json.loads(capsys.readouterr().out)["stored_answers"]
        return found

    async with a_store() as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        two = Two(server)
        for replays in two.workers:
            replays.start()
        for tenant in (TENANT, replace(TENANT, tenant_id="t2")):
            (await owned(two.first, b"k", tenant=tenant)).recorder(Client()).whole(200, JSON, b"answer")
        await asyncio.sleep(0.1)
        assert await purge("--tenant", "t") == 0  # it is not a day old
        assert await purge("--tenant", "t", "--older-than", "0") == 1
        assert await purge("--kind", "replays", "--older-than", "0") == 1
        assert await purge("--older-than", "0") == 0
        await two.close()
