"""Names the ranks that keep this one waiting, while it waits.

A rank that waits in a collective, the guard's or DDP's, cannot speak. A thread beside it publishes where its rank is
and, once a wait has passed the deadline, reads where the others are and says which of them have not come. Nothing is
published while steps go on: healthy steps cost nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import torch.distributed as dist

log = logging.getLogger("nanproof")


class Watchdog:
    """One thread per guard with several ranks; started at the first wait, ends with the guard."""

    def __init__(self, rank: int, world: int, deadline: float, *, stop: bool) -> None:
        self._rank, self._world, self._deadline, self._stop = rank, world, deadline, stop
        self._since: float | None = None
        self._step = 0
        self._told = -1
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, step: int) -> None:
        """This rank may begin to wait at a step."""
        self._step, self._since = step, time.monotonic()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._run, name="nanproof-watchdog", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        self._since = None

    def close(self) -> None:
        self._closed.set()

    def missing(self) -> list[int]:
        """The ranks that are not known to have reached this rank's step."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(self._key(self._rank), str(self._step))
            behind = []
            for rank in range(self._world):
                key = self._key(rank)
                if rank != self._rank and (not store.check([key]) or int(store.get(key)) < self._step):
                    behind.append(rank)
            return behind
        except Exception:  # the store went away with its owner
            return []

    def _key(self, rank: int) -> str:
        return f"nanproof/waiting/{rank}"

    def _run(self) -> None:
        pause = max(0.05, min(self._deadline / 4, 5.0))
        while not self._closed.wait(pause):
            since = self._since
            if since is None:
                continue
            waited = time.monotonic() - since
            if waited > self._deadline / 2:
                self._publish()
            if waited > self._deadline and self._told != self._step:
                self._told = self._step
                self._tell(waited)

    def _publish(self) -> None:
        try:
            dist.distributed_c10d._get_default_store().set(self._key(self._rank), str(self._step))
        except Exception:
            return

    def _tell(self, waited: float) -> None:
        missing = self.missing()
        who = f"rank {', '.join(map(str, missing))}" if missing else "the other ranks"
        log.error(
            "nanproof: rank %d has waited %.0f s at guarded step %d for %s; look at what %s: a rank that died, hangs,"
            " or skipped its step%s",
            self._rank,
            waited,
            self._step,
            who,
            "they do" if len(missing) != 1 else "it does",
            "; stopping, exit code 66 (policy.on_missing_rank)" if self._stop else "",
        )
        if self._stop:
            logging.shutdown()
            os._exit(66)
