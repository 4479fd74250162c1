"""The failure boundary: whatever of the guard raises, in any driver, the run ends as the unguarded one would."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import nanproof.guard
from nanproof.guard.boundary import Boundary
from nanproof.guard.external import attach
from support.runs import Net, digest, guarded, loss_of, make_batches, seed_everything, with_faults

pytestmark = pytest.mark.slow

MODULES = tuple(
    importlib.import_module(f"nanproof.guard.{m.name}") for m in pkgutil.iter_modules(nanproof.guard.__path__)
)
THE_LOOPS_OWN = ("Guard.", "OwnLoop.", "Deferred.", "BatchReplay.", "FrozenClosure.", "update.")
"""What the loop calls by itself, runs its passes in, and makes its updates with: its exceptions are the loop's."""
BOUNDARY = {
    "Boundary": "surviving around hook failed _record_failure",
    "Context": "failed failure _record_failure tell record stop require_running",
    "Engine": "begin judge finish lowered fall_back close see next_pass abandon",
    "ExternalLoop": "judge judge_clip step left _stepped close",
    "Passes": "in_backward before_backward after_backward",
    "OpenStep": "saw next_pass abandon parameters",
    "training": "gradients_of",
    "Training": "zero_grad",
    "DataSource": "add",
}
"""What a driver calls, and the boundary itself: they must work for anything to be survived. DataSource.add has a
boundary of its own around it in `nanproof run`."""


def is_boundary(name: str) -> bool:
    owner, _, attribute = name.partition(".")
    return attribute in BOUNDARY.get(owner, "").split()


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


ALL = [f for f in functions() if not f[0].startswith(THE_LOOPS_OWN) and not is_boundary(f[0])]


def small() -> nn.Module:
    """Without dropout: deferred timing does not give random states back."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


@dataclass
class Ended:
    digest: str
    finite: bool


def ended(model: nn.Module, optimizer: torch.optim.Optimizer) -> Ended:
    return Ended(digest(model, [optimizer]), all(bool(p.isfinite().all()) for p in model.parameters()))


Made = Callable[[], None]
"""Called when the guard stands and training begins."""


def own_loop(batches: list[Any], run_dir: Path | None, made: Made) -> Ended:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, snapshot_every=3, run_dir=run_dir)
    made()
    for b in guard.batches(batches):
        guard.step(lambda b=b: loss_of(model, b))
    guard.close()
    return ended(model, optimizer)


def without_closure(batches: list[Any], run_dir: Path | None, made: Made) -> Ended:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, snapshot_every=3, run_dir=run_dir)
    made()
    for b in batches:
        guard.backward(loss_of(model, b), batch=b)
        guard.step()
    guard.close()
    return ended(model, optimizer)


def external(batches: list[Any], run_dir: Path | None, made: Made) -> Ended:
    seed_everything()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = attach(model, optimizer, run_dir=run_dir)
    made()
    for b in batches:
        loop.passes.data.add(b, "a batch")
        loss = loss_of(model, b)
        with loop.in_backward(loss):
            loss.backward()
        if loop.judge_clip(list(model.parameters())):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loop.step(optimizer, optimizer.step)
        optimizer.zero_grad()
    loop.close()
    return ended(model, optimizer)


def deferred(batches: list[Any], run_dir: Path | None, made: Made) -> Ended:
    seed_everything()
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    guard = guarded(model, optimizer, max_norm=1.0, spike_window=8, timing="deferred", run_dir=run_dir)
    made()
    for b in batches:
        guard.step(lambda b=b: loss_of(model, b))
    guard.close()
    return ended(model, optimizer)


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


DRIVERS: dict[str, Callable[[list[Any], Path | None, Made], Ended]] = {
    "own loop": own_loop,
    "without closure": without_closure,
    "external": external,
    "deferred": deferred,
}


def replace(patch: pytest.MonkeyPatch, owner: Any, attribute: str, by: Callable[..., Any]) -> None:
    patch.setattr(owner, attribute, by)
    for module in MODULES:  # functions that others have imported by name
        if inspect.ismodule(owner) and attribute in vars(module):
            patch.setattr(module, attribute, by)


def taking_part(driver: str, batches: list[Any], folder: Path) -> list[tuple[str, Any, str]]:
    """The functions of the guard that run once training has begun."""
    called: set[str] = set()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return original(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name, owner, attribute in ALL:
            replace(patch, owner, attribute, noting(name, vars(owner)[attribute]))
        DRIVERS[driver](batches, folder, called.clear)
    return [f for f in ALL if f[0] in called]


def break_each_function(driver: str, batches: list[Any], folder: Path) -> Iterator[tuple[str, Ended | None]]:
    """One run for every function that takes part, which raises in it from the first step on: how the run ended."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("injected")

    found = taking_part(driver, batches, folder / "whole")
    assert len(found) > 40, "too few functions to be the guard's"
    for number, (name, owner, attribute) in enumerate(found):
        with pytest.MonkeyPatch.context() as patch:
            try:
                made = functools.partial(replace, patch, owner, attribute, broken)
                how = DRIVERS[driver](batches, folder / f"{number}", made)
            except Exception as error:
                if "injected" not in f"{error!r}{error.__context__!r}":
                    raise
                how = None
        yield name, how


# functions that garbage collection calls are broken, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_function_of_the_guard_can_end_or_change_a_healthy_run(
    driver: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.CRITICAL, "nanproof")
    batches = make_batches(5)
    plain = unguarded(batches, fused=driver == "deferred")
    assert DRIVERS[driver](batches, None, lambda: None).digest == plain
    wrong = []
    for name, how in break_each_function(driver, batches, tmp_path):
        if how is None or how.digest != plain:
            wrong.append(f"{name}: the run {'died' if how is None else 'differs'}")
    assert wrong == []


# functions that garbage collection calls are broken, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("driver", DRIVERS)
def test_no_function_of_the_guard_lets_a_bad_step_through(
    driver: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Even under the plainest check parameters stay finite."""
    caplog.set_level(logging.CRITICAL, "nanproof")
    batches = with_faults(make_batches(4), {2: "nan"})
    wrong = []
    for name, how in break_each_function(driver, batches, tmp_path):
        if how is None or not how.finite:
            wrong.append(f"{name}: {'the run died' if how is None else 'NaN got into the parameters'}")
    assert wrong == []


def test_a_failure_is_recorded_each_time_and_printed_once(caplog: pytest.LogCaptureFixture) -> None:
    class Records(Boundary):
        kept: ClassVar[list[str]] = []

        def _record_failure(self, doing: str, said: str, *, first: bool) -> None:
            self.kept.append(said)

    ours = Records()
    for _ in range(3):
        with ours.surviving("taking a snapshot"):
            raise OSError("disk full")
    entered = 0
    for _ in range(2):
        with ours.around("waiting", lambda: contextlib.nullcontext(1 / 0)):
            entered += 1  # the loop's own work
    assert entered == 2
    assert ours.hook("watching", lambda: 1 / 0)() is None
    assert [said.partition(":")[0] for said in ours.kept] == ["taking a snapshot"] * 3 + ["waiting"] * 2 + ["watching"]
    assert [r.getMessage() for r in caplog.records] == [
        "nanproof: guard-failed, taking a snapshot: OSError: disk full",
        "nanproof: guard-failed, waiting: ZeroDivisionError: division by zero",
        "nanproof: guard-failed, watching: ZeroDivisionError: division by zero",
    ]
