"""Telling somebody: the first bad value, a rollback, a stop, a recovery, the end; once each, and never in the way.

The address comes from an environment variable, because it is a secret. Slack's and Discord's are recognised.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import urllib.request
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import UsageError

VARIABLE = "NANPROOF_WEBHOOK"
Occasion = Literal["nonfinite", "rollback", "stop", "recovery", "finish"]
SILENCE = 60.0  # seconds between two messages of one kind about one run
WAIT = 5.0  # seconds for a server to answer


class Notifier:
    """Sends messages from a thread of its own.

    A message is dropped when the queue is full or the server does not answer: a training must not wait for a chat.
    """

    def __init__(self, address: str | None = None, *, clock: Any = time.monotonic) -> None:
        address = address or os.environ.get(VARIABLE, "")
        if urlsplit(address).scheme not in ("http", "https"):
            raise UsageError(f"{VARIABLE} holds no web address", hint=f"export {VARIABLE}=https://… before starting")
        self._address, self._clock = address, clock
        self._told: dict[tuple[str, Occasion], float] = {}
        self._queue: queue.Queue[bytes | None] = queue.Queue(32)
        self.sent = self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="nanproof-notify", daemon=True)
        self._thread.start()

    def tell(self, run: str, occasion: Occasion, text: str) -> bool:
        """Queue a message; False when it was told just now, or when there is no room. Returns at once."""
        now = self._clock()
        last = self._told.get((run, occasion))
        if last is not None and now - last < SILENCE:
            return False
        self._told[run, occasion] = now
        try:
            self._queue.put_nowait(payload(self._address, run, occasion, text))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self, seconds: float = WAIT) -> None:
        """Give what is queued a last chance to go out."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            request = urllib.request.Request(self._address, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=WAIT):
                    self.sent += 1
            except Exception:  # whatever a network can do, it must not reach a training
                self.dropped += 1


def payload(address: str, run: str, occasion: Occasion, text: str) -> bytes:
    """The message in the shape that the receiver knows.

    >>> payload("https://hooks.slack.com/services/x", "a", "stop", "stopped")
    b'{"text": "nanproof, a: stopped"}'
    """
    host = urlsplit(address).hostname or ""
    words = f"nanproof, {run}: {text}"[:1500]
    if host.endswith("slack.com"):
        message: dict[str, Any] = {"text": words}
    elif host.endswith(("discord.com", "discordapp.com")):
        message = {"content": words, "allowed_mentions": {"parse": []}}  # a log must not call everybody
    else:
        message = {"run": run, "occasion": occasion, "text": text}
    return json.dumps(message).encode()
