"""`workbench mlflow`: accounts of the MLflow server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.mlflow_accounts import PASSWORD, USERNAME, UserRole

app = typer.Typer(no_args_is_help=True, help="The MLflow server: who may do what there.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING)


@app.callback()
def group() -> None:
    """The MLflow server: who may do what there."""


@app.command(
    "init-auth",
    epilog=epilog(
        "workbench mlflow init-auth --release-manager ben --researcher ana",
        "workbench mlflow init-auth --researcher eva --passwords eva.json",
        codes=CODES,
    ),
)
def init_auth(
    release_manager: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Approves and rejects versions. May be repeated.")
    ] = None,
    researcher: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measures and reads the registry. May be repeated.")
    ] = None,
    passwords: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write new passwords there, for you alone, and print none.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes the service account, the roles and people's accounts; prints each new password this once.

    What is there already stays as it is, so that people can be added later. The stack's own server is started for it if
    it does not run; for somebody else's, the environment names its admin.
    """
    from workbench.mlflow_setup import init_auth as make

    people = dict.fromkeys(researcher or (), UserRole.RESEARCHER)
    for name in release_manager or ():
        if name in people:
            raise CommandFailed(f"{name} is either a release manager or a researcher", Exit.USAGE)
        people[name] = UserRole.RELEASE_MANAGER
    if passwords is not None and passwords.exists():
        raise CommandFailed(f"{passwords} is there already: name another file", Exit.USAGE)
    made = run(make(settings(config), people))
    new = {one.name: one.account.password for one in made if one.account is not None}
    if passwords is not None:
        with os.fdopen(os.open(passwords, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(new, file, indent=1)
    shown = {} if passwords is not None else new
    data = [{"name": one.name, "role": str(one.role), "is_new": one.name in new} for one in made]
    data = [one | ({"password": shown[one["name"]]} if one["name"] in shown else {}) for one in data]

    def show() -> None:
        for one in data:
            state = "made" if one["is_new"] else "there already, the password stays"
            out.print(f"{one['name']} ({one['role']}): {one.get('password', state)}", highlight=False, markup=False)
        err.print(f"People set {USERNAME} and {PASSWORD}; the stack uses its own account from its next start.")

    emit(data, as_json, show)
