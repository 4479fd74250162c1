"""``nanproof smoke``: a quick test of a training, before it costs anything."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..launch import is_first_process
from ..text import style
from .shell import Screen, verb

if TYPE_CHECKING:
    from ..run.launcher import Outcome
    from ..run.smoke import SmokeReport


@verb(example="nanproof smoke train.py --steps 10 --junit smoke.xml -- --lr 3e-4")
@click.argument("target")
@click.argument("arguments", nargs=-1)
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module to run, as with python -m.")
@click.option("--steps", type=click.IntRange(0), default=10, show_default=True, help="Number of training steps.")
@click.option("--watch", multiple=True, metavar="PATTERN", help="Report the size of these parameters: '*alpha*'.")
@click.option("--junit", metavar="FILE", help="Write the checks as JUnit XML.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Folder for records. Default: runs/smoke-NAME-TIME.")
def command(
    screen: Screen,
    target: str,
    arguments: tuple[str, ...],
    is_module: bool,
    steps: int,
    watch: tuple[str, ...],
    junit: str | None,
    run_dir: Path | None,
) -> int:
    """Run one forward and backward pass and a few steps, and check everything that can be checked.

    TARGET is a training script, which runs unmodified for that many steps and is ended then; its own arguments come
    after --. Or it is FILE:FUNCTION or MODULE:FUNCTION; the function returns (model, step_fn) or (model, step_fn,
    optimizer).
    """

    def tell(report: SmokeReport) -> None:
        show(screen, report)
        if junit is not None:
            from ..files import write_atomic
            from ..run.smoke.junit import junit as as_junit

            write_atomic(junit, as_junit(report, f"smoke {target}"))
            screen.note(f"wrote {junit}")

    if ":" in target and not is_module:
        report = _smoke_factory(target, arguments, steps, watch)
        tell(report)
    else:
        report = _smoke_script(screen, target, arguments, is_module, steps, watch, run_dir, tell)
    return 0 if report.ok else 1


def _smoke_factory(target: str, arguments: tuple[str, ...], steps: int, watch: tuple[str, ...]) -> SmokeReport:
    from ..errors import UsageError
    from ..run.smoke import smoke
    from ..run.smoke.setting import from_factory

    if arguments:
        raise UsageError(f"a factory takes no arguments such as {arguments[0]!r}", hint="leave them out")
    model, step, optimizer = from_factory(target)
    return smoke(model, step, optimizer=optimizer, steps=steps, watch=watch)


def _smoke_script(
    screen: Screen,
    target: str,
    arguments: tuple[str, ...],
    is_module: bool,
    steps: int,
    watch: tuple[str, ...],
    run_dir: Path | None,
    tell: Callable[[SmokeReport], None],
) -> SmokeReport:
    from ..run.console import show_messages
    from ..run.program import Program
    from ..run.smoke.script import smoke_program

    ours = sys.stdout
    first = is_first_process()

    def report(found: SmokeReport, outcome: Outcome) -> None:
        sys.stdout.flush()
        if first:
            with contextlib.redirect_stdout(ours):
                tell(found)
                if outcome.run_dir is not None:
                    screen.note(f"records are in {outcome.run_dir}")
        ours.flush()

    program = Program(target=target, arguments=arguments, is_module=is_module)
    # what the script prints must not get between the lines that a machine reads
    with show_messages(quiet=True), contextlib.redirect_stdout(sys.stderr if screen.as_json else ours):
        return smoke_program(program, steps=steps, watch=watch, run_dir=run_dir, report=report)


def show(screen: Screen, report: SmokeReport) -> None:
    """One line for each check."""
    screen.data({"ok": report.ok, "checks": report.checks, "trial": report.trial})
    colors = {"PASS": "green", "FAIL": "red", "NOTE": "yellow"}
    width = max(len(c.name) for c in report.checks)
    for check in report.checks:
        screen.result(
            f"{style(check.result, fg=colors[check.result])}  {check.name:<{width}}  {check.reason}", width + 8
        )
    counts = {word: sum(c.result == word for c in report.checks) for word in colors}
    notes = f", {counts['NOTE']} to note" if counts["NOTE"] else ""
    screen.result(f"{counts['PASS']} passed, {counts['FAIL']} failed{notes}")
