"""What all verbs share: finding them, their common options, exit codes, and how errors look.

A verb is a file in this folder that defines ``command``, made with the decorator `verb`. It does its work
through the library, prints through `Screen`, and returns its exit code: 0 clean, 1 findings. Whatever fails
in the tool or in its usage exits with 2.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .. import __version__
from ..errors import NanproofError

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOT_VERBS = {"__init__", "shell", "progress"}


class Done(SystemExit):
    """The end of a verb that ran nothing of the user's, so that nothing is left to be closed."""

    code: int


class Screen:
    """Where a verb prints: a terminal, or JSON for machines."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def data(self, value: object) -> None:
        """The result for machines; printed only with ``--json``."""
        if self.as_json:
            import json

            from ..records import to_json

            click.echo(json.dumps(to_json(value), indent=2, allow_nan=False))

    def result(self, value: RenderableType) -> None:
        """The result for people; printed even with ``--quiet``."""
        if not self.as_json:
            self._print(value)

    def note(self, value: RenderableType) -> None:
        """What is nice to know: silent with ``--quiet`` and with ``--json``."""
        if not self.as_json and not self.quiet:
            self._print(value)

    def _print(self, value: RenderableType) -> None:
        if isinstance(value, str):
            click.echo(value)  # as it is: shapes such as [2, 3] are no markup; colours only on a terminal
            return
        from rich.console import Console

        width = None if sys.stdout.isatty() else 120  # piped output must not depend on a terminal's width
        Console(width=width, highlight=False).print(value)


class Verbs(click.Group):
    """Finds the verbs by looking into this folder and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        with os.scandir(os.path.dirname(__file__)) as folder:  # noqa: PTH120 - pathlib would be loaded for this alone
            names = {entry.name.removesuffix(".py") for entry in folder if entry.name.endswith(".py")}
        return sorted(names - _NOT_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"nanproof.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"nanproof {close[0]}" if close else "nanproof --help lists the verbs"
            fail(f"there is no verb {args[0]!r}", hint)


def fail(message: str, hint: str = "", code: int = 2) -> NoReturn:
    """End with one red line and, below it, the next step."""
    click.secho(f"error: {message}", fg="red", err=True)
    if hint:
        click.echo(f"  next: {hint}", err=True)
    raise SystemExit(code)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 clean, 1 findings, 2 the tool or its usage failed. --debug shows tracebacks.",
)
@click.version_option(__version__, prog_name="nanproof", message="%(prog)s %(version)s")
def nanproof() -> None:
    """Keep PyTorch training finite: guard a run, find what broke it, say why, repair it, resume."""


def verb(example: str, *, inert: bool = False) -> Callable[[Callable[..., int]], click.Command]:
    """Make a function a verb: it gets a `Screen` first, then its own arguments, and returns the exit code.

    An ``inert`` verb never runs code of the user's, whose files Python would have to close when it ends.
    """

    def decorate(function: Callable[..., int]) -> click.Command:
        @functools.wraps(function)
        def run(*, as_json: bool, quiet: bool, debug: bool, **arguments: Any) -> None:
            try:
                code = function(Screen(as_json=as_json, quiet=quiet), **arguments)
            except NanproofError as error:
                if debug:
                    raise
                fail(error.message, error.hint, error.exit_code)
            except (KeyboardInterrupt, BrokenPipeError):
                raise SystemExit(130) from None
            except Exception as error:
                if debug:
                    raise
                if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                    fail("this verb needs torch", "pip install 'nanproof[torch]'")
                fail(f"{type(error).__name__}: {error}", "run it again with --debug and report what it prints")
            raise Done(code) if inert else SystemExit(code)

        command = click.command(epilog=f"Example: {example}")(run)
        for option in reversed(
            [
                click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for machines."),
                click.Option(["--quiet", "-q"], is_flag=True, help="Print the result only."),
                click.Option(["--debug"], is_flag=True, envvar="NANPROOF_DEBUG", help="Show tracebacks."),
            ]
        ):
            command.params.append(option)
        return command

    return decorate
