"""A trial as its log tells it: the losses, the bad steps, the time of a step."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..files import file_bytes

LOG = "training_log.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, as the guard wrote it down."""

    step: int
    loss: float
    bad: bool
    """Not finite, and not the daily work of a loss scaler."""
    spike: bool = False
    skipped: bool = False
    """The guard left it out, or went back."""
    stopped: bool = False
    """The guard ended the run at it."""
    seconds: float = math.nan


def parts_of(run_dir: Path) -> list[Path]:
    """The folders of what was trained in one run, in order: a program may pre-train first, under a guard of its own."""
    more = sorted(run_dir.glob("part-*"), key=lambda p: (len(p.name), p.name))
    return [p for p in (run_dir, *more) if (p / LOG).exists()]


def part_that_died(run_dir: Path) -> str:
    """Which of them ended the run: its folder below the run's, '' for the run's own."""
    parts = parts_of(run_dir)
    died = [p for p in parts if any(r.stopped for r in read_rows(p / LOG))] or parts
    return "" if not died or died[-1] == run_dir else died[-1].name


def read_rows(path: Path, horizon: int | None = None) -> list[Row]:
    """The steps of a guarded run, up to a horizon; a line that is not whole yet is left for later."""
    rows = []
    try:
        lines = file_bytes(path).split(b"\n")[:-1]
    except OSError:
        return []
    for line in lines:
        try:
            told = json.loads(line)
            step = int(told["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if "verdict" not in told or (horizon is not None and step > horizon):
            continue
        verdict = str(told["verdict"])
        rows.append(
            Row(
                step=step,
                loss=_number(told.get("loss")),
                bad=verdict in ("nonfinite", "overflow"),
                spike=verdict == "spike",
                skipped=told.get("action") in ("skip", "rollback", "restore") and verdict != "overflow",
                stopped=told.get("action") == "stop",
                seconds=_number(told.get("seconds")),
            )
        )
    return rows


def _number(value: object) -> float:
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else math.nan
    return float(value) if isinstance(value, int | float) else math.nan


def best_loss(rows: Sequence[Row]) -> float:
    """The lowest loss that held for a while: the least median of five good steps in a row."""
    good = [r.loss for r in rows if not r.bad and math.isfinite(r.loss)]
    width = min(5, len(good))
    if not width:
        return math.inf
    return min(statistics.median(good[i : i + width]) for i in range(len(good) - width + 1))


def last_loss(rows: Sequence[Row]) -> float:
    """The median loss of the last fifth."""
    good = [r.loss for r in rows if not r.bad and math.isfinite(r.loss)]
    return statistics.median(good[-max(3, len(good) // 5) :]) if good else math.inf


def step_seconds(rows: Sequence[Row]) -> float:
    """What a step costs, without the first few: the median of the faster half, as other programs slow single steps."""
    times = sorted(r.seconds for r in rows[3:] if math.isfinite(r.seconds))
    return statistics.median(times[: (len(times) + 1) // 2]) if times else math.nan
