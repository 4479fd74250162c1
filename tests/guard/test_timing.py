"""Two timings: one host read per step, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard
from nanproof.errors import UsageError
from support.runs import Batch, digest, guarded, loss_of, make_batches, seed_everything, with_faults


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device: scalar reads, and copies to the host that are not async."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars = 0
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name == "aten::_local_scalar_dense":
            self.scalars += 1
        blocking = not kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        if name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu") and blocking:
            self.copies += 1
        if name == "aten::copy_" and blocking and args[0].numel() <= 32:
            self.copies += 1
        return function(*args, **kwargs)


def make(sync: str, fused: bool = True, **options: Any) -> tuple[nn.Module, Any, Guard]:
    seed_everything()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return (
        model,
        optimizer,
        guarded(model, optimizer, scheduler=scheduler, max_norm=1.0, timing=sync, spike_window=16, **options),
    )


@pytest.mark.parametrize(("sync", "reads"), [("exact", 50), ("deferred", 0)])
def test_host_reads_over_fifty_steps(sync: str, reads: int) -> None:
    model, _, guard = make(sync)
    batches = make_batches(52)
    for b in batches[:2]:
        guard.step(lambda b=b: loss_of(model, b))
    with HostReads() as counted:
        for b in batches[2:]:
            guard.step(lambda b=b: loss_of(model, b))
    assert (counted.scalars, counted.copies) == (reads, 0)


@dataclass
class Everything:
    """What a closure may name: the parts of the training in one object, and a whole data set."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: list[Batch]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_closure_that_names_everything_has_none_of_it_printed(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are the keys of an optimizer's state: as text, each would be read back in every step."""
    printed: list[Tensor] = []
    monkeypatch.setattr(nn.Parameter, "__repr__", lambda parameter: printed.append(parameter) or "")
    model, optimizer, guard = make("exact", accumulate=accumulate)
    all_of_it = Everything(model, optimizer, make_batches(6))
    for i in range(6):
        guard.step(lambda: loss_of(all_of_it.model, all_of_it.data[i]))  # noqa: B023
    assert printed == []


class Counted(list[float]):
    """A data set that counts how often one of its numbers is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[float]:
        for number in super().__iter__():
            self.looks += 1
            yield number


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_closure_that_names_a_data_set_does_not_have_it_read(accumulate: int) -> None:
    model, _, guard = make("exact", accumulate=accumulate)
    numbers = Counted(map(float, range(100_000)))
    for b in make_batches(10):
        guard.step(lambda b=b: loss_of(model, b) * (1 + numbers[0]))
    assert numbers.looks <= 10 * 2 * 256


def test_the_count_sees_what_a_naive_check_costs() -> None:
    model, _, _ = make("exact")
    loss_of(model, make_batches(1)[0]).backward()
    with HostReads() as counted:
        for p in model.parameters():
            assert p.grad is not None
            bool(torch.isfinite(p.grad).all())
    assert counted.scalars == len(list(model.parameters()))


def final(model: nn.Module, optimizer: Any, guard: Guard, batches: list[Batch]) -> str:
    for b in batches:
        guard.step(lambda b=b: loss_of(model, b))
    guard.close()
    return digest(model, [optimizer], *guard.training.schedulers)


@pytest.mark.parametrize("kind", ["nan", "+inf", "-inf", "spike", "grad:nan", "grad:+inf", "grad:spike"])
def test_late_is_exact_where_it_says_so(kind: str) -> None:
    """Parameters, moments, step counters, buffers, LR and schedule; there is no dropout here."""
    clean = make_batches(20)
    reference = final(*make("deferred"), clean)
    assert final(*make("exact"), clean) == reference
    assert final(*make("deferred"), with_faults(clean, {14: kind})) == reference
    assert final(*make("deferred"), with_faults(clean, {14: kind, 15: kind, 19: kind})) == reference


def test_late_accounts_a_step_later() -> None:
    model, _, guard = make("deferred")
    batches = with_faults(make_batches(10), {5: "nan"})
    for b in batches[:6]:
        guard.step(lambda b=b: loss_of(model, b))
    assert guard.tally.actions["skip"] == 0
    guard.step(lambda: loss_of(model, batches[6]))
    assert guard.tally.actions["skip"] == 1
    guard.close()
    assert guard.tally.updates == 6


def test_late_with_a_scaler_needs_no_host_read_either() -> None:
    seed_everything()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = Guard(model, optimizer, scaler=scaler, timing="deferred")
    guard.step(lambda: loss_of(model, make_batches(1)[0]))
    before = [p.detach().clone() for p in model.parameters()]
    bad = with_faults(make_batches(1), {0: "nan"})[0]
    with HostReads() as counted:
        guard.step(lambda: loss_of(model, bad))
    assert counted.scalars == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fused": False}, r"AdamW cannot\. Next: build it with fused=True"),
        ({"ema": torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))}, "cannot hold back an averaged model"),
        ({"accumulate": 2, "on_bad_microbatch": "microbatch"}, "dropping single micro-batches needs"),
    ],
)
def test_late_refuses_what_it_cannot_keep(change: dict[str, Any], words: str) -> None:
    fused = change.pop("fused", True)
    with pytest.raises(UsageError, match=words):
        make("deferred", fused=fused, **change)


def extra_ops(timing: str) -> list[int]:
    """Operations that the guard adds to steps that clip anyway, in a calm run: one for each of fifty steps."""

    class Ops(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function is not torch.ops.aten.detach.default  # no kernel; torch 2.7 calls it twice each time
            return function(*args, **(kwargs or {}))

    batches = make_batches(3)
    model, optimizer, guard = make(timing)
    scheduler = guard.training.schedulers[0]
    for _ in range(20):  # with a full window, as in a long run: limits move every step
        guard.step(lambda: loss_of(model, batches[0]))
    counts = []
    for _ in range(50):
        with Ops() as guarded_step:
            guard.step(lambda: loss_of(model, batches[1]))
        counts.append(guarded_step.count)
    with Ops() as plain:
        loss_of(model, batches[2]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [count - plain.count for count in counts]


def test_the_guard_adds_a_handful_of_operations_to_every_step() -> None:
    """It does not grow with the model: buffers are one foreach copy, the rest is a few scalars.

    Every tenth step reads four outputs here, every twentieth compares samples of three parameters.
    """
    assert max(extra_ops("exact")) <= 11
    late = extra_ops("deferred")
    assert sorted(late)[25] <= 13
    assert max(late) <= 19  # each of the three buffers is selected by itself


def test_a_tensor_is_returned_unchanged() -> None:
    t = Tensor([1.0])
    from nanproof import tap

    assert tap("x", t) is t
