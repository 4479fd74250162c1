"""Bare ``nanproof``: what happened in this project, and the one command to type next.

It is a glance: on a small project it takes less than a second, on a large one it leaves the cause to `diagnose`.
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
    from ..diagnosing import Diagnosis
    from ..watch.runs import Run

SCANNED = 64 << 20  # bytes of checkpoints that are read; more takes longer than anybody waits here
PATIENCE, LEAST = 0.6, 0.1  # seconds of this process for all of it, and for a diagnosis whatever came before it
WAIT = 4.0  # seconds on the clock for a diagnosis when the machine is busy
_SCRIPTS = ("train", "main", "finetune", "pretrain", "run")
_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
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
        import time

        from ..watch.alive import record_of
        from ..watch.runs import Run, runs_below, typed
        from ..watch.why import OWN_ERROR

    began = time.process_time()
    found = runs_below(folder)
    if not found:
        return Here(next=_first_command(folder))
    path, home = found[0].path, found[0].home
    run = Run(0, path, log_run=found[0].run or None, home=home)
    run.poll()
    state, incidents = run.state(), run.incidents()
    lines: list[tuple[str, str]] = []
    loss = run.series.loss
    if loss is not None and len(loss):
        lines.append(("loss", _course(run)))
    cause = next((i for i in incidents if i["where"] and i["cause"]), None)
    if incidents:
        lines.append(("incidents", _counted(incidents)))
    lines += [("repair", text) for text in state.repairs[:1]]
    if cause is not None:
        lines.append(("cause", f"{cause['where']} {cause['why'] or cause['cause']} (step {cause['step']:,})"))
    elif state.own_error:
        lines.append(("cause", OWN_ERROR))
    elif not state.healthy and state.kind not in ("stale", "interrupted") and not run.series.empty:
        lines += _suspected(home, until=max(began + PATIENCE, time.process_time() + LEAST))
    lines += _log_words(run)
    began_at = float(record_of(home)[0].get("started") or 0)
    good, words = _checkpoint(folder, own=path, others=[place.home for place in found[1:]], began=began_at)
    lines += [("checkpoint", words)] if words else []
    if others := len(found) - 1:
        lines.append(("also", f"{others} older run{'s' if others > 1 else ''}, newest {_shown(found[1].name)}"))
    trouble = bool(incidents) or state.since is not None or state.kind in ("died", "stopped")
    command = _next(typed(home), state.kind, trouble=trouble, checkpoint=good)
    if state.bad and run.series.empty:  # it never came to a step: what it printed says why
        command = _again(path) or _first_command(folder)
    elif state.own_error and not incidents:
        command = _again(path) or f"nanproof report {typed(home)}"
    return Here(
        run=_shown(path if home == folder else home),
        state=str(state),
        kind=state.kind,
        lines=tuple(lines),
        next=command,
    )


def _again(path: Path) -> str:
    """The command that began a run, to be typed once more."""
    import shlex

    from ..watch.why import command_of, torchrun_ranks

    words, ranks = command_of(path), torchrun_ranks(path)
    verb = next((i for i, word in enumerate(words) if word in ("run", "smoke")), None)
    if verb is None:
        return ""
    return shlex.join(["nanproof", words[verb], *(["--nproc", ranks] if ranks else []), *words[verb + 1 :]])


def _suspected(path: Path, until: float) -> list[tuple[str, str]]:
    """The cause that a diagnosis finds, or its one question, as far as that takes no time."""
    import threading
    import time

    from ..watch.why import diagnosed

    found: list[Diagnosis | None] = []
    thread = threading.Thread(target=lambda: found.append(diagnosed(path)[0]), daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive() and time.process_time() < until and time.monotonic() - began < WAIT:
        thread.join(0.02)
    if not found:
        return [("cause", "not found within a second; the next command takes longer to look")]
    diagnosis = found[0]
    if diagnosis is None or not diagnosis.causes:
        return [("cause", "not known")]
    first = diagnosis.causes[0]
    lines = [("cause", f"{first.confidence}: {first.title}")]
    lines += [("evidence", first.evidence[0])] if first.evidence else []
    if diagnosis.missing and not diagnosis.decided:
        lines.append(("to decide", diagnosis.missing[0].asks))
    return lines


def _next(run: str, kind: str, *, trouble: bool, checkpoint: str) -> str:
    if trouble:
        return f"nanproof diagnose {run}"
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


def _checkpoint(folder: Path, own: Path, others: list[Path], began: float) -> tuple[str, str]:
    """The run's last healthy checkpoint as one would type it, and what to say about all of them.

    Checkpoints may lie anywhere in a project; those in the folder of another run are that run's.
    """
    from ..diagnosing.sources.checkpoints import find_checkpoints
    from ..errors import NanproofError
    from ..watch.runs import typed

    try:
        found = [c for c in find_checkpoints([folder]) if "incidents" not in Path(c.path).parts]
        homes = {p if p.is_dir() else p.parent for p in others} - {folder, own, *own.parents}
        found = [c for c in found if not homes & {Path(c.path), *Path(c.path).parents}]
    except (NanproofError, OSError):
        return "", ""
    if not found:
        return "", ""
    from ..checkpoint.scan import scan_checkpoint
    from ..checkpoint.series import order

    written = {c.path: max((Path(i.path).stat().st_mtime for i in c.items), default=0.0) for c in found}
    ordered = sorted(found, key=lambda c: written[c.path])
    left = SCANNED
    for bad, checkpoint in enumerate(reversed(ordered)):
        size = sum(i.size for i in checkpoint.items)
        if size > left:
            return "", f"{len(found):,} found, newest {_shown(ordered[-1].path)} (not read: large)"
        left -= size
        report = order([scan_checkpoint(checkpoint, fast=True, jobs=1)], [checkpoint]).reports[0]
        if report.ok:
            if written[checkpoint.path] < began:  # whose it is cannot be seen
                return "", f"{_shown(checkpoint.path)} is healthy, but older than this run"
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
    import shutil
    import textwrap

    width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 120))
    name, *rest = textwrap.wrap(f"{here.run}  {here.state}", width, subsequent_indent="  ", **_WHOLE)
    color, whole = _COLORS.get(here.kind, "cyan"), name.removeprefix(here.run)
    head = (
        f"{style(here.run, bold=True)}{style(whole, fg=color)}" if name.startswith(here.run) else style(name, fg=color)
    )
    for line in [head, *(style(line, fg=color) for line in rest)]:
        screen.result(line)
    for word, words in here.lines[:8]:
        first = f"  {word:<11}"
        for line in textwrap.wrap(plain(words), width, initial_indent=first, subsequent_indent=" " * 13, **_WHOLE):
            screen.result(line)
    screen.result(f"next: {style(here.next, fg='cyan')}")
