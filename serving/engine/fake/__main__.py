"""`python -m serving.engine.fake`: the fake engine as a process. Ends on SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from serving.engine.fake.server import FakeEngine
from serving.engine.fake.settings import FakeSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to end.

    Returns:
        0 after a signal, 1 when it cannot listen, 2 when an option has a wrong value.
    """
    parser = argparse.ArgumentParser(prog="python -m serving.engine.fake", description=FakeSettings.__doc__)
    parser.add_argument("--port-file", type=Path, help="file into which the port is written once it listens")
    for name, field in FakeSettings.model_fields.items():
        text = f"{field.description} (default: {field.default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=text.replace("%", "%%"), metavar="VALUE")
    options = vars(parser.parse_args(argv))
    port_file = options.pop("port_file")
    try:
        settings = FakeSettings.model_validate({name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return asyncio.run(_serve(settings, port_file))


async def _serve(settings: FakeSettings, port_file: Path | None) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, ended.set)
    engine = FakeEngine(settings)
    try:
        await engine.start()
    except OSError as error:
        sys.stderr.write(f"cannot listen on {settings.host}:{settings.port}: {error}\n")
        return 1
    if port_file is not None:
        _write_whole(port_file, str(engine.port))
    sys.stderr.write(f"fake engine with model {settings.model} on {engine.url}\n")
    await ended.wait()
    await engine.stop()
    return 0


def _write_whole(path: Path, text: str) -> None:
    """Writes so that a reader finds nothing or all of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
