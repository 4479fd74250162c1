"""Watching in the terminal: one panel for each run, drawn a few times a second; q ends it."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..text import console as clean_console
from .glance import Glance, glance, value
from .runs import Finder, Run
from .sparkline import BAD, sparkline
from .state import duration

EVERY = 0.25
NARROWEST = 46  # characters that a panel needs
STYLES = {"died": "bold red", "stopped": "bold red", "finished": "green", "interrupted": "yellow", "stale": "yellow"}

Hear = Callable[[Run, Glance], str]


def watch(finder: Finder, *, once: bool = False, hear: Hear | None = None, console: Console | None = None) -> None:
    """Show the runs until q is pressed; with ``once``, or without a terminal, print one frame and return.

    ``hear`` gets every glance; what it answers stands below the runs.
    """
    console = console or clean_console()
    if once or not console.is_terminal:
        console.print(finder.waiting or frame(_look(finder, hear)[0], console.width), highlight=False)
        return
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            glances, answer = _look(finder, hear)
            live.update(frame(glances, console.width, console.height, answer or finder.waiting), refresh=True)
            until = time.monotonic() + EVERY
            while (left := until - time.monotonic()) > 0:
                if pressed(left) in ("q", "Q", "\x03"):
                    return


def _look(finder: Finder, hear: Hear | None) -> tuple[list[Glance], str]:
    found, answer = [], ""
    finder.more()
    for run in finder.runs:
        run.poll()
        found.append(glance(run.name, run.series, run.incidents(), run.state(), run.outlook))
        if hear is not None:
            answer = hear(run, found[-1])
    return found, answer


def frame(glances: Sequence[Glance], width: int, height: int | None = None, below: str = "") -> RenderableType:
    """All runs, side by side as far as they fit."""
    across = max(1, min(len(glances), width // NARROWEST))
    body = Table.grid()
    bad = [Text(f"✗ {_plain(g.name)} {g.state}", style="bold red") for g in glances if g.state.bad and len(glances) > 1]
    room = (height or 0) - 3 - sum(1 + len(text) // width for text in bad)
    shown = 0
    for first in range(0, len(glances), across):
        row = glances[first : first + across]
        room -= max(_lines(g, width // across) for g in row)
        if height and room < 0 and first:
            break
        body.add_row(*(panel(g, width // across) for g in row))
        shown += len(row)
    told = [Text(below, style="yellow")] if below else []
    if left := len(glances) - shown:
        told.append(
            Text(
                f"and {left} more run{'s' if left > 1 else ''}: a taller window shows {'them' if left > 1 else 'it'}",
                style="dim",
            )
        )
    return Group(*bad, body, *told, Text("q quits", style="dim")) if height else Group(*bad, body)


def _lines(g: Glance, width: int) -> int:
    """About how many lines a panel takes."""
    texts = [str(g.state), *g.state.repairs, *([g.warning] if g.warning else []), *([" "] if g.counts else [])]
    return 2 + len(g.curves) + sum(1 + len(t) // (width - 4) for t in texts) + 2 * len(g.incidents)


def panel(g: Glance, width: int) -> Panel:
    """One run."""
    curves = Table.grid(padding=(0, 1))
    names = max((len(c.name) for c in g.curves), default=4)
    room = max(4, width - min(names, 18) - 17)
    for curve in g.curves:
        bad = curve.last != curve.last or abs(curve.last) == float("inf")
        line = Text(sparkline(curve.recent, room))
        line.highlight_regex(BAD, "bold red")
        shown = Text(value(curve.last), style="bold red" if bad else "bold", justify="right")
        curves.add_row(Text(curve.name[:18], style="cyan"), line, shown)
    parts = []
    if g.pace and g.state.kind == "running":
        parts.append(f"{value(float(f'{g.pace:.3g}'))} {g.unit}s/s")
    if g.left is not None:
        parts.append(f"{duration(g.left)} to go")
    parts += [f"{n:,} {kind}{'s' if n > 1 else ''}" for kind, n in g.counts.items()]
    rows: list[RenderableType] = [Text(str(g.state), style=STYLES.get(g.state.kind, "bold"))]
    rows += [Text(" · ".join(parts), style="dim")] if parts else []
    rows += [Text(f"! {g.warning}", style="bold yellow", overflow="fold")] if g.warning else []
    rows += [Text(f"+ {repair}", style="green", overflow="fold") for repair in g.state.repairs]
    rows += [curves] if g.curves else []
    for incident in g.incidents:
        where = ", ".join(part for part in (incident["cause"], incident["where"]) if part)
        told = f"▸ {incident['verdict']} → {incident['action']}{f': {where}' if where else ''}"
        rows.append(Text(told, style="yellow", overflow="fold"))
    return Panel(Group(*rows), title=Text(_plain(g.name)), border_style="red" if g.state.bad else "dim", width=width)


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Single keys without Enter; where there is no terminal to read from, nothing is ever pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""  # type: ignore[func-returns-value]
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        return sys.stdin.read(1) if select.select([fd], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
