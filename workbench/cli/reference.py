"""The reference of all commands as Markdown, made from the commands themselves.

    python -m workbench.cli.reference > docs/commands.md

A test keeps docs/commands.md equal to it, so an option that nobody documented fails the build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

from workbench.cli.app import app
from workbench.cli.exits import MEANINGS

HEAD = """# Commands

Made by `python -m workbench.cli.reference`; a test keeps it true. Every command takes `--help`.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD, "\n| exit code | meaning |\n|---|---|\n"]
    parts += [f"| {int(code)} | {meaning} |\n" for code, meaning in MEANINGS.items()]
    for path, command in commands(typer.main.get_command(app)):
        parts.append(_section(path, command))
    return "".join(parts)


def commands(command: Any, path: tuple[str, ...] = ("workbench",)) -> Iterator[tuple[str, Any]]:
    """Each command that does something, with its words."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield " ".join(path), command
        return
    for name in sorted(subcommands):
        yield from commands(subcommands[name], (*path, name))


def _section(path: str, command: Any) -> str:
    lines = [f"\n## {path}\n\n{' '.join((command.help or '').split())}\n\n"]
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        lines += ["| option | meaning |\n|---|---|\n", *rows]
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("$")]
    lines += ["\n```console\n", *(f"{example}\n" for example in examples), "```\n"]
    return "".join(lines)


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = parameter.name.upper() if is_argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    shown = parameter.default if not callable(parameter.default) else None
    default = f" Default: `{getattr(shown, 'value', shown)}`." if shown not in (None, False, ()) else ""
    return f"| `{names}` | {parameter.help or ''}{default} |\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
