"""A real S3 server on this machine, and a way to it that is slow, breaks connections or ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Way:
    """A proxy in front of a server: each request waits ``latency`` seconds; every ``breaks``-th connection is cut."""

    def __init__(self, port: int, *, latency: float = 0.0, breaks: int = 0) -> None:
        self.target, self.latency, self.breaks = port, latency, breaks
        self.count, self.requests = 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.count += 1
                server = socket.create_connection(("127.0.0.1", self.target))
                self._open += [client, server]
                cut = bool(self.breaks) and self.count % self.breaks == 0
                threading.Thread(target=self._carry, args=(client, server, True, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, False, cut), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, delayed: bool, cut: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if delayed:
                    self.requests += 1
                    time.sleep(self.latency)
                target.sendall(data[: len(data) // 2] if cut else data)
                if cut:
                    break
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # closing alone lets a thread that waits in accept take one more
            with suppress(OSError):
                end.close()


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a moto server."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def s3_settings(port: int) -> dict[str, Any]:
    """What tells s3fs where the server is; also for the environment variable FSSPEC_S3."""
    return {
        "key": "testing",
        "secret": "testing",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
        "skip_instance_cache": True,
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
