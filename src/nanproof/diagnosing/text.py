"""A diagnosis as people read it: on a terminal, as Markdown, as a page of its own.

>>> from nanproof.diagnosing.diagnosis import Diagnosis, Suspect
>>> suspect = Suspect(name="masked-row", title="every entry of a softmax row is masked", confidence="strong",
...     evidence=("only with padding (--fact)",), against=(), fix="nanproof.ops.masked_softmax", verify="…",
...     commands=("nanproof explain masked-row",))
>>> print(as_text(Diagnosis(causes=(suspect,), verdict="broken")))
Cause: every entry of a softmax row is masked (masked-row, strong)
  evidence  only with padding (--fact)
  repair    nanproof.ops.masked_softmax
  run       nanproof explain masked-row
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterator

from .diagnosis import Diagnosis, Missing, Suspect

WIDTH = 100
SCREEN = 24
"""The lines of a screen; ``full`` is as long as it gets."""
EVIDENCE, MOMENTS, HELD = 3, 2, 6
"""How much of each a screen shows at most."""
STEPS = ((2, 4, 2), (2, 3, 1), (1, 3, 1), (1, 2, 1), (1, 1, 1), (0, 1, 1))
"""Other causes, lines of an entry of the first, of another one: the first that fits the screen is taken."""
WORTH_A_WORD = 0.03
"""The part of the probability below which another cause is not worth a word beside the first."""
Style = Callable[[str, str], str]
_HEADS = {"strong": "Cause", "likely": "Likely cause", "possible": "Possible cause"}


def _unstyled(text: str, kind: str) -> str:
    return text


def as_text(diagnosis: Diagnosis, *, full: bool = False, width: int = WIDTH, style: Style = _unstyled) -> str:
    """The diagnosis for a terminal, one screen of it unless ``full``."""
    text = ""
    for others, lines, short in ((len(diagnosis.causes), 0, 0),) if full else STEPS:
        page = _Page(diagnosis, full, max(40, min(width, 120)), style, others=others, lines=lines, short=short)
        blocks = [list(page.held()), list(page.story()), list(page.verdict()), list(page.notes())]
        if full:
            blocks.insert(0, [f"{x.mark} {plain(x.what):<12} {plain(x.found)}" for x in diagnosis.checklist])
            blocks[2:2] = [[f"{title}:", *text.splitlines()] for title, text in diagnosis.tables.items()]
        text = "\n\n".join("\n".join(b) for b in blocks if b)
        if text.count("\n") < SCREEN:
            break
    return text


class _Page:
    def __init__(
        self, diagnosis: Diagnosis, full: bool, width: int, style: Style, *, others: int, lines: int, short: int
    ) -> None:
        self._d, self._full, self._width, self._style = diagnosis, full, width, style
        self._others, self._lines, self._short = others, lines, short

    def held(self) -> Iterator[str]:
        """The settings in force, with what contradicts them."""
        rows = self._d.in_force if self._full else self._d.in_force[:HELD]
        for i, row in enumerate(rows):
            clash = f"   ! {row.clash}" if row.clash else ""
            yield from self._wrap(f"{'In force' if not i else '':<10}{row.setting:<10} {row.value}{clash}", 21)

    def story(self) -> Iterator[str]:
        timeline = self._d.timeline
        moments = list(timeline[:MOMENTS])
        moments += [m for m in timeline if m.broke][:1] if not any(m.broke for m in moments) else []
        later = [m for m in timeline if m not in moments]
        warned = [m for m in later if m.what.startswith("early warning")]  # the log had it before the run broke
        for i, moment in enumerate((*moments, *(later if self._full else warned[:1]))):
            head = "Log" if not i else ""
            yield from self._cut(f"{head:<10}{plain(moment.when)}: {plain(moment.what)}", 12, self._lines)

    def verdict(self) -> Iterator[str]:
        diagnosis = self._d
        causes = diagnosis.causes
        if diagnosis.verdict != "broken" and diagnosis.ended:
            yield from self._wrap(f"Ended by: {plain(diagnosis.ended)}", 2)
        if diagnosis.verdict == "healthy":
            yield self._style(f"No problem found ({causes[0].name}, {causes[0].confidence})", "healthy")
            yield from self._entry("evidence", causes[0].evidence if self._full else causes[0].evidence[:EVIDENCE])
            yield from self._commands("run", causes[0].commands)
            return
        if diagnosis.verdict == "unknown":
            shows = "its numbers do not show" if diagnosis.ended else "no log here shows"
            yield from self._wrap(f"Cannot tell: {shows} that the run broke, nor that it is healthy.", 2)
            for i, cause in enumerate([c for c in causes if not c.harmless][: max(1, self._others)]):
                yield from self._also(cause, "Risk")
                yield from self._commands("run", cause.commands if not i else ())
            yield from self._ask(diagnosis.missing)
            return
        if not causes:
            yield from self._wrap("The run broke, and nothing that was read points to a cause.", 2)
        else:
            yield from self._suspect(causes[0], _HEADS[causes[0].confidence], causes[0].confidence)
        others = [c for c in causes[1:] if self._full or c.share >= WORTH_A_WORD]
        for cause in others[: self._others]:
            yield from self._also(cause, "Also possible")
        yield from self._ask(diagnosis.missing)

    def notes(self) -> Iterator[str]:
        notes = self._d.notes if self._full else self._d.notes[:2]
        for note in notes:
            yield from self._wrap(f"note: {plain(note)}", 6)
        if not self._full and (len(self._d.causes) > 1 or self._d.checklist):
            yield self._style("--full shows everything that was read.", "dim")

    def _suspect(self, cause: Suspect, word: str, kind: str) -> Iterator[str]:
        head = list(self._wrap(f"{word}: {cause.title} ({cause.name}, {cause.confidence})", 2))
        yield from (self._style(line, kind) for line in head)
        yield from self._entry("evidence", cause.evidence if self._full else cause.evidence[:EVIDENCE])
        yield from self._entry("against", cause.against if self._full else cause.against[:1])
        yield from self._entry("repair", (cause.fix,))
        yield from self._commands("run", cause.commands)

    def _also(self, cause: Suspect, word: str) -> Iterator[str]:
        yield from self._wrap(f"{word}: {cause.title} ({cause.name}, {cause.confidence})", 2)
        yield from self._entry("evidence", cause.evidence if self._full else cause.evidence[:1], self._short)

    def _ask(self, missing: tuple[Missing, ...]) -> Iterator[str]:
        for question in missing:
            several = " Run the one that is true:" if len(question.commands) > 1 else ""
            yield from self._wrap(f"To decide: {question.asks}{several}", 2)
            yield from self._commands("run", question.commands)

    def _entry(self, name: str, lines: tuple[str, ...], most: int | None = None) -> Iterator[str]:
        most = self._lines if most is None else most
        for i, line in enumerate(lines):
            yield from self._cut(f"  {name if not i else '':<10}{plain(line)}", 14, 0 if name == "repair" else most)

    def _cut(self, text: str, indent: int, most: int) -> Iterator[str]:
        """At most so many lines, if any number is given; … stands for the rest."""
        lines = list(self._wrap(text, indent))
        if 0 < most < len(lines):
            last = lines[most - 1]
            room = last if len(last) <= self._width - 2 else last.rpartition(" ")[0]
            lines[most - 1 :] = [f"{room} …"]
        yield from lines

    def _commands(self, name: str, commands: tuple[str, ...]) -> Iterator[str]:
        """Never wrapped: a command is copied as it stands."""
        for i, command in enumerate(commands):
            yield f"  {name if not i else '':<10}{self._style(plain(command), 'command')}"

    def _wrap(self, text: str, indent: int) -> Iterator[str]:
        yield from textwrap.wrap(
            text,
            self._width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )


def as_markdown(diagnosis: Diagnosis) -> str:
    """For an issue or a report."""
    lines = ["# Diagnosis", ""]
    if diagnosis.in_force:
        lines += ["## In force", "", "| setting | value | contradicted by |", "|---|---|---|"]
        lines += [f"| {h.setting} | {_cell(h.value)} | {_cell(h.clash)} |" for h in diagnosis.in_force] + [""]
    if diagnosis.checklist:
        lines += ["| | looked at | found |", "|---|---|---|"]
        lines += [f"| {x.mark} | {_cell(x.what)} | {_cell(x.found)} |" for x in diagnosis.checklist] + [""]
    if diagnosis.timeline:
        lines += ["## Timeline", "", "| when | what |", "|---|---|"]
        lines += [f"| {_cell(m.when)} | {_cell(m.what)} |" for m in diagnosis.timeline] + [""]
    for title, text in diagnosis.tables.items():
        lines += [f"## {title}", "", "```text", text.replace("```", "ʼʼʼ"), "```", ""]
    for i, cause in enumerate(diagnosis.causes):
        lines += [f"## {i + 1}. {cause.title} (`{cause.name}`, {cause.confidence})", ""]
        for name, entries in (("For", cause.evidence), ("Against", cause.against), ("Repair", (cause.fix,))):
            lines += [f"- **{name}:** {_cell(e)}" for e in entries or ("—",)]
        lines += [f"- **Run:** `{plain(c).replace('`', '')}`" for c in cause.commands]
        lines += [f"- **Verify:** {_cell(cause.verify)}", ""]
    if diagnosis.missing:
        lines += ["## What would decide", ""]
        lines += [f"- {m.asks} {' or '.join(f'`{plain(c)}`' for c in m.commands)}" for m in diagnosis.missing] + [""]
    lines += [f"> {_cell(n)}" for n in diagnosis.notes]
    return "\n".join(lines).rstrip() + "\n"


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#222;background:#fff}h1,h2{line-height:1.2}table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}
pre{background:#f4f4f4;padding:.8rem;overflow:auto}.strong{color:#b00020}.likely{color:#9a5b00}.possible{color:#555}
dt{font-weight:600}dd{margin:0 0 .4rem 1.5rem}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}
pre{background:#242424}.strong{color:#ff8a80}.likely{color:#ffc46b}.possible{color:#aaa}}"""


def as_html(diagnosis: Diagnosis) -> str:
    """A page that needs nothing else: no script, no address, everything from the run escaped."""
    e = html.escape
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Diagnosis</title><style>{_STYLE}</style>"]
    parts.append("<h1>Diagnosis</h1>")
    if diagnosis.in_force:
        held = (f"<tr><td>{e(h.setting)}<td>{e(h.value)}<td>{e(h.clash)}" for h in diagnosis.in_force)
        parts.append(f"<h2>In force</h2><table>{''.join(held)}</table>")
    if diagnosis.checklist:
        rows = (f"<tr><td>{x.mark}<td>{e(x.what)}<td>{e(x.found)}" for x in diagnosis.checklist)
        parts.append(f"<table>{''.join(rows)}</table>")
    if diagnosis.timeline:
        rows = (f"<tr><td>{e(m.when)}<td>{e(m.what)}" for m in diagnosis.timeline)
        parts.append(f"<h2>Timeline</h2><table>{''.join(rows)}</table>")
    parts += [f"<h2>{e(title)}</h2><pre>{e(text)}</pre>" for title, text in diagnosis.tables.items()]
    for i, cause in enumerate(diagnosis.causes):
        parts.append(
            f"<h2 class={cause.confidence}>{i + 1}. {e(cause.title)} ({e(cause.name)}, {cause.confidence})</h2><dl>"
        )
        entries = (
            ("For", cause.evidence),
            ("Against", cause.against),
            ("Repair", (cause.fix,)),
            ("Run", cause.commands),
            ("Verify", (cause.verify,)),
        )
        for name, lines in entries:
            parts.append(f"<dt>{name}" + "".join(f"<dd>{e(line)}" for line in lines or ("—",)))
        parts.append("</dl>")
    if diagnosis.missing:
        asked = (
            f"<li>{e(m.asks)} {' or '.join(f'<code>{e(c)}</code>' for c in m.commands)}" for m in diagnosis.missing
        )
        parts.append(f"<h2>What would decide</h2><ul>{''.join(asked)}</ul>")
    parts += [f"<p>{e(n)}" for n in diagnosis.notes]
    return "\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Names and lines come from files of others: nothing in them may move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|").replace("<", "&lt;")
