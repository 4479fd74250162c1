"""``nanproof diagnose``: why a run broke."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import click

from ..text import style
from .shell import Screen, verb

if TYPE_CHECKING:
    from ..diagnosing import Diagnosis
    from ..diagnosing.data import DataReport


@verb(example="nanproof diagnose runs/a --fact gpu='RTX 4090' --fact attention=sdpa")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--fact", "facts", multiple=True, metavar="NAME=VALUE", help="A fact only you know: gpu, precision, resumed …"
)
@click.option("--evidence", metavar="FILE", help="An incident described in JSON, see docs/diagnose.md.")
@click.option("--before-resume", metavar="CKPT", help="Go or no-go for resuming from CKPT; PATH is the project.")
@click.option("--data", metavar="PATH", help="Check training data: NaN, empty targets, labels, CTC lengths.")
@click.option("--classes", type=click.IntRange(1), help="With --data: labels must be below this.")
@click.option("--labels", multiple=True, metavar="COLUMN", help="With --data: label column. Default: by name.")
@click.option("--downsample", type=click.IntRange(1), default=1, help="With --data: input steps per output step, CTC.")
@click.option("--model", metavar="SPEC", help="Check an untrained model: FILE:FUNCTION returns it (needs torch).")
@click.option("--batch", metavar="SPEC", help="With --model: FILE:FUNCTION that returns a batch.")
@click.option(
    "--watch-params", multiple=True, metavar="PATTERN", help="With --model: report these parameters: '*alpha*'."
)
@click.option("--full", is_flag=True, help="Show everything that was read.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--html", is_flag=True, help="Print a standalone HTML page.")
def command(
    screen: Screen,
    paths: tuple[str, ...],
    facts: tuple[str, ...],
    evidence: str | None,
    before_resume: str | None,
    data: str | None,
    classes: int | None,
    labels: tuple[str, ...],
    downsample: int,
    model: str | None,
    batch: str | None,
    watch_params: tuple[str, ...],
    full: bool,
    markdown: bool,
    html: bool,
) -> int:
    """Find out why a run broke: ranked causes with evidence, the repair, and the question that would decide.

    PATH is a folder or files of the run: logs, tracker files, configs, checkpoints, incidents, code, data. From the
    folder of one run the code and configs of the project around it are read, too. Without PATH the facts alone are
    diagnosed. Exit code 0: a log shows a healthy run. 1: anything else.
    """
    from ..diagnosing import diagnose
    from .progress import working

    if before_resume is not None:
        return _clear(screen, before_resume, paths)
    if model is not None:
        return _fresh(screen, model, batch, watch_params)
    report = _look(screen, data, classes, labels, downsample) if data is not None else None
    if report is not None and not paths and not facts and evidence is None:
        screen.data(report)
        return 0 if report.ok else 1
    with working(screen, f"reading {', '.join(paths)}"):
        diagnosis = diagnose(list(paths), facts=_stated(facts), evidence=evidence, data=report)
    _show(screen, diagnosis, full=full, markdown=markdown, html=html)
    return 0 if diagnosis.benign else 1


def _fresh(screen: Screen, model: str, batch: str | None, watch: tuple[str, ...]) -> int:
    """A model that has not trained yet: one forward, one backward, the checks of a smoke test."""
    from ..run.smoke import smoke
    from ..run.smoke.setting import from_model
    from .smoke import show

    made, step, _ = from_model(model, batch)
    report = smoke(made, step, steps=0, watch=watch)
    show(screen, report)
    return 0 if report.ok else 1


def _look(screen: Screen, path: str, classes: int | None, labels: tuple[str, ...], downsample: int) -> DataReport:
    """Look through the data, and say what is there."""
    from ..diagnosing.data import scan_data
    from ..diagnosing.text import plain
    from .progress import Bar

    with Bar(screen, f"reading {path}") as bar:
        report = scan_data(path, classes=classes, labels=labels, downsample=downsample, progress=bar.advance)
    for problem in report.problems:
        mark = style("✗", fg="red") if problem.cause else style("!", fg="yellow")
        screen.result(f"{mark} {plain(str(problem))}", 2)
    for note in report.notes:
        screen.note(f"! {plain(note)}", 2)
    if report.ok:
        found = "nothing that breaks a training; see ! above" if report.problems else "no problems found"
        files = "1 file" if report.files == 1 else f"{report.files:,} files"
        screen.result(f"✓ {report.rows:,} rows in {files}: {found}", 2)
    return report


def _stated(facts: tuple[str, ...]) -> dict[str, str]:
    from ..errors import UsageError

    found: dict[str, str] = {}
    for text in facts:
        name, equals, value = text.partition("=")
        if not name or (name in found and found[name] != value):
            raise UsageError(f"--fact {text!r} cannot be used", hint="--fact NAME=VALUE, each name once")
        found[name.strip()] = value if equals else "yes"
    return found


_STYLES: dict[str, dict[str, Any]] = {
    "strong": {"fg": "red", "bold": True},
    "likely": {"fg": "red"},
    "possible": {"fg": "yellow"},
    "healthy": {"fg": "green"},
    "command": {"fg": "cyan"},
    "dim": {"dim": True},
}


def _show(screen: Screen, diagnosis: Diagnosis, *, full: bool, markdown: bool, html: bool) -> None:
    from ..diagnosing.text import as_html, as_markdown, as_text

    screen.data(diagnosis)
    if html or markdown:
        screen.result((as_html if html else as_markdown)(diagnosis).rstrip("\n"))
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        screen.result(as_text(diagnosis, full=full, width=columns, style=lambda t, k: style(t, **_STYLES[k])))


def _clear(screen: Screen, checkpoint: str, paths: tuple[str, ...]) -> int:
    from ..diagnosing.before_resume import MARKS, check_before_resume
    from ..diagnosing.text import plain

    clearance = check_before_resume(checkpoint, paths)
    screen.data(clearance.to_json())
    for check in clearance.checks:
        screen.result(f"{MARKS[check.verdict]} {check.point:<11} {plain(check.found)}", 14)
    wrong = sum(c.verdict == "wrong" for c in clearance.checks)
    skipped = len(clearance.unchecked)
    unchecked = f" ({skipped} check{'s' if skipped > 1 else ''} skipped)" if skipped else ""
    if clearance.go:
        screen.result(style(f"GO: safe to resume from {plain(clearance.checkpoint)}{unchecked}", fg="green"))
        return 0
    reasons = f"{wrong} reason{'s' if wrong > 1 else ''} above, marked ✗"
    screen.result(style(f"NO-GO: {reasons}{unchecked}", fg="red"))
    return 1
