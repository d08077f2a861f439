"""`workbench up` on a disk that runs full, with a terminal that goes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.processes import text, until
from tests.integration.workplaces import ROOT, Workplace, new_workplace, running

# `workbench` on a disk that is full while a file called `full` lies beside the program.
PROGRAM = """
import errno, sys
from pathlib import Path
from workbench.cli.app import run_app
from workbench.stack.state import StateFile

write, full = StateFile.write, Path(__file__).with_name("full")

def write_or_fail(file, state):
    if full.exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    write(file, state)

StateFile.write = write_or_fail
sys.exit(run_app(sys.argv[1:]))
"""


@pytest.fixture
def workplace(mlflow_uri: str) -> Iterator[Workplace]:
    with new_workplace() as place:
        (place.folder / "program.py").write_text(PROGRAM)
        place.program = (str(place.folder / "program.py"),)
        place.env |= {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": mlflow_uri}
        yield place


def pid_of(place: Workplace, name: str) -> int | None:
    state = place.state
    return next((record.pid for record in state.processes if record.name == name), None) if state else None


def in_session(pids: set[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


async def test_a_full_disk_and_a_broken_state_file_end_neither_supervision_nor_the_end(workplace: Workplace):
    full, file = workplace.folder / "full", workplace.folder / ".workbench" / "run" / "stack.json"

    async def is_said() -> bool:
        return "cannot write" in text(workplace.folder / "err")

    async with running(workplace) as child:
        gateway = pid_of(workplace, "gateway-0")
        assert gateway is not None
        full.touch()
        psutil.Process(gateway).kill()
        await until(is_said, "the full disk to be said", 20.0)
        file.write_text("{")
        full.unlink()

        async def is_back() -> bool:
            return pid_of(workplace, "gateway-0") not in (None, gateway) and await workplace.ask() == 200

        await until(is_back, "the gateway to be back and written down", 30.0)
        state = workplace.state
        assert state is not None
        pids = {record.pid for record in state.processes}
        assert text(workplace.folder / "err").count("cannot write") == 1
        full.touch()
        child.send_signal(signal.SIGHUP)
        await asyncio.wait_for(child.wait(), 40)
        assert in_session(pids) == [], text(workplace.folder / "err")
        assert not file.exists()


async def test_up_on_a_full_disk_names_the_folder(workplace: Workplace):
    (workplace.folder / "full").touch()
    code, _ = await workplace.run("up", "--no-lab")
    said = text(workplace.folder / "err")
    assert code == 1, said
    assert str(workplace.folder / ".workbench") in said.replace("\n", "")
    assert "No space left" in said
    assert "Traceback" not in said
