"""The failure boundary: whatever of the guard raises, in any driver, the run ends as the unguarded one would."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanproof.guard import (
    auto_locate,
    data,
    engine,
    examine,
    forward_capture,
    incident,
    judge,
    motion,
    optimizer_groups,
    readback,
    recorder,
    rng_tracking,
    rows,
    rundir,
    signals,
    snapshots,
    step,
    taps,
    training,
    window,
)
from nanproof.guard.external import attach
from support.runs import Net, digest, guarded, loss_of, make_batches, seed_everything, with_faults

MODULES = (
    auto_locate, data, engine, examine, forward_capture, incident, judge, motion, optimizer_groups, readback,
    recorder, rng_tracking, rows, rundir, signals, snapshots, step, taps, training, window,
)  # fmt: skip
# what a driver calls to open a step, and the boundary itself: they must work for anything to be survived
BOUNDARY = {
    "Engine.__init__", "Engine.begin", "Engine.judge", "Engine.finish", "Engine.surviving", "Engine._failed",
    "Engine._fall_back", "Engine._tell", "Engine._tell_event", "Engine.require_running", "Engine._no_reading",
    "Engine.stop", "Engine._together", "Engine.close", "Engine.state_dict", "Engine.load_state_dict",
    "Engine.abandon", "Engine.see", "Engine.watch_pass", "Engine.subscribe", "Engine.block", "Engine.check_state",
    "Engine._record", "OpenStep.saw", "OpenStep.abandon", "OpenStep.parameters", "OpenStep.culprit",
    "OptimizerGroups.of", "OptimizerGroups.get", "OptimizerGroups.learn", "OptimizerGroups.several",
    "training.gradients_of", "Training.zero_grad",
}  # fmt: skip


def functions() -> Iterator[tuple[str, Any, str]]:
    """Every function and method of the engine: its name, its owner, its attribute."""
    for module in MODULES:
        short = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{short}.{name}", module, name
            elif inspect.isclass(value):
                for attribute, member in vars(value).items():
                    if inspect.isfunction(member) and not attribute.startswith("__"):
                        yield f"{value.__name__}.{attribute}", value, attribute


ALL = [f for f in functions() if f[0] not in BOUNDARY]


def small() -> nn.Module:
    """Without dropout: deferred timing does not give random states back."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def own_loop(batches: list[Any], run_dir: Path | None, **options: Any) -> str:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, snapshot_every=3, run_dir=run_dir, **options)
    for b in guard.batches(batches):
        guard.step(lambda b=b: loss_of(model, b))
    guard.close()
    return digest(model, [optimizer])


def without_closure(batches: list[Any], run_dir: Path | None) -> str:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, snapshot_every=3, run_dir=run_dir)
    for b in batches:
        guard.backward(loss_of(model, b), batch=b)
        guard.step()
    guard.close()
    return digest(model, [optimizer])


def external(batches: list[Any], run_dir: Path | None) -> str:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = attach(model, optimizer, run_dir=run_dir)
    for b in batches:
        loop.data.add(b, "a batch")
        loss = loss_of(model, b)
        with loop.in_backward(loss):
            loss.backward()
        if loop.judge_clip(list(model.parameters())):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loop.step(optimizer, optimizer.step)
        optimizer.zero_grad()
    loop.close()
    return digest(model, [optimizer])


def deferred(batches: list[Any], run_dir: Path | None) -> str:
    seed_everything()
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, timing="deferred", run_dir=run_dir)
    for b in batches:
        guard.step(lambda b=b: loss_of(model, b))
    guard.close()
    return digest(model, [optimizer])


def unguarded(batches: list[Any], fused: bool) -> str:
    seed_everything()
    model = small() if fused else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused or None)
    for b in batches:
        loss_of(model, b).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model, [optimizer])


DRIVERS: dict[str, Callable[..., str]] = {
    "own loop": own_loop,
    "without closure": without_closure,
    "external": external,
    "deferred": deferred,
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_function_of_the_guard_can_end_or_change_a_healthy_run(
    driver: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.CRITICAL, "nanproof")
    batches = make_batches(7)
    plain = unguarded(batches, fused=driver == "deferred")
    assert DRIVERS[driver](batches, None) == plain
    wrong, raised = [], 0
    for number, (name, owner, attribute) in enumerate(ALL):
        hits = 0

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal hits
            hits += 1
            raise ZeroDivisionError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, broken)
            for module in MODULES:  # functions that others have imported by name
                if inspect.ismodule(owner) and attribute in vars(module):
                    patch.setattr(module, attribute, broken)
            try:
                ended = DRIVERS[driver](batches, tmp_path / f"{number}")
            except ZeroDivisionError:
                if hits == 1:
                    continue  # while the guard was being made: an error before anything runs
                wrong.append(f"{name}: the run died")
                continue
            raised += hits > 0
            if ended != plain:
                wrong.append(f"{name}: the run differs")
    assert wrong == []
    assert raised > 20, "most of these functions take part in a healthy run"


@pytest.mark.parametrize("driver", ["own loop", "without closure", "external"])
def test_no_function_of_the_guard_lets_a_bad_step_through(
    driver: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Even under the plainest check parameters stay finite."""
    caplog.set_level(logging.CRITICAL, "nanproof")
    batches = with_faults(make_batches(5), {3: "nan"})
    clean = unguarded(make_batches(5), fused=False)
    assert DRIVERS[driver](batches, None) == clean
    wrong = []
    for number, (name, owner, attribute) in enumerate(ALL):
        hits = 0

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal hits
            hits += 1
            raise ZeroDivisionError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, broken)
            for module in MODULES:
                if inspect.ismodule(owner) and attribute in vars(module):
                    patch.setattr(module, attribute, broken)
            try:
                DRIVERS[driver](batches, tmp_path / f"{number}")
            except ZeroDivisionError:
                if hits > 1:
                    wrong.append(name)
    assert wrong == []
