"""``nanproof report``: show a run to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..watch.runs import Run


@verb(example="nanproof report runs/original runs/stable -o report.html")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN_B]")
@click.option(
    "-o", "--out", default="report.html", show_default=True, metavar="FILE", help="FILE.html, FILE.md or FILE.png."
)
def command(screen: Screen, runs: tuple[str, ...], out: str) -> int:
    """Write a report of one run, or of two compared: a page that opens from disk, Markdown, or a picture."""
    from pathlib import Path

    from ..errors import UsageError
    from ..watch.runs import find_runs
    from .progress import working

    kind = Path(out).suffix.lower()
    if kind not in (".html", ".md", ".png"):
        raise UsageError(f"unsupported format {kind or out!r}", hint="use .html, .md or .png, as in -o report.html")
    with working(screen, "looking for runs") as say:
        found = find_runs(runs)
        say(f"reading {len(found):,} run{'s' if len(found) > 1 else ''}")
        if kind == ".html":
            from ..report.html import write_html

            write_html(found, out)
        elif kind == ".md":
            from ..report.markdown import write_markdown

            write_markdown(found, out)
        else:
            from ..report.plot import write_png

            write_png(found, out)
    screen.data({"wrote": out, "runs": [{"name": r.name, "state": str(r.state())} for r in found], **_compared(found)})
    for run in found:
        screen.note(f"{run.name}: {run.state()}", 2)
    for comparison in _compared(found).values():
        screen.note(comparison.first, 2)
    screen.result(f"wrote {out}")
    return 0


def _compared(runs: list[Run]) -> dict[str, Any]:
    if len(runs) != 2:
        return {}
    from ..watch.compare import compare

    return {"compared": compare(*runs)}
