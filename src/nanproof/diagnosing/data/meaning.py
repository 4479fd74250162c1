"""What columns mean to a training: labels, boxes, lengths; and what is wrong with a row of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .piece import Piece, Values
from .report import Kind

IGNORED = (-100, -1)  # what losses leave out
_LABEL = re.compile(r"(?:^|[_./-])(?:labels?|targets?|class(?:es)?|category(?:_ids?)?|y|answer)$", re.I)
_BOX = re.compile(r"(?:^|[_./-])(?:b?box(?:es)?|bboxes)$", re.I)
_TEXT = re.compile(
    r"(?:^|[_./-])(?:text|content|document|prompt|completion|response|transcript|caption|sentence|body"
    r"|output|chosen|rejected|summary|highlights|question)$",
    re.I,
)
_TURNS = re.compile(r"(?:^|[_./-])(?:messages|conversations?|dialog(?:ue)?|turns)$", re.I)
_SECONDS = re.compile(r"^(?:duration|audio_duration|seconds)$", re.I)
FRAMES = 100
"""Frames of speech in a second, as nearly all features have them."""
_SIZE = re.compile(r"^(?:w|h|width|height|bbox_width|bbox_height|box_w|box_h)$", re.I)
_INPUT = re.compile(
    r"^(?:input|audio|frame|feature|time)s?_?(?:lengths?|len|frames|steps)$|^num_frames$|^n_frames$", re.I
)
_TARGET = re.compile(r"^(?:target|label|text|token)s?_?(?:lengths?|len)$", re.I)


@dataclass(frozen=True, slots=True)
class Fault:
    """One row that a training would trip over."""

    kind: Kind
    column: str
    row: int
    words: str


MINUS_ONE = "label −1: an error unless the loss has ignore_index=-1"
EMPTY: tuple[Kind, str] = ("empty-target", "the target is empty")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the user knows of the data: how many classes, which columns are labels, by how much CTC input shrinks."""

    classes: int | None = None
    labels: tuple[str, ...] = ()
    downsample: int = 1

    def is_label(self, name: str) -> bool:
        return name in self.labels if self.labels else bool(_LABEL.search(name))

    def faults(self, piece: Piece) -> Iterator[Fault]:
        for name, values in piece.columns.items():
            if self.is_label(name):
                yield from self._labels(piece.first, name, values)
            if _BOX.search(name) and isinstance(values, list):
                yield from _boxes(piece.first, name, values)
            if _TEXT.search(name) and isinstance(values, list) and not self.is_label(name):
                yield from _texts(piece.first, name, values)
            if _TURNS.search(name) and isinstance(values, list):
                yield from _turns(piece.first, name, values)
        yield from _sizes(piece)
        yield from self._ctc(piece)

    def _labels(self, first: int, name: str, values: Values) -> Iterator[Fault]:
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim:
            wrong = (values < 0) & ~np.isin(values, IGNORED)
            if self.classes is not None:
                wrong |= values >= self.classes
            rows = wrong.reshape(len(values), -1)
            for row in np.flatnonzero(rows.any(1)):
                value = int(values.reshape(len(values), -1)[row][rows[row]][0])
                yield Fault("label-out-of-range", name, first + int(row), self._range(value))
            if values.ndim == 1:
                yield from (
                    Fault("ignored-label", name, first + int(r), MINUS_ONE) for r in np.flatnonzero(values == -1)
                )
                yield from self._strays(first, name, values)
            if values.ndim > 1 and values.shape[1]:
                masked = np.isin(values, IGNORED[:1]).reshape(len(values), -1).all(1)
                for row in np.flatnonzero(masked):
                    yield Fault("empty-target", name, first + int(row), "every label is −100, so none counts")
            return
        if isinstance(values, list):
            measured = any(isinstance(v, float) or (isinstance(v, str) and _DECIMAL.fullmatch(v)) for v in values)
            for offset, value in enumerate(values):
                fault = self._label(value)
                if measured and fault == EMPTY:  # a measurement that is missing, not a target without labels
                    fault = "nonfinite", "the target is empty: NaN once loaded"
                if fault:
                    yield Fault(fault[0], name, first + offset, fault[1])

    def _strays(self, first: int, name: str, values: NDArray[Any]) -> Iterator[Fault]:
        """A label far above all others, in very few rows: a typing error, or what marks something to ignore."""
        found, counts = np.unique(values[values >= 0], return_counts=True)
        if self.classes is not None or len(found) < 3 or counts[-1] > max(1, len(values) // 100):
            return
        if len(found) <= 1_000 and found[-1] > found[-2] + max(2, len(found)) and found[-2] < 2 * len(found):
            others = f"the others, {found[0]} to {found[-2]}"
            words = f"label {found[-1]} is far from {others}: tell how many classes there are"
            yield Fault("out-of-range", name, first + int(np.argmax(values == found[-1])), words)

    def _label(self, value: Any) -> tuple[Kind, str] | None:
        if value is None or (isinstance(value, str) and not value.strip()):
            return EMPTY
        if isinstance(value, list | tuple):
            if not value:
                return EMPTY
            numbers = [v for v in value if isinstance(v, int) and not isinstance(v, bool)]
            if len(numbers) == len(value) and all(v == IGNORED[0] for v in numbers):
                return "empty-target", "every label is −100, so none counts"
        else:
            numbers = [value] if isinstance(value, int) and not isinstance(value, bool) else []
        if value == -1 and numbers:
            return "ignored-label", MINUS_ONE
        for number in numbers:
            if (number < 0 and number not in IGNORED) or (self.classes is not None and number >= self.classes):
                return "label-out-of-range", self._range(number)
        return None

    def _range(self, value: int) -> str:
        if self.classes is None:
            return f"label {value} is negative, and no loss leaves it out"
        return f"label {value} with {self.classes} classes, 0 to {self.classes - 1}"

    def _ctc(self, piece: Piece) -> Iterator[Fault]:
        """CTC needs an input at least as long as its target, and one step more for each pair of equal neighbors."""
        inputs = next((n for n in piece.columns if _INPUT.search(n)), None)
        seconds = next((n for n in piece.columns if _SECONDS.search(n)), None) if inputs is None else None
        if inputs is None and seconds is None:
            return
        given_in, rate = (inputs, 1) if inputs is not None else (str(seconds), FRAMES)
        lengths = next((n for n in piece.columns if _TARGET.search(n)), None)
        targets = next((n for n in piece.columns if self.is_label(n) and isinstance(piece.columns[n], list)), None)
        # speech is far slower than its frames: a text with more letters than frames fits by no tokenizer
        column = targets or lengths or next((n for n in piece.columns if _TEXT.search(n)), None)
        if column is None:
            return
        for offset, (given, target) in enumerate(zip(piece.columns[given_in], piece.columns[column], strict=False)):
            if not isinstance(given, int | float | np.integer | np.floating) or not math.isfinite(given):
                continue
            steps, needed = int(given * rate) // self.downsample, _needed(target)
            if needed is not None and needed > steps:
                has = f"the input has {steps}" if rate == 1 else f"{given:g} s give {steps} at 10 ms each"
                words = f"the target needs {needed} steps, {has}: CTC loss is infinite"
                yield Fault("ctc-infeasible", column, piece.first + offset, words)


def _needed(target: Any) -> int | None:
    if isinstance(target, str | list | tuple):
        return len(target) + sum(bool(a == b) for a, b in pairwise(target))
    if isinstance(target, int | np.integer):
        return int(target)
    return None


def _boxes(first: int, name: str, values: list[Any]) -> Iterator[Fault]:
    """Boxes without area: four numbers, two corners or a corner and sizes.

    Nobody says which. Of sizes, many are smaller than the place of their box; where nearly all of the last two
    numbers exceed the first two, they are corners.
    """
    boxes = [(i, b) for i, v in enumerate(values) for b in _each_box(v)]
    corners = sum(b[2] > b[0] and b[3] > b[1] for _, b in boxes) >= 0.95 * len(boxes)
    for i, b in boxes:
        width, height = (b[2] - b[0], b[3] - b[1]) if corners else (b[2], b[3])
        if width <= 0 or height <= 0:
            yield Fault("degenerate-box", name, first + i, f"box {list(b)} has no area")


def _texts(first: int, name: str, values: list[Any]) -> Iterator[Fault]:
    """Empty documents among others: no token, no loss to average."""
    blank = [i for i, v in enumerate(values) if v is None or (isinstance(v, str) and not v.strip())]
    if len(blank) < len(values):
        yield from (Fault("empty-text", name, first + i, "the text is empty") for i in blank)


def _turns(first: int, name: str, values: list[Any]) -> Iterator[Fault]:
    """Conversations without an answer: with the questions masked, no label counts."""
    for offset, turns in enumerate(values):
        if not isinstance(turns, list) or not all(isinstance(t, Mapping) for t in turns):
            continue
        said = [(str(t.get("role", t.get("from", ""))), t.get("content", t.get("value"))) for t in turns]
        answers = [words for role, words in said if role.lower() in ("assistant", "gpt", "model", "bot", "chatgpt")]
        if said and not any(role for role, _ in said):
            continue
        if not any(words if not isinstance(words, str) else words.strip() for words in answers):
            what = "every answer is empty" if answers else "it holds no answer of the assistant"
            yield Fault("empty-target", name, first + offset, f"{what}: no label counts where questions are masked")


def _sizes(piece: Piece) -> Iterator[Fault]:
    """Widths and heights of boxes in columns of their own."""
    names = [n for n in piece.columns if _SIZE.search(n)]
    if len(names) < 2:
        return
    for name in names:
        for offset, value in enumerate(piece.columns[name]):
            if isinstance(value, int | float | np.integer | np.floating) and value <= 0:
                yield Fault(
                    "degenerate-box",
                    name,
                    piece.first + offset,
                    f"{name} is {value:g}: a box without area in its picture",
                )


def _each_box(value: Any) -> Iterator[tuple[float, ...]]:
    if isinstance(value, Mapping):
        return
    if isinstance(value, list | tuple):
        if len(value) == 4 and all(isinstance(v, int | float) and math.isfinite(v) for v in value):
            yield tuple(value)
        else:
            for v in value:
                yield from _each_box(v)
