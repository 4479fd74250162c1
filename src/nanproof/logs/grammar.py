"""What a grammar of log lines is: a pattern for what is special about them. Pairs of names and numbers are everywhere.

>>> sample = "iter 7: loss nan, lr 1e-3"
>>> nano = Grammar(name="nanoGPT", needle=b"iter", line=r"iter <step>[:,]<rest>", sample=sample)
>>> nano.read(b"iter 7: loss nan, lr 1e-3")
Reading(values={'loss': nan, 'lr': 0.001}, step=7, last=None, epoch=None, judged=False)
"""

from __future__ import annotations

import re
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
    rb"(?P<value>" + numbers.NUMBER + rb")(?:ms|s|%|[kKMGT]i?B?|it)?" + numbers.END +
    rb"(?:['\"]?\s{0,10}/\s{0,10}['\"]?(?P<last>\d{1,18})(?![\w.:]))?"
    rb"(?:(?:\s{1,3}|\s{0,3}:\s{1,3})(?P<after>" + numbers.NUMBER + rb")" + numbers.END + rb")?"
)  # fmt: skip
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


def read_pairs(text: bytes) -> Reading:
    """The pairs of a text, sorted into step, epoch and values.

    >>> read_pairs(b"Train Epoch: 3, iter: 140 / 10000, total loss: nan")
    Reading(values={'total loss': nan}, step=140, last=10000, epoch=3.0, judged=False)
    >>> read_pairs(b"[Train Step] 2598/10000: loss_simple: nan").step
    2598
    """
    step = last = limit = epoch = None
    best = len(STEP_KEYS)
    values: dict[str, float] = {}
    for match in _PAIR.finditer(text, 0, LINE):
        key, number, total, after = match.groups()
        kind, name, rank = _key(key)
        value = numbers.value(number)
        if after is not None and kind == "value" and number.isdigit() and not after.isdigit():
            counted = _COUNTED.sub(b"", key)  # "Train loss 17 nan", "Loss at step 10: 0.5": the first one counts
            if _is_loss(counted) and step is None:
                step, name, value = int(number), counted.decode("ascii", "replace"), numbers.value(after)
        if kind == "value":
            values.setdefault(name, value)
        elif kind == "step":
            if rank < best and (whole := numbers.whole(value)) is not None:
                step, last, best = whole, None if total is None else int(total), rank
        elif kind == "epoch":
            epoch = value if epoch is None else epoch
        elif kind == "last":
            limit = numbers.whole(value)
    return Reading(values, step, last if limit is None else limit, epoch)


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

    def read(self, line: bytes, heading: float | None = None) -> Reading | None:
        """What the line says, or None if it is not of this layout; the epoch may stand in a heading above."""
        match = self._line.search(line, 0, LINE)
        if match is None:
            return None
        groups = match.groupdict()
        found = read_pairs(groups.get("rest") or (b"" if "rest" in groups else line))
        judged = self._judged.search(line, 0, LINE) is not None
        step, last = _whole(groups.get("step")), _whole(groups.get("last"))
        number = _whole(groups.get("epoch"))
        epoch = found.epoch if number is None else float(number)
        inside, length = _whole(groups.get("inside")), _whole(groups.get("length"))
        if step is None and inside is not None and not judged:  # how far a validation is says nothing about steps
            known = epoch if epoch is not None else heading
            # the epochs before are known to be as long
            step = inside + (max(0, int(known) - self.epochs_from) * length if length and known is not None else 0)
        return Reading(
            found.values, found.step if step is None else step, found.last if last is None else last, epoch, judged
        )


def _whole(text: bytes | None) -> int | None:
    return int(text.replace(b",", b"")) if text and len(text) <= 18 else None
