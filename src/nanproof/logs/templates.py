"""Lines of one shape are read once: a template keeps what was found in the first, and where its numbers stand.

>>> templates = Templates()
>>> line = b"iter 7: loss 2.5, lr 1e-3"
>>> recipe = Recipe(find_pairs(line))
>>> templates.learn(line, recipe), templates.learn(line, recipe)   # a shape that comes once is not worth it
(False, True)
>>> template, numbers = templates.find(b"iter 12: loss -0.25, lr 9.5e-4")
>>> template.read(template.layout, numbers)
Reading(values={'loss': -0.25, 'lr': 0.00095}, step=12, last=None, epoch=None, judged=False)
>>> templates.find(b"iter 12: loss nan, lr 9.5e-4"), templates.find(b"iter 12: loss -0.25")
(None, None)

A template is a regular expression: the line with places for its numbers. Names, with their digits, words and
punctuation must be the same; so must the form of a number (whole or not) where the reading could depend on it. NaN is a
word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .grammar import Layout, Reading, Slot, find_pairs, whole
from .grammars.bar import Bar

__all__ = ["CLOCK", "Recipe", "Template", "Templates", "find_pairs"]

CLOCK = re.compile(rb"(20\d\d)[-/](0[1-9]|1[0-2])[-/]([0-3]\d)[ T](\d\d):(\d\d):(\d\d)")
"""The time at which a line was written."""
LONGEST, MOST, OF_ONE_SORT = 2_000, 2_000, 32
_NUMBER = rb"((?>[-+]?(?:\d{1,15}(?:\.\d{0,25})?|\.\d{1,25})(?:[eE][-+]?\d{1,2})?))"
_ANY = re.compile(_NUMBER)
_FORM = re.compile(rb"\d{1,15}(?:\.\d{1,25})?")
_WORD = re.compile(rb"[-+]?(?i:nan|inf|infinity)(?:\.0)?")
_RUN = re.compile(rb"\d+")
_GRAPH = re.compile(rb"%\|([^|]{0,600})\|")
# a count of 0 says something else than another one
_COUNT = re.compile(rb"\s{0,3}(?i:nan|inf(?!o)|non)")
_JOINED = re.compile(rb"\d[:,/-]")
# what differs between lines of one sort: numbers, the spaces that align them, the graph of a bar
_VARIES = b"0123456789.+-eE #\xe2" + bytes(range(0x80, 0xA0))


class Recipe(NamedTuple):
    """What a line was found to be: a record, a bar, or neither, and then it says nothing."""

    layout: Layout | None = None
    bar: Bar | None = None
    waits: bool = False
    """Whether a record without a step waits for the bar that is drawn after it."""
    learned: bool = False
    """Whether its names were learned from repetition: it belongs to no heading, and lone pairs below not to it."""


@dataclass(slots=True, eq=False)
class Template:
    """A shape of lines, and how to read them."""

    pattern: re.Pattern[bytes]
    recipe: Recipe
    groups: dict[tuple[int, int], int]
    """Which group of the pattern holds the number of a slot."""
    clock: int | None
    """The first of the six groups of the time."""
    names: tuple[str, ...] | None = None
    """What the columns are called; found out with the first line."""
    values: tuple[int, ...] = ()
    counts: bool = False

    @property
    def layout(self) -> Layout | None:
        return self.recipe.layout

    def group(self, slot: Slot) -> int:
        return self.groups[slot[:2]]

    def read(self, layout: Layout, numbers: tuple[bytes, ...], heading: float | None = None) -> Reading:
        """What a line says whose numbers are these."""
        return layout.read(lambda slot: numbers[self.groups[slot[:2]]], heading)

    def place(self, numbers: tuple[bytes, ...], heading: float | None) -> tuple[int | None, int | None, float | None]:
        """The step of such a line, the last step, and the epoch."""
        layout = self.recipe.layout
        assert layout is not None
        if layout.step is not None and layout.last is None and layout.epoch is None and layout.inside is None:
            return whole(numbers[self.groups[layout.step[:2]]]), None, None
        reading = layout._replace(values={}).read(lambda slot: numbers[self.groups[slot[:2]]], heading)
        return reading.step, reading.last, reading.epoch


class Templates:
    """The shapes of a log."""

    def __init__(self) -> None:
        self._sorts: dict[bytes, list[Template]] = {}
        self._sights: dict[bytes, int] = {}
        self._count = 0

    def find(self, line: bytes) -> tuple[Template, tuple[bytes, ...]] | None:
        """The template of a line, and its numbers."""
        known = self._sorts.get(line.translate(None, _VARIES))
        if known is None:
            return None
        for i, template in enumerate(known):
            match = template.pattern.fullmatch(line)
            if match is not None:
                if i:
                    known.insert(0, known.pop(i))
                return template, match.groups()
        return None

    def learn(self, line: bytes, recipe: Recipe, shift: int = 0) -> bool:
        """Keep what was found in a line, so many bytes behind its begin; the second time that such a line comes."""
        if len(line) > LONGEST or self._count >= MOST:
            return False
        sort = line.translate(None, _VARIES)
        sights = self._sights.get(sort, 0) + 1
        if len(self._sights) < 10_000 or sort in self._sights:
            self._sights[sort] = sights
        says = recipe.layout or recipe.bar
        known = self._sorts.get(sort, [])
        # lines that say nothing may still turn out to repeat: see `shapes`
        if sights < (2 if says else 6) or len(known) >= OF_ONE_SORT:
            return False
        made = _make(line, recipe, shift)
        if made is None:
            return False
        self._count += 1
        self._sorts.setdefault(sort, known).insert(0, made)
        return True


def _make(line: bytes, recipe: Recipe, shift: int) -> Template | None:
    """A template, or None if the numbers of the line are not plain enough."""
    layouts = (recipe.bar.head, recipe.bar.found) if recipe.bar else (recipe.layout,) if recipe.layout else ()
    places = {(s.start + shift, s.end + shift): s for s in _slots(recipe, layouts)}
    fixed = [(s.start + shift, s.end + shift) for layout in layouts for s in layout.fixed]
    holes: list[tuple[int, int, bytes]] = []
    for (start, end), slot in places.items():
        form = _form(line, start, end, exact=slot.exact)
        if form is None:
            return None
        holes.append((start, end, form))
    if recipe.bar is not None and (graph := _GRAPH.search(line)) is not None:
        holes.append((*graph.span(1), rb"[^|]{0,600}"))
    clock = CLOCK.search(line, 0, 120)
    if clock is not None and not recipe.bar and not recipe.learned:
        holes += [(*clock.span(i), form) for i, form in enumerate(_CLOCK_FORMS, 1)]
    holes.sort()
    pattern, groups, at, place = b"", dict[tuple[int, int], int](), 0, 0
    for start, end, form in holes:
        if start < place:
            return None
        pattern += _text(line, place, start, fixed) + form
        if (start, end) in places:
            groups[start - shift, end - shift] = at
        at, place = at + form.count(b"(") - form.count(b"(?"), end
    first = sum(f.count(b"(") - f.count(b"(?") for s, _, f in holes if clock is not None and s < clock.start())
    pattern += _text(line, place, len(line), fixed)
    return Template(
        re.compile(pattern, re.DOTALL),
        recipe,
        groups,
        first if clock and not recipe.bar and not recipe.learned else None,
    )


_CLOCK_FORMS = (rb"(20\d\d)", rb"(0[1-9]|1[0-2])", rb"([0-3]\d)", rb"(\d\d)", rb"(\d\d)", rb"(\d\d)")


def _slots(recipe: Recipe, layouts: Iterable[Layout]) -> Iterator[Slot]:
    for layout in layouts:
        counters = (layout.step, layout.last, layout.epoch, layout.inside, layout.length)
        yield from (*layout.others, *layout.values.values(), *(s for s in counters if s is not None))
    if recipe.bar is not None:
        yield recipe.bar.n
        if recipe.bar.of is not None:
            yield recipe.bar.of


def _form(line: bytes, start: int, end: int, *, exact: bool) -> bytes | None:
    """The pattern of a number that may stand in a slot."""
    text = line[start:end]
    joined = line[start - 1 : start] == b"," or line[end : end + 1] == b","
    if not exact and _ANY.fullmatch(text) and not (joined and _RUN.search(line, end, end + 2)):
        return _NUMBER
    if _FORM.fullmatch(text):
        return rb"(\d{1,15}\.\d{1,25})" if b"." in text else rb"(\d{1,15})"
    if _WORD.fullmatch(text):
        return b"(" + re.escape(text) + b")"
    return None


def _text(line: bytes, start: int, end: int, fixed: list[tuple[int, int]]) -> bytes:
    """The pattern of what stands between the slots: any digits where there are digits, but for those of names."""
    pattern, place = b"", start
    for run in _RUN.finditer(line, start, end):
        first, last = run.span()
        pattern += re.escape(line[place:first])
        place = last
        joined = _JOINED.match(line, max(0, first - 2), first) or _JOINED.match(line[last : last + 2][::-1])
        if (
            any(s <= first and last <= e for s, e in fixed)
            or line[:first].endswith(b"count: ")
            or _COUNT.match(line, last)
        ):
            pattern += run[0]
        elif joined and len(run[0]) < 16:
            pattern += rb"\d{%d}" % len(run[0])  # clocks, dates and thousands are known by how many digits they have
        else:
            pattern += rb"\d{1,15}" if len(run[0]) < 16 else rb"\d{16,60}"
    return pattern + re.escape(line[place:end])
