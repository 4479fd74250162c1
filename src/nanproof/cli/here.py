"""Bare ``nanproof``: what happened in this project, and the one command to type next.

It looks, it does not diagnose: a second must be enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..collector import loading
from ..text import plain, style
from .shell import Screen

if TYPE_CHECKING:
    from ..watch.runs import Run

SCANNED = 64 << 20  # bytes of checkpoints that are read; more takes longer than anybody waits here
_SCRIPTS = ("train", "main", "finetune", "pretrain", "run")
_COLORS = {"died": "red", "stopped": "red", "finished": "green", "interrupted": "yellow", "stale": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What was found."""

    run: str = ""
    state: str = ""
    kind: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    """What else there is to say: a word and a sentence each."""
    next: str = ""
    """One command, which works as it stands."""


def look(folder: Path) -> Here:
    """The newest run of a project: its state, its cause as far as it is known, its last healthy checkpoint."""
    with loading():
        from ..logs import find_logs
        from ..watch.runs import Run, typed

    logs = find_logs(folder)
    if not logs:
        return Here(next=_first_command(folder))
    path = Path(os.path.relpath(logs[0].path, folder)) if folder != Path() else Path(logs[0].path)
    run = Run(0, path, log_run=logs[0].run or None)
    run.poll()
    state, incidents = run.state(), run.incidents()
    lines: list[tuple[str, str]] = []
    loss = run.series.loss
    if loss is not None and len(loss):
        lines.append(("loss", _course(run)))
    cause = next((i for i in incidents if i["where"] and i["mechanism"] not in ("", "unknown")), None)
    if incidents:
        lines.append(("incidents", _counted(incidents)))
    if cause is not None:
        lines.append(("cause", f"{cause['mechanism']} at {cause['where']} (step {cause['step']:,})"))
    elif not state.healthy and state.kind not in ("stale", "interrupted"):
        lines.append(("cause", "not known yet"))
    lines += _log_words(run)
    good, words = _checkpoint(folder)
    lines += [("checkpoint", words)] if words else []
    others = len({log.path for log in logs}) - 1
    if others:
        lines.append(("also", f"{others} older log{'s' if others > 1 else ''}, newest {_shown(logs[1].path)}"))
    target = typed(path)
    return Here(
        run=_shown(path), state=str(state), kind=state.kind, lines=tuple(lines),
        next=_next(target, state.kind, dead=state.since is not None, incidents=bool(incidents), checkpoint=good),
    )  # fmt: skip


def _next(run: str, kind: str, *, dead: bool, incidents: bool, checkpoint: str) -> str:
    if incidents:
        return f"nanproof locate {run}"
    if kind in ("died", "stopped") or dead:
        return f"nanproof diagnose {run if Path(run).is_dir() else '.'}"  # beside a log lie the code and the config
    if kind in ("running", "empty"):
        return f"nanproof watch {run}"
    if kind in ("interrupted", "stale") and checkpoint:
        return f"nanproof diagnose --before-resume {checkpoint}"
    return f"nanproof report {run}"


def _course(run: Run) -> str:
    from ..watch.glance import value
    from ..watch.sparkline import sparkline

    loss = run.series.loss
    assert loss is not None
    finite = loss.values[~loss.bad]
    ends = f"{value(float(finite[0]))} → {value(float(finite[-1]))}" if len(finite) else "never finite"
    last = f", now {value(float(loss.values[-1]))}" if loss.bad[-1] else ""
    return f"{sparkline(loss.values, 30)}  {ends}{last}"


def _counted(incidents: list[dict[str, Any]]) -> str:
    from collections import Counter

    kinds = Counter(i["action"] for i in incidents)
    steps = [i["step"] for i in incidents]
    told = ", ".join(f"{n:,} × {kind}" for kind, n in kinds.most_common())
    return f"{told}, first at step {min(steps):,}, last at step {max(steps):,}"


def _log_words(run: Run) -> list[tuple[str, str]]:
    counts = run.series.counts
    told = [(counts[kind], kind) for kind in ("overflow", "rollback", "resume") if counts.get(kind)]
    return [("log", ", ".join(f"{n:,} {kind}{'s' if n > 1 else ''}" for n, kind in told))] if told else []


def _checkpoint(folder: Path) -> tuple[str, str]:
    """The last healthy checkpoint as one would type it, and what to say about all of them."""
    from ..diagnosing.sources.checkpoints import find_checkpoints
    from ..errors import NanproofError
    from ..watch.runs import typed

    try:
        found = [c for c in find_checkpoints([folder]) if "incidents" not in Path(c.path).parts]
    except (NanproofError, OSError):
        return "", ""
    if not found:
        return "", ""
    from ..checkpoint.scan import scan_checkpoint
    from ..checkpoint.series import order

    ordered = sorted(found, key=lambda c: max((Path(i.path).stat().st_mtime for i in c.items), default=0.0))
    left = SCANNED
    for bad, checkpoint in enumerate(reversed(ordered)):
        size = sum(i.size for i in checkpoint.items)
        if size > left:
            return "", f"{len(found):,} found, newest {_shown(ordered[-1].path)} (not read: large)"
        left -= size
        report = order([scan_checkpoint(checkpoint, fast=True, jobs=1)], [checkpoint]).reports[0]
        if report.ok:
            newer = f"; {bad:,} newer {'is' if bad == 1 else 'are'} not" if bad else ""
            return typed(Path(checkpoint.path)), f"{_shown(checkpoint.path)} is healthy{newer}"
    return "", f"none of {len(found):,} is healthy"


def _first_command(folder: Path) -> str:
    """What works in a project that has not trained yet."""
    scripts = sorted(p.name for p in folder.glob("*.py") if p.stem.startswith(_SCRIPTS))
    if scripts:
        return f"nanproof run {sorted(scripts, key=lambda n: (not n.startswith('train'), n))[0]}"
    return "nanproof lint ." if next(folder.glob("**/*.py"), None) else "nanproof case"


def _shown(path: str | Path) -> str:
    return plain(os.path.relpath(path))


def show_here(screen: Screen, here: Here) -> None:
    """Ten lines at most."""
    screen.data({"run": here.run, "state": here.state, "kind": here.kind, **dict(here.lines), "next": here.next})
    if not here.run:
        screen.result("no run found here: no log of a training, no records of a guarded one")
        screen.result(f"next: {style(here.next, fg='cyan')}")
        screen.note("nanproof --help lists all commands")
        return
    screen.result(f"{style(here.run, bold=True)}  {style(here.state, fg=_COLORS.get(here.kind, 'cyan'))}")
    for word, words in here.lines[:7]:
        screen.result(f"  {word:<11}{plain(words)}")
    screen.result(f"next: {style(here.next, fg='cyan')}")
