"""``nanproof report``: show a run to others."""

from __future__ import annotations

import click

from .shell import Screen, verb


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

    kind = Path(out).suffix.lower()
    if kind not in (".html", ".md", ".png"):
        raise UsageError(f"{out} has an ending that says nothing", hint="end it in .html, .md or .png")
    for run in runs:
        if not Path(run).exists():
            raise UsageError(f"{run} does not exist", hint="name a run folder or a log")
    found = find_runs(runs)
    if kind == ".html":
        from ..report.html import write_html

        write_html(found, out)
    elif kind == ".md":
        from ..report.markdown import write_markdown

        write_markdown(found, out)
    else:
        from ..report.plot import write_png

        write_png(found, out)
    screen.data({"wrote": out, "runs": [r.name for r in found]})
    screen.result(f"wrote {out}")
    return 0
