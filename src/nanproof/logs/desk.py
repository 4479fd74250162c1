"""The lines of a text log: each is given to whoever understands it, first come, first served.

>>> from nanproof.logs.collect import Collector
>>> log = Collector(source="train.log", format="text")
>>> desk = Desk(log)
>>> desk.feed(b"iter 1: loss 2.5, lr 1e-3\\n{'loss': nan, 'grad_norm': 1.0}\\n")
>>> desk.feed(b"Loss is nan, stopping training\\n"); desk.close()
>>> series = log.series()
>>> series.loss.values.tolist(), [e.kind for e in series.events]
([2.5, nan, nan], ['nan'])

JSON objects are taken many at a time. Anything else goes, piece by piece, to the bars, the dicts, the tables, the
grammars, the messages and last to the reader of plain pairs. What nobody understands is passed over.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from . import numbers
from .collect import Collector
from .gaps import Gaps
from .grammar import LINE, Layout, Reading, find_pairs, is_heading, read_pairs
from .grammars import GRAMMARS
from .grammars.bar import Bars
from .grammars.braces import find_braces
from .grammars.table import Tables
from .lines import Lines, Numbered, clean
from .messages import Found, find
from .names import meaning
from .objects import parse_object, parse_objects
from .series import EventKind
from .shapes import METRIC, Shapes
from .templates import CLOCK, Recipe, Template, Templates
from .traceback import Tracebacks

_RANK = re.compile(rb"^(?:\[(?:default|rank)?\d{1,5}\]:? ?|\([^)]{1,40}pid=\d+[^)]{0,40}\) ?)+")
_ONE_PAIR = re.compile(
    rb"\W{0,80}[A-Za-z_][\w ./()-]{0,80}\s{0,20}[:=]\s{0,20}"
    + numbers.NUMBER
    + rb"(?:\s{0,9}\("
    + numbers.NUMBER
    + rb"\))?\W{0,40}"
)
_JUDGED = re.compile(
    rb"(?i)^(?:[^a-z]|info\b|debug\b){0,80}(?:test|validation|valid|val|eval|evaluation|dev)\b"
    rb"(?!\s*[/_]|\s+(?:loss|acc|ppl|[-\d]))"
)
_SETTINGS = re.compile(rb"Namespace\(|Arguments\(|Config\(|[Cc]onfig\b.{0,20}[:=]")
_ACTIONS: dict[str, EventKind] = {
    "resume": "resume",
    "skip": "skip",
    "rollback": "rollback",
    "restore": "rollback",
    "stop": "stop",
}
# the guard of nanproof, on the console of the run that it guards: a step that it judged, or what it says in general
_OURS = re.compile(
    rb"^.{0,80}?\bnanproof: (?:step (?P<step>[\d,]+): (?P<what>.{1,400}?) \xe2\x86\x92 (?P<action>\w+))?"
)
_OURS_TOO = re.compile(rb"^  (?:why|warnings|cause|first bad|data|incidents?|next|not saved): ")
# a line of a source file, as tracebacks quote it: what it says did not happen
_CODE = re.compile(rb"^\s*(?:raise [A-Za-z]|File \"|assert |return |print\(|if .{1,200}:\s*$|def |import )")
_OF = re.compile(rb"\d+\s*(?:/|of)\s*\d+")
# a NaN that stands where a value would
_NAN_VALUE = re.compile(
    rb"(?i)(?:[:=,(\[|\t>~<'\"-]|\d|  |\b(?:is|was|became|got|(?<!number )of|to) "
    rb"|\b(?:np|numpy|torch|math|float\d*)[.(])\s*"
    rb"[-+]?nan(?![a-z_])|\s[-+]?nan\W{0,3}$|\w\s[-+]nan\b|1\.\#(?:qnan|snan|ind)"
)
# a finite norm beside its running mean, which one NaN before has spoiled
_NORM_MEAN = re.compile(rb"(?i)(\b(?:grad\w*|g)[ _]?norm\W{1,3}\d[\d.e+-]*)\s\(nan\)")
_TENSOR = re.compile(rb"(?i)\b(?:weights?|bias(?:es)?|params?|parameters?|logits?|activations?|hidden|embeddings?)\b")
_EMPTY = re.compile(rb"(?i)\b(?P<name>\w*loss\w*)\s?=\s?(?=[,\]])")
_OF_NOTHING = re.compile(rb"\bcount: 0\s*$")  # darknet's means over no box of a batch: NaN, and no harm
_LOSSES = re.compile(rb"\b[Ll]osses: \[([^\]]{1,400})\]")
_NUMBERS = re.compile(rb"(?<![\w.])" + numbers.NUMBER)
_CHINESE = {
    word.encode(): plain
    for word, plain in {
        "：": b":",
        "，": b",",
        "（": b"(",
        "）": b")",
        "＝": b"=",
        "损失": b" loss ",
        "学习率": b" lr ",
        "轮": b" epoch ",
        "步": b" step ",
        "ロス": b" loss ",
        "손실": b" loss ",
        "第": b" ",
        "損失": b" loss ",
        "エポック": b" epoch ",
        "에폭": b" epoch ",
        "потери": b"loss",
        "Потери": b"loss",
        "эпоха": b"epoch",
        "Эпоха": b"epoch",
        "pérdida": b"loss",
        "Pérdida": b"loss",
        "época": b"epoch",
        "Época": b"epoch",
        "Époque": b"epoch",
        "époque": b"epoch",
        "—": b"-",
        "非数": b"nan",
        "∞": b"inf",
        **{chr(ord("０") + i): str(i).encode() for i in range(10)},
    }.items()
}
_TELLING = frozenset({"loss", "component", "grad_norm", "eval"})
_COUNTS = frozenset({"loss", "component", "grad_norm"})


class Desk:
    """Takes the bytes of a text log and fills a collector; with ``words_only`` its numbers are left to others."""

    def __init__(self, collector: Collector, *, words_only: bool = False) -> None:
        self.collector = collector
        self._words_only = words_only
        self.epoch: float | None = None
        """The epoch of a heading such as ``Epoch 2/10``, for the lines below it."""
        self._lines = Lines()
        self._bars = Bars(self)
        self._tables = Tables(self)
        self._tracebacks = Tracebacks(collector)
        self._shapes = Shapes(collector)
        self._waiting: Reading | None = None
        self._names: dict[str, str] = {}
        """Names as they were written first: "Loss is nan" belongs to the loss of the lines before."""
        self._templates = Templates()
        self._gaps = Gaps()
        self._cut = False
        """Whether the line that is read now has no end: it may have been cut while it was written."""
        self._ours = False
        """Whether the line before was the guard's."""
        self._block = False
        """Whether the line before was a record or its heading, so that lone pairs below belong to it."""

    def feed(self, data: bytes) -> None:
        block = self._lines.take(data)
        # lines that are all JSON objects need not even be split
        if block[:2] == b'{"' and block[-1:] == b"\n" and not self._words_only:
            rows = parse_objects(block[:-1].replace(b"\n", b","))
            if rows is not None:
                self.release(None)
                first = self._lines.number
                self._lines.passed(len(rows))
                self.collector.records(rows, lambda row, index: self._take_row(row, first + index))
                return
        self._take(self._lines.split(block if block.isascii() else _translate(block)))

    def settle(self) -> None:
        """Nothing more has come for now: place what was waiting for the next line."""
        self.release(None)

    def close(self) -> None:
        """The file is at its end: its last line counts, even without a newline."""
        self._cut = True
        self._take([(number, _translate(line)) for number, line in self._lines.rest()])
        self.settle()
        self._tracebacks.close()
        self._tables.close()
        self._shapes.close()
        if self._lines.cut:
            self.collector.note("a line of more than 4 MB was cut", self._lines.cut)

    def emit(self, reading: Reading, clock: bytes = b"") -> None:
        """Place what a line says."""
        values = self._named(reading)
        if (moment := CLOCK.search(clock, 0, 120)) is not None:
            values["timestamp"] = _timestamp(*moment.groups())
        if reading.last is not None and reading.last > 0 and reading.epoch is None and not reading.judged:
            self.collector.max_steps = reading.last  # beside an epoch it would be the length of the epoch
        counts = not reading.judged and any(meaning(name).role in _COUNTS for name in values)
        epoch = reading.epoch if reading.epoch is not None else self.epoch
        self.collector.place(values, step=reading.step, epoch=epoch, counts=counts)
        self._block = True

    def _named(self, reading: Reading | Layout) -> dict[str, Any]:
        """The values of a line under the names that they have in this log."""
        names = {n: f"eval/{n}" if reading.judged and meaning(n).role != "eval" else n for n in reading.values}
        return {self._names.setdefault(names[n].lower(), names[n]): value for n, value in reading.values.items()}

    @property
    def waits(self) -> bool:
        """Whether a record waits for its step."""
        return self._waiting is not None

    def wait(self, reading: Reading) -> None:
        """Keep a record without a step until the next piece: the bar that is drawn after it knows the step."""
        self.release(None)
        self._waiting = reading

    def release(self, step: int | None) -> None:
        """Place the record that waits; without a step from a bar, by what is known."""
        if self._waiting is not None:
            reading, self._waiting = self._waiting, None
            self.emit(reading._replace(step=self._bars.known() if step is None else step))

    def learn(self, text: bytes) -> None:
        """Keep the shape of a text that nobody reads by its names."""
        self._shapes.take(text, self._lines.number)

    def row_of_table(self, text: bytes, inside: int, length: int) -> bool:
        """The text before a bar may be a row of a table, as ultralytics prints it."""
        return self._tables.take_row(text, inside, length)

    def _take(self, lines: Sequence[Numbered]) -> None:
        place, end = 0, len(lines)
        while place < end:
            stop = place
            while not self._words_only and stop < end and lines[stop][1].startswith((b'{"', b"{ ")):
                stop += 1
            if stop > place:
                self._take_json(lines[place:stop])
            elif not (stop := place + self._take_alike(lines, place)) > place:
                number, line = lines[place]
                for piece in clean(line):
                    self._take_piece(piece[:LINE], number)
                stop += 1
            place = stop

    def _take_alike(self, lines: Sequence[Numbered], place: int) -> int:
        """Take lines in a row whose shapes are known; returns how many."""
        if self._ours or self._tracebacks.open or self._words_only or self._tables.open:
            return 0
        template: Template | None = None
        for taken in range(len(lines) - place):
            line = lines[place + taken][1]
            match = None if template is None else template.pattern.fullmatch(line)
            if template is not None and match is not None:
                self._take_known(template, match.groups())
            elif (found := self._templates.find(line)) is not None and not self._may_be_row(line):
                template, numbers_found = found
                self._take_known(template, numbers_found)
            else:
                return taken
        return len(lines) - place

    def _may_be_row(self, line: bytes) -> bool:
        """Whether a line could be a row of the table whose heading was seen."""
        return bool(self._tables.heads) and (b"%|" in line or line.lstrip()[:1] in b"|0123456789")

    def _take_known(self, template: Template, found: tuple[bytes, ...]) -> None:
        """A line of a shape that is known, with the numbers in it."""
        bar = template.recipe.bar
        if bar is not None:
            of = None if bar.of is None else int(found[template.group(bar.of)])
            head, inner = template.read(bar.head, found), template.read(bar.found, found)
            self._bars.place(int(found[template.group(bar.n)]), of, head, inner)
            return
        self.release(None)
        if template.layout is None:
            self._block = False
        elif template.recipe.waits:
            self.wait(template.read(template.layout, found, self.epoch))
        else:
            self._take_values(template, template.layout, found)

    def _take_values(self, template: Template, layout: Layout, found: tuple[bytes, ...]) -> None:
        """The same as `emit`, with all done before that is the same for all lines of a shape."""
        if template.names is None:
            named = layout.values if template.recipe.learned else self._named(layout)
            template.names = (*named, *(("timestamp",) if template.clock is not None else ()))
            template.values = tuple(template.group(slot) for slot in named.values())
            counts = not layout.judged and any(meaning(name).role in _COUNTS for name in named)
            template.counts = counts or template.recipe.learned
        values = tuple([numbers.value(found[i]) for i in template.values])
        if template.clock is not None:
            values = (*values, _timestamp(*found[template.clock : template.clock + 6]))
        step, last, epoch = template.place(found, self.epoch)
        if last is not None and last > 0 and layout.epoch is None and not layout.judged:
            self.collector.max_steps = last
        epoch = self.epoch if epoch is None and not template.recipe.learned else epoch
        self.collector.place_row(template.names, values, step=step, epoch=epoch, counts=template.counts)
        self._block = not template.recipe.learned

    def _take_json(self, lines: Sequence[Numbered]) -> None:
        self.release(None)
        rows = parse_objects(b",".join([line for _, line in lines]))
        if rows is None or len(rows) != len(lines):
            for number, line in lines:
                self._take_one_json(line, number)
        else:
            self.collector.records(rows, lambda row, index: self._take_row(row, lines[index][0]))

    def _take_one_json(self, line: bytes, number: int) -> None:
        row = parse_object(line)
        if row is not None:
            self._take_row(row, number)
        else:
            for piece in clean(line):
                self._take_piece(piece[:LINE], number)

    def _take_row(self, row: dict[str, Any], number: int) -> None:
        """A JSON object that may say something in words."""
        words = next((row[k] for k in ("message", "msg") if isinstance(row.get(k), str)), None)
        if isinstance(row.get("event"), str):
            reason = row.get("reason") if row["event"] == "warning" else words  # ours say it in a sentence
            text = reason if isinstance(reason, str) else ", ".join(f"{k} {v}" for k, v in row.items())
            step = row["step"] if isinstance(row.get("step"), int) else None
            if row["event"] == "exception":  # that ended the script of a guarded run
                self._tracebacks.end(text.encode("utf-8", "replace"), number, str(row.get("where", "")))
                return
            self.collector.event(_ACTIONS.get(row["event"], "warning"), text, step=step, line=number)
        elif words is not None and not any(meaning(key).role in _TELLING for key in row):
            self._take_piece(words.encode("utf-8", "replace")[:LINE], number)
        else:
            _, step = self.collector.record(row)
            verdict, action = row.get("verdict", "ok"), str(row.get("action"))
            if verdict != "ok":
                text = f"{verdict}: {action}"
                self.collector.event(_ACTIONS.get(action, "warning"), text, name=str(verdict), step=step, line=number)

    def _take_piece(self, piece: bytes, number: int) -> None:
        """Read a piece; a NaN beside a metric counts, whatever the layout of its line."""
        if b"nanproof: " in piece and (ours := _OURS.match(piece)) is not None:
            self._take_ours(ours, piece, number)
            return
        self._ours = self._ours and _OURS_TOO.match(piece) is not None
        if self._ours:
            return
        seen = self.collector.nonfinite_seen
        stripped = _RANK.sub(b"", piece) if piece[:1] in b"[(" else piece
        if not self._words_only and (lacking := self._gaps.find(stripped, cut=self._cut)):
            self.release(None)
            self.collector.gap(lacking, stripped.strip().decode("utf-8", "replace"), read_pairs(stripped).step, number)
            return
        recipe = self._read_piece(stripped, number)
        if recipe is not None and recipe.layout is not None:
            self._gaps.learn(stripped, recipe.layout)
        lower = piece.lower()
        if b"nan)" in lower and _NORM_MEAN.search(piece):
            self.collector.event("warning", "the running mean of the norm is NaN", name="norm-in-mean", line=number)
            piece = _NORM_MEAN.sub(rb"\1", piece)
            lower = piece.lower()
        unread = self.collector.nonfinite_seen == seen and not self.waits and (b"nan" in lower or b"1.#" in lower)
        if recipe is not None and recipe.bar is not None and self._bars.nonfinite:
            unread = False
        if (
            unread
            and not _OF_NOTHING.search(piece)
            and (METRIC.search(piece) or _TENSOR.search(piece))
            and _NAN_VALUE.search(piece)
            and not _CODE.match(piece)
        ):
            text = piece.strip().decode("utf-8", "replace")
            self.collector.event("nan", text, name="nan-in-line", line=number)
        elif recipe is not None:
            self._templates.learn(piece, recipe, len(piece) - len(stripped))

    def _read_piece(self, piece: bytes, number: int) -> Recipe | None:
        """Read a piece; returns how, if others of its shape can be read in the same way."""
        if not piece.strip():
            return None
        if self._tracebacks.take(piece, number):
            self.release(None)
            self._block = False
            return None
        if _CODE.match(piece) or _SETTINGS.match(piece):
            return None
        if self._words_only:
            if (found := find(piece)) is not None:
                self._take_message(found, piece, number)
            return None
        listed = b"osses: [" in piece
        if listed:
            piece = _LOSSES.sub(_numbered, piece)
        if b"%|" in piece and (empty := _EMPTY.search(piece)) is not None:
            self.collector.gap(empty["name"].decode(), piece.strip().decode("utf-8", "replace")[-80:], line=number)
        rest = self._bars.take(piece)
        if rest is piece or rest.strip():
            self.release(None)
        if not rest.strip():
            return None if self._bars.drawn is None else Recipe(bar=self._bars.drawn)
        recipe = self._read_rest(rest, number)
        return recipe if rest is piece and not listed and rest.lstrip()[:1] != b"|" else None

    def _read_rest(self, piece: bytes, number: int) -> Recipe | None:
        """Read what is no bar."""
        if b"{" in piece and (layouts := find_braces(piece)):
            return self._take_braces(layouts, piece)
        if self._tables.take(piece):
            return None
        if (layout := next((f for g in GRAMMARS if g.needle in piece and (f := g.find(piece))), None)) is not None:
            self.emit(layout.read_line(piece, self.epoch), piece)
            return Recipe(layout)
        found = find(piece)
        if found is not None:
            self._take_message(found, piece, number)
            return None
        return self._take_plain(piece, number)

    def _take_braces(self, layouts: list[Layout], piece: bytes) -> Recipe | None:
        for layout in layouts:
            reading = layout.read_line(piece)
            self.wait(reading) if reading.step is None else self.emit(reading, piece)
        if any("train_runtime" in layout.values for layout in layouts):
            self.collector.event("finished", piece.decode("utf-8", "replace"))
            return None
        return Recipe(layouts[0], waits=layouts[0].step is None) if len(layouts) == 1 else None

    def _take_message(self, found: Found, piece: bytes, number: int) -> None:
        step = numbers.whole(found.details.get("step", ""))
        if step is None:
            step = self._bars.standing(self.collector.pacer.last)
        text = piece.strip().decode("utf-8", "replace")
        self.collector.event(found.kind, text, name=found.name, step=step, line=number, details=found.details)
        scale = numbers.parse(found.details.get("scale", "").encode())
        if scale is not None:
            standing = self._bars.standing(self.collector.pacer.last)
            self.collector.place({"loss_scale": scale}, step=standing, counts=False)
        if found.kind in ("nan", "skip", "warning") and not self._words_only:
            self._take_told(piece)
        self._block = False

    def _take_ours(self, said: re.Match[bytes], piece: bytes, number: int) -> None:
        """What the guard did about a step is an event there; the value that it names is no metric of the script."""
        self.release(None)
        self._ours = True
        step = numbers.whole((said["step"] or b"").decode().replace(",", ""))
        if step is not None:
            text = piece.strip().decode("utf-8", "replace")
            kind = "nan" if said["what"].startswith(b"nonfinite") else _ACTIONS.get(said["action"].decode(), "warning")
            name = "nan-detected" if kind == "nan" else ""
            self.collector.event(kind, text, name=name, step=step, line=number, counts=False)

    def _take_told(self, piece: bytes) -> None:
        """The numbers of a message: "skipping batch 12: loss nan" is a record as well."""
        reading = read_pairs(piece)
        told = {n: v for n, v in reading.values.items() if meaning(n).role in ("loss", "component", "grad_norm")}
        if told:
            back = reading.step is not None and reading.step < self.collector.pacer.last  # it counts something else
            self.emit(reading._replace(values=told, step=None if back else reading.step), piece)

    def _take_plain(self, piece: bytes, number: int) -> Recipe | None:
        """Pairs without a layout that is known: a record if a loss or a gradient norm is among them."""
        layout = find_pairs(piece)
        reading = layout.read_line(piece)
        if not reading.values:
            return self._take_heading(reading, piece, number)
        roles = {meaning(name).role for name in reading.values}
        telling = not _TELLING.isdisjoint(roles) and not _SETTINGS.search(piece)
        alone = _ONE_PAIR.fullmatch(piece) is not None
        parts = [v for name, v in reading.values.items() if meaning(name).role == "component"]
        placed = reading.step is not None or reading.epoch is not None or not roles.isdisjoint(("loss", "grad_norm"))
        placed = placed or len(parts) > 1 or not all(map(math.isfinite, parts))
        known = self._block or (alone and self.collector.pacer.unit is not None)
        if (self._block and alone) or (telling and (placed or known)):
            layout = layout._replace(judged=_JUDGED.match(piece) is not None)
            self.emit(layout.read_line(piece), piece)
            return Recipe(layout) if telling and placed else None
        self._block = False
        if not telling and alone:
            return None
        return self._shapes.take(piece, number)

    def _take_heading(self, reading: Reading, piece: bytes, number: int) -> Recipe | None:
        """A line of counters and nothing else stands above the values that belong to them."""
        if reading.last is not None and reading.step is None:
            self.collector.max_steps = reading.last  # "Total optimization steps = 1,042"
        elif reading.step is not None and is_heading(piece):
            self.emit(reading, piece)
            return None
        elif reading.epoch is not None and len(piece) < 120 and len(_NUMBERS.findall(_OF.sub(b"1", piece))) <= 1:
            self.epoch, self._block = reading.epoch, True
            return None
        self._block = False
        recipe = self._shapes.take(piece, number)
        return recipe if reading.last is None and reading.epoch is None else None


@lru_cache(maxsize=4096)
def _minute(year: bytes, month: bytes, day: bytes, hour: bytes, minute: bytes) -> int:
    return calendar.timegm((int(year), int(month), int(day), int(hour), int(minute), 0))


def _timestamp(year: bytes, month: bytes, day: bytes, hour: bytes, minute: bytes, second: bytes) -> float:
    return float(_minute(year, month, day, hour, minute) + int(second))


def _numbered(listed: re.Match[bytes]) -> bytes:
    """A list of losses as pairs: ``Losses: [2.1, nan]`` is ``loss_1: 2.1, loss_2: nan``."""
    return b", ".join(b"loss_%d: %s" % (i, v.strip()) for i, v in enumerate(listed[1].split(b","), start=1))


def _translate(block: bytes) -> bytes:
    """Full-width punctuation, and the words for loss and rate in other scripts, as the grammars know them.

    >>> _translate("Loss：nan".encode())
    b'Loss:nan'
    """
    for word, plain in _CHINESE.items():
        block = block.replace(word, plain)
    return block
