"""JupyterLab in the foreground, without a stack."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys

from workbench.cli.common import emit, err
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.stack.lab import LAB_HOST, jupyter_lab, lab_url, proxied
from workbench.stack.ports import check_port
from workbench.wiring import layout


async def run_lab(config: WorkbenchConfig, token: str, as_json: bool) -> None:
    """Serves notebooks/ until Ctrl-C.

    Raises:
        CommandFailed: JupyterLab is not installed.
        PortTaken: its port is in use.
        ServiceFailed: it did not start.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise CommandFailed("JupyterLab is not installed: pip install 'llm-workbench[notebooks]'", Exit.MISSING)
    check_port(LAB_HOST, config.lab.port, "lab.port")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = jupyter_lab(config, layout(config), token, config.file.parent)
    try:
        with err.status("waiting for JupyterLab to answer"):
            await service.start()
        url = lab_url(config, token, config.file.parent)
        emit({"url": url, "proxied": sorted(proxied(config))}, as_json, lambda: sys.stdout.write(url + "\n"))
        sys.stdout.flush()
        await stop.wait()
    finally:
        await service.stop()
