"""A report for a pull request: what broke, why, what to change, what was verified and what was not."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..diagnosing import Diagnosis
from ..files import write_atomic
from ..logs.timeline import Timeline, timeline
from ..watch.compare import compare
from ..watch.glance import value
from ..watch.runs import Run, typed
from ..watch.why import command_of, diagnosed, in_trouble, nearer, script_in, why
from .settings import proposed


def write_markdown(runs: Sequence[Run], out: str | os.PathLike[str]) -> None:
    """Write the report of one run, or of several compared."""
    write_atomic(out, markdown(runs))


def markdown(runs: Sequence[Run]) -> str:
    """The report's text."""
    for run in runs:
        run.poll()
    stories = [timeline(run.series) for run in runs]
    lines = [f"# {' and '.join(_text(r.name) for r in runs)}", "", *_states(runs), ""]
    if len(runs) > 1:
        lines += [*_comparison(runs, stories), "", *_differences(runs)]
    for run, story in zip(runs, stories, strict=True):
        lines += [*_run(run, story, alone=len(runs) == 1), ""]
    return "\n".join([*lines, *_next_steps(runs)])


def _states(runs: Sequence[Run]) -> Iterator[str]:
    """How each run stands, before anything else; one that died must not be found out from a table."""
    for run in sorted(runs, key=lambda r: not r.state().bad):
        state = run.state()
        name = f"{_text(run.name)}: " if len(runs) > 1 else ""
        yield f"- {name}**{_text(state.headline)}**{f': {_text(state.why)}' if state.why else ''}"


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    found = compare(runs[0], runs[1])
    yield from ("### Where they part", "", f"- {_text(found.first)}", "")
    around = [*found.environment, *([("command", *found.command)] if found.command else [])]
    names = " | ".join(_text(r.name) for r in runs[:2])
    for title, rows in (("Settings changed", found.settings), ("Environment", around)):
        if rows:
            yield from (f"### {title}", "", f"| | {names} |", "|---|---|---|")
            yield from (f"| {' | '.join(map(_text, row))} |" for row in rows)
            yield ""


def _comparison(runs: Sequence[Run], stories: Sequence[Timeline]) -> Iterator[str]:
    yield f"| | {' | '.join(_text(r.name) for r in runs)} |"
    yield f"|---|{'---|' * len(runs)}"
    rows: list[tuple[str, list[str]]] = [
        ("state", [_text(r.state().headline) for r in runs]),
        ("last step", [f"{s.last_step:,}" if s.last_step is not None else "–" for s in stories]),
        ("first thing wrong", [_text(s.first.text) if s.first else "nothing" for s in stories]),
        ("loss, first → last", [_ends(r, "loss") for r in runs]),
        ("gradient norm, first → last", [_ends(r, "grad_norm") for r in runs]),
        ("values not finite", [f"{_bad(r):,}" for r in runs]),
        ("skipped", [f"{r.series.counts.get('skip', 0):,}" for r in runs]),
        ("rolled back", [f"{r.series.counts.get('rollback', 0):,}" for r in runs]),
        ("incidents", [f"{len(r.incidents()):,}" for r in runs]),
    ]
    for name, cells in rows:
        yield f"| {name} | {' | '.join(cells)} |"


def _proposals(run: Run) -> Iterator[str]:
    rows = list(proposed(run))
    if rows:
        yield from ("### Settings: before, after, why", "", "| setting | before | after | why |", "|---|---|---|---|")
        yield from (f"| {' | '.join(map(_text, row))} |" for row in rows)
        yield ""


def _ends(run: Run, what: str) -> str:
    column = run.series.loss if what == "loss" else run.series.grad_norm
    if column is None or not len(column):
        return "–"
    return f"{value(float(column.values[0]))} → {value(float(column.values[-1]))}"


def _bad(run: Run) -> int:
    columns = [run.series.loss, run.series.grad_norm, *run.series.components]
    return max((int(c.bad.sum()) for c in columns if c is not None), default=0)


def _run(run: Run, story: Timeline, *, alone: bool) -> Iterator[str]:
    if not alone:
        yield f"## {_text(run.name)}"
        yield ""
    troubled = in_trouble(run.state(), run.incidents())
    diagnosis, failed = diagnosed(run.home) if alone or troubled or _bad(run) else (None, "")
    yield "### Root cause"
    yield ""
    fine = not troubled and (diagnosis is None or diagnosis.benign) and not _bad(run)
    yield from ["No bad value and no incident was recorded.", ""] if fine and not failed else _causes(diagnosis, failed)
    if run.state().repairs:
        yield from ("### Repairs in force", "", *(f"- {_text(repair)}" for repair in run.state().repairs), "")
    if story.moments:
        yield from ("### What happened, in order", "", *(f"- {_text(m.text)}" for m in story.moments[:20]), "")
    incidents = [i for i in (run.incident(i["id"]) for i in run.incidents()[:5]) if i is not None]
    if incidents:
        yield "### Causal chain"
        yield ""
        for incident in incidents:
            yield from _chain(incident)
    yield from _proposals(run)
    for title, text in (diagnosis.tables if diagnosis else {}).items():
        yield from (f"### {title}", "", "```text", text.rstrip(), "```", "")
    yield from _checklist(run, story, diagnosis, incidents, fine=fine)
    cause = why(run.home, run.state(), run.incidents(), diagnosis)
    if cause.command:
        yield from ("### Next command", "", _code(cause.command), "")


def _causes(diagnosis: Diagnosis | None, failed: str) -> Iterator[str]:
    if diagnosis is None or not diagnosis.causes:
        yield f"No cause can be named{f': {_text(failed)}' if failed else ''}."
        yield ""
        return
    yield "| cause | confidence | evidence | against | repair |"
    yield "|---|---|---|---|---|"
    for cause in diagnosis.causes[:3]:
        cells = [
            cause.title,
            cause.confidence,
            "<br>".join(_text(nearer(e)) for e in cause.evidence) or "–",
            "<br>".join(_text(nearer(e)) for e in cause.against) or "–",
            _text(cause.fix),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for missing in diagnosis.missing[:2]:
        yield f"To decide between them: {_text(missing.asks)}"
        yield ""
        yield from (f"- {_code(command)}" for command in missing.commands)
        yield ""


def _chain(incident: dict[str, Any]) -> Iterator[str]:
    place = incident.get("location") or {}
    verdict, answer = incident["verdict"], incident["action"]["kind"]
    yield f"- **step {incident['step']:,}**: {verdict['kind']} {verdict.get('level') or ''} → {answer}"
    if place.get("file"):
        yield f"  - {_text(place['cause'])} at {_code(place['where'])}: {_text(str(place.get('why', '')))}"
        yield f"  - path: {_code(' → '.join(map(str, place.get('chain', []))))}"
    for reading in incident.get("readings", [])[-3:]:
        loss, norm, lr = (_number(reading[k]) for k in ("loss", "grad_norm", "lr"))
        yield f"  - before, step {reading['step']:,}: loss {loss}, gradient norm {norm}, lr {lr}"
    yield ""


def _checklist(
    run: Run, story: Timeline, diagnosis: Diagnosis | None, incidents: Sequence[dict[str, Any]], *, fine: bool
) -> Iterator[str]:
    located = [i for i in incidents if i.get("location")]
    proved = [i for i in located if i["location"].get("verified")]
    done = [
        (bool(run.series.rows), f"the log was read ({run.series.rows:,} rows, {run.series.format})"),
        (story.outcome == "healthy", "every logged value is finite"),
    ]
    asked = [
        (bool(located), "a bad step was located at its line"),
        (bool(proved), "the location was proved by replaying the step without that operation"),
        (diagnosis is not None and diagnosis.decided, "one cause stands out"),
    ]
    yield "### Verified, and not"
    yield ""
    done += [] if fine else asked
    yield from (f"- [{'x' if good else ' '}] {words}" for good, words in done)
    yield ""


def _next_steps(runs: Sequence[Run]) -> Iterator[str]:
    """What to do about the runs that broke; every command works as it stands, where the report was written."""
    broken = [run for run in runs if in_trouble(run.state(), run.incidents())]
    if not broken:
        return
    yield from ("## Next steps", "")
    if any(next(Path().glob(pattern), None) for pattern in ("*.py", "*/*.py")):
        yield "- [ ] look at the repairs of the code as a diff, then apply them with `--fix`: `nanproof lint --diff .`"
    script = next((words for run in broken if (words := script_in(command_of(run.home)))), [])
    if script and Path(script[0]).is_file():
        name, options = shlex.quote(script[0]), f" -- {shlex.join(script[1:])}" if script[1:] else ""
        yield f"- [ ] prove it small: {_code(f'nanproof smoke {name}{options}')}"
        yield f"- [ ] plan the way to the full size: {_code(f'nanproof rollout --init {name}')}"
        yield f"- [ ] train under the guard: {_code(f'nanproof run {shlex.join(script)}')}"
    yield f"- [ ] watch it: {_code(f'nanproof watch {typed(broken[-1].home)}')}"
    yield ""


def _number(number: Any) -> str:
    return number if isinstance(number, str) else value(float(number))


def _code(text: Any) -> str:
    """Text out of files as code."""
    flat = "".join(c if c.isprintable() and c != "`" else "?" for c in " ".join(str(text).split()))
    return f"`{flat}`"


def _text(text: str) -> str:
    """Text out of files must not become Markdown or HTML."""
    flat = " ".join(text.split())
    return "".join("&lt;" if c == "<" else f"\\{c}" if c in "|`*_[]#" else c if c.isprintable() else "?" for c in flat)
