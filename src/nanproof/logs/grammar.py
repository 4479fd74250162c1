"""What a grammar of log lines is: a pattern for what is special about them. Pairs of names and numbers are everywhere.

>>> sample = "iter 7: loss nan, lr 1e-3"
>>> nano = Grammar(name="nanoGPT", needle=b"iter", line=r"iter <step>[:,]<rest>", sample=sample)
>>> nano.read(b"iter 7: loss nan, lr 1e-3")
Reading(values={'loss': nan, 'lr': 0.001}, step=7, last=None, epoch=None, judged=False)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from . import numbers
from .names import EPOCH_KEYS, LAST_STEP_KEYS, STEP_KEYS, meaning
from .plan import wanted

# A name is made of up to six words, none of which is itself a number word (but "number of nan iterations" counts them);
# then ":" or "=" or only space; then, perhaps behind tensor( or a bracket or a quote, the number with its unit, and
# perhaps "/ 10000": how many there are.
_COUNTS = rb" (?i:iter|step|batch|count|grad)"
_FIRST = rb"(?!(?i:nan|inf|infinity)\b(?!" + _COUNTS + rb")|tensor\(|array\()[A-Za-z_]\w*+(?:[./@-]\w++)*+"
_WORD = rb"(?!(?<!\bof )(?<!\bnum )(?<!skipped )(?<!\btotal )(?i:nan|inf|infinity)\b)" + _FIRST
_PAIR = re.compile(
    rb"(?<![\w./@-])(?P<key>" + _FIRST + rb"(?: " + _WORD + rb"){0,5}+(?: ?\([A-Za-z/.]{1,12}\))?)['\"\]]?"
    rb"(?:\s{0,20}[:=]\s{0,20}| - |\s{1,20})"
    rb"(?:tensor\(|array\(|np\.float\d+\()?(?:\{['\"][\w.]{1,30}['\"]:)?[\[({'\"]{0,3}\s{0,9}"
    rb"(?P<value>"
    + numbers.NUMBER
    + rb")(?:ms|s|%|[kKMGT]i?B?|it)?"
    + numbers.END
    + rb"(?:['\"]?\s{0,10}/\s{0,10}['\"]?(?P<last>\d{1,18})(?![\w.:]))?"
    rb"(?:(?:\s{1,3}|\s{0,3}:\s{1,3})(?P<after>" + numbers.NUMBER + rb")" + numbers.END + rb")?"
)
_COUNTED = re.compile(rb"(?i) (?:at|after|in|for|on) (?:step|iteration|iter|epoch|batch|update)$")
_COUNTERS = ("step", "iteration", "iter", "epoch", "batch", "update")
_BEFORE_COUNTERS = frozenset({"train", "training", "learning", "global", "current", "completed", "optimizer", "at"})
LINE = 16_384
"""How much of a line is looked at."""


class Reading(NamedTuple):
    """What one line says."""

    values: dict[str, float]
    step: int | None = None
    last: int | None = None
    epoch: float | None = None
    judged: bool = False
    """Whether these are values of a validation."""


class Slot(NamedTuple):
    """Where a number stands in a line."""

    start: int
    end: int
    exact: bool = True
    """Whether a number of another form (1.5 for 1) could mean something else there."""


class Layout(NamedTuple):
    """Where the numbers of a line stand; `read` turns them into what the line says."""

    values: dict[str, Slot]
    step: Slot | None = None
    last: Slot | None = None
    epoch: Slot | None = None
    judged: bool = False
    inside: Slot | None = None
    """The place within an epoch, and how long epochs are: they tell the step where no other number does."""
    length: Slot | None = None
    epochs_from: int = 0
    fixed: tuple[Slot, ...] = ()
    """Names: a digit in one belongs to it."""
    others: tuple[Slot, ...] = ()
    """Numbers with names that nobody wants."""

    def read(self, number: Callable[[Slot], bytes], heading: float | None = None) -> Reading:
        """What a line says, given the text in each slot; the epoch may stand in a heading above."""
        values = {name: numbers.value(number(slot)) for name, slot in self.values.items()}
        step = None if self.step is None else whole(number(self.step))
        last = None if self.last is None else whole(number(self.last))
        epoch = None if self.epoch is None else numbers.value(number(self.epoch))
        epoch = epoch if epoch is not None and math.isfinite(epoch) else None  # no count
        if self.inside is not None and (step := whole(number(self.inside))) is not None:
            length = None if self.length is None else whole(number(self.length))
            known = epoch if epoch is not None else heading
            if length and known is not None and math.isfinite(known):  # the epochs before are known to be as long
                step += max(0, int(known) - self.epochs_from) * length
        return Reading(values, step, last, epoch, self.judged)

    def read_line(self, line: bytes, heading: float | None = None) -> Reading:
        """What the line says that this is the layout of."""
        return self.read(lambda slot: line[slot.start : slot.end], heading)


class Key(NamedTuple):
    """What a name before a number is: a counter of steps (the lower its rank, the better), an epoch, a value …"""

    kind: Literal["step", "epoch", "last", "value", "none"]
    name: str
    rank: int = 0


@lru_cache(maxsize=8192)
def _key(text: bytes) -> Key:
    words = text.decode("ascii", "replace").split(" ")
    while len(words) > 1 and words[-1].lower() in ("is", "was", "became", "of", "to"):  # "Loss is nan"
        words.pop()
    name, words = " ".join(words), [word.lower() for word in words]
    # "Learning iteration 12", "Train Epoch: 3": words that may stand before a counter
    counted = len(words) > 1 and words[-1] in _COUNTERS and _BEFORE_COUNTERS.issuperset(words[:-1])
    plain = words[-1] if counted else "_".join(words)
    if plain in STEP_KEYS:
        return Key("step", name, STEP_KEYS.index(plain))
    if plain in EPOCH_KEYS:
        return Key("epoch", name)
    if plain in LAST_STEP_KEYS:
        return Key("last", name)
    return Key("value" if wanted(name) else "none", name)


def find_pairs(text: bytes, offset: int = 0) -> Layout:
    """The pairs of a text, sorted into step, epoch and values; the text may begin within its line."""
    step: Slot | None = None
    last: Slot | None = None
    limit: Slot | None = None
    epoch: Slot | None = None
    best = len(STEP_KEYS)
    values: dict[str, Slot] = {}
    fixed, others = [], []
    for match in _PAIR.finditer(text, 0, LINE):
        key, number, total, after = match.groups()
        kind, name, rank = _key(key)
        fixed.append(Slot(match.start("key") + offset, match.end("key") + offset))
        slot = Slot(match.start("value") + offset, match.end("value") + offset, after is not None or kind != "value")
        if after is not None and kind == "value" and number.isdigit() and not after.isdigit():
            counted = _COUNTED.sub(b"", key)  # "Train loss 17 nan", "Loss at step 10: 0.5": the first one counts
            if _is_loss(counted) and step is None:
                step, name = slot, counted.decode("ascii", "replace")
                slot = Slot(match.start("after") + offset, match.end("after") + offset)
        if kind == "value":
            values.setdefault(name, slot)
        elif kind == "step":
            if rank < best and whole(number) is not None:
                step, best = slot, rank
                last = None if total is None else Slot(match.start("last") + offset, match.end("last") + offset)
        elif kind == "epoch":
            epoch = slot if epoch is None else epoch
        elif kind == "last":
            limit = slot if whole(number) is not None else None
        else:
            others.append(slot._replace(exact=after is not None))
    return Layout(values, step, limit or last, epoch, fixed=tuple(fixed), others=tuple(others))


def read_pairs(text: bytes) -> Reading:
    """What the pairs of a text say.

    >>> read_pairs(b"Train Epoch: 3, iter: 140 / 10000, total loss: nan")
    Reading(values={'total loss': nan}, step=140, last=10000, epoch=3.0, judged=False)
    >>> read_pairs(b"[Train Step] 2598/10000: loss_simple: nan").step
    2598
    """
    return find_pairs(text).read_line(text)


@lru_cache(maxsize=1024)
def _is_loss(key: bytes) -> bool:
    return meaning(key.decode("ascii", "replace")).role in ("loss", "component", "eval")


def is_heading(text: bytes) -> bool:
    """Whether a text holds counters and nothing else.

    >>> is_heading(b"   Learning iteration 12/1500"), is_heading(b"Step 3: load the model")
    (True, False)
    """
    return re.search(rb"[A-Za-z]", _PAIR.sub(b"", text[:LINE])) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One layout of log lines.

    A pattern is a regular expression with places: ``<step>``, ``<last>`` (how many steps there are), ``<epoch>``,
    ``<inside>`` and ``<length>`` (the place within an epoch, and how many there are), ``<rest>`` (where the pairs are;
    they are looked for in the whole line without it).
    """

    name: str
    needle: bytes
    """A line without these bytes is not looked at."""
    line: str
    sample: str
    judged: str = r"(?!)"
    """What marks a line as one of validation."""
    epochs_from: int = 0
    """The number of the first epoch, for layouts that count steps within an epoch."""
    _line: re.Pattern[bytes] = field(init=False, repr=False)
    _judged: re.Pattern[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pattern = re.sub(r"<(step|last|epoch|inside|length)>", r"(?P<\1>\\d[\\d,]{0,17})", self.line)
        object.__setattr__(self, "_line", re.compile(pattern.replace("<rest>", "(?P<rest>.*)").encode()))
        object.__setattr__(self, "_judged", re.compile(self.judged.encode()))

    def find(self, line: bytes) -> Layout | None:
        """Where the numbers of the line stand, or None if it is not of this layout."""
        match = self._line.search(line, 0, LINE)
        if match is None:
            return None
        groups = {n: Slot(*match.span(n)) for n, text in match.groupdict().items() if text is not None}
        rest = groups.get("rest")
        if rest is None and "rest" in self._line.groupindex:
            found = Layout({})
        else:
            found = find_pairs(line if rest is None else line[rest.start : rest.end], 0 if rest is None else rest.start)
        judged = self._judged.search(line, 0, LINE) is not None
        step, inside = groups.get("step"), groups.get("inside")
        if step is not None or judged:  # how far a validation is says nothing about steps
            inside = None
        return found._replace(
            step=step or (None if inside else found.step),
            last=groups.get("last") or found.last,
            epoch=groups.get("epoch") or found.epoch,
            inside=inside,
            length=groups.get("length"),
            epochs_from=self.epochs_from,
            judged=judged,
        )

    def read(self, line: bytes, heading: float | None = None) -> Reading | None:
        """What the line says, or None if it is not of this layout; the epoch may stand in a heading above."""
        found = self.find(line)
        return None if found is None else found.read_line(line, heading)


def whole(number: bytes) -> int | None:
    """The integer that a match of `numbers.NUMBER` is, or None."""
    return int(number) if number.isdigit() and len(number) <= 18 else numbers.whole(numbers.value(number))
