"""Telling somebody: the first bad value, a rollback, a stop, a recovery, the end; once each, and never in the way.

Addresses come from environment variables, because they are secrets: ``NANPROOF_WEBHOOK`` is one web address (Slack's
and Discord's are recognized), ``NANPROOF_ALERTS`` holds addresses of apprise, such as ``mailto://…`` or the
address that Teams' Workflows shows.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import UsageError

VARIABLE, ALERTS = "NANPROOF_WEBHOOK", "NANPROOF_ALERTS"
Occasion = Literal["warning", "nonfinite", "rollback", "stop", "recovery", "finish"]
Send = Callable[[str, Occasion, str], None]
SILENCE = 60.0  # seconds between two messages of one kind about one run
WAIT = 5.0  # seconds for a server to answer


class Notifier:
    """Sends messages from a thread of its own.

    A message is dropped when the queue is full or the server does not answer: watching must not wait for a chat.
    `trouble` says so.
    """

    def __init__(self, address: str | None = None, *, clock: Any = time.monotonic) -> None:
        address = address or os.environ.get(VARIABLE, "")
        services = os.environ.get(ALERTS, "").split()
        if address and urlsplit(address).scheme not in ("http", "https"):
            raise UsageError(f"{VARIABLE} holds no web address", hint=f"export {VARIABLE}=https://… before starting")
        if not address and not services:
            hint = f"export {VARIABLE}=https://… or {ALERTS}='mailto://… workflows://…' before starting"
            raise UsageError("there is nobody to tell", hint=hint)
        self._senders = [_webhook(address)] if address else []
        self._senders += [_apprise(services)] if services else []
        self._clock = clock
        self._told: dict[tuple[str, Occasion], float] = {}
        self._queue: queue.Queue[tuple[str, Occasion, str] | None] = queue.Queue(32)
        self.sent = self.dropped = 0
        self.trouble = ""
        """Why the last message did not go out; '' after one that did."""
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
            self._queue.put_nowait((run, occasion, text))
        except queue.Full:
            self.dropped += 1
            self.trouble = "the receiver does not keep up"
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
        while (message := self._queue.get()) is not None:
            for send in self._senders:
                try:
                    send(*message)
                    self.sent += 1
                    self.trouble = ""
                except Exception as error:  # whatever a network can do, it must not stop the watching
                    self.dropped += 1
                    self.trouble = str(getattr(error, "reason", "") or error) or type(error).__name__


def _webhook(address: str) -> Send:
    def send(run: str, occasion: Occasion, text: str) -> None:
        body = payload(address, run, occasion, text)
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT):
            pass

    return send


def _apprise(addresses: Sequence[str]) -> Send:
    """Slack, Discord, Teams, e-mail and a hundred more, by apprise's addresses."""
    try:
        import apprise
    except ModuleNotFoundError:
        raise UsageError(f"{ALERTS} needs apprise", hint="pip install 'nanproof[alerts]'") from None
    services = apprise.Apprise()
    for number, address in enumerate(addresses, 1):
        if not services.add(address):  # the address itself is a secret: only its place is named
            raise UsageError(
                f"address {number} in {ALERTS} is none that apprise knows",
                hint="give one such as mailto://user:password@example.com, discord://ID/TOKEN",
            )

    def send(run: str, occasion: Occasion, text: str) -> None:
        if not services.notify(title=f"nanproof: {run}", body=text[:1500]):
            raise OSError("a service refused the message")

    return send


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
