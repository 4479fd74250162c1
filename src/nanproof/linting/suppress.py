"""Comments that silence findings: `# noqa`, `# noqa: NP301`, `# nanproof: ignore[NP301]`, `# nanproof: ignore-file`."""

from __future__ import annotations

import re
from collections.abc import Callable

_NOQA = re.compile(r"#\s*noqa\b(?P<codes>\s*:\s*[A-Z][A-Z0-9]*(?:[\s,]+[A-Z]+[0-9]+)*)?", re.I)
_IGNORE = re.compile(r"#\s*nanproof:\s*ignore(?!-)\s*(?:\[(?P<codes>[^\]]*)\])?", re.I)
_IGNORE_FILE = re.compile(r"^[ \t]*#\s*nanproof:\s*ignore-file\s*(?:\[(?P<codes>[^\]]*)\])?", re.I | re.M)


def named(codes: str | None, code: str, name: str) -> bool:
    """Whether a list in a comment names a rule: by code, beginning of a code, or name; no list names all.

    >>> named(" : E501, NP3", "NP301", "clip-without-unscale"), named(None, "NP301", ""), named("NP2", "NP301", "")
    (True, True, False)
    """
    if codes is None:
        return True
    words = [w for w in re.split(r"[\s,:]+", codes) if w]
    return any(code.startswith(w.upper()) or w.lower() == name for w in words)


def silenced(line: Callable[[int], str], first: int, last: int, code: str, name: str) -> bool:
    """Whether a comment silences a finding that reaches from line ``first`` to ``last`` (from 1).

    It may stand at the end of either line; `# nanproof: ignore` also alone on the line above.
    """
    for text in {line(first), line(last)}:
        if "#" in text:
            for pattern in (_NOQA, _IGNORE):
                match = pattern.search(text)
                if match and named(match["codes"], code, name):
                    return True
    match = _IGNORE.match(line(first - 1).strip())
    return match is not None and named(match["codes"], code, name)


def file_silenced(text: str, code: str, name: str) -> bool:
    """Whether a comment on a line of its own silences a rule, or all, in the whole file."""
    return any(named(m["codes"], code, name) for m in _IGNORE_FILE.finditer(text))
