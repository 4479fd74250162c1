"""``nanproof smoke``: a quick test of a training, before it costs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..run.smoke import SmokeReport


@verb(example="nanproof smoke train.py:make --steps 10 --junit smoke.xml")
@click.argument("target")
@click.option("--steps", type=click.IntRange(0), default=10, show_default=True, help="How many training steps.")
@click.option("--watch", multiple=True, metavar="PATTERN", help="Tell the size of these parameters, such as '*alpha*'.")
@click.option("--junit", metavar="FILE", help="Write the checks as JUnit XML.")
def command(screen: Screen, target: str, steps: int, watch: tuple[str, ...], junit: str | None) -> int:
    """Run one forward and backward pass and a few steps, and check everything that can be checked.

    TARGET is FILE:FUNCTION or MODULE:FUNCTION; the function returns (model, step_fn) or (model, step_fn, optimizer).
    """
    from ..run.smoke import smoke
    from ..run.smoke.setting import from_factory

    model, step, optimizer = from_factory(target)
    report = smoke(model, step, optimizer=optimizer, steps=steps, watch=watch)
    show(screen, report)
    if junit is not None:
        from ..files import write_atomic
        from ..run.smoke.junit import junit as as_junit

        write_atomic(junit, as_junit(report, f"smoke {target}"))
        screen.note(f"wrote {junit}")
    return 0 if report.ok else 1


def show(screen: Screen, report: SmokeReport) -> None:
    """One line for each check."""
    screen.data({"ok": report.ok, "checks": report.checks, "trial": report.trial})
    colours = {"PASS": "green", "FAIL": "red", "NOTE": "yellow"}
    width = max(len(c.name) for c in report.checks)
    for check in report.checks:
        screen.result(f"{click.style(check.result, fg=colours[check.result])}  {check.name:<{width}}  {check.reason}")
    failed = sum(c.result == "FAIL" for c in report.checks)
    screen.result(
        f"{failed} of {len(report.checks)} checks failed" if failed else f"all {len(report.checks)} checks passed"
    )
