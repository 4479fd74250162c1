"""Locating in a guarded run: by itself, until it brings nothing new, within a budget of time and memory."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from ..locating import Location, locate
from ..records import Verdict
from .moment import Moment
from .ranks import Ranks
from .seam import Seam
from .state import Training

log = logging.getLogger("nanproof")


class Finder:
    """Plays a bad step again under a trace, before the optimizer steps, while its state is still there."""

    def __init__(self, training: Training, ranks: Ranks, *, seconds: float, max_bytes: int = 256 << 20) -> None:
        self._training = training
        self._ranks = ranks
        self._left = seconds
        self._max_bytes = max_bytes
        self._places: set[tuple[str, int, str]] = set()
        self._settled: set[tuple[Any, ...]] = set()
        """Kinds of failure whose last location brought nothing new."""

    def find(
        self, verdict: Verdict, closure: Callable[[], Any] | None, seam: Seam, batch: Any, moment: Moment
    ) -> Location | None:
        """The origin of a bad step; None when this kind keeps leading to known places, or the budget is spent.

        Without a closure the model's part is played again; what lies between its output and the loss is not.
        """
        step = closure or seam.step()
        if step is None:
            return None
        kind = (verdict.kind, verdict.level, verdict.names[:1], verdict.origin)
        # every rank must come to the same answer here: they replay together
        if kind in self._settled or self._ranks.any(self._left <= 0):
            return None
        if moment.taken:
            moment.restore()
        start = time.monotonic()
        try:
            several = not self._ranks.alone
            found = locate(step, model=self._training.model, batch=batch, max_bytes=self._max_bytes, lockstep=several)
            if closure is None and not found.reproduced:
                found = seam.between() or found
        except Exception as error:
            log.error("nanproof: the bad step could not be located: %s: %s", type(error).__name__, error)
            found = None
        self._left -= time.monotonic() - start
        reproduced = found is not None and found.reproduced
        place = (found.file, found.line, found.op) if found is not None else ("", 0, "")
        if not self._ranks.any(reproduced and place not in self._places):
            self._settled.add(kind)
        if found is None or not reproduced:
            return None
        self._places.add(place)
        return dataclasses.replace(found, rank=self._ranks.rank if not self._ranks.alone else None)
