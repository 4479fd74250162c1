"""``nanproof lint``: what in the code makes training diverge, and its repair."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..linting.engine import Checked, Problem
    from ..linting.inspection import Inspection, Outcome

T = TypeVar("T")


@verb(example="nanproof lint train.py src/ --diff", inert=True)
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--select", multiple=True, metavar="CODES", help="Only these rules: NP301, NP3, a name, ALL.")
@click.option("--ignore", multiple=True, metavar="CODES", help="Not these rules.")
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif", "github"]), default="text")
@click.option("--diff", is_flag=True, help="Show the patch of --fix, or of --unsafe-fixes; write nothing.")
@click.option("--fix", is_flag=True, help="Apply the safe fixes.")
@click.option("--unsafe-fixes", is_flag=True, help="Apply all fixes, also those that change behaviour.")
@click.option("--beside", is_flag=True, help="Write repaired copies (train_stable.py); originals stay untouched.")
@click.option("--undo", is_flag=False, flag_value="last", metavar="[ID]", help="Take back the last fix, or this one.")
def command(
    screen: Screen, paths: tuple[str, ...], select: tuple[str, ...], ignore: tuple[str, ...], form: str, diff: bool,
    fix: bool, unsafe_fixes: bool, beside: bool, undo: str | None,
) -> int:  # fmt: skip
    """Lint training code for what makes it diverge: Python files, notebooks, folders, or - for standard input.

    A safe fix keeps every finite result as it is; an unsafe one changes behaviour. Whatever is applied is journalled
    first, checked afterwards, and can be undone.
    """
    from ..errors import UsageError

    if undo is not None:
        return _undo(screen, undo, paths)
    if not paths:
        raise UsageError("nothing to lint was named", hint="nanproof lint .")
    if "-" in paths and (len(paths) > 1 or beside):
        raise UsageError("- stands for standard input and goes alone", hint="nanproof lint - < train.py")
    if beside and fix:
        raise UsageError("--fix writes into the files, --beside next to them", hint="give one of the two")
    if screen.as_json and form not in ("text", "json"):
        raise UsageError(f"--json and --format {form} are two formats", hint="give one of the two")
    screen.as_json = screen.as_json or form == "json"
    run = _inspect(paths, _split(select), _split(ignore))
    if not run.files:
        screen.note(f"no Python file and no notebook in {', '.join(paths)}; nothing was linted")
    if diff:
        return _diff(screen, run, unsafe_fixes)
    if fix or unsafe_fixes or beside:
        return _fix(screen, run, form, paths, unsafe=unsafe_fixes, beside=beside)
    checked = [c for c in _watched(screen, run.lint(), len(run.files)) if c.problems]
    _show(screen, form, checked, len(run.files))
    return 1 if checked else 0


def _watched(screen: Screen, items: Iterable[T], total: int) -> Iterator[T]:
    """The items as they come, with a progress bar on a terminal once they take longer than a second."""
    began = time.monotonic()
    wanted = sys.stderr.isatty() and not screen.quiet and not screen.as_json
    bar: Progress | None = None
    try:
        for count, item in enumerate(items, 1):
            yield item
            if bar is None and wanted and time.monotonic() - began > 1:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                bar.add_task("linting", total=total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=count)
    finally:
        if bar is not None:
            bar.stop()


def _split(values: Iterable[str]) -> list[str]:
    return [word for value in values for word in value.replace(",", " ").split()]


def _inspect(paths: Sequence[str], select: list[str], ignore: list[str]) -> Inspection:
    from .. import journal
    from ..linting.inspection import Inspection

    if paths[0] == "-":
        return Inspection([], select=select, ignore=ignore, stdin=sys.stdin.buffer.read())
    run = Inspection(paths, select=select, ignore=ignore)
    for taken in journal.recover(run.home):
        click.echo(f"{taken.why} ({taken.id}) was killed half-way: its changes were taken back", err=True)
    return run


def _diff(screen: Screen, run: Inspection, unsafe: bool) -> int:
    from ..linting.render import patch

    results = list(_watched(screen, run.fix(unsafe=unsafe), len(run.files)))
    changed = [fixed for _, fixed in results if fixed is not None]
    lines = [line for fixed in changed for line in patch(str(fixed.path), fixed.old, fixed.new)]
    screen.data({"diff": "".join(f"{line}\n" for line in lines), "repaired": [r for f in changed for r in f.repaired]})
    for line in lines:
        screen.result(_coloured(line))
    if not lines:
        screen.note("no unsafe fix either" if unsafe else "no safe fix to show; --unsafe-fixes shows the others")
    return 1 if lines or any(checked.problems for checked, _ in results) else 0


def _coloured(line: str) -> str:
    style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    plain = "".join(c if c.isprintable() or c == "\t" else "?" for c in line)
    return click.style(plain, fg=style) if style else plain


def _fix(screen: Screen, run: Inspection, form: str, paths: Sequence[str], *, unsafe: bool, beside: bool) -> int:
    results = list(_watched(screen, run.fix(unsafe=unsafe), len(run.files)))
    changed = [fixed for _, fixed in results if fixed is not None]
    left = [checked for checked, fixed in results if checked.problems and fixed is None]
    if run.stdin is not None:
        sys.stdout.buffer.write(changed[0].new if changed else run.stdin)
        return 1 if left or any(f.after.problems for f in changed) else 0
    if not changed:
        _show(screen, form, left, len(run.files))
        screen.note("no fix to apply")
        return 1 if left else 0
    why = "lint --unsafe-fixes" if unsafe else "lint --fix"
    outcome = run.apply_beside(changed) if beside else run.apply(changed, why=why)
    left += [checked for checked in outcome.after if checked.problems]
    _show(screen, form, left, len(run.files), outcome)
    home = "" if run.home == _home_of_here() else f" {paths[0]}"
    screen.note(f"undo: nanproof lint --undo {outcome.application.id}{home}")
    return 0 if all(r.verified for r in outcome.repairs) and not left else 1


def _home_of_here() -> Path:
    from ..journal import home_of

    return home_of(Path.cwd())


def _undo(screen: Screen, undo: str, paths: Sequence[str]) -> int:
    from .. import journal

    id, place = undo, Path(paths[0]) if paths else Path.cwd()
    if not paths and undo != "last" and not undo.isdigit():
        id, place = "last", Path(undo)  # `--undo train.py`: the last one there
    home = journal.home_of(place)
    for taken in journal.recover(home):
        click.echo(f"{taken.why} ({taken.id}) was killed half-way: its changes were taken back", err=True)
    restored = journal.undo(home, None if id == "last" else id)
    screen.data({"restored": [str(p) for p in restored]})
    for path in restored:
        screen.result(f"{'restored' if path.exists() else 'removed'} {path}")
    return 0


def _show(screen: Screen, form: str, found: Sequence[Checked], total: int, outcome: Outcome | None = None) -> None:
    """All findings in the wanted form, and what was repaired."""
    findings = [p.finding for checked in found for p in checked.problems]
    machine: dict[str, object] = {"files": total, "findings": findings}
    if outcome is not None:
        machine |= {"repairs": outcome.repairs, "application": outcome.application}
    screen.data(machine)
    if screen.as_json:
        return
    if form == "sarif":
        from ..linting.sarif import sarif

        click.echo(json.dumps(sarif(findings), indent=2))
        return
    if form == "github":
        from ..linting.render import annotation

        for finding in findings:
            click.echo(annotation(finding))
        return
    for checked in found:
        for problem in checked.problems:
            _show_problem(screen, checked, problem)
    if outcome is not None:
        _show_outcome(screen, outcome)
    _show_end(screen, found, total)


def _show_problem(screen: Screen, checked: Checked, problem: Problem) -> None:
    from ..linting.render import fix_words, frame

    finding = problem.finding
    place = click.style(f"{finding.path}:{finding.line}:{finding.column}", bold=True)
    screen.result(f"{place}: {click.style(finding.code, fg='red', bold=True)} {finding.message}")
    if screen.quiet:
        return
    lines = frame(checked.document, problem.span) if checked.document and problem.span[1] else []
    margin = " " * (len(lines[0]) - 1 if lines else 2)
    for line in lines:
        screen.result(line)
    if finding.help:
        screen.result(f"{margin}= {click.style('help', bold=True)}: {finding.help}")
    if words := fix_words(finding):
        screen.result(f"{margin}= {click.style('fix', bold=True)}: {words}")
    screen.result("")


def _show_outcome(screen: Screen, outcome: Outcome) -> None:
    for repair in outcome.repairs:
        words = [
            "applied" if repair.applied else "NOT APPLIED",
            "finding gone" if repair.gone else "FINDING STILL THERE",
            "compiles"
            if repair.compiles
            else "DOES NOT COMPILE"
            if repair.compiled
            else "did not compile before either",
        ]
        mark = click.style("verified", fg="green") if repair.verified else click.style("failed", fg="red")
        finding = repair.finding
        screen.result(f"{mark} {finding.path}:{finding.line}: {finding.code} {', '.join(words)}")
    here = Path.cwd()
    for path in (Path(t.path) for t in outcome.application.files):
        screen.note(f"wrote {path.relative_to(here) if path.is_relative_to(here) else path}")


def _show_end(screen: Screen, found: Sequence[Checked], total: int) -> None:
    problems = [p for checked in found for p in checked.problems]
    safe = sum(p.finding.safe for p in problems)
    unsafe = sum(bool(p.finding.edits) for p in problems) - safe
    files = f"{total} file{'s' * (total != 1)}"
    if not problems:
        if total:
            screen.note(f"{files} linted, nothing found")
        return
    count = f"{len(problems)} finding{'s' * (len(problems) != 1)} in {len(found)} of {files}"
    ways = [f"{safe} with a safe fix (--fix)"] if safe else []
    ways += [f"{unsafe} with an unsafe fix (--unsafe-fixes)"] if unsafe else []
    screen.note(", ".join([count, *ways]))
