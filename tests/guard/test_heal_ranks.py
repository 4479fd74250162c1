"""Healing on several ranks: all open the same islands in the same step, and go back to the same state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nanproof import Guard, Policy, islands
from support.hot import Block, Net
from support.ranks import on_ranks

pytestmark = pytest.mark.slow

N, BAD = 6, 3


def given(rank: int, n: int, bad: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of a rank's own; that at ``bad`` leaves float16's range on rank 1 only."""
    g = torch.Generator().manual_seed(3 + rank)
    sizes = [8.0 if i == bad and rank == 1 else 0.5 for i in range(n)]
    return [(torch.randn(4, 8, generator=g) * s, torch.randn(4, 8, generator=g)) for s in sizes]


def digest(model: nn.Module) -> float:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]  # type: ignore[operator]
    return float(torch.stack([p.detach().double().abs().sum() for p in whole]).sum())


def wrapped(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net(Raising if way == "one rank raises" else Block, gain=2e4)
    if way.startswith("FSDP2"):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16) if "float16" in way else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    return DistributedDataParallel(model.half() if way == "DDP float16" else model)


class Raising(Block):
    """Cannot compute in float32 on the first rank: its kernel refuses."""

    def forward(self, x: Tensor) -> Tensor:
        hot = self.up(x) * self.gain
        if hot.dtype is torch.float32 and self.gain > 1 and torch.distributed.get_rank() == 0:
            raise RuntimeError("no float32 kernel")
        return x + self.down(hot / self.gain)


WAYS = ("DDP", "DDP float16", "FSDP2", "FSDP2 float16", "one rank raises")


def heals(rank: int) -> dict[str, tuple[int, list[str], float]]:
    """Updates, islands and weights at the end, for each way of training on several ranks."""
    found = {}
    for way in WAYS:
        model = wrapped(way)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        dtype = torch.float16 if way == "DDP float16" else torch.float32

        def loss(x: Tensor, y: Tensor, model: nn.Module = model, way: str = way, dtype: Any = dtype) -> Tensor:
            with torch.autocast("cpu", torch.float16, enabled="float16" not in way):
                out = model(x.to(dtype))
            return (out.float() - y).pow(2).mean()

        with Guard(model, optimizer, heal="open", max_norm=10.0) as guard:
            for x, y in given(rank, N, BAD):
                guard.step(lambda x=x, y=y, loss=loss: loss(x, y))
        found[way] = (guard.tally.updates, [i.path for i in islands.list(model)], digest(model))
    return found


def test_all_ranks_open_the_same_island_for_a_batch_of_one() -> None:
    first, second = on_ranks(heals)
    assert first == second
    for way in WAYS[:4]:
        assert first[way][:2] == (N, ["blocks.1"]), way
    updates, paths, _ = first["one rank raises"]
    assert updates >= N - 1, "no rank waits for another"
    assert paths != ["blocks.1"]


def diverges(rank: int) -> tuple[int, int, int, float]:
    """Rank 1 alone sees that the run has diverged, and it has seen a hard batch before the second island."""
    first, second, broken = 24, 30, 32
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(gain=2e4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    late = Block(2e4)
    rolled = -1
    with Guard(model, optimizer, heal="open", max_norm=10.0) as guard:
        for i, (x, y) in enumerate(given(rank, 42, first)):
            if i == second:
                model.module.blocks[2].gain = late.gain
            hard = 1e3 if rank == 1 and (i == second - 1 or (i > broken and rolled < 0)) else 1.0

            def loss(x: Tensor = x, y: Tensor = y, hard: float = hard, i: int = i) -> Tensor:
                with torch.autocast("cpu", torch.float16):
                    out = model(x * (16 if i == second else 1))
                return (out.float() - y).pow(2).mean() * hard

            guard.step(loss)
            if guard.tally.actions["rollback"] and rolled < 0:
                rolled = guard.tally.updates
    return guard.tally.actions["heal"], guard.tally.actions["rollback"], rolled, digest(model)


def test_ranks_whose_losses_differ_go_back_to_the_same_state() -> None:
    one, other = on_ranks(diverges)
    assert one == other
    heals, rollbacks, updates, _ = one
    assert (heals, rollbacks) == (2, 1)
    assert updates == 24, "the state of the first island: of the second one, rank 1 had seen a hard batch before"


def steps_with_half_adam(rank: int, heal: str) -> tuple[list[float], bool, list[tuple[str, float]]]:
    """Losses of float16 shards under Adam, whose eps of 1e-8 is 0 there."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 5)).half())
    x = torch.randint(0, 50, (32, 4), generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with Guard(model, optimizer, heal=heal, policy=Policy(mode="observe")) as guard:
        for _ in range(20):

            def loss() -> Tensor:
                return nn.functional.cross_entropy(model(x).float(), x[:, 0] % 5)

            guard.step(loss)
            losses.append(loss().item())
    finite = math.isfinite(digest(model))
    return losses, finite, [(r.kind, r.value) for r in guard.repairs]


def test_shards_agree_on_an_eps_that_is_not_zero() -> None:
    assert not all(finite for _, finite, _ in on_ranks(steps_with_half_adam, "off"))
    (losses, one, mine), (_, other, theirs) = on_ranks(steps_with_half_adam, "open")
    assert one
    assert other
    assert mine == theirs
    assert [kind for kind, _ in mine] == ["eps"]
    assert losses[-1] < 0.8 * losses[0]
