"""What lint finds in the code of the run, as facts for the causes that it would explain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ...errors import NanproofError
from ...linting import lint
from ..diagnosis import Looked
from ..evidence import Fact
from .part import Part, name_in

MAX_FILES = 300
FAMILIES = ("NP1", "NP2", "NP3", "NP4", "NP5", "NP6", "NP308", "NP502")


def read_code(paths: Sequence[Path], root: Path) -> Part:
    """The findings of NP1xx to NP6xx; config rules have their own place."""
    if not paths:
        return Part()
    chosen = sorted(paths)[:MAX_FILES]
    notes = (f"{len(paths) - MAX_FILES:,} Python files were not linted",) if len(paths) > MAX_FILES else ()
    try:
        findings = lint(chosen, select=FAMILIES, info=True)
    except NanproofError as error:
        return Part(looked=(Looked(mark="✗", what="code", found=str(error)),), notes=notes)
    facts = []
    for finding in findings:
        path = Path(finding.path)
        name = name_in(root, path)
        words = f"{finding.code}: {finding.message}"
        facts.append(Fact(name="lint", value=finding.code, where=f"{name}:{finding.line}", words=words))
    counted = ", ".join(f"{n} × {code}" for code, n in sorted(Counter(f.code for f in findings).items()))
    found = f"{len(chosen):,} Python file{'s' if len(chosen) > 1 else ''}, {counted or 'nothing found'}"
    return Part(
        facts=tuple(facts), looked=(Looked(mark="!" if findings else "✓", what="code", found=found),), notes=notes
    )
