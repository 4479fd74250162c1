"""Progress bars of tqdm: the step, and often the only place where a value is written.

    Epoch 2:  41%|████      | 123/300 [00:21<00:30,  5.81it/s, v_num=7, train_loss_step=nan.0]
    [losses/total_loss: 4.35 | losses/value_loss: 21.92]:  16%|█▋        | 1045/6400 [1:16:09<53:12,  1.68it/s]

A bar is drawn again and again: a value counts when its step or the value itself is new. Values of a validation or of a
whole epoch stay in the bar long after; they count once.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from ..grammar import Layout, Reading, Slot, find_pairs
from ..names import meaning

if TYPE_CHECKING:
    from ..desk import Desk

_COUNT = rb"(?P<n>\d[\d.]{0,11}[kMGT]?)/(?P<of>\d[\d.]{0,11}[kMGT]?|\?)"
_INNER = rb"(?P<inner>[^\[\]]{0,2000}(?:\[[^\[\]]{0,200}\][^\[\]]{0,2000}){0,20})\]?"
_BAR = re.compile(rb"\d{1,3}%\|[^|]{0,600}\|\s{0,9}" + _COUNT + rb"\s{0,9}\[" + _INNER)
_OPEN = re.compile(rb"(?<![\w/])(?P<n>\d{1,15})it \[" + _INNER)
_OTHER_WORK = re.compile(
    rb"(?i)valid|eval|test|sanity|predict|\bmap\b|load|download|generat|tokeniz|filter|fetch|shard|process|extract"
    rb"|convert|cach|sampl|infer|groupin|running"
)
_CLOCK = re.compile(rb"^[^,\[\]]{0,40}(?:,[^,=\[\]]{0,30}(?:it/s|s/it|/s|\?)[^,=\[\]]{0,20})?,?")
_SIZES = {ord("k"): 10**3, ord("M"): 10**6, ord("G"): 10**9, ord("T"): 10**12}
_KEPT = frozenset({"loss", "component", "grad_norm", "lr", "loss_scale", "eval"})


class Bar(NamedTuple):
    """Where the numbers of a bar stand."""

    n: Slot
    of: Slot | None
    head: Layout
    """What stands before the bar."""
    found: Layout
    """What stands in its brackets."""


class Bars:
    """Reads bars, and remembers where the bar of training stands."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._length: int | None = None
        self._at: int | None = None
        self._before: tuple[int, int | None] | None = None
        self._seen: dict[str, tuple[int, float]] = {}
        self._epochs_from: int | None = None
        self.drawn: Bar | None = None
        """The bar of the piece that was taken last, if it was one bar that says something."""
        self.nonfinite = False
        """Whether a value of the last bar is NaN or Inf, be it new or drawn again."""

    def known(self) -> int | None:
        """Where the bar of training stands: the one that follows records, or else the last bare one before."""
        if self._at is None and self._before is not None:
            self._at, self._length = self._before
        return self._at

    def standing(self, last: int) -> int | None:
        """Where the bar of training stands, if it is further than the last record."""
        at = self._at if self._at is not None else self._before[0] if self._before is not None else 0
        return at if at > last else None

    def take(self, piece: bytes) -> bytes:
        """What is left of a piece when its bars are taken out; the piece itself if it has none."""
        self.drawn = None
        if b"%|" not in piece and b"it [" not in piece:
            return piece
        rest, whole = b"", True
        while (match := _BAR.search(piece) or _OPEN.search(piece)) is not None:
            before, piece = piece[: match.start()], piece[match.end() :]
            rest += self._take_one(match, before)
            whole, self.drawn = False, self.drawn if whole else None
        return rest + piece

    def _take_one(self, match: re.Match[bytes], before: bytes) -> bytes:
        """Read one bar; returns the text before it, if it is none of the bar's business."""
        n, of = _count(match["n"]), _count(match.groupdict().get("of") or b"?")
        if n is None:
            return before
        if of is not None and self._desk.row_of_table(before, n, of):
            return b""
        if b"}" in before:  # a record glued to the bar that is drawn after it
            return before
        if _OTHER_WORK.search(before):
            return b""
        head, inner = find_pairs(before), match["inner"]
        clock = _CLOCK.match(inner)
        skipped = clock.end() if clock is not None else 0
        found = find_pairs(inner[skipped:], match.start("inner") + skipped)
        total = Slot(*match.span("of")) if of is not None else None
        text = match.string
        if not self.place(n, of, head.read_line(text), found.read_line(text)) and head.values:
            self._desk.learn(before)  # names that mean nothing here: a NaN among their numbers counts
        else:
            self.drawn = Bar(Slot(*match.span("n")), total, head, found)
        return b""

    def place(self, n: int, of: int | None, head: Reading, found: Reading) -> bool:
        """Take what a bar says; false if that is no more than how far it is."""
        step, epoch = n, head.epoch
        if epoch is not None and of is not None:  # the bar counts within an epoch
            if self._epochs_from is None:
                self._epochs_from = 1 if epoch == 1 else 0
            step += max(0, int(epoch) - self._epochs_from) * of
            of = None
        if self._desk.waits:
            self._length, self._at = of, step
            self._desk.collector.max_steps = of or self._desk.collector.max_steps
            self._desk.release(step)
        elif of is not None and of == self._length:
            self._at = step
        elif not head.values and not found.values and epoch is None:
            self._before = (step, of)
        values = {k: v for k, v in {**head.values, **found.values}.items() if meaning(k).role in _KEPT}
        self.nonfinite = not all(map(math.isfinite, values.values()))
        fresh = {k: v for k, v in values.items() if self._is_new(k, step, v)}
        if fresh:
            self._desk.emit(Reading(fresh, step, of, epoch))
        return bool(values)

    def _is_new(self, name: str, step: int, value: float) -> bool:
        last = self._seen.get(name)
        same = last is not None and (last[1] == value or (last[1] != last[1] and value != value))
        once = meaning(name).role == "eval" or "epoch" in name.lower()
        if same and (once or (last is not None and last[0] == step)):
            return False
        if len(self._seen) < 1_000 or name in self._seen:
            self._seen[name] = (step, value)
        return True


def _count(text: bytes) -> int | None:
    """A count as a bar writes it.

    >>> _count(b"123"), _count(b"1.5k"), _count(b"?"), _count(b"1.2.3")
    (123, 1500, None, None)
    """
    size = _SIZES.get(text[-1])
    try:
        return int(float(text[:-1]) * size) if size else int(text)
    except ValueError:
        return None
