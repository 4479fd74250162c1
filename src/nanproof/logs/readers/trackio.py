"""Trackio: a SQLite file for each project, its metrics as JSON, NaN as the string "NaN"."""

from __future__ import annotations

from pathlib import Path

import orjson

from ..collect import Collector
from ..plan import flatten
from .database import choose, columns_of, open_database

COLUMNS = frozenset({"run_name", "step", "metrics", "timestamp"})


class TrackioStore:
    """Reads one run of a project, by default the newest."""

    def __init__(self, path: Path, collector: Collector, run: str | None) -> None:
        self._path, self._collector, self._wanted = path, collector, run
        self._last = -1
        self._run: str | None = None

    def poll(self) -> None:
        """Take the rows that are new."""
        with open_database(self._path) as connection:
            newest = "SELECT run_name, max(rowid) FROM metrics GROUP BY run_name ORDER BY 2"
            runs = {str(name): str(name) for name, _ in connection.execute(newest)}
            self._collector.runs = tuple(runs)
            if self._run is None:
                self._run = choose(runs, self._wanted)
                self._collector.run = self._run or ""
            rows = connection.execute(
                "SELECT rowid, step, timestamp, metrics FROM metrics WHERE run_name=? AND rowid>? ORDER BY rowid",
                (self._run, self._last),
            )
            while batch := rows.fetchmany(2_000):
                self._collector.records([_record(*row[1:]) for row in batch])
                self._last = batch[-1][0]

    def close(self) -> None:
        """Every query opens the file for itself."""


def _record(step: object, time: object, metrics: object) -> dict[str, object]:
    try:
        found = orjson.loads(metrics) if isinstance(metrics, str | bytes) else {}
    except orjson.JSONDecodeError:
        found = {}
    # what the program itself logged as its step is better than what Trackio counted
    return {"_step": step, "timestamp": time, **flatten(found if isinstance(found, dict) else {})}


def is_trackio(path: Path) -> bool:
    with open_database(path) as connection:
        return columns_of(connection, "metrics") >= COLUMNS
