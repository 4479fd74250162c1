"""Lint training code: find what makes a run diverge, say why, and repair it, reviewed and reversible.

from nanproof import lint

for finding in lint(["train.py", "models/"]):
    print(finding.path, finding.line, finding.code, finding.message)
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..records import Finding

__all__ = ["lint"]


def lint(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    info: bool = False,
) -> tuple[Finding, ...]:
    """What is wrong in Python files and notebooks, files and folders alike, in the order of files and lines.

    ``select`` and ``ignore`` take codes ("NP301"), beginnings of codes ("NP3"), names ("clip-without-unscale") and
    "ALL"; the nearest pyproject.toml with a section ``[tool.nanproof.lint]`` is respected. Findings carry the edits
    that would repair them, as ranges of bytes. ``info`` adds what is possible although nothing in the code says that
    it happens.
    """
    from .inspection import Inspection

    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    inspection = Inspection(named, select=select, ignore=ignore, info=info)
    return tuple(p.finding for checked in inspection.lint() for p in checked.problems)
