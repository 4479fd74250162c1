"""``nanproof rollout``: scale a training up in stages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..text import show, show_status, style
from .shell import Screen, verb

if TYPE_CHECKING:
    from rich.table import Table

    from ..run.rollout import Plan, Result


@verb(example="nanproof rollout plan.yaml")
@click.argument("plan", required=False)
@click.option("--init", is_flag=True, help="Write a plan for this project; PLAN may be its training script.")
@click.option(
    "--processes", type=click.IntRange(1), default=2, show_default=True, help="With --init: those of the last stage."
)
@click.option("--out", metavar="DIR", help="Folder for runs and results. Default: runs/NAME beside the plan.")
@click.option("--restart", is_flag=True, help="Discard earlier results and start with the first stage.")
@click.option("--check", is_flag=True, help="Validate the plan without running anything.")
def command(
    screen: Screen, plan: str | None, init: bool, processes: int, out: str | None, restart: bool, check: bool
) -> int:
    """Run the stages of PLAN in order; each must pass its gates before the next one starts.

    After an interruption the same command resumes with the first stage that has not passed.
    """
    from ..errors import UsageError

    if init:
        return _init(screen, plan, processes)
    if plan is None:
        raise UsageError("no plan given", hint="nanproof rollout --init writes one")
    from ..run.rollout import load_plan, roll_out

    loaded = load_plan(plan, out)
    if check:
        screen.data(loaded.stages)
        screen.result(f"{len(loaded.stages)} stages: {', '.join(s.name for s in loaded.stages)}")
        return 0
    result = roll_out(loaded, restart=restart, tell=_Progress(screen))
    _show(screen, loaded, result)
    return 0 if result.ok else 1


def _init(screen: Screen, script: str | None, processes: int) -> int:
    from pathlib import Path

    from ..errors import UsageError
    from ..files import write_atomic
    from ..run.rollout.start import first_plan

    target = Path("plan.yaml")
    if target.exists():
        raise UsageError("plan.yaml exists already", hint="edit it, or move it away")
    write_atomic(target, first_plan(Path.cwd(), script, processes))
    screen.data({"wrote": str(target)})
    screen.result(f"wrote {target}: read it, then run nanproof rollout {target}")
    return 0


class _Progress:
    """One line that is rewritten on a terminal; elsewhere a line for each stage."""

    def __init__(self, screen: Screen) -> None:
        self._live = sys.stderr.isatty() and not screen.quiet and not screen.as_json
        self._told = screen.quiet or screen.as_json
        self._stage = ""

    def __call__(self, stage: str, words: str) -> None:
        if self._live:
            show_status(f"{stage}: {words}")
        elif stage != self._stage and not self._told:
            show(f"{stage} …", err=True)
        self._stage = stage


def _show(screen: Screen, plan: Plan, result: Result) -> None:
    from ..files import write_atomic
    from ..run.rollout.engine import summary

    report = plan.out / "rollout.md"
    write_atomic(report, summary(result, plan))
    screen.data(result)
    if sys.stderr.isatty() and not screen.quiet and not screen.as_json:
        show_status("")
    screen.result(_table(plan, result))
    for stage in result.stages:
        for gate in (g for g in stage.gates if not g.open):
            where = f"{stage.name}, attempt {stage.attempt}"
            screen.result(f"{where}: {style('✗', fg='red')} {gate.name}: {gate.reason}", 2)
    screen.note(f"report: {report}")


def _table(plan: Plan, result: Result) -> Table:
    """One line for each attempt, and for each stage that was not reached."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "attempt", "settings", "gates open", "loss", "result"):
        table.add_column(name)
    for s in result.stages:
        setting = " ".join(f"{k}={v}" for k, v in s.setting.items()) or "as planned"
        gates = f"{sum(g.open for g in s.gates)} of {len(s.gates)}"
        fall = next((g.reason for g in s.gates if g.name == "loss falling"), "")
        word = Text("passed", style="green") if s.passed else Text("failed", style="red")
        table.add_row(s.name, str(s.attempt), setting, gates, fall, word)
    done = {s.name for s in result.stages}
    for name in (s.name for s in plan.stages if s.name not in done):
        table.add_row(name, "–", "", "", "", "not run")
    return table
