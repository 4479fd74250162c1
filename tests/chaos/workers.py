"""Two processes that stay: they meet once over gloo and then run one trial after the other, each within a deadline."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.forked import context


class TrialError(AssertionError):
    """A rank raised, or gave no answer in time."""


def _serve(rank: int, world: int, store: str, orders: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            break
        work, args = order
        try:
            orders.send((True, work(rank, *args)))
        except BaseException as error:
            orders.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # the group may be waiting for a rank that was ended


class Workers:
    """Processes, one for each rank; after a failure they are replaced, so that one trial cannot spoil the next.

    with Workers(deadline=10) as workers:
        workers.run(work, "an argument")   # [work(0, "an argument"), work(1, "an argument")]
    """

    def __init__(self, *, deadline: float, world: int = 2) -> None:
        self.deadline, self.world = deadline, world
        self._context = context()
        self._crew: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss()

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``work(rank, *args)`` returns on every rank."""
        if not self._crew:
            self._hire()
        for _, line in self._crew:
            line.send((work, args))
        answers: dict[int, tuple[bool, Any]] = {}
        for rank, (process, line) in enumerate(self._crew):
            if self._comes(line):
                try:
                    answers[rank] = line.recv()
                except EOFError:
                    process.join(5)
                    answers[rank] = (False, f"its process ended with {process.exitcode}")
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if failed or len(answers) < self.world:
            self._dismiss()
            silent = sorted(set(range(self.world)) - set(answers))
            told = [f"rank {r} gave no answer and did nothing for {self.deadline:g} s (a deadlock)" for r in silent]
            raise TrialError("; ".join([*(f"rank {r}: {text}" for r, text in failed.items()), *told]))
        return [answers[r][1] for r in range(self.world)]

    def _comes(self, line: Connection) -> bool:
        """Wait for an answer; on a busy machine longer than the deadline, as long as some rank gets on."""
        still, before = time.monotonic(), 0.0
        while not line.poll(0.5):
            used = sum(_cpu_seconds(process.pid) for process, _ in self._crew)
            if used > before + 0.05:
                still, before = time.monotonic(), used
            if time.monotonic() > still + self.deadline:
                return False
        return True

    def _hire(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self.world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._crew.append((process, mine))
        for _, line in self._crew:
            line.send((_hello, ()))
        for rank, (_, line) in enumerate(self._crew):
            if not line.poll(300):  # importing torch on a busy machine
                self._dismiss()
                raise TrialError(f"rank {rank} did not start")
            line.recv()

    def _dismiss(self) -> None:
        for process, line in self._crew:
            line.close()
            process.kill()
            process.join()
        if self._crew:
            self._folder.cleanup()
        self._crew = []


def _cpu_seconds(pid: int) -> float:
    """What a process and its threads have used; nothing once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _hello(rank: int) -> int:
    return rank
