"""The run's log: one JSON line per step, written in whole lines, a few at a time."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

from ..files import JsonLines
from ..records import Action, Reading, Verdict, to_json
from .observers import Observer

log = logging.getLogger("nanproof")
SECONDS = 2.0
"""How long a line may wait at most, when steps are slow: somebody may be watching."""


class Recorder(Observer):
    """Keeps the last readings in memory and the whole history in ``training_log.jsonl``."""

    def __init__(self, run_dir: Path | None, *, every: int, keep: int = 50) -> None:
        self.recent: deque[Reading] = deque(maxlen=keep)
        self._file = JsonLines(run_dir / "training_log.jsonl") if run_dir is not None else None
        self._lines: list[dict[str, Any]] = []
        self._every = every
        self._flushed = -math.inf  # the first step is written at once: it shows that the run trains

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        self.recent.append(reading)
        if self._file is None:
            return
        unread = verdict.kind in ("ok", "guard-failed", "forecast")
        line = {
            "step": reading.step,
            "update": update,
            # what was not read is null, which is not the same as NaN: a loop may make its gradients without a loss
            "loss": None if math.isnan(reading.loss) and (unread or verdict.level == "gradient") else reading.loss,
            **reading.components,
            "grad_norm": None if math.isnan(reading.grad_norm) and unread else reading.grad_norm,
            "lr": None if math.isnan(reading.lr) else reading.lr,
            "scale": reading.scale,
            "risk": reading.risk,
            "verdict": verdict.kind,
            "action": action.kind,
            "seconds": round(reading.seconds, 6),
            "timestamp": round(time.time(), 3),
            **reading.watched,
        }
        self._lines.append(to_json(line))
        due = len(self._lines) >= self._every or time.monotonic() - self._flushed > SECONDS
        if due or not verdict.ok:
            self.flush()

    def event(self, **fields: object) -> None:
        if self._file is not None:
            self._lines.append(to_json(fields))
            self.flush()

    def closed(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write what is waiting; a full disk costs log lines, with an error message, never the run."""
        if self._file is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        self._flushed = time.monotonic()
        try:
            self._file.append(lines)
        except OSError as error:
            log.error("nanproof: %d log lines lost, %s: %s", len(lines), self._file.path, error)
