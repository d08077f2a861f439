"""A group of commands whose first one needs no name: `workbench bench MODEL` is `workbench bench run MODEL`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

DEFAULT = "run"


class RunsByDefault(TyperGroup):
    """What is no command of the group is the first word of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts `run` in front of words that name no command; nothing at all, or `--help`, is the group's own."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)
