"""A diagnosis as people read it: on a terminal, as Markdown, as a page of its own.

>>> from nanproof.diagnosing.diagnosis import Diagnosis, Missing, Suspect
>>> suspect = Suspect(name="masked-row", title="every entry of a softmax row is masked", confidence="strong",
...     evidence=("only with padding (--fact)",), against=(), fix="nanproof.ops.masked_softmax", verify="…")
>>> print(as_text(Diagnosis(causes=(suspect,))))
Most likely: every entry of a softmax row is masked   (masked-row, strong)
  evidence  only with padding (--fact)
  against   —
  fix       nanproof.ops.masked_softmax
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator

from .diagnosis import Diagnosis, Missing, Suspect

WIDTH = 118
ALSO = 3
MOMENTS = 16
"""How much of the timeline a terminal shows; Markdown, HTML and JSON have all of it."""
WORTH_A_WORD = 0.03
"""The part of the probability below which another cause is not worth a word beside the first."""


def as_text(diagnosis: Diagnosis) -> str:
    """Everything, for a terminal."""
    blocks = [
        [f"{x.mark} {plain(x.what):<12} {plain(x.found)}" for x in diagnosis.checklist],
        [f"{plain(m.when):>14}  {plain(m.what)}" for m in diagnosis.timeline[:MOMENTS]],
        *([f"{title}:", *text.splitlines()] for title, text in diagnosis.tables.items()),
        list(_verdict(diagnosis)),
        [f"note: {plain(n)}" for n in diagnosis.notes],
    ]
    return "\n\n".join("\n".join(b) for b in blocks if b)


def _verdict(diagnosis: Diagnosis) -> Iterator[str]:
    causes = diagnosis.causes
    if not causes:
        yield "Nothing points to a cause."
        return
    supported = [c for c in causes if c.evidence]
    if not diagnosis.broke:
        yield "Nothing shows that a run broke. What could break one:"
        for cause in supported[:ALSO]:
            yield from _suspect("Risk", cause)
        return
    if not diagnosis.decided:
        yield from _ask("Cannot tell yet. The fact that would decide", diagnosis.missing)
        for cause in supported[:ALSO] or causes[:ALSO]:
            yield from _suspect("Possible", cause)
        return
    yield from _suspect("Nothing is wrong" if diagnosis.benign else "Most likely", causes[0])
    others = [c for c in causes[1:] if c.evidence and c.share >= WORTH_A_WORD][:ALSO]
    for cause in others:
        yield from _also(cause)
    if others and diagnosis.missing:
        yield from _ask("To decide between them", diagnosis.missing)


def _suspect(word: str, cause: Suspect) -> Iterator[str]:
    yield f"{word}: {cause.title}   ({cause.name}, {cause.confidence})"
    yield from _entry("evidence", cause.evidence or ("none beyond how common it is",))
    yield from _entry("against", cause.against or ("—",))
    yield from _entry("fix", (cause.fix,))


def _also(cause: Suspect) -> Iterator[str]:
    yield f"Also possible: {cause.title}   ({cause.name}, {cause.confidence})"
    yield from _entry("evidence", cause.evidence[:2])
    yield from _entry("against", cause.against[:2])


def _entry(name: str, lines: tuple[str, ...]) -> Iterator[str]:
    for i, line in enumerate(lines):
        head = f"  {name if not i else '':<10}"
        yield textwrap.fill(
            plain(line), WIDTH, initial_indent=head, subsequent_indent=" " * 14, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip


def _ask(words: str, missing: tuple[Missing, ...]) -> Iterator[str]:
    if not missing:
        yield f"{words}: more of the run (its log, config or checkpoint), or --fact"
    for i, question in enumerate(missing):
        answers = "|".join(question.answers)
        head = f"{words}: " if not i else " " * (len(words) + 2)
        yield f"{head}{question.asks}   nanproof diagnose … --fact {question.fact}={answers}"


def as_markdown(diagnosis: Diagnosis) -> str:
    """For an issue or a report."""
    lines = ["# Diagnosis", ""]
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
        for name, entries in (("For", cause.evidence), ("Against", cause.against), ("Fix", (cause.fix,))):
            lines += [f"- **{name}:** {_cell(e)}" for e in entries or ("—",)]
        lines += [f"- **Verify:** {_cell(cause.verify)}", ""]
    if diagnosis.missing:
        lines += ["## What would decide", ""]
        lines += [f"- {m.asks} (`--fact {m.fact}={'|'.join(m.answers)}`)" for m in diagnosis.missing] + [""]
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
            ("Fix", (cause.fix,)),
            ("Verify", (cause.verify,)),
        )
        for name, lines in entries:
            parts.append(f"<dt>{name}" + "".join(f"<dd>{e(line)}" for line in lines or ("—",)))
        parts.append("</dl>")
    if diagnosis.missing:
        asked = (f"<li>{e(m.asks)} <code>--fact {e(m.fact)}={e('|'.join(m.answers))}</code>" for m in diagnosis.missing)
        parts.append(f"<h2>What would decide</h2><ul>{''.join(asked)}</ul>")
    parts += [f"<p>{e(n)}" for n in diagnosis.notes]
    return "\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Names and lines come from files of others: nothing in them may move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|").replace("<", "&lt;")
