"""Findings that were there before: recorded once, left out afterwards, so that only new ones are shown.

A finding is known by its file, its rule and the text of its line, not by its number: lines above may come and go.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .. import files
from ..errors import UsageError
from ..files import file_text
from .engine import Checked, Problem

VERSION = 1


def write(path: Path, found: Iterable[Checked]) -> int:
    """Record findings; returns how many."""
    marks = sorted(_mark(checked, problem, path) for checked in found for problem in checked.problems)
    files.write_atomic(path, json.dumps({"version": VERSION, "findings": marks}, indent=1) + "\n")
    return len(marks)


def new_only(path: Path, found: Sequence[Checked]) -> list[Checked]:
    """What the record at ``path`` does not have; each recorded finding stands for one."""
    left = _read(path)
    kept = []
    for checked in found:
        problems = []
        for problem in checked.problems:
            mark = _mark(checked, problem, path)
            if left[mark] > 0:
                left[mark] -= 1
            else:
                problems.append(problem)
        if problems:
            kept.append(replace(checked, problems=tuple(problems)))
    return kept


def _read(path: Path) -> Counter[str]:
    try:
        table = json.loads(file_text(path))
        return Counter(str(mark) for mark in table["findings"])
    except OSError as error:
        hint = f"nanproof lint --baseline {path} --write-baseline"
        raise UsageError(f"the baseline {path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, KeyError, TypeError):
        hint = f"nanproof lint --baseline {path} --write-baseline"
        raise UsageError(f"{path} is not a baseline of nanproof lint", hint=hint) from None


def _mark(checked: Checked, problem: Problem, baseline: Path) -> str:
    """``train.py NP206 1f0c9a…``; paths are relative to the baseline's folder."""
    full, home = Path(checked.path).absolute(), baseline.absolute().parent
    name = full.relative_to(home).as_posix() if full.is_relative_to(home) else full.as_posix()
    text = checked.document.text if checked.document else ""
    start = text.rfind("\n", 0, problem.span[0]) + 1
    line = text[start : (text.find("\n", problem.span[0]) + 1 or len(text) + 1) - 1]
    return f"{name} {problem.finding.code} {hashlib.sha256(line.strip().encode()).hexdigest()[:16]}"
