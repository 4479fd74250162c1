"""SQLite files, opened so that nothing is written: neither the file nor anything beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from ...errors import FormatError

_OPERATIONS = 2_000_000_000
"""A query that takes more operations than this is not one of ours: the file defines something hostile."""


def is_database(head: bytes) -> bool:
    return head.startswith(b"SQLite format 3\0")


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that only reads; whatever SQLite finds wrong is a `FormatError`.

    A database that somebody writes to has its newest rows in a file beside it; only then the usual locks are taken.
    Without such a file it is opened as immutable, because SQLite would create some files itself otherwise.
    """
    beside = Path(f"{path}-wal")
    live = beside.exists() and beside.stat().st_size > 0
    mode = "mode=ro" if live else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=2)) as connection:
            steps = iter(range(_OPERATIONS // 1_000_000))
            connection.set_progress_handler(lambda: int(next(steps, None) is None), 1_000_000)
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield connection
    except sqlite3.Error as error:
        raise FormatError(f"{path} cannot be read as a database: {error}", hint="is it whole, and closed?") from error


def columns_of(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    """The columns of a table; none if there is no such table (a view does not count)."""
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE type='table' AND name=?", (table,)).fetchone()
    if found is None:
        return frozenset()
    return frozenset(row[1] for row in connection.execute(f'PRAGMA table_info("{table}")'))


def choose(runs: dict[str, str], wanted: str | None) -> str | None:
    """The run that is meant: the one wanted, by its id or its name, or else the last."""
    if wanted is None:
        return next(reversed(runs), None) if runs else None
    return next((key for key, name in reversed(runs.items()) if wanted in (key, name)), None)
