"""``nanproof lint``: what in the code makes training diverge, and its repair."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ..text import console, show, style
from .shell import Screen, verb

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..linting.engine import Checked, Problem
    from ..linting.inspection import Inspection, Outcome
    from ..records import Finding

T = TypeVar("T")


@verb(example="nanproof lint train.py src/ --diff", inert=True)
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--select", multiple=True, metavar="CODES", help="Only these rules: NP301, NP3, a name, ALL.")
@click.option("--ignore", multiple=True, metavar="CODES", help="Skip these rules.")
@click.option("--info", is_flag=True, help="Also show hazards that nothing in the code confirms.")
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif", "github"]), default="text")
@click.option("--output-file", type=click.Path(dir_okay=False), help="Write the findings to this file.")
@click.option("--statistics", is_flag=True, help="Print how many findings each rule has, not the findings.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Skip files and folders that match.")
@click.option("--no-gitignore", is_flag=True, help="Also lint files that .gitignore excludes.")
@click.option("--baseline", type=click.Path(dir_okay=False), help="Ignore findings recorded in this file.")
@click.option("--write-baseline", is_flag=True, help="Write the current findings to the --baseline file.")
@click.option("--add-noqa", is_flag=True, help="Silence the current findings with # noqa comments.")
@click.option("--no-cache", is_flag=True, help="Ignore cached results.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 even if there are findings.")
@click.option("--stdin-filename", metavar="NAME", help="File name of code read from standard input.")
@click.option("--diff", is_flag=True, help="Print the patch of --fix or --unsafe-fixes; write nothing.")
@click.option("--fix", is_flag=True, help="Apply the safe fixes.")
@click.option("--unsafe-fixes", is_flag=True, help="Apply all fixes, including those that change behavior.")
@click.option("--beside", is_flag=True, help="Write fixed copies (train_stable.py) beside the originals.")
@click.option(
    "--undo", is_flag=False, flag_value="last", metavar="[ID]", help="Revert the last fix, or the one with this ID."
)
@click.option("--lsp", is_flag=True, help="Run as a language server on stdin and stdout (needs nanproof[lsp]).")
def command(
    screen: Screen,
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    form: str,
    output_file: str | None,
    statistics: bool,
    exclude: tuple[str, ...],
    no_gitignore: bool,
    baseline: str | None,
    write_baseline: bool,
    add_noqa: bool,
    no_cache: bool,
    exit_zero: bool,
    stdin_filename: str | None,
    diff: bool,
    fix: bool,
    unsafe_fixes: bool,
    beside: bool,
    undo: str | None,
    lsp: bool,
    info: bool,
) -> int:
    """Lint training code for what makes it diverge: Python files, notebooks, folders, or - for standard input.

    Without a path the current folder is linted. A safe fix keeps every finite result as it is; an unsafe one changes
    behavior. Whatever is applied is journaled first, checked afterwards, and can be undone.
    """
    from ..errors import UsageError

    if lsp:
        from ..linting.server import serve

        return serve()
    if undo is not None:
        return _undo(screen, undo, paths)
    paths = paths or (("-",) if stdin_filename else (".",))
    if "-" in paths and (len(paths) > 1 or beside or add_noqa):
        raise UsageError("- stands for standard input and goes alone", hint="nanproof lint - < train.py")
    if beside and fix:
        raise UsageError("--fix writes into the files, --beside next to them", hint="give one of the two")
    if write_baseline and not baseline:
        raise UsageError("--write-baseline needs a file", hint="nanproof lint --baseline lint.json --write-baseline")
    if screen.as_json and form not in ("text", "json"):
        raise UsageError(f"--json and --format {form} are two formats", hint="give one of the two")
    screen.as_json = screen.as_json or form == "json"
    run = _inspect(
        paths,
        _split(select),
        _split(ignore),
        _split(exclude),
        not no_gitignore,
        stdin_filename,
        info=info,
        cache=not no_cache and not (diff or fix or unsafe_fixes or beside or add_noqa),
    )
    if not run.files:
        screen.note(f"no Python file and no notebook in {', '.join(paths)}; nothing was linted")
    if diff:
        return _diff(screen, run, unsafe_fixes)
    if fix or unsafe_fixes or beside:
        return _fix(screen, run, form, paths, unsafe=unsafe_fixes, beside=beside)
    checked = [c for c in _watched(screen, run.lint(), len(run.files)) if c.problems]
    if baseline:
        from ..linting import baseline as record

        if write_baseline:
            count = record.write(Path(baseline), checked)
            screen.note(
                f"recorded {count} findings in {baseline}; show new ones with: nanproof lint --baseline {baseline}"
            )
            return 0
        checked = record.new_only(Path(baseline), checked)
    if add_noqa:
        return _add_noqa(screen, run, checked, paths)
    with _output(output_file):
        if statistics:
            _statistics(screen, checked, len(run.files))
        else:
            _show(screen, form, checked, len(run.files))
    if output_file:
        screen.note(f"wrote {output_file}")
    certain = any(not p.finding.info for c in checked for p in c.problems)
    return 1 if certain and not exit_zero else 0


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[None]:
    """What is printed inside goes into a file, whole or not at all."""
    if path is None:
        yield
        return
    from .. import files

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    files.write_atomic(Path(path), text.getvalue())


def _statistics(screen: Screen, found: Sequence[Checked], total: int) -> None:
    """How many findings each rule has, most first."""
    from ..linting.catalogue import everything

    counts = Counter(p.finding.code for checked in found for p in checked.problems)
    fixable = Counter(p.finding.code for checked in found for p in checked.problems if p.finding.safe)
    names = {rule.code: rule.name for rule in everything()}
    rows = [{"code": c, "name": names[c], "count": n, "safe_fixes": fixable[c]} for c, n in counts.most_common()]
    screen.data({"files": total, "statistics": rows})
    for code, count in counts.most_common():
        screen.result(f"{count:>6}  {code}  {'[*]' if fixable[code] else '   '}  {names[code]}")
    if not counts:
        screen.note(f"{total} files linted, nothing found")


def _add_noqa(screen: Screen, run: Inspection, found: Sequence[Checked], paths: Sequence[str]) -> int:
    from .. import journal
    from ..linting.annotate import add_noqa

    new = {Path(c.path): text for c in found if (text := add_noqa(c)) is not None}
    seen = {Path(c.path): c.document.data for c in found if c.document is not None and Path(c.path) in new}
    if not new:
        screen.note("no comment to add")
        return 0
    done = journal.apply(new, home=run.home, why="lint --add-noqa", seen=seen)
    screen.data({"application": done})
    screen.note(f"added comments to {len(new)} file{'s' * (len(new) != 1)}")
    home = "" if run.home == _home_of_here() else f" {paths[0]}"
    screen.note(f"undo: nanproof lint --undo {done.id}{home}")
    return 0


def _watched(screen: Screen, items: Iterable[T], total: int) -> Iterator[T]:
    """The items as they come, with a progress bar on a terminal once they take longer than a second."""
    began = time.monotonic()
    wanted = sys.stderr.isatty() and not screen.quiet and not screen.as_json
    bar: Progress | None = None
    try:
        for count, item in enumerate(items, 1):
            yield item
            if bar is None and wanted and time.monotonic() - began > 1:
                from rich.progress import Progress

                bar = Progress(console=console(err=True), transient=True)
                bar.start()
                bar.add_task("linting", total=total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=count)
    finally:
        if bar is not None:
            bar.stop()


def _split(values: Iterable[str]) -> list[str]:
    return [word for value in values for word in value.replace(",", " ").split()]


def _inspect(
    paths: Sequence[str],
    select: list[str],
    ignore: list[str],
    exclude: list[str],
    gitignore: bool,
    name: str | None,
    *,
    cache: bool,
    info: bool,
) -> Inspection:
    from .. import journal
    from ..linting.inspection import Inspection

    if paths[0] == "-":
        given = Path(name) if name else None
        return Inspection([], select=select, ignore=ignore, stdin=sys.stdin.buffer.read(), stdin_name=given, info=info)
    run = Inspection(paths, select=select, ignore=ignore, exclude=exclude, gitignore=gitignore, cache=cache, info=info)
    for taken in journal.recover(run.home):
        show(f"{taken.why} ({taken.id}) was killed half-way: its changes were taken back", err=True)
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
    return style(line, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))


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
        show(f"{taken.why} ({taken.id}) was killed half-way: its changes were taken back", err=True)
    restored = journal.undo(home, None if id == "last" else id)
    screen.data({"restored": [str(p) for p in restored]})
    for path in restored:
        screen.result(f"{'restored' if path.exists() else 'removed'} {path}")
    return 0


def _show(screen: Screen, form: str, found: Sequence[Checked], total: int, outcome: Outcome | None = None) -> None:
    """All findings in the wanted form, and what was repaired."""
    findings = [p.finding for checked in found for p in checked.problems]
    machine: dict[str, object] = {"files": total, "findings": [_for_machines(f) for f in findings]}
    if outcome is not None:
        machine |= {"repairs": outcome.repairs, "application": outcome.application}
    screen.data(machine)
    if screen.as_json:
        return
    if form == "sarif":
        from ..linting.sarif import sarif

        show(json.dumps(sarif(findings), indent=2))
        return
    if form == "github":
        from ..linting.render import annotation

        for finding in findings:
            show(annotation(finding))
        return
    for checked in found:
        for problem in checked.problems:
            _show_problem(screen, checked, problem)
    if outcome is not None:
        _show_outcome(screen, outcome)
    _show_end(screen, found, total)


def _for_machines(finding: Finding) -> object:
    """A finding, with the place in the file itself where it is in a cell of a notebook."""
    path, mark, cell = finding.path.partition(":cell ")
    if not mark:
        return finding
    from ..linting.notebook import file_place
    from ..records import to_json

    _, line, column = file_place(finding)
    return {**to_json(finding), "path": path, "cell": int(cell), "file_line": line, "file_column": column}


def _show_problem(screen: Screen, checked: Checked, problem: Problem) -> None:
    from ..linting.render import fix_words, frame

    finding = problem.finding
    place = style(f"{finding.path}:{finding.line}:{finding.column}", bold=True)
    code = style(finding.code, fg="blue" if finding.info else "red", bold=True)
    screen.result(f"{place}: {code} {'info: ' if finding.info else ''}{finding.message}")
    if screen.quiet:
        return
    lines = frame(checked.document, problem.span) if checked.document and problem.span[1] else []
    margin = " " * (len(lines[0]) - 1 if lines else 2)
    for line in lines:
        screen.result(line)
    if finding.help:
        screen.result(f"{margin}= {style('help', bold=True)}: {finding.help}")
    if words := fix_words(finding):
        screen.result(f"{margin}= {style('fix', bold=True)}: {words}")
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
        mark = style("verified", fg="green") if repair.verified else style("failed", fg="red")
        finding = repair.finding
        screen.result(f"{mark} {finding.path}:{finding.line}: {finding.code} {', '.join(words)}")
    here = Path.cwd()
    for path in (path.resolve() for path in outcome.written):
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
