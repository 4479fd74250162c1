"""Locating in a guarded run: by itself, once per kind of failure, within a budget of time and memory."""

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
        self._seen: set[tuple[Any, ...]] = set()

    def find(
        self, verdict: Verdict, closure: Callable[[], Any] | None, seam: Seam, batch: Any, moment: Moment
    ) -> Location | None:
        """The origin of a bad step; None when this kind was located before, or the budget is spent.

        Without a closure the model's part is played again; what lies between its output and the loss is not.
        """
        step = closure or seam.step(self._training.model)
        if step is None:
            return None
        kind = (verdict.kind, verdict.level, verdict.names[:1], verdict.origin)
        # every rank must come to the same answer here: they replay together
        if kind in self._seen or self._ranks.any(self._left <= 0):
            return None
        self._seen.add(kind)
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
        if found is None or not found.reproduced:
            return None
        return dataclasses.replace(found, rank=self._ranks.rank if not self._ranks.alone else None)
