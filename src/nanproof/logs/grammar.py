"""What a grammar of log lines is: a pattern for what is special about them; pairs of names and numbers are the same everywhere.

>>> nano = Grammar(name="nanoGPT", needle=b"iter", line=rb"iter (?P<step>\\d+)[:,](?P<rest>.*)", sample="iter 7: loss nan, lr 1e-3")
>>> nano.read(b"iter 7: loss nan, lr 1e-3")
Reading(values={'loss': nan, 'lr': 0.001}, step=7, last=None, epoch=None, judged=False)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from . import numbers
from .names import EPOCH_KEYS, LAST_STEP_KEYS, STEP_KEYS
from .plan import wanted

# A name is made of up to six words, none of which is itself a number word (but "nan iterations" are words); then ":" or
# "=" or only space; then, perhaps behind tensor( or a bracket or a quote, the number with its unit, and perhaps
# "/ 10000": how many there are.
_WORD = rb"(?!(?i:nan|inf|infinity)\b(?! (?i:iter|step|batch|count|grad)))[A-Za-z_]\w*+(?:[./@-]\w++)*+"
_PAIR = re.compile(
    rb"(?<![\w./@-])(?P<key>" + _WORD + rb"(?: " + _WORD + rb"){0,5}+(?: ?\([A-Za-z/.]{1,12}\))?)['\"]?"
    rb"(?:\s{0,20}[:=]\s{0,20}|\s{1,20})(?:tensor\(|array\(|np\.float\d+\()?[\[({'\"]{0,3}\s{0,9}"
    rb"(?P<value>" + numbers.NUMBER + rb")(?:ms|s|%|[kKMGT]i?B?|it)?" + numbers.END +
    rb"(?:['\"]?\s{0,10}/\s{0,10}['\"]?(?P<last>\d{1,18})(?![\w.:]))?"
)  # fmt: skip
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


def pairs(text: bytes) -> Iterator[tuple[str, float, int | None]]:
    """Names, numbers, and the total where one follows: ``iter: 140 / 10000, total loss: nan``."""
    for match in _PAIR.finditer(text, 0, LINE):
        last = match["last"]
        key = match["key"].decode("ascii", "replace")
        yield key, numbers.value(match["value"]), int(last) if last is not None else None


def read_pairs(text: bytes) -> Reading:
    """The pairs of a text, sorted into step, epoch and values.

    >>> read_pairs(b"Train Epoch: 3, iter: 140 / 10000, total loss: nan")
    Reading(values={'total loss': nan}, step=140, last=10000, epoch=3.0, judged=False)
    """
    step = last = epoch = None
    rank = len(STEP_KEYS)
    values: dict[str, float] = {}
    for key, value, total in pairs(text):
        name = _counter(key)
        if name in STEP_KEYS:
            if STEP_KEYS.index(name) < rank and (whole := numbers.whole(value)) is not None:
                step, last, rank = whole, total if total is not None else last, STEP_KEYS.index(name)
        elif name in EPOCH_KEYS:
            epoch = value if epoch is None else epoch
        elif name in LAST_STEP_KEYS:
            last = numbers.whole(value)
        elif wanted(key) and key not in values:
            values[key] = value
    return Reading(values, step, last, epoch)


def _counter(key: str) -> str:
    """What a key counts, without the words that may stand before a counter: "Learning iteration", "Train Epoch"."""
    words = key.lower().split(" ")
    if len(words) > 1 and words[-1] in _COUNTERS and _BEFORE_COUNTERS.issuperset(words[:-1]):
        return words[-1]
    return "_".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One layout of log lines.

    The pattern may name the groups ``step``, ``last`` (how many steps there are), ``epoch``, ``inside`` and ``length``
    (the place within an epoch and how many there are), ``rest`` (where the pairs are; the whole line without it).
    """

    name: str
    needle: bytes
    """A line without these bytes is not looked at."""
    line: bytes
    sample: str
    judged: bytes = rb"(?!)"
    """What marks a line as one of validation."""
    epochs_from: int = 0
    """The number of the first epoch, for layouts that count steps within an epoch."""
    _line: re.Pattern[bytes] = field(init=False, repr=False)
    _judged: re.Pattern[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_line", re.compile(self.line))
        object.__setattr__(self, "_judged", re.compile(self.judged))

    def read(self, line: bytes) -> Reading | None:
        """What the line says, or None if it is not of this layout."""
        match = self._line.search(line, 0, LINE)
        if match is None:
            return None
        groups = match.groupdict()
        found = read_pairs(groups.get("rest") or (b"" if "rest" in groups else line))
        step, last, epoch = _whole(groups.get("step")), _whole(groups.get("last")), _whole(groups.get("epoch"))
        inside, length = _whole(groups.get("inside")), _whole(groups.get("length"))
        if step is None and inside is not None:
            step = inside
            if length and epoch is not None:  # the epochs before it are known to be this long
                step += max(0, epoch - self.epochs_from) * length
        return Reading(
            found.values, found.step if step is None else step, found.last if last is None else last,
            found.epoch if epoch is None else float(epoch), self._judged.search(line, 0, LINE) is not None,
        )  # fmt: skip


def _whole(text: bytes | None) -> int | None:
    return int(text.replace(b",", b"")) if text and len(text) <= 18 else None
