"""Measuring side by side: variants take turns in one run, and only ratios come out.

Every round runs each variant once, in shuffled order, and gives one ratio for each pair; a median over many rounds
does not care about the few that a neighbor on the machine disturbed. Time is the CPU time of this process, so
waiting for a core is not counted.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Times = Mapping[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One number per round, summed up: the median, the quartiles, and how sure the median is."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def margin(self) -> float:
        """Half of a 95 % interval for the median, as the notch of a box plot shows it."""
        return 1.57 * (self.high - self.low) / math.sqrt(self.rounds)

    def show(self, form: str) -> str:
        return f"{form.format(self.median)} ± {form.format(self.margin)}"

    def times(self, factor: float) -> Ratio:
        return Ratio(median=self.median * factor, low=self.low * factor, high=self.high * factor, rounds=self.rounds)

    def verdict(self, figure: float) -> str:
        """Whether the median stays below a figure, and whether the noise leaves a doubt."""
        if self.median > figure:
            return verdict(False)
        return "reached" if self.median + self.margin <= figure else "reached, though the interval goes beyond it"


def verdict(reached: bool) -> str:
    return "reached" if reached else "**not reached**"


def cpu_seconds(work: Callable[[], Any]) -> float:
    """The CPU time of one call, in all threads of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleave(
    variants: Mapping[str, Callable[[], float]], *, seconds: float, warmup: int, least: int = 20, seed: int = 0
) -> dict[str, list[float]]:
    """Let variants take turns for about ``seconds``, at least ``least`` rounds; each call returns its own time."""
    order = list(variants)
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(warmup):
        for run in variants.values():
            run()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[order[0]]) < least:
        shuffle(order)
        for name in order:
            times[name].append(variants[name]())
    return times


def summed(values: Iterable[float]) -> Ratio:
    numbers = list(values)
    low, median, high = statistics.quantiles(numbers, n=4)
    return Ratio(median=median, low=low, high=high, rounds=len(numbers))


def ratio(times: Times, name: str, over: str) -> Ratio:
    """How much longer one variant took than another, round by round."""
    return summed(a / b for a, b in zip(times[name], times[over], strict=True))


def together(times: Times, *names: str) -> list[float]:
    """Several copies of one variant as one, round by round: less noise."""
    return [sum(turn) for turn in zip(*(times[name] for name in names), strict=True)]


def surplus(times: Times, name: str, over: str, unit: float) -> Ratio:
    """How many ``unit`` one variant took more than another, round by round."""
    return summed((a - b) / unit for a, b in zip(times[name], times[over], strict=True))


class Ops(TorchDispatchMode):
    """Counts operations that reach the dispatcher, and those among them that make the host wait for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def count(work: Callable[[], Any]) -> tuple[int, int]:
    """The operations and the host reads of one call."""
    with Ops() as ops:
        work()
    return ops.total, ops.reads
