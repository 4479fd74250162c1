"""Several ranks: one verdict everywhere, the origin named, nothing paired wrongly."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard, Policy
from support.ranks import on_ranks
from support.runs import Batch, Net, digest, guarded, loss_of, make_batches, seed_everything, with_faults

pytestmark = pytest.mark.slow

KINDS = ["nan", "+inf", "-inf", "spike", "grad:nan", "grad:+inf", "grad:-inf", "grad:spike"]
N, WHERE = 14, 11


class Plain(nn.Module):
    """For FSDP2: no BatchNorm, whose statistics are not sharded but differ per rank anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(torch.relu(self.first(x)), 0.2))


def make(kind: str, **options: Any) -> tuple[nn.Module, Any, Guard]:
    seed_everything()
    if kind == "ddp":
        model: nn.Module = DDP(Net())
    else:
        model = Plain()
        fully_shard(model.first)
        fully_shard(model.last)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())  # dropout differs per rank, as in a real run
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if kind == "ddp" else None
    return (
        model,
        optimizer,
        guarded(model, optimizer, scheduler=scheduler, ema=ema, max_norm=1.0, spike_window=16, **options),
    )


def train(kind: str, batches: list[Batch], **options: Any) -> tuple[str, list[Any], list[torch.Tensor]]:
    model, optimizer, guard = make(kind, **options)
    verdicts = [guard.step(lambda b=b: loss_of(model, b), batch=b) for b in batches]
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    guard.close()
    return digest(model, [optimizer], guard.training.schedulers[0], guard.training.ema), verdicts, weights


def all_faults(rank: int, kind: str) -> list[tuple[str, int, bool, Any, Any]]:
    """Every fault on every rank: is the state that of the clean run, and what was said?"""
    mine = make_batches(N, seed=rank)
    clean, verdicts, _ = train(kind, mine)
    assert all(v.ok for v in verdicts)
    found = []
    for where in (0, 1):
        for fault in KINDS:
            batches = with_faults(mine, {WHERE: fault if rank == where else "none"})
            state, verdicts, weights = train(kind, batches)
            v = verdicts[WHERE]
            same = all(torch.equal(w, _from_first(w)) for w in weights)
            found.append((fault, where, state == clean and same, (v.kind, v.level, v.rank), [x.ok for x in verdicts]))
    return found


def _from_first(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    dist.broadcast(copy, 0)
    return copy


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_fault_on_any_rank_is_vetoed_exactly_on_all(kind: str) -> None:
    first, second = on_ranks(all_faults, kind)
    for a, b in zip(first, second, strict=True):
        fault, where = a[:2]
        assert a[2], (fault, where, "state of rank 0 differs from the clean run")
        assert b[2], (fault, where, "state of rank 1 differs from the clean run")
        assert a[3:] == b[3:], (fault, where, "ranks judged differently")
        said, level, rank = a[3]
        assert said == ("spike" if "spike" in fault else "nonfinite")
        assert level == ("gradient" if "grad" in fault or fault == "spike" else "loss")
        if "spike" not in fault:  # a finite gradient leaves no trace of its origin after the reduction
            assert rank == where, (fault, where, a[3])


def unguarded(rank: int, kind: str) -> list[bool]:
    """The suite's own check: with no veto each of these faults changes every rank's weights."""
    mine = make_batches(N, seed=rank)
    watching = {"policy": Policy.observe(spikes="observe")}
    _, _, clean = train(kind, mine, **watching)
    harmed = []
    for fault in KINDS:
        _, _, weights = train(kind, with_faults(mine, {WHERE: fault if rank == 1 else "none"}), **watching)
        harmed.append(not any(torch.equal(a, b) for a, b in zip(weights, clean, strict=True)))
    return harmed


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_without_vetoes_every_fault_harms_every_rank(kind: str) -> None:
    assert on_ranks(unguarded, kind) == [[True] * len(KINDS)] * 2


def late_faults(rank: int) -> list[bool]:
    """The device's veto under DDP: no host read, and still the same decision on both ranks."""
    mine = make_batches(N, seed=rank)

    def run(batches: list[Batch]) -> str:
        seed_everything()
        model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with guarded(model, optimizer, max_norm=1.0, spike_window=16, timing="deferred") as guard:
            for b in batches:
                guard.step(lambda b=b: loss_of(model, b))
        return digest(model, [optimizer])

    clean = run(mine)
    return [
        run(with_faults(mine, {WHERE: fault if rank == where else "none"})) == clean
        for where in (0, 1)
        for fault in KINDS
    ]


def test_late_vetoes_on_all_ranks_too() -> None:
    assert on_ranks(late_faults) == [[True] * 2 * len(KINDS)] * 2


def microbatches(rank: int) -> tuple[bool, bool, int]:
    """Rank 1 drops one of four; the divisor is the global count of good ones: seven."""
    mine = make_batches(8, seed=rank)
    options = {"accumulate": 4, "on_bad_microbatch": "microbatch", "policy": Policy(rerun=False)}
    model, _, guard = make("ddp", **options)
    batches = list(mine[:4])
    if rank == 1:
        batches[2] = Batch(batches[2].x, batches[2].y, "nan")
    verdicts = [guard.step(lambda b=b: loss_of(model, b)).ok for b in batches]
    got = [p.detach().clone() for p in model.parameters()]
    # by hand: the same seven micro-batches, summed over ranks and divided by seven
    seed_everything()
    twin = Net()
    torch.manual_seed(rank)
    total = None
    for i, b in enumerate(mine[:4]):
        if rank == 1 and i == 2:
            continue
        grads = torch.autograd.grad(loss_of(twin, b), list(twin.parameters()))
        total = grads if total is None else [a + g for a, g in zip(total, grads, strict=True)]
    assert total is not None
    for p, g in zip(twin.parameters(), total, strict=True):
        dist.all_reduce(g)
        p.grad = g / 7
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=1e-2).step()
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, twin.parameters(), strict=True))
    guard.close()
    return close, all(torch.equal(w, _from_first(w)) for w in got), verdicts.count(True)


def test_a_rank_drops_its_own_microbatch_and_the_divisor_is_global() -> None:
    assert on_ranks(microbatches) == [(True, True, 4), (True, True, 3)]


def healthy_microbatches(rank: int) -> bool:
    """Without a fault: statistics, weights and moments of a plain loop that accumulates under no_sync."""
    mine = make_batches(16, seed=rank)

    def run(guarding: bool) -> str:
        seed_everything()
        model = DDP(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        torch.manual_seed(rank)
        if guarding:
            options = {"accumulate": 4, "on_bad_microbatch": "microbatch"}
            with guarded(model, optimizer, **options) as guard:
                for b in mine:
                    guard.step(lambda b=b: loss_of(model, b))
        else:
            for i, b in enumerate(mine):
                with model.no_sync():  # as the guard does it: sums of local gradients are reduced once
                    loss_of(model, b).backward()
                if i % 4 == 3:
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= 8
                    optimizer.step()
                    optimizer.zero_grad()
                    model.require_forward_param_sync = True
        return digest(model.module, [])

    return run(True) == run(False)


def test_healthy_microbatches_leave_the_statistics_of_a_plain_loop() -> None:
    assert on_ranks(healthy_microbatches) == [True, True]


def windows(rank: int) -> tuple[bool, list[bool]]:
    mine = make_batches(24, seed=rank)
    clean, _, _ = train("ddp", mine[:16] + mine[20:], accumulate=4)
    bad = list(mine)
    if rank == 0:
        bad[17] = Batch(bad[17].x, bad[17].y, "nan")
    state, verdicts, _ = train("ddp", bad, accumulate=4)
    return state == clean, [v.ok or v.pending for v in verdicts]


def test_a_bad_window_is_dropped_on_all_ranks() -> None:
    for exact, oks in on_ranks(windows):
        assert exact
        assert [i for i, ok in enumerate(oks) if not ok] == [19]


class Length(nn.Module):
    """The gradient of its root is infinite for a sample of zeros, its output is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = self.inner(x).square().sum(1, keepdim=True).sqrt()
        return self.outer(self.inner(x)) * length


def bad_gradients(rank: int, run_dir: str, closure: bool) -> tuple[list[Any], str]:
    """Two windows of three; a finite loss of rank 1's fifth micro-batch has a gradient that is not finite."""
    seed_everything()
    model = DDP(Length())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, accumulate=3, run_dir=run_dir, locate_seconds=60.0)
    for i in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + i))
        x[2] *= not (rank == 1 and i == 4)
        if closure:
            verdict = guard.step(lambda x=x: model(x).square().mean(), batch=x)
        else:
            guard.backward(model(x).square().mean(), batch=x)
            verdict = guard.step()
    guard.close()
    return [verdict.kind, verdict.level], digest(model.module, [optimizer])


@pytest.mark.parametrize("closure", [True, False])
def test_a_bad_gradient_is_blamed_on_its_rank_and_micro_batch(closure: bool, tmp_path: Path) -> None:
    (said, first), (_, second) = on_ranks(bad_gradients, str(tmp_path), closure)
    assert said == ["nonfinite", "gradient"]
    assert first == second
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("incidents/*/incident.json"))]
    assert [(i["id"], i["verdict"]["rank"]) for i in found] == [("000002-r0", 1), ("000002-r1", 1)]
    assert ".sqrt()" in "".join(found[1]["location"]["code"])
    assert found[1]["location"]["verified"]
    stored = load_file(tmp_path / "incidents" / "000002-r1" / "batch.safetensors")
    assert [t[2].count_nonzero().item() for t in stored.values()] == [0]


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.sizes.append(sum(t.numel() for t in tensors if isinstance(t, torch.Tensor)))
        return function(*args, **(kwargs or {}))


def collectives(rank: int, share: str, bad: bool) -> tuple[int, int, int]:
    mine = make_batches(6, seed=rank)
    seed_everything()
    model: nn.Module = DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def plain(b: Batch) -> None:
        loss_of(model, b).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for b in mine[:3]:
        plain(b)  # DDP rebuilds its buckets after the first steps
    with Collectives() as before:
        plain(mine[3])
    guard = guarded(model, optimizer, max_norm=1.0, share=share, policy=Policy(rerun=False))
    batch = Batch(mine[4].x, mine[4].y, "nan" if bad and rank == 1 else None)
    with Collectives() as after:
        ok = guard.step(lambda: loss_of(model, batch)).ok
    assert ok is not bad
    guard.close()
    return len(before.sizes), len(after.sizes), min(after.sizes)


def test_one_small_collective_per_step_and_none_when_gradients_carry_it() -> None:
    for plain, with_guard, smallest in on_ranks(collectives, "flags", False):
        assert with_guard == plain + 1
        assert smallest <= 16
    for plain, with_guard, _ in on_ranks(collectives, "gradients", False):
        assert with_guard == plain


def fall_out_of_step(rank: int) -> str:
    model, _, guard = make("ddp", deadline=300.0, policy=Policy(rerun=False))
    net = model.module
    for i, b in enumerate(guard.batches(make_batches(6, seed=rank))):
        if rank == 1 and i == 2:
            continue  # the bug: one rank leaves a batch out
        try:
            guard.step(lambda b=b: loss_of(net, b))  # no gradient reduction that could hang first
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_leaves_a_batch_out_is_named_at_once() -> None:
    first, second = on_ranks(fall_out_of_step, timeout=600)
    assert first == second
    assert first.startswith(
        "DesyncError: ranks are out of step at guarded step 3: rank 0 at batch 3, rank 1 at batch 4"
    )


def vanish(rank: int) -> tuple[int, list[str]]:
    """Rank 1 comes late to step 2, far past the deadline, and leaves before step 4."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nanproof").addHandler(handler)
    seed_everything()
    model = DDP(nn.Linear(2, 2))
    guard = guarded(model, torch.optim.SGD(model.parameters(), lr=0.1), deadline=1.0)
    for i in range(1, 5):
        if rank == 1 and i == 2:
            time.sleep(4)
        if rank == 1 and i == 4:
            break
        # outside DDP, whose own reduction would end the run of the rank that stays
        guard.step(lambda: sum(p.sum() for p in model.module.parameters()))
    return guard.tally.updates, said


def test_a_late_rank_is_named_within_the_deadline_and_harms_nothing() -> None:
    first, second = on_ranks(vanish)
    assert first[0] == 4, "a rank that comes late, or never again, ends no run"
    assert second[0] == 3
    named = [m for m in first[1] if "waited" in m]
    assert any("rank 0 has waited" in m and "at guarded step 2 for rank 1" in m for m in named)
    assert any("from now on rank 0 is guarded alone" in m for m in first[1])
