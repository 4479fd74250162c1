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
from ..text import fold, show, style

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOT_VERBS = {"__init__", "shell", "progress", "here"}


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

            show(json.dumps(to_json(value), indent=2, allow_nan=False))

    def result(self, value: RenderableType, indent: int | None = None) -> None:
        """The result for people; printed even with ``--quiet``. A line that is too long is folded to an ``indent``."""
        if not self.as_json:
            self._print(value, indent)

    def note(self, value: RenderableType, indent: int | None = None) -> None:
        """What is nice to know: silent with ``--quiet`` and with ``--json``."""
        if not self.as_json and not self.quiet:
            self._print(value, indent)

    def _print(self, value: RenderableType, indent: int | None) -> None:
        if isinstance(value, str):
            show(value if indent is None else fold(value, indent))
            return
        from ..text import console

        width = None if sys.stdout.isatty() else 120  # piped output must not depend on a terminal's width
        console(width=width).print(value)


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
            hint = f"did you mean nanproof {close[0]}?" if close else "nanproof --help lists the commands"
            if os.path.exists(args[0]):  # noqa: PTH110 - pathlib would be loaded for this alone
                hint = f"did you mean nanproof watch {args[0]}, or diagnose?"
            fail(f"unknown command {args[0]!r}", hint)

    def main(self, *args: Any, **rest: Any) -> Any:
        """Run a command; what click complains about looks like every other error."""
        rest["standalone_mode"] = False
        try:
            code = super().main(*args, **rest)
        except click.NoSuchOption as error:
            import difflib

            names = [name.lstrip("-") for name in error.possibilities or ()]  # dashes make all of them alike
            typed = error.option_name.lstrip("-")
            near = difflib.get_close_matches(typed, names) or [name for name in names if typed.startswith(name)]
            close = " or ".join(f"--{name}" for name in near)
            fail(f"no such option {error.option_name!r}", f"did you mean {close}?" if close else _example(error.ctx))
        except click.UsageError as error:
            fail(_sentence(error), _example(error.ctx))
        except click.ClickException as error:
            fail(_sentence(error))
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", code=130)
        raise SystemExit(code if isinstance(code, int) else 0)


def _sentence(error: click.ClickException) -> str:
    """What click says, as all other errors begin and end."""
    text = error.format_message().rstrip(".").replace("a valid integer range", "a whole number")
    return text[:1].lower() + text[1:]


def _example(ctx: click.Context | None) -> str:
    """How the command is used: the example of its help."""
    epilog = ctx.command.epilog if ctx is not None else None
    return epilog.removeprefix("Example: ") if epilog and epilog.startswith("Example: ") else "nanproof --help"


_EXTRAS = {
    "torch": "torch",
    "starlette": "ui",
    "uvicorn": "ui",
    "matplotlib": "plots",
    "transformers": "hf",
    "accelerate": "hf",
    "lightning": "lightning",
    "gguf": "gguf",
    "pygls": "lsp",
    "fsspec": "remote",
    "s3fs": "s3",
    "pyarrow": "data",
    "PIL": "data",
    "apprise": "alerts",
}


def explain_failure(error: BaseException) -> tuple[str, str]:
    """What failed, and the next step, for an error from elsewhere."""
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in _EXTRAS:
            return f"this command needs {name}", f"pip install 'nanproof[{_EXTRAS[name]}]'"
        return f"no module named {name!r}", "install it into this environment"
    if _is_network(error):
        reason = getattr(error, "reason", None) or error
        return f"network: {reason}", "check the address and the connection, then try again"
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        import shlex

        from ..files import intended

        place = intended(error.filename)
        hint = "check the path"
        if isinstance(error, FileNotFoundError) and not place.parent.exists():
            hint = f"create the folder first: mkdir -p {shlex.quote(str(place.parent))}"
        return f"{place}: {error.strerror}", hint
    if isinstance(error, OSError) and error.strerror:
        return error.strerror, "check the path"
    return f"{type(error).__name__}: {error}", "run it again with --debug and report what it prints"


def _was_interrupted(error: BaseException) -> bool:
    """Whether it only followed from Ctrl-C: a library that was interrupted while it loaded fails in its own way."""
    cause = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (cause is not None and _was_interrupted(cause))


def _is_network(error: BaseException) -> bool:
    names = {c.__name__ for c in type(error).__mro__}
    known = {"URLError", "ConnectionError", "gaierror", "ClientConnectorError", "EndpointConnectionError"}
    return bool(names & known) or (isinstance(error, TimeoutError) and "socket" in type(error).__module__)


def fail(message: str, hint: str = "", code: int = 2) -> NoReturn:
    """End with one red line and, below it, the next step.

    This is how every error looks, whoever found it: ``error:`` what is wrong, ``hint:`` what to do.
    """
    show(style(f"error: {message}", fg="red"), err=True)
    if hint:
        show(f"  hint: {hint}", err=True)
    raise SystemExit(code)


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 clean, 1 findings, 2 the tool or its usage failed. --debug shows tracebacks.",
)
@click.version_option(__version__, prog_name="nanproof", message="%(prog)s %(version)s")
@click.option("--json", "as_json", is_flag=True, help="Without a command: print what was found as JSON.")
@click.pass_context
def nanproof(ctx: click.Context, as_json: bool) -> None:
    """Keep PyTorch training finite: guard a run, find what broke it, say why, repair it, resume.

    Without a command: finds the newest run in this folder, says how it stands, and which command to type next.
    """
    if ctx.invoked_subcommand is None:
        from pathlib import Path

        from .here import look, show_here

        show_here(Screen(as_json=as_json, quiet=False), look(Path()))
        raise Done(0)


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
            except KeyboardInterrupt:
                fail("interrupted", code=130)
            except BrokenPipeError:
                raise SystemExit(130) from None
            except Exception as error:
                if debug:
                    raise
                if _was_interrupted(error):
                    fail("interrupted", code=130)
                fail(*explain_failure(error))
            raise Done(code) if inert else SystemExit(code)

        command = click.command(epilog=f"Example: {example}")(run)
        for option in reversed(
            [
                click.Option(["--json", "as_json"], is_flag=True, help="Print JSON (docs/automation.md)."),
                click.Option(["--quiet", "-q"], is_flag=True, help="Print only the result."),
                click.Option(["--debug"], is_flag=True, envvar="NANPROOF_DEBUG", help="Show tracebacks."),
            ]
        ):
            command.params.append(option)
        return command

    return decorate
