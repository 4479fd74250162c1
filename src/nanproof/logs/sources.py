"""Where a log comes from: a file, a folder of event files, a run folder, a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..errors import FormatError
from ..files import file_bytes, open_file
from ..records import Incident
from .collect import Collector
from .detect import HEAD, Stream, find_stream
from .readers.database import is_database
from .readers.mlflow import MlflowDatabase, MlflowFolder, is_mlflow, is_run_folder
from .readers.tensorboard import EventStream, is_events
from .readers.trackio import TrackioStore, is_trackio
from .readers.trainer_state import StateStream
from .tail import Tail

RUN_LOG = "training_log.jsonl"


class Source(Protocol):
    """Fills a collector with what is new each time."""

    def poll(self) -> None: ...

    def close(self) -> None:
        """Nothing more will come: what was half written counts, and files are closed."""


class FileSource:
    """A file that is read as a stream of bytes, and may grow, be cut, or be replaced."""

    def __init__(self, path: Path, collector: Collector, stream: Callable[[Collector], Stream] | None = None) -> None:
        self._collector = collector
        self._tail = Tail(path)
        self._given = stream
        self._stream: Stream | None = None
        self._head = b""

    def poll(self) -> None:
        for data in self._tail.chunks():
            if data is None:
                self._begin_anew()
            else:
                self._feed(data)
        if self._stream is not None:
            self._stream.settle()

    def close(self) -> None:
        """The file will not grow: its last, half line counts."""
        if self._stream is None and self._head:
            self._start(self._head)
        if self._stream is not None:
            self._stream.close()
        self._tail.close()

    def _feed(self, data: bytes) -> None:
        if self._stream is None:
            self._head += data
            # a few bytes do not tell what a file is; a line does
            line = b"\n" in self._head or b"\r" in self._head.lstrip()
            if self._given is None and len(self._head) < 4_096 and not line:
                return
            data, self._head = self._head, b""
            self._start(data)
        else:
            self._stream.feed(data)

    def _start(self, data: bytes) -> None:
        if self._given is not None:
            self._stream = self._given(self._collector)
        else:
            self._collector.format, stream = find_stream(data[:HEAD])
            self._stream = stream(self._collector)
        self._stream.feed(data)

    def _begin_anew(self) -> None:
        old, self._stream, self._head = self._stream, None, b""
        if isinstance(old, StateStream):  # each checkpoint brings the whole history again
            taken = old.taken
            self._stream = StateStream(self._collector, after=taken)
            return
        if old is not None:
            old.close()
            self._collector.event("file", f"{self._tail.path.name} starts over", name="starts-over")


class EventFolder:
    """A folder of TensorBoard: all its event files, in the order of their names, which hold their time."""

    def __init__(self, path: Path, collector: Collector) -> None:
        self._path, self._collector = path, collector
        self._files: dict[Path, FileSource] = {}

    def poll(self) -> None:
        for path in event_files(self._path):
            if path not in self._files:
                self._files[path] = FileSource(path, self._collector, EventStream)
        for path in sorted(self._files):
            self._files[path].poll()

    def close(self) -> None:
        for source in self._files.values():
            source.close()


class RunFolder:
    """The run folder of nanproof's own guard: its log and its incidents."""

    def __init__(self, path: Path, collector: Collector) -> None:
        self._path, self._collector = path, collector
        self._log = FileSource(path / RUN_LOG, collector)
        self._seen: set[str] = set()
        self._named = False

    def poll(self) -> None:
        if not self._named:
            self._name_components()
        self._log.poll()
        self._collector.format = "nanproof"
        for path in sorted(self._path.glob("incidents/[0-9]*/incident.json")):
            if path.parent.name not in self._seen:
                self._seen.add(path.parent.name)
                self._incident(path)

    def close(self) -> None:
        self._log.close()

    def _name_components(self) -> None:
        """In the guard's log the parts of the loss stand between the loss and the norm."""
        try:
            with open_file(self._path / RUN_LOG) as file:
                first = json.loads(file.readline(1 << 20))
        except (OSError, ValueError, RecursionError):
            return
        keys = list(first) if isinstance(first, dict) else []
        if "loss" in keys and "grad_norm" in keys:
            self._named = True
            for name in keys[keys.index("loss") + 1 : keys.index("grad_norm")]:
                self._collector.give_role(name, "component")

    def _incident(self, path: Path) -> None:
        try:
            incident = Incident.from_json(json.loads(file_bytes(path)))
        except (OSError, ValueError, RecursionError):
            self._collector.note(f"{path.parent.name}/incident.json cannot be read")
            return
        self._collector.event(
            "incident",
            f"{incident.verdict} → {incident.action.kind}",
            name=incident.verdict.kind,
            step=incident.step,
            details={"path": str(path.parent)},
        )


def event_files(folder: Path) -> list[Path]:
    """The TensorBoard files of a folder, known by their first bytes."""
    try:
        files = sorted(p for p in folder.iterdir() if p.is_file())
    except OSError:
        return []
    return [p for p in files[:10_000] if is_events(head_of(p, 16))]


def head_of(path: Path, size: int = HEAD) -> bytes:
    """The first bytes of a file; none if it cannot be read, or is a pipe that would hold us up."""
    if not path.is_file():
        return b""
    try:
        with open_file(path) as file:
            return file.read(size)
    except OSError:
        return b""


def open_source(path: Path, collector: Collector, run: str | None) -> Source | None:
    """The source behind a path; None if there is nothing yet."""
    if path.is_dir():
        return _open_folder(path, collector)
    if not path.exists():
        return None
    if not is_database(head_of(path, 16)):
        return FileSource(path, collector)
    if is_trackio(path):
        collector.format = "trackio"
        return TrackioStore(path, collector, run)
    if is_mlflow(path):
        collector.format = "mlflow"
        return MlflowDatabase(path, collector, run)
    raise FormatError(f"{path} is a database of neither Trackio nor MLflow", hint="name a log, or the folder of a run")


def _open_folder(path: Path, collector: Collector) -> Source | None:
    if (path / RUN_LOG).is_file():
        return RunFolder(path, collector)
    if is_run_folder(path):
        collector.format = "mlflow"
        return MlflowFolder(path, collector)
    if event_files(path):
        collector.format = "tensorboard"
        return EventFolder(path, collector)
    return None
