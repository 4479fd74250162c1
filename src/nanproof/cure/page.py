"""The curves of all trials on one page, with the table above them."""

from __future__ import annotations

from pathlib import Path

from ..report.html import write_html
from ..watch.runs import Run
from .outcome import Outcome

MOST = 24
"""Curves on the page; more could not be told apart."""


def write_page(outcome: Outcome, out: Path) -> Path:
    """Write ``report.html`` into the folder of a cure."""
    runs: list[Run] = []
    for line in outcome.lines[:MOST]:
        for slug in line.trials[:1]:
            folder = out / "trials" / slug / "guard" / line.part
            if (folder / "training_log.jsonl").exists():
                runs.append(Run(len(runs), folder, f"{line.change.name} ({line.standing})"))
    path = out / "report.html"
    # the table says why each trial ended; to diagnose a dozen of them would take longer than to train them
    write_html(runs, path, note=f"{outcome.command}: {outcome.told}", causes=False)
    return path
