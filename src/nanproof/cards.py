"""Records as small pieces of HTML, for notebooks: ``_repr_html_`` of a record is a card.

>>> card("died at step 3", {"cause": "log(0) < 0"}, good=False)[:36]
'<div style="border-left:3px solid #c'

Nothing but tags and inline styles; everything that comes from a file is escaped. No script.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

RED, GREEN, GREY = "#c8102e", "#1a7f4b", "#7c828b"
_NAME = "text-align:left;vertical-align:top;opacity:.65;padding:1px 12px 1px 0;white-space:nowrap"
_MONO = "font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap"


def card(
    title: str,
    facts: Mapping[str, str] | None = None,
    *,
    good: bool | None = None,
    code: Iterable[str] = (),
    commands: Iterable[str] = (),
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """A title, named facts, a table (its heads first), lines of code with the culprit marked, and commands."""
    color = GREY if good is None else GREEN if good else RED
    parts = [f'<div style="border-left:3px solid {color};padding:4px 12px;margin:4px 0">']
    parts.append(f'<div style="font-weight:600;color:{color}">{html.escape(title)}</div>')
    named = [
        f'<tr><td style="{_NAME}">{html.escape(name)}</td><td style="text-align:left">{html.escape(words)}</td></tr>'
        for name, words in (facts or {}).items()
        if words
    ]
    parts += [f'<table style="margin:2px 0">{"".join(named)}</table>'] if named else []
    parts += (
        [f'<table style="margin:2px 0">{"".join(map(_row, rows, ["th", *["td"] * len(rows)]))}</table>'] if rows else []
    )
    lines = [_line(line) for line in code]
    parts += [f'<div style="{_MONO};margin:4px 0">{"".join(lines)}</div>'] if lines else []
    parts += [f'<code style="{_MONO}">{html.escape(command)}</code><br>' for command in commands]
    return "".join([*parts, "</div>"])


def _row(cells: Sequence[str], tag: str) -> str:
    shown = (f'<{tag} style="text-align:left;padding:1px 12px 1px 0">{html.escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def _line(line: str) -> str:
    mark = f";background:{RED}22" if line.lstrip().startswith(">") else ""
    return f'<div style="min-height:1.5em{mark}">{html.escape(line)}</div>'
