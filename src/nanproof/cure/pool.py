"""Where trials run: in threads that each wait for a process, or as tasks of a Ray cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

from ..errors import UsageError
from .starter import Starter
from .trial import Bench, Ran, Trial, run_trial

Heard = Callable[[Trial, Ran], None]


class Pool(Protocol):
    """Runs trials side by side and reports each when it ends; the order of the results is that of the trials."""

    def run(self, bench: Bench, trials: Sequence[Trial], deadline: float, heard: Heard) -> list[Ran]: ...


class Local:
    """Processes on this machine."""

    def __init__(self, jobs: int, modules: Sequence[str] = ()) -> None:
        self.jobs = jobs
        self._over = threading.Event()
        self._modules = modules
        self._starter: Starter | None = None

    def run(self, bench: Bench, trials: Sequence[Trial], deadline: float, heard: Heard) -> list[Ran]:
        results: dict[int, Ran] = {}
        if self._starter is None and any(bench.known(t) is None for t in trials):
            self._starter = Starter(self._modules)
        with ThreadPoolExecutor(self.jobs) as executor:
            running = {
                executor.submit(self._one, bench, trial, deadline): number for number, trial in enumerate(trials)
            }
            try:
                for number, ran in _finished(running):
                    results[number] = ran
                    heard(trials[number], ran)
            except BaseException:  # Ctrl-C: the trials end with us
                self._over.set()
                for future in running:
                    future.cancel()
                raise
        return [results[n] for n in range(len(trials))]

    def _one(self, bench: Bench, trial: Trial, deadline: float) -> Ran:
        known = bench.known(trial)
        if known is not None:
            return known
        assert self._starter is not None
        return run_trial(bench, trial, self._starter, deadline, self._over.is_set)

    def close(self) -> None:
        if self._starter is not None:
            self._starter.close()


def _finished(running: dict[Future[Ran], int]) -> Iterator[tuple[int, Ran]]:
    waiting = set(running)
    while waiting:
        done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda f: running[f]):
            yield running[future], future.result()


class OnRay:
    """Tasks of a Ray cluster that shares this machine's files."""

    def __init__(self, address: str, jobs: int) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("--ray needs Ray", hint="pip install 'nanproof[ray]'") from None
        self._ray, self.jobs = ray, jobs
        local = address == "local"
        try:
            ray.init(address=None if local else address, num_cpus=jobs if local else None, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            hint = "ray start --head, then --ray auto"
            raise UsageError(f"no Ray cluster at {address}: {error}", hint=hint) from None

    def run(self, bench: Bench, trials: Sequence[Trial], deadline: float, heard: Heard) -> list[Ran]:
        left = deadline - time.monotonic()
        task = self._ray.remote(num_cpus=1, max_retries=1)(_remote)
        running = {task.remote(bench, trial, left): number for number, trial in enumerate(trials)}
        results: dict[int, Ran] = {}
        waiting = list(running)
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1)
            for reference in done:
                number = running[reference]
                results[number] = self._ray.get(reference)
                heard(trials[number], results[number])
        return [results[n] for n in range(len(trials))]

    def close(self) -> None:
        self._ray.shutdown()


def _remote(bench: Bench, trial: Trial, left: float) -> Ran:
    """On a worker: its clock is its own."""
    starter = Starter()
    try:
        return run_trial(bench, trial, starter, time.monotonic() + left)
    finally:
        starter.close()


@contextmanager
def open_pool(jobs: int, ray: str | None, modules: Sequence[str] = ()) -> Iterator[Pool]:
    """The place where trials run; ``modules`` are what they are going to import."""
    pool = OnRay(ray, jobs) if ray is not None else Local(jobs, modules)
    try:
        yield pool
    finally:
        pool.close()
