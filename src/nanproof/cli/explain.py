"""``nanproof explain``: what a name means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from ..text import fitting
from .shell import Screen, verb

if TYPE_CHECKING:
    from ..floats import Format
    from ..topics import Topic


@verb(example="nanproof explain NP301")
@click.argument("name", required=False)
def command(screen: Screen, name: str | None) -> int:
    """Explain a rule, a cause or a floating-point format. Without NAME: compare all formats; --json lists all names."""
    from ..floats import FORMATS, find_format

    if name is None:
        _compare(screen, FORMATS)
    elif (form := find_format(name)) is not None:
        _show_format(screen, form)
    else:
        _show_topic(screen, _find(name))
    return 0


def _topics() -> Iterator[Topic]:
    """Every rule, config check and cause, those of other packages included."""
    from ..diagnosing.causes import all_causes
    from ..linting.catalogue import everything

    yield from (thing.topic for thing in (*everything(), *all_causes()))


def _find(name: str) -> Topic:
    import difflib

    from ..errors import UsageError
    from ..floats import FORMATS, format_of

    topics = list(_topics())
    for topic in topics:
        if name.lower() in (topic.name.lower(), topic.title.lower()):
            return topic
    formats = [word for f in FORMATS for word in (f.name, *f.aliases)]
    known = [word for topic in topics for word in (topic.name, topic.title)]
    close = difflib.get_close_matches(name.lower(), [w.lower() for w in [*known, *formats]], n=1, cutoff=0.5)
    if close and close[0] in formats:
        format_of(name)  # says which formats there are
    right = next((w for w in known if close and w.lower() == close[0]), None)
    hint = f"did you mean {right}?" if right else "give a code such as NP301, a rule's name, or a format such as fp16"
    raise UsageError(f"nothing to explain for {name!r}", hint=hint)


def _show_topic(screen: Screen, topic: Topic) -> None:
    import sys

    screen.data({"name": topic.name, "title": topic.title, "sections": dict(topic.sections)})
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        screen.result(Markdown(fitting(topic.markdown())))
    else:
        screen.result(topic.markdown())


def _facts(form: Format) -> dict[str, object]:
    return {
        "format": form.name,
        "also_called": ", ".join(form.aliases),
        "max": form.max,
        "smallest_normal": form.smallest_normal,
        "smallest_subnormal": form.smallest_subnormal,
        "machine_eps": form.machine_eps,
        "safe_eps": form.safe_eps,
        "exp_overflows_above": form.exp_limit,
        "has_inf": form.inf_code is not None,
        "has_nan": form.specials != "none",
    }


def _show_format(screen: Screen, form: Format) -> None:
    from rich.table import Table

    screen.data(_facts(form))
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in _facts(form).items():
        table.add_row(_heading(key), _words(value))
    screen.result(table)


def _compare(screen: Screen, formats: Iterable[Format]) -> None:
    from rich.table import Table

    facts = [_facts(f) for f in formats]
    if screen.as_json:  # listing the topics imports every rule and cause
        screen.data({"formats": facts, "topics": [{"name": t.name, "title": t.title} for t in _topics()]})
        return
    keys = [k for k in facts[0] if k not in ("also_called", "machine_eps")]
    table = Table(*map(_heading, keys), box=None, pad_edge=False)
    for row in facts:
        table.add_row(*(_words(row[k]) for k in keys))
    screen.result(table)


def _heading(key: str) -> str:
    return key.replace("exp_", "exp(x)_").replace("_", " ")


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
