"""`workbench sweep` with bounds, and `workbench slo-search`, on a running stack of fake engines."""

from __future__ import annotations

import json

from tests.integration.workplaces import Workplace, new_workplace, running
from workbench.cli.exits import Exit

SMALL = ("--shape", "24x8", "--concurrency", "1", "--concurrency", "2")


async def test_a_sweep_is_previewed_bounded_and_resumed_and_a_load_is_searched(mlflow_uri: str) -> None:
    with new_workplace() as place:
        place.env["MLFLOW_TRACKING_URI"] = mlflow_uri
        async with running(place):
            await preview_then_sweep(place)
            await search(place)


async def preview_then_sweep(place: Workplace) -> None:
    words = ("sweep", place.model, *SMALL, "--json")
    code, output = await place.run(*words, "--dry-run")
    [shown] = json.loads(output)["sweeps"]
    assert code == Exit.OK
    assert [cell["is_assumed"] for cell in shown["cells"]] == [True] * 5
    assert shown["kept"] == [] and shown["minutes"] > 0 and shown["usd"] > 0
    code, output = await place.run(*words, "--budget-minutes", "0.01")
    assert code == Exit.FAILED and len(json.loads(output)["skipped"]) == 5
    code, output = await place.run(*words, "--budget-minutes", "5")
    assert code == Exit.OK and len(json.loads(output)["cells"]) == 5
    code, output = await place.run(*words, "--dry-run", "--no-resume")
    [shown] = json.loads(output)["sweeps"]
    assert [cell["is_assumed"] for cell in shown["cells"]] == [False] * 5


async def search(place: Workplace) -> None:
    bounds = ("--start", "2", "--highest", "4", "--prompt-tokens", "24", "--output-tokens", "4")
    code, output = await place.run("slo-search", place.model, *bounds, "--json")
    found = json.loads(output)
    assert code == Exit.OK
    assert (found["capacity"]["ending"], found["capacity"]["load"]) == ("always_kept", 4)
    assert found["mlflow_run_id"]
