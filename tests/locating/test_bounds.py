"""A replay with a repaired value may never end by itself: it is ended, and training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanproof
from nanproof import Guard, Incident, Policy
from nanproof.locating import apart
from nanproof.locating.bounds import Endless, within
from support.forked import run_python

pytestmark = pytest.mark.slow

X = torch.ones(1, 2)


def stride_of(h: Tensor) -> Tensor:
    """NaN, at which a loop stops at once; repaired, it is 0."""
    return torch.log(h.detach().mean() * 0 - 1)


def counts_tensors(h: Tensor) -> Tensor:
    position, stride = torch.zeros(()), stride_of(h)
    while position < 3:
        position = position + stride * 0 * 2
    return position


def counts_numbers(h: Tensor) -> Tensor:
    position, stride = 0.0, float(stride_of(h)) * 0
    while position < 3:
        position += stride
    return torch.tensor(position)


def catches_everything(h: Tensor) -> Tensor:
    """What ends the replay must not make it look healthy."""
    position, stride = 0.0, float(stride_of(h)) * 0
    try:
        while position < 3:
            position += stride
    except BaseException:
        position = 1.0
    return torch.tensor(position)


@pytest.mark.parametrize("count", [counts_tensors, counts_numbers, catches_everything])
def test_a_loop_of_the_forward_pass_is_ended(count: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(2, 2)

    def step() -> Tensor:
        h: Tensor = model(X)
        return (h * count(h)).sum()

    # operations are bounded without any limit of time; on a slow machine the second is over before the loop begins
    found = nanproof.locate(step, model=model, seconds=None if count is counts_tensors else 1)
    assert (found.op, found.function) == ("log", "stride_of")
    assert found.verified is not True
    assert ("not end" if count is counts_tensors else "") in found.doubt
    assert found.doubt


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: bool) -> Tensor:
        ctx.numbers = numbers
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        stride: Any = float(g.sum() * 0) if ctx.numbers else g.sum() * 0
        position: Any = 0.0
        while position < 3:
            position = position + stride
        return g, None


@pytest.mark.parametrize("numbers", [True, False])
def test_a_loop_of_the_backward_pass_is_ended(numbers: bool) -> None:
    model = nn.Linear(2, 2)

    def step() -> Tensor:
        h: Any = Counts.apply(model(X), numbers)  # type: ignore[no-untyped-call]
        squares: Tensor = (h - h.detach()).square().sum()
        return squares.sqrt()

    found = nanproof.locate(step, model=model, seconds=1 if numbers else None)
    assert (found.op, found.phase) == ("sqrt", "backward")
    assert found.verified is not True
    assert ("" if numbers else "not end") in found.doubt
    assert found.doubt


class Walks(nn.Module):
    def __init__(self, count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.count, self.calls = nn.Linear(2, 2), count, 0

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h * self.count(h) if bool((x > 1).any()) else h


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("count", [counts_tensors, counts_numbers])
def test_a_guarded_run_goes_on(tmp_path: Path, count: Callable[[Tensor], Tensor], closure: bool) -> None:
    model = Walks(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdicts = []
    with Guard(model, optimizer, run_dir=tmp_path / "run", policy=Policy(locate_seconds=2.0)) as guard:
        for i in range(6):
            x = X * 2 if i == 3 else X
            if closure:
                verdicts.append(guard.step(lambda x=x: model(x).square().mean()))  # type: ignore[misc]
            else:
                guard.backward(model(x).square().mean())
                verdicts.append(guard.step())
    assert [v.ok for v in verdicts] == [True, True, True, False, True, True]
    (record,) = (tmp_path / "run" / "incidents").glob("*/incident.json")
    found = Incident.from_json(json.loads(record.read_text())).location
    assert found is not None
    assert (found.op, found.function) == ("log", "stride_of")
    assert found.verified is not True


def test_what_ends_a_block_is_never_raised_after_it() -> None:
    """Many blocks whose time is over just as they end: an exception that comes too late would fail the test."""
    for _ in range(300):
        until = time.monotonic() + 0.001

        def work(until: float = until) -> None:
            while time.monotonic() < until:
                pass

        with contextlib.suppress(Endless):
            within(0.001, work)
        sum(i for i in range(100))
    assert not [t for t in threading.enumerate() if t.name == "nanproof-replay"]


TRACED = """
import sys
from nanproof.locating.bounds import Endless, within

def loop():
    while True:
        pass

def count(n):
    return sum(i for i in range(n))

within(60, lambda: count(10))
for work in (loop, lambda: count(10**5)):
    try:
        within(0.001, work)
    except Endless:
        pass
sys.settrace(lambda *_: (lambda *_: None))
print(count(1000))
"""


def test_code_can_be_traced_afterwards() -> None:
    """By a debugger, or for coverage: an exception that was taken back would let it wait forever."""
    assert run_python("-c", TRACED).stdout.strip() == "499500"


def test_a_block_in_any_thread_is_ended() -> None:
    said: list[str] = []

    def loop() -> None:
        while True:
            pass

    def run() -> None:
        try:
            within(0.01, loop)
        except Endless:
            said.append("ended")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert said == ["ended"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_waits_forever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that another thread held when the child was made stay held in it."""
    monkeypatch.setattr(apart, "foreign_code", lambda: ["kernels.so"])
    monkeypatch.setattr(apart, "_SECONDS", 0.5)
    held = threading.Lock()
    held.acquire()
    said, remark = apart.apart(lambda: held.acquire(), False, "proved")
    assert (said, remark) == (False, "not proved: it did not end within 0 seconds in a child process")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_child_says_is_read_while_another_process_holds_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a data loader's worker does that was started meanwhile: the pipe has no end until it ends."""
    monkeypatch.setattr(apart, "foreign_code", lambda: ["kernels.so"])

    def work() -> list[int]:
        if (worker := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        return [worker] * 100_000  # more than a pipe holds

    said, remark = apart.apart(work, [], "proved")
    os.kill(said[0], signal.SIGKILL)
    assert (len(said), remark) == (100_000, "")
