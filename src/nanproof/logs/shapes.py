"""Lines that no grammar knows: what repeats is their shape, what moves are their numbers.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="train.log", format="text")
>>> shapes = Shapes(log)
>>> for line in (b"76930 2.6496", b"76940 2.5910", b"76950 nan"):
...     _ = shapes.take(line, 1)
>>> shapes.close()
>>> log.series().loss.steps.tolist(), log.series().loss.values.tolist()
([76930, 76940, 76950], [2.6496, 2.591, nan])

A shape is a line with ``#`` for each number, NaN included. The integer that rises from line to line counts steps. A
number beside a word such as "loss" is that loss; the only other number of a line is the loss as well, where the log
has no better one. A NaN where other lines of the shape have a number is a NaN, whatever it is called.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise

from . import numbers
from .collect import Collector
from .grammar import Layout, Slot
from .messages import NONE
from .names import EPOCH_KEYS, STEP_KEYS, meaning
from .templates import Recipe

MOST, WAIT, LONGEST, SLOTS = 300, 3, 400, 24
_NUMBER = re.compile(rb"(?<![\w.#-])" + numbers.NUMBER + rb"(?=ms\b|s\b|%|it\b)?" + rb"(?:(?![\w#]|\.\d)|(?=ms\b|s\b))")
_WRAPPED = re.compile(
    rb"(?:torch\.)?(?:tensor|array|np\.float\d+)\(\s*\[?\s*(" + numbers.NUMBER + rb")\]?(?:,\s*[a-z_]+=[^()]{0,80})*\)"
)
_CLOCK = re.compile(rb"\d{1,4}[-/:]\d\d?[-/:]\d{1,4}(?:[ T]\d\d:\d\d(?::\d\d)?)?(?:[.,]\d+)?|\d+:\d\d(?::\d\d)?")
_GLUED = re.compile(rb"(?i)\b(?P<name>\w*loss\w*)\s{0,3}[:=]\s{0,3}-?nan[a-z]")
METRIC = re.compile(
    rb"(?i)loss|\bcost\b|\bnll\b|\bkld?\b|grad|norm|perplexity|\bppl\b|\bmse\b|\bmae\b|\bbce\b|\bce\b|\belbo\b|objective"
    rb"|\berr(?:or)?\b|\bl_\w+|\brewards?\b"
)
_WORDS = re.compile(rb"[A-Za-z_][\w./-]*")
_TELLING = frozenset({"loss", "component", "grad_norm", "eval"})


@dataclass(slots=True)
class _Shape:
    waiting: list[tuple[list[float], int]] = field(default_factory=list)
    decided: bool = False
    step: int | None = None
    names: dict[int, str] = field(default_factory=dict)
    finite: set[int] = field(default_factory=set)
    """Slots that held a finite number in some line."""
    whole: list[bool] = field(default_factory=list)


class Shapes:
    """Learns the lines that nobody else reads."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._shapes: dict[bytes, _Shape] = {}

    def take(self, line: bytes, number: int) -> Recipe | None:
        """Learn from a line; returns how lines like it are read, once that is decided."""
        if len(line) > LONGEST or NONE.search(line) or line.rstrip().endswith(b"count: 0"):
            return Recipe()
        glued = _GLUED.search(line)
        if glued is not None:
            self._collector.place({glued["name"].decode("ascii", "replace"): math.nan}, step=None)
            return None
        text = _CLOCK.sub(b"@", _WRAPPED.sub(rb"\1", line.strip())).replace(b"#", b" ")  # it stands for a number below
        if text.endswith(b" images"):  # darknet before it wrote "avg loss"
            text = text.replace(b" avg, ", b" avg loss, ")
        found = [m[0] for m in _NUMBER.finditer(text)]
        if not found or len(found) > SLOTS:
            return Recipe()
        key = _NUMBER.sub(b"#", text)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= MOST:
                return Recipe()
            shape = self._shapes[key] = _Shape(whole=[True] * len(found))
        values = [numbers.value(v) for v in found]
        for i, (word, value) in enumerate(zip(found, values, strict=True)):
            shape.whole[i] &= word.isdigit()
            if math.isfinite(value):
                shape.finite.add(i)
        if shape.decided:
            self._emit(key, shape, values, number)
        else:
            shape.waiting.append((values, number))
            if len(shape.waiting) >= WAIT:
                self._decide(key, shape)
        return _recipe(line, shape, len(found)) if shape.names else Recipe()

    def close(self) -> None:
        for key, shape in self._shapes.items():
            if not shape.decided:
                self._decide(key, shape)

    def _decide(self, key: bytes, shape: _Shape) -> None:
        shape.decided = True
        rows = [values for values, _ in shape.waiting]
        if len(rows) == 1 and all(map(math.isfinite, rows[0])):  # a line that came once may count anything
            return
        names = _slot_names(key, len(rows[0]))
        for i, whole in enumerate(shape.whole):
            column = [r[i] for r in rows]
            rising = len(column) > 1 and all(a < b for a, b in pairwise(column))
            counter = names[i].lower() in (*STEP_KEYS, *EPOCH_KEYS)
            if whole and shape.step is None and (rising or counter):
                shape.step = i
        shape.names = {i: n for i, n in enumerate(names) if i != shape.step and meaning(n).role in _TELLING}
        others = [i for i in range(len(rows[0])) if i != shape.step and not shape.whole[i]]
        if not shape.names and shape.step is not None and len(others) == 1 and (len(rows) > 1 or METRIC.search(key)):
            named = METRIC.search(key)
            if named is not None or not self._known():
                name = names[others[0]] or "value"
                shape.names = {others[0]: name}
                self._collector.give_role(name, "loss")
        for values, number in shape.waiting:
            self._emit(key, shape, values, number)
        shape.waiting.clear()

    def _known(self) -> bool:
        """Whether the log has a loss already that somebody read by its name."""
        return self._collector.has(_TELLING)

    def _emit(self, key: bytes, shape: _Shape, values: list[float], number: int) -> None:
        step = numbers.whole(values[shape.step]) if shape.step is not None else None
        named = {n: values[i] for i, n in shape.names.items()}
        if named:
            self._collector.place(named, step=step)
            return
        bad = [i for i, v in enumerate(values) if not math.isfinite(v)]
        numeric = METRIC.search(key) is not None or key == b"#"
        if any(math.isnan(values[i]) and (i in shape.finite or numeric) for i in bad):
            text = key.decode("utf-8", "replace")
            for value in values:
                text = text.replace("#", f"{value:g}", 1)
            self._collector.event("nan", text, name="nan-in-line", step=step, line=number)


def _recipe(line: bytes, shape: _Shape, count: int) -> Recipe | None:
    """Where the numbers of a line stand that was learned; None if they are wrapped."""
    spans = [m.span() for m in _NUMBER.finditer(_CLOCK.sub(lambda m: b"@" * len(m[0]), line))]
    if len(spans) != count or _WRAPPED.search(line) or b"#" in line:
        return None
    values = {name: Slot(*spans[i], exact=False) for i, name in shape.names.items()}
    return Recipe(Layout(values, None if shape.step is None else Slot(*spans[shape.step])), learned=True)


def _slot_names(key: bytes, count: int) -> list[str]:
    """The words beside each number: those before it, or else those after it up to the next separator."""
    parts = key.split(b"#")
    names = []
    for i in range(count):
        before = _WORDS.findall(re.split(rb"[,;|\]\[()]", parts[i])[-1])[-3:]
        after = _WORDS.findall(re.split(rb"[,;|\]\[()]", parts[i + 1])[0])[:3]
        words = before if before and parts[i].strip() else after
        if words is before and after and meaning(_join(before)).role not in _TELLING and parts[i + 1][:1] == b" ":
            words = after if meaning(_join(after)).role in _TELLING else before
        names.append(_join(words))
    return names


def _join(words: list[bytes]) -> str:
    return b" ".join(words).decode("ascii", "replace")
