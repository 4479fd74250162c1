"""The short part of `make chaos`, tier A, and the trials that once found something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.numeric import Fault, Trial, check, draw
from chaos.workers import TrialError, Workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(deadline=300) as workers:
        yield workers


@pytest.mark.parametrize("seed", range(6))
def test_the_bad_batches_never_happened(workers: Workers, seed: int) -> None:
    check(workers, draw(seed))


def of(**changes: object) -> Trial:
    usual = {
        "seed": 1,
        "layout": "ddp",
        "precision": "fp32",
        "optimizer": "adamw",
        "accumulate": 2,
        "drop": "window",
        "closure": True,
        "rerun": True,
        "averaged": False,
        "max_norm": 1.0,
        "snapshot_every": 3,
        "faults": (),
    }
    return Trial(**{**usual, **changes})  # type: ignore[arg-type]


FOUND = {
    "a spike in an early micro-batch of one rank": of(
        faults=(Fault(window=14, micro=0, ranks=(0,), site="loss", kind="spike"),)
    ),
    "a bad input in an early micro-batch of one rank": of(
        faults=(Fault(window=14, micro=0, ranks=(1,), site="input", kind="nan"),)
    ),
    "an infinite loss of one rank under a scaler, without a second run": of(
        layout="fsdp2",
        precision="fp16",
        accumulate=4,
        faults=(Fault(window=11, micro=2, ranks=(0,), site="loss", kind="+inf"),),
    ),
    "a second run in float32 of bfloat16 weights, after which DDP reduced nothing": of(
        precision="bf16 weights",
        accumulate=1,
        max_norm=None,
        faults=(Fault(window=12, micro=0, ranks=(1,), site="loss", kind="nan"),),
    ),
    "a second run in float32 of sharded bfloat16 weights, which FSDP2 did not survive": of(
        layout="fsdp2",
        precision="bf16 weights",
        accumulate=1,
        max_norm=None,
        faults=(Fault(window=13, micro=0, ranks=(0,), site="activation", kind="nan"),),
    ),
    "a second micro-batch without a closure, whose random states a veto then went back to": of(
        seed=5202,
        layout="nested",
        accumulate=4,
        closure=False,
        rerun=False,
        max_norm=None,
        faults=(Fault(window=12, micro=2, ranks=(1,), site="activation", kind="+inf"),),
    ),
    "a first micro-batch left out on both ranks, and with it the statistics that DDP had just shared": of(
        seed=5081,
        layout="nested",
        optimizer="sgd",
        accumulate=4,
        drop="microbatch",
        rerun=False,
        averaged=True,
        max_norm=0.1,
        faults=(Fault(window=14, micro=0, ranks=(0, 1), site="loss", kind="spike"),),
    ),
    "a look at sharded weights whose memory FSDP2 had taken back, which ended the process": of(
        seed=79,
        layout="fsdp2",
        precision="bf16",
        optimizer="rmsprop",
        accumulate=1,
        closure=False,
        rerun=False,
        faults=tuple(
            Fault(window=w, micro=0, ranks=(r,), site="input", kind=k) for w, r, k in ((14, 1, "+inf"), (15, 0, "nan"))
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_trials_found_before(workers: Workers, name: str) -> None:
    check(workers, FOUND[name])


def never_ends(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        dist.recv(torch.zeros(1), 0)


def test_a_rank_that_hangs_is_named_and_the_next_trial_is_not_spoiled() -> None:
    with Workers(deadline=3) as workers:
        with pytest.raises(TrialError, match=r"rank 1 gave no answer .* for 3 s \(a deadlock\)"):
            workers.run(never_ends)
        workers.deadline = 300
        assert workers.run(rank_of) == [0, 1]


def rank_of(rank: int) -> int:
    return rank


def dies(rank: int) -> None:
    import os

    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    from nanproof import Guard

    model = torch.nn.Linear(2, 2)
    guard = Guard(DDP(model), torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        if rank == 1 and step == 2:
            os._exit(3)
        guard.step(lambda: model(torch.ones(1, 2)).sum())  # not through DDP, whose own reduction would fail first


def test_a_rank_that_dies_ends_no_other() -> None:
    with Workers(deadline=300) as workers, pytest.raises(TrialError) as caught:
        workers.run(dies)
    assert str(caught.value) == "rank 1: its process ended with 3"
