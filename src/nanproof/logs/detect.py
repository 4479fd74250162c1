"""Which reader takes a file: by its first bytes, never by its name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import orjson

from .collect import Collector
from .desk import Desk
from .readers.history import HistoryStream, is_history
from .readers.notebook import NotebookStream, is_notebook
from .readers.sheet import SheetStream, read_header
from .readers.tensorboard import EventStream, is_events
from .readers.trainer_state import StateStream, is_trainer_state
from .readers.wandb import WandbStream, is_wandb

HEAD = 65_536
"""How many bytes are looked at."""
_TEXT = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x7F)) | set(range(0x80, 0x100)))


class Stream(Protocol):
    """Decodes the bytes of a file as they come."""

    def feed(self, data: bytes) -> None: ...

    def settle(self) -> None:
        """Nothing more has come for now."""

    def close(self) -> None:
        """The file is at its end."""


def find_stream(head: bytes) -> tuple[str, Callable[[Collector], Stream]]:
    """The name of the format, and its decoder, for a file that begins so.

    >>> heads = (b'{"step": 1, "loss": 2.5}\\n', b"epoch,train_loss\\n", b"iter 1: loss 2", b"\\x7fELF\\0\\0")
    >>> [find_stream(head)[0] for head in heads]
    ['jsonl', 'csv', 'text', 'binary']
    """
    if is_gzip(head):
        name, stream = find_stream(unzip_head(head))
        return f"{name}, gzip", lambda collector: Unzipped(stream(collector), collector)
    if is_events(head):
        return "tensorboard", EventStream
    if is_wandb(head):
        return "wandb", WandbStream
    if is_trainer_state(head):
        return "trainer state", StateStream
    if is_notebook(head):
        return "notebook", NotebookStream
    if is_history(head):
        return "history", HistoryStream
    if is_binary(head):
        return "binary", Nothing
    lines = head.lstrip(b"\xef\xbb\xbf\r\n").split(b"\n", 2)
    first, below = lines[0], lines[1] if len(lines) == 3 else b""  # the second line only when it is whole
    if first.startswith(b"{") and _is_json(first):
        return "jsonl", Desk
    if read_header(first[:20_000], below[:20_000]) is not None:
        return "csv", SheetStream
    return "text", Desk


def is_binary(head: bytes) -> bool:
    """Whether a file is no text: many bytes that texts do not hold (UTF-16 is a text that does)."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    return len(head.translate(None, _TEXT)) * 10 > len(head)


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line.replace(b"NaN", b"0").replace(b"Infinity", b"0")), dict)
    except orjson.JSONDecodeError:
        return False


def is_gzip(head: bytes) -> bool:
    return head.startswith(b"\x1f\x8b\x08")


def unzip_head(head: bytes) -> bytes:
    """The first bytes within a gzip file."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD)
    except zlib.error:
        return b""


class Nothing:
    """Takes what is no log."""

    def __init__(self, collector: Collector) -> None:
        collector.note("binary data in an unrecognized format")

    def feed(self, data: bytes) -> None:
        """Nothing to read."""

    def settle(self) -> None:
        """Nothing to settle."""

    def close(self) -> None:
        """Nothing to close."""


class Unzipped:
    """A gzip file around another format, a megabyte at a time."""

    def __init__(self, stream: Stream, collector: Collector) -> None:
        self._stream, self._collector = stream, collector
        self._zip = zlib.decompressobj(wbits=31)
        self._broken = False

    def feed(self, data: bytes) -> None:
        try:
            while data and not self._broken:
                self._stream.feed(self._zip.decompress(data, 1 << 20))
                data = self._zip.unconsumed_tail or self._zip.unused_data
                if self._zip.eof:  # rotated logs are sometimes several gzip files in one
                    self._zip = zlib.decompressobj(wbits=31)
        except zlib.error:
            self._broken = True
            self._collector.note("the gzip file is damaged; what follows is not read")

    def settle(self) -> None:
        self._stream.settle()

    def close(self) -> None:
        self._stream.close()
