"""``nanproof explain``: what a name means."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from .shell import Screen, verb

if TYPE_CHECKING:
    from ..floats import Format
    from ..topics import Topic

# Folders of objects that carry a ``topic``: rules, checks of configs, causes of failures.
_SHELVES = ("nanproof.linting.rules", "nanproof.config.checks", "nanproof.diagnosing.causes")


@verb(example="nanproof explain NP301")
@click.argument("name", required=False)
def command(screen: Screen, name: str | None) -> int:
    """Explain a rule or a cause by code or name, or a floating-point format. Without NAME, compare all formats."""
    from ..floats import FORMATS, find_format

    if name is None:
        _compare(screen, FORMATS)
    elif (form := find_format(name)) is not None:
        _show_format(screen, form)
    else:
        _show_topic(screen, _find(name))
    return 0


def _topics() -> Iterator[Topic]:
    """Everything that explains itself, from whichever of the rooms are there."""
    from ..topics import Topic

    for shelf in _SHELVES:
        if importlib.util.find_spec(shelf.rpartition(".")[0]) is None or importlib.util.find_spec(shelf) is None:
            continue
        package = importlib.import_module(shelf)
        inside = pkgutil.iter_modules(getattr(package, "__path__", []))
        for module in (package, *(importlib.import_module(f"{shelf}.{m.name}") for m in inside)):
            found = (getattr(thing, "topic", None) for thing in vars(module).values())
            yield from (topic for topic in found if isinstance(topic, Topic))


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
    raise UsageError(f"there is nothing called {name!r} to explain", hint=hint)


def _show_topic(screen: Screen, topic: Topic) -> None:
    import sys

    screen.data({"name": topic.name, "title": topic.title, "sections": dict(topic.sections)})
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        screen.result(Markdown(topic.markdown()))
    else:
        screen.result(topic.markdown())


def _facts(form: Format) -> dict[str, object]:
    return {
        "format": form.name,
        "also called": ", ".join(form.aliases),
        "max": form.max,
        "smallest normal": form.smallest_normal,
        "smallest subnormal": form.smallest_subnormal,
        "machine eps": form.machine_eps,
        "safe eps": form.safe_eps,
        "exp(x) overflows above": form.exp_limit,
        "has Inf": form.inf_code is not None,
        "has NaN": form.specials != "none",
    }


def _show_format(screen: Screen, form: Format) -> None:
    from rich.table import Table

    screen.data(_facts(form))
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, value in _facts(form).items():
        table.add_row(key, _words(value))
    screen.result(table)


def _compare(screen: Screen, formats: Iterable[Format]) -> None:
    from rich.table import Table

    facts = [_facts(f) for f in formats]
    screen.data(facts)
    keys = [k for k in facts[0] if k not in ("also called", "machine eps")]
    table = Table(*keys, box=None, pad_edge=False)
    for row in facts:
        table.add_row(*(_words(row[k]) for k in keys))
    screen.result(table)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
