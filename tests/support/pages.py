"""Logs to watch, and waiting for a page in a browser."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver


def write_log(path: Path, count: int, bad: tuple[int, ...] = (), first: int = 0, mode: str = "w") -> None:
    with path.open(mode) as file:
        for step in range(first, first + count):
            loss = math.nan if step in bad else 3 * math.exp(-step / 500)
            file.write(json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-4}) + "\n")


def wait(browser: webdriver.Chrome, script: str, seconds: float = 300) -> object:
    """Wait until a script returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while True:
        value = browser.execute_script(f"return {script}")
        if value:
            return value
        assert time.monotonic() < deadline, f"never true: {script}; console: {browser.get_log('browser')}"
        time.sleep(0.05)


@contextmanager
def serving() -> Iterator[Callable[..., str]]:
    """Starts servers, and ends them after the block."""
    children = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "nanproof", "watch", "--web", *arguments]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        assert address.startswith("http://"), child.communicate(timeout=600)
        return address

    try:
        yield start
    finally:
        for child in children:
            child.send_signal(signal.SIGINT)
        for child in children:
            try:
                child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate(timeout=20)
