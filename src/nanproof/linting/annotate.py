"""Comments that silence today's findings: ``# noqa: NP206`` at the end of their lines."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable

from .document import PythonFile
from .engine import Checked
from .tree import line_starts

_CODES = re.compile(r"(#\s*noqa\s*:\s*)([A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*)", re.I)


def add_noqa(checked: Checked) -> bytes | None:
    """The file with a comment for each finding; None where nothing can be added (a notebook, a config)."""
    document = checked.document
    if not isinstance(document, PythonFile):
        return None
    wanted: dict[int, set[str]] = {}
    for problem in checked.problems:
        if problem.finding.code.startswith("NP0"):
            continue
        wanted.setdefault(problem.finding.line, set()).add(problem.finding.code)
    text = document.text
    ends, inside = _tokens(text)
    starts = [*line_starts(text), len(text)]
    changed = False
    for line in sorted(wanted, reverse=True):
        at = next((n for n in sorted(ends) if n >= line), None) if line in inside else line
        if at is None:
            continue
        body = text[starts[at - 1] : starts[at]]
        plain = body.rstrip("\r\n")
        new = commented(plain, wanted[line])
        if new != plain:
            text = text[: starts[at - 1]] + new + body[len(plain) :] + text[starts[at] :]
            changed = True
    if not changed:
        return None
    head = document.data[:3] if document.data.startswith(b"\xef\xbb\xbf") else b""
    return head + text.encode(document.encoding)


def commented(line: str, codes: Iterable[str]) -> str:
    """
    >>> commented("y = x  # noqa: E501", ["NP203"]), commented("y = x", ["NP203", "NP201"])
    ('y = x  # noqa: E501, NP203', 'y = x  # noqa: NP201, NP203')
    """
    found = _CODES.search(line)
    if found is None:
        return f"{line.rstrip()}  # noqa: {', '.join(sorted(codes))}"
    there = re.split(r"[\s,]+", found[2])
    added = [c for c in sorted(codes) if c not in there]
    return line[: found.end()] + "".join(f", {c}" for c in added) + line[found.end() :]


def _tokens(text: str) -> tuple[set[int], set[int]]:
    """The lines on which a statement ends, and those whose end is in a string or continued on the next."""
    ends, inside = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            ends.add(token.start[0])
        if token.start[0] != token.end[0] and token.type != tokenize.NEWLINE:
            inside.update(range(token.start[0], token.end[0]))
    inside.update(n for n, line in enumerate(text.splitlines(), 1) if line.rstrip().endswith("\\"))
    return ends, inside
