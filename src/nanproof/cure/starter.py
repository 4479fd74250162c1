"""A process that starts trials: it has torch imported already, and forks; its trials end when it does.

    starter = Starter(modules=("torch",))
    child = starter.start(words, cwd=folder, environment=environment, output=path, warm=True)
    child.poll(), child.pid
    starter.close()

Importing torch costs seconds; a search starts dozens of trials. A warm trial is a fork that becomes ``nanproof run``;
any other is executed as it is. If the search is killed, the starter notices that nobody talks to it any more, and ends
the trials with itself: nothing is left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..errors import NanproofError
from ..text import show

GRACE = 5.0


class Child:
    """A trial that was started."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.code: int | None = None
        self._told = threading.Event()
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.code if self._ended.is_set() else None

    def wait(self, seconds: float | None = None) -> bool:
        return self._ended.wait(seconds)

    def stop(self) -> None:
        """End it with everything that it started; nobody else is in its session."""
        self._told.wait(GRACE)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.pid is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            self._ended.wait(GRACE if number == signal.SIGTERM else None)

    def hear(self, told: Mapping[str, Any]) -> None:
        if "pid" in told:
            self.pid = int(told["pid"])
            self._told.set()
        if "code" in told:
            self.code = int(told["code"])
            self._told.set()
            self._ended.set()


class Starter:
    """The other end of the process below."""

    def __init__(self, modules: Sequence[str] = (), python: str = sys.executable) -> None:
        words = [python, "-m", "nanproof.cure.starter", *modules]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self, words: Sequence[str], *, cwd: Path, environment: Mapping[str, str], output: Path, warm: bool
    ) -> Child:
        """Start a trial; ``words`` of a warm one begin after ``python -m nanproof``."""
        child = Child()
        with self._lock:
            number = len(self._children)
            self._children[number] = child
            asked = {"id": number, "words": list(words), "cwd": str(cwd), "environment": dict(environment)}
            asked |= {"output": str(output), "warm": warm}
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise NanproofError("the process that starts trials has ended", hint="run it again") from None
        return child

    def close(self) -> None:
        """End it, and all trials that still run."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self._children[told["id"]].hear(told)
        for child in self._children.values():  # it is gone, and so are they
            if child.poll() is None:
                child.hear({"code": -signal.SIGKILL})


def _serve(modules: Sequence[str]) -> list[str] | None:
    """Fork for every request; returns the words to run in a child, None in the starter at its end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write into the answers
    _import(modules)
    running: dict[int, int] = {}
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if running else 1.0)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                _end(list(running))
                return None
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    return _become(asked)
                running[pid] = asked["id"]
                _tell(answers, id=asked["id"], pid=pid)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _tell(answers, id=running.pop(pid), code=os.waitstatus_to_exitcode(status))


def _tell(answers: Any, **told: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def _import(modules: Sequence[str]) -> None:
    """What trials will need, once for all of them; what cannot be imported is their own business."""
    import gc
    import importlib

    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _become(asked: Mapping[str, Any]) -> list[str]:
    """In a fork: a session, a folder, an environment and an output of its own; or another program altogether."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.chdir(asked["cwd"])
    except FileNotFoundError:  # the search was interrupted while this process was still importing
        os._exit(128 + signal.SIGINT)
    with files.output_file(asked["output"]) as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    words: list[str] = asked["words"]
    if not asked["warm"]:
        try:
            os.execvpe(words[0], words, asked["environment"])
        except OSError as error:
            show(f"{words[0]} cannot be started: {error.strerror}", err=True)
            os._exit(127)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[0] = asked["cwd"]
    sys.argv = ["nanproof", *words]
    sys.orig_argv[:] = [sys.executable, "-m", "nanproof", *words]
    return words


def _end(children: list[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        until = time.monotonic() + GRACE
        while children and time.monotonic() < until:
            for pid in list(children):
                with contextlib.suppress(ChildProcessError):
                    if not os.waitpid(pid, os.WNOHANG)[0]:
                        continue
                children.remove(pid)
            time.sleep(0.02)


if __name__ == "__main__" and _serve(sys.argv[1:]) is not None:
    import runpy

    runpy.run_module("nanproof", run_name="__main__", alter_sys=False)  # in a fork: it ends as `nanproof run` ends
