"""``run.json``: there from the start, so that anybody can see whether the run is guarded."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import make_folder, write_atomic
from ..records import to_json

log = logging.getLogger("nanproof")


class RunRecord:
    """One file, rewritten whole when something changes; a full disk costs the record, never the run."""

    def __init__(self) -> None:
        self._start = {
            "command": [sys.executable, *sys.orig_argv[1:]],
            "pid": os.getpid(),
            "started": round(time.time(), 3),
        }

    def write(self, folder: Path, name: str, fields: Mapping[str, Any]) -> None:
        try:
            make_folder(folder)
            write_atomic(folder / name, json.dumps(to_json({**self._start, **fields}), indent=1) + "\n")
        except OSError as error:
            log.error("nanproof: %s was not written: %s", folder / name, error)

    def processes(self, folder: Path) -> list[dict[str, Any]]:
        """The records of the processes that this one has started."""
        found = []
        for path in sorted([*folder.glob("run.r*.json"), *folder.glob("*/run.json")]):
            try:
                record = json.loads(path.read_text())
                if record["started"] >= self._start["started"]:
                    found.append(record)
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found
