"""What the docs say can be done: commands parse, python compiles, links lead somewhere, options are documented."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from serving.core.errors import ErrorCode
from workbench.cli.app import app
from workbench.cli.reference import commands, reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")
ASSIGNMENT = re.compile(r"^[A-Z_0-9]+=")


def blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text("utf-8"))):
            if match[1] == language:
                yield pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{number}")


def console_lines() -> list[tuple[str, list[str]]]:
    lines = []
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text("utf-8")):
            assert match[1] not in ("sh", "bash", "shell"), f"{page.name}: commands stand in console blocks"
            if match[1] != "console":
                continue
            for line in match[2].splitlines():
                assert line.startswith("$ "), f"{page.name}: a console block holds commands alone: {line}"
                words = shlex.split(line.removeprefix("$ "))
                while ASSIGNMENT.match(words[0]):
                    words.pop(0)
                lines.append((f"{page.relative_to(ROOT)}: {line}", words))
    return lines


def parse(command: Any, name: str, words: list[str]) -> None:
    """Parses a command line down to its last command, without running it."""
    context = command.make_context(name, list(words))
    if hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        sub_name, subcommand, rest = command.resolve_command(context, rest)
        parse(subcommand, sub_name, rest)


def test_every_command_in_the_docs_parses():
    lines = console_lines()
    assert len(lines) > 40
    root = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for where, words in lines:
        if words[0] == "workbench":
            try:
                parse(root, "workbench", words[1:])
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error
        elif words[0] == "make":
            assert words[1] in targets, where
        else:
            raise AssertionError(f"{where}: neither workbench nor make")


def test_every_example_in_a_help_parses():
    root = typer.main.get_command(app)
    for path, command in commands(root):
        examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("$")]
        assert examples, f"{path} has no example in its help"
        assert "Exit codes:" in command.epilog, path
        for example in examples:
            words = [word for word in shlex.split(example[1:]) if not ASSIGNMENT.match(word)]
            parse(root, "workbench", words[1:])


def test_every_command_and_option_says_what_it_does():
    root = typer.main.get_command(app)
    silent = [name for name, group in root.commands.items() if not group.help]
    assert silent == []
    for path, command in commands(root):
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            assert getattr(parameter, "hidden", False) or parameter.help, f"{path}: {parameter.name} has no help"


def test_every_command_speaks_json():
    for path, command in commands(typer.main.get_command(app)):
        assert any("--json" in option.opts for option in command.params), f"{path} has no --json"


def test_the_reference_of_commands_is_that_of_the_commands():
    written = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert written == reference(), "run: python -m workbench.cli.reference > docs/commands.md"


def test_every_command_is_on_a_users_page():
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "users").glob("*.md"))
    for path, _ in commands(typer.main.get_command(app)):
        assert path in pages, f"no page of docs/users shows `{path}`"


def test_every_error_code_is_documented():
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    missing = [code.value for code in ErrorCode if f"`{code.value}`" not in page]
    assert missing == []


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_in_the_docs_compiles(block: str):
    ast.parse(block)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in LINK.findall(page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
