"""`workbench up|down|status|logs|lab`: the stack of this data folder."""

from __future__ import annotations

import collections
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli import status as status_view
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.up import SweepMode, UpRequest, run_up
from workbench.stack.lock import StackLock
from workbench.stack.state import StackState, end_sessions
from workbench.wiring import NotRunning, layout, running_stack

DOWN_TIMEOUT_S = 90.0
RUNNING = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE)


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    starting = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING, Exit.CONFLICT, Exit.INTERRUPTED)
    app.command(
        epilog=epilog(
            "workbench up",
            "workbench up --pool all-minilm-l6-v2-cpu",
            "workbench up --sweep short --ask --once",
            codes=starting,
        )
    )(up)
    app.command(epilog=epilog("workbench down", codes=RUNNING))(down)
    app.command(epilog=epilog("workbench status", "workbench status --json", codes=RUNNING))(status)
    app.command(
        epilog=epilog(
            "workbench logs", "workbench logs gateway-0 --follow", "workbench logs --json -n 5", codes=RUNNING
        )
    )(logs)
    app.command(epilog=epilog("workbench lab", codes=starting))(lab)


def up(
    sweep: Annotated[SweepMode, typer.Option(help="Measure every model that is served, then publish the table.")] = (
        SweepMode.NONE
    ),
    ask: Annotated[bool, typer.Option("--ask", help="Send one chat completion through the gateway.")] = False,
    once: Annotated[bool, typer.Option("--once", help="End the stack when that is done.")] = False,
    pool: Annotated[list[str] | None, typer.Option(help="Also start this on-demand pool; may be repeated.")] = None,
    lab: Annotated[bool, typer.Option(help="Start JupyterLab too, where it is installed.")] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Starts the stack and serves until Ctrl-C: store, MLflow, control plane, gateway, engines."""
    loaded = settings(config)
    for pool_id in pool or ():
        loaded.pool(pool_id)
    for warning in loaded.warnings():
        err.print(f"[yellow]warning[/] {warning}")
    request = UpRequest(sweep=sweep, ask=ask, once=once, pools=tuple(pool or ()), lab=lab, as_json=as_json)
    code = run(run_up(loaded, request))
    if code is not Exit.OK:
        raise typer.Exit(int(code))


def down(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Drains and ends the running stack, or what a dead one left behind."""
    where = layout(settings(config))
    if not where.lock_path.exists() and not where.state_file.path.exists():
        raise NotRunning(f"no stack runs from {where.data_dir}")
    lock = StackLock(where.lock_path)
    try:
        was_running = _end_supervisor(where.state_file.read(), lock)
        state = where.state_file.read()
        if state is None and not was_running:
            raise NotRunning(f"no stack runs from {where.data_dir}")
        left = []
        if lock.is_held:  # else another stack began meanwhile, and all this is its own
            left = [] if state is None else end_sessions(list(state.processes))
            where.state_file.remove()
            shutil.rmtree(where.metrics_dir, ignore_errors=True)  # in memory, and nobody counts in it now
    finally:
        lock.release()
    data = {"was_running": was_running, "ended_leftovers": left}
    emit(
        data,
        as_json,
        lambda: out.print("the stack has ended" + (f"; left over were {', '.join(left)}" if left else "")),
    )


def _end_supervisor(state: StackState | None, lock: StackLock) -> bool:
    """Ends the supervisor if one runs, and takes the lock: whoever holds it is a stack, whoever does not is none.

    Returns:
        Whether one ran. The lock is not taken when another stack began meanwhile.

    Raises:
        CommandFailed: it did not end in time, or is not the one that the state file names.
    """
    if lock.try_acquire():
        return False
    if state is None or not state.supervisor.signal(signal.SIGTERM):
        raise CommandFailed("a stack begins to start or ends just now: try again in a moment")
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    with err.status("waiting for requests in flight and for the engines to end"):
        while state.is_running and not lock.try_acquire():
            if time.monotonic() > deadline_s:
                raise CommandFailed(
                    f"the stack (pid {state.supervisor.pid}) did not end within {DOWN_TIMEOUT_S:g} s: see its logs"
                )
            time.sleep(0.1)
    lock.try_acquire()
    return True


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows processes, replicas, the routing table and the URLs of the running stack. Exit 3 when none runs."""
    loaded = settings(config)
    state = running_stack(loaded)
    if state is None:
        raise NotRunning(f"no stack runs from {loaded.data_dir}: start it with `workbench up`")
    seen = run(status_view.look(state))
    emit(status_view.as_data(state, seen), as_json, lambda: status_view.show(out, state, seen))


def logs(
    name: Annotated[
        str | None, typer.Argument(help="A process of `workbench status`; all of them when left out.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end of each log.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prints the logs of the stack's processes, also after it ended. Exit 3 when there is none."""
    if follow and as_json:
        raise CommandFailed("--json prints one document and --follow never ends: choose one", Exit.USAGE)
    loaded = settings(config)
    files = {path.stem: path for path in sorted(layout(loaded).log_dir.glob("*.log"))}
    state = layout(loaded).state_file.read()
    if state is not None:
        files |= {record.name: Path(record.log_path) for record in state.processes if record.log_path is not None}
    if not files:
        raise CommandFailed(f"no logs below {loaded.data_dir}: start the stack with `workbench up`", Exit.UNAVAILABLE)
    if name is not None and name not in files:
        raise CommandFailed(f"no log of {name!r}; there are {', '.join(files)}", Exit.UNAVAILABLE)
    chosen = {name: files[name]} if name is not None else files
    tails = [{"name": title, "path": str(path), "lines": _tail(path, lines)} for title, path in chosen.items()]
    emit(tails, as_json, lambda: _print_tails(tails, headed=name is None))
    if follow:
        _follow(chosen)


def lab(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Opens JupyterLab: prints the running stack's, or runs one in the foreground until Ctrl-C."""
    loaded = settings(config)
    state = running_stack(loaded)
    url = state.urls.get("lab") if state is not None else None
    if url is None:
        from workbench.cli.lab import run_lab

        run(run_lab(loaded, secrets.token_urlsafe(24), as_json))
        return
    emit({"url": url}, as_json, lambda: sys.stdout.write(url + "\n"))


def _tail(path: Path, num_lines: int) -> list[str]:
    if not path.exists():
        return []
    with path.open("r", encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in collections.deque(file, maxlen=num_lines)]


def _print_tails(tails: list[dict[str, Any]], *, headed: bool) -> None:
    for tail in tails:
        if headed:
            sys.stdout.write(f"==> {tail['name']} ({tail['path']}) <==\n")
        sys.stdout.writelines(f"{line}\n" for line in tail["lines"])


def _follow(files: dict[str, Path]) -> None:
    at = {title: path.stat().st_size if path.exists() else 0 for title, path in files.items()}
    while True:
        time.sleep(0.25)
        for title, path in files.items():
            if not path.exists() or path.stat().st_size == at[title]:
                continue
            with path.open("r", encoding="utf-8", errors="replace") as file:
                file.seek(at[title] if path.stat().st_size > at[title] else 0)
                for line in file:
                    sys.stdout.write(f"{title}: {line}" if len(files) > 1 else line)
                at[title] = file.tell()
        sys.stdout.flush()
