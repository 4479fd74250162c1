"""Clients that do not finish their requests do not keep others out."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

pytestmark = pytest.mark.slow

SERVER = """
import sys
from nanproof.watch import limits
from nanproof.watch.runs import Finder
from nanproof.watch.server import serve
limits.HEADERS, limits.READING, limits.PATIENCE = 1.0, 1.0, 0.1
serve(Finder([sys.argv[1]]), ready=lambda address: print(address, flush=True))
"""
FILES = 128


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("limits") / "log.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n')
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))  # noqa: E731
    command = [sys.executable, "-c", SERVER, str(log)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.communicate(timeout=300)


def _connect(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(address).port or 0), timeout=300)


@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nhost: 127.", b"GET / HT"])
def test_a_half_sent_request_is_ended(address: str, half: bytes) -> None:
    with _connect(address) as client:
        client.sendall(half)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""  # the server ends it; otherwise this would wait for 300 seconds and raise


def test_a_second_request_that_is_never_finished_is_ended(address: str) -> None:
    host = urlsplit(address).netloc
    with _connect(address) as client:
        client.sendall(f"GET / HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 404"
        client.sendall(b"GET / HT")
        with suppress(ConnectionResetError):
            while client.recv(1 << 16):
                pass


def test_more_idle_clients_than_files_do_not_keep_a_browser_out(address: str) -> None:
    idle = []
    try:
        for _ in range(3 * FILES):
            idle.append(_connect(address))
        for _ in range(20):
            answer = None
            for _ in range(50):
                try:
                    answer = httpx.get(address + "runs", timeout=300)
                except httpx.TransportError:
                    continue
                if answer.status_code == 200:
                    break
            assert answer is not None
            assert answer.status_code == 200
    finally:
        for client in idle:
            client.close()


def test_a_websocket_is_refused(address: str) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert httpx.get(address, headers=headers).status_code == 400
    assert httpx.get(address).status_code == 200


def test_the_answer_says_nothing_about_the_server(address: str) -> None:
    assert "server" not in httpx.get(address).headers
    assert Path(urlsplit(address).path).name  # the token is still part of the address
