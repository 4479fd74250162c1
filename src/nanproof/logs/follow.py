"""Reading a log, once or while it grows.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp()) / "train.log"
>>> follower = follow(path)          # it need not exist yet
>>> follower.poll().empty
True
>>> _ = path.write_text("iter 1: loss 2.5\\niter 2: loss 2.4\\niter 3: lo")
>>> follower.poll().loss.steps.tolist()
[1, 2]
>>> _ = path.write_text("iter 1: loss 2.5\\niter 2: loss 2.4\\niter 3: loss nan\\n")
>>> new = follower.poll()
>>> new.loss.steps.tolist(), follower.series.loss.values.tolist()
([3], [2.5, 2.4, nan])
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FormatError, UsageError, missing
from .collect import Collector
from .find import find_logs
from .series import Series
from .sources import Source, open_source


class Follower:
    """Follows one log; `poll` tells what is new, `series` everything so far."""

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None) -> None:
        self.path = Path(path)
        self._run = run
        self._collector = Collector(source=str(self.path), format="")
        self._source: Source | None = None

    @property
    def series(self) -> Series:
        """Everything so far."""
        return self._collector.series()

    def poll(self) -> Series:
        """What came since the last time: its points and its events; empty when there is nothing new."""
        mark = self._collector.pacer.row
        try:
            if self._source is None:
                self._source = open_source(self.path, self._collector, self._run) or self._open_only_log()
            if self._source is not None:
                self._source.poll()
        except FormatError as error:
            self._collector.note(str(error))
        return self._collector.series(since=mark)

    def _open_only_log(self) -> Source | None:
        """The one log in a folder that is no log itself."""
        found = {log.path for log in find_logs(self.path)} if self.path.is_dir() else set()
        return open_source(Path(found.pop()), self._collector, self._run) if len(found) == 1 else None

    @property
    def waits(self) -> bool:
        """Whether there is nothing yet to follow."""
        return self._source is None

    def close(self) -> Series:
        """Stop following; a last line without a newline counts now. Returns everything."""
        if self._source is not None:
            self._source.close()
            self._source = None
        return self.series

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def follow(path: str | os.PathLike[str], *, run: str | None = None) -> Follower:
    """A follower of a log, a run folder, a folder of event files or a store; it need not exist yet."""
    return Follower(path, run=run)


def read(path: str | os.PathLike[str], *, run: str | None = None) -> Series:
    """What a log says. Of a store with several runs the newest is read, unless ``run`` names another.

    A folder is read when it is one log: a run folder of nanproof, of MLflow, of TensorBoard, or a folder that holds
    a single log.
    """
    place = Path(path)
    if not place.exists():
        raise missing(place, "name a log file or the folder of a run")
    with Follower(place, run=run) as follower:
        follower.poll()
        if follower.waits and place.is_dir():
            raise _which(place)
        series = follower.close()
    if run is not None and series.runs and not series.run:
        raise UsageError(f"{place} has no run {run}", hint=f"choose from {', '.join(series.runs[:8])}")
    return series


def _which(folder: Path) -> UsageError:
    names = sorted({log.path for log in find_logs(folder)})
    if not names:
        return UsageError(f"no log was found in {folder}", hint="name the log itself")
    return UsageError(f"{folder} holds {len(names)} logs", hint=f"name one of them: {', '.join(names[:5])}")
