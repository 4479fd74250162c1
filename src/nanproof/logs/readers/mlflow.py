"""MLflow: its SQLite file, and its older store of one text file for each metric.

In the database NaN is 0.0 with a flag, and infinity is the largest double. In the text files a line is
``timestamp value step``.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .. import numbers
from ..collect import Collector
from ..lines import Lines
from ..tail import Tail
from .database import choose, columns_of, open_database

COLUMNS = frozenset({"key", "value", "timestamp", "run_uuid", "step", "is_nan"})
_ENDED = {"FAILED": "MLflow says that the run failed", "KILLED": "MLflow says that the run was killed"}
Point = tuple[str, float, float, int]


def _take(collector: Collector, points: Iterable[Point]) -> None:
    """Points of many metrics (name, time, value, step), in the order of time."""
    names: dict[str, int] = {}
    which, steps, values, times = array("q"), array("q"), array("d"), array("d")
    for name, time, value, step in points:
        which.append(names.setdefault(name, len(names)))
        steps.append(step)
        values.append(value)
        times.append(time / 1000)
    order = np.argsort(np.array(times), kind="stable")
    arrays = [np.array(a)[order] for a in (which, steps, values, times)]
    collector.points(list(names), *arrays)


class MlflowDatabase:
    """Reads one run of a database, by default the newest."""

    def __init__(self, path: Path, collector: Collector, run: str | None) -> None:
        self._path, self._collector, self._wanted = path, collector, run
        self._last = -1
        self._run: str | None = None
        self._ended = False

    def poll(self) -> None:
        """Take the points that are new."""
        with open_database(self._path) as connection:
            runs = connection.execute("SELECT run_uuid, name, status FROM runs ORDER BY start_time, rowid").fetchall()
            names = {str(key): str(name or key) for key, name, _ in runs}
            self._collector.runs = tuple(names)
            if self._run is None:
                self._run = choose(names, self._wanted)
                self._collector.run = names.get(self._run or "", "")
            found = connection.execute(
                "SELECT rowid, key, timestamp, value, step, is_nan FROM metrics WHERE run_uuid=? AND rowid>?"
                " ORDER BY rowid",
                (self._run, self._last),
            )
            while batch := found.fetchmany(50_000):
                _take(self._collector, [p for row in batch if (p := _point(*row[1:])) is not None])
                self._last = batch[-1][0]
            status = next((str(s) for key, _, s in runs if key == self._run), "")
            if status in _ENDED and not self._ended:
                self._ended = True
                self._collector.event("stop", _ENDED[status], name=status.lower())

    def close(self) -> None:
        """Every query opens the file for itself."""


def _point(key: object, time: object, value: object, step: object, is_nan: object) -> Point | None:
    number, place, when = numbers.of(value), numbers.whole(step), numbers.of(time)
    if number is None or place is None or when is None:
        return None
    if is_nan:
        number = math.nan
    elif abs(number) == sys.float_info.max:
        number = math.copysign(math.inf, number)
    return str(key), when, number, place


def is_mlflow(path: Path) -> bool:
    with open_database(path) as connection:
        return columns_of(connection, "metrics") >= COLUMNS and "run_uuid" in columns_of(connection, "runs")


class MlflowFolder:
    """Reads the folder of one run: ``metrics/train/loss`` and so on."""

    def __init__(self, path: Path, collector: Collector) -> None:
        self._path, self._collector = path, collector
        self._files: dict[str, tuple[Tail, Lines]] = {}
        collector.run = path.name

    def poll(self) -> None:
        """Take the lines that are new, of all metrics together."""
        folder = self._path / "metrics"
        points: list[Point] = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file())[:10_000]:
            name = path.relative_to(folder).as_posix()
            tail, lines = self._files.setdefault(name, (Tail(path), Lines()))
            for data in tail.chunks():
                if data is None:
                    lines = Lines()
                    self._files[name] = (tail, lines)
                    continue
                points += [p for _, line in lines.feed(data) if (p := _line(name, line)) is not None]
        _take(self._collector, points)

    def close(self) -> None:
        for tail, _ in self._files.values():
            tail.close()


def _line(name: str, line: bytes) -> Point | None:
    cells = line.split()
    if len(cells) not in (2, 3):  # the oldest stores have no step
        return None
    time, value = numbers.parse(cells[0]), numbers.parse(cells[1])
    step = numbers.whole(cells[2].decode("ascii", "replace")) if len(cells) == 3 else 0
    return None if time is None or value is None or step is None else (name, time, value, step)


def is_run_folder(path: Path) -> bool:
    return (path / "metrics").is_dir() and (path / "meta.yaml").is_file()
