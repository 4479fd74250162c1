"""What one connection to the page may cost: time for its headers, time to read its answer, and a place among others.

A client that sends half a request, or does not read, would otherwise hold a file of this process for ever. When all
places are taken, the connection that has been waiting longest for its request goes; a client that sends one gets in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from typing import Any

HEADERS = 10.0  # seconds from the first byte expected to a complete request
READING = 30.0  # seconds in which a client must take some of its answer
PATIENCE = 1.0  # a connection younger than this is not sent away for another
CONNECTIONS = 512
PER_CLIENT = 64  # of other machines; all browsers of this one share an address
RESERVED = 64  # files that the process needs for itself: logs, the listener, standard streams


def room() -> int:
    """How many connections there may be at once, within what the system lets this process open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVED
    if soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(8, min(CONNECTIONS, soft - RESERVED))


def limited() -> Any:
    """The protocol for uvicorn: HTTP/1.1 with these limits, and no WebSockets."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = room()
    waiting: dict[Limited, float] = {}  # connections without a request, in the order of their arrival
    clients: dict[str, int] = {}

    class Limited(H11Protocol):
        late: asyncio.TimerHandle | None = None
        stuck: asyncio.TimerHandle | None = None
        host = ""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.host = self.client[0] if self.client else ""
            clients[self.host] = clients.get(self.host, 0) + 1
            allowed = most if _is_here(self.host) else min(PER_CLIENT, most)
            if len(self.connections) > most or clients[self.host] > allowed:
                longest = next((c for c in waiting if len(self.connections) > most or c.host == self.host), None)
                if longest is None or self.loop.time() - waiting[longest] < PATIENCE:
                    transport.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\r\n")
                    transport.close()
                    return
                longest.give_up()
            self._await_request()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if not self._is_busy() and self.late is None:
                self._await_request()
            super().data_received(data)
            if self._is_busy():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            if self.stuck is not None:
                self.stuck.cancel()
            clients[self.host] = clients.get(self.host, 1) - 1
            if not clients[self.host]:
                del clients[self.host]
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stuck = self.loop.call_later(READING, self.give_up)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.stuck is not None:
                self.stuck.cancel()

        def give_up(self) -> None:
            self._stop_waiting()
            self.transport.abort()

        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _await_request(self) -> None:
            waiting[self] = self.loop.time()
            self.late = self.loop.call_later(HEADERS, self.give_up)

        def _stop_waiting(self) -> None:
            waiting.pop(self, None)
            if self.late is not None:
                self.late.cancel()
                self.late = None

    return Limited


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
