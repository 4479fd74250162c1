"""Logs of every trainer and tracker, read into one model; without torch, without the libraries that wrote them.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp()) / "train.log"
>>> _ = path.write_text("iter 1: loss 2.5, lr 1e-3\\niter 2: loss 2.4, lr 1e-3\\niter 3: loss nan, lr 1e-3\\n")
>>> series = read(path)
>>> series.loss.steps.tolist(), series.loss.values.tolist(), series.lr.values.tolist()
([1, 2, 3], [2.5, 2.4, nan], [0.001, 0.001, 0.001])
"""

from __future__ import annotations

from .find import LogFile, find_logs
from .follow import Follower, follow, read
from .moments.moment import Moment
from .series import Column, Event, Segment, Series
from .timeline import Timeline, timeline

__all__ = [
    "Column",
    "Event",
    "Follower",
    "LogFile",
    "Moment",
    "Segment",
    "Series",
    "Timeline",
    "find_logs",
    "follow",
    "read",
    "timeline",
]
