"""The model and the data of `make engines`: batch 7 of rank 1 holds a NaN, or was never there."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCHES, BAD, SIZE = 12, 7, 4
mode = "bad"


def each(train: Callable[[], Any]) -> None:
    """Train with the bad batch, and as if it had never come; print one RESULT line for each, per rank."""
    global mode
    for chosen in ("bad", "without"):
        mode = chosen
        try:
            train()
        except Exception as error:
            traceback.print_exc()
            _say("EXC", f"{type(error).__name__}: {str(error)[:150]}".replace("\n", " "))


def make_model(*, norm: bool = False, drop: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(8, 16)]
    parts += [nn.BatchNorm1d(16)] if norm else []
    parts += [nn.ReLU()]
    parts += [nn.Dropout(0.1)] if drop else []
    return nn.Sequential(*parts, nn.Linear(16, 2))


def batches(rank: int = 0, guilty: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a rank; with ``guilty`` equal to it, one of them is bad."""
    generator = torch.Generator().manual_seed(100 + rank)
    for i in range(BATCHES):
        x, y = torch.randn(SIZE, 8, generator=generator), torch.randint(0, 2, (SIZE,), generator=generator)
        if i == BAD:
            if mode == "without":
                continue
            if rank == guilty:
                x[1, 2] = float("nan")
        yield x, y


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The same, sample by sample; interleaved as a DistributedSampler without shuffling deals them to two ranks."""

    def __init__(self, world: int = 1) -> None:
        dealt = [list(batches(r, guilty=world - 1)) for r in range(world)]
        self.x = torch.stack(
            [dealt[r][i][0][j] for i in range(len(dealt[0])) for j in range(SIZE) for r in range(world)]
        )
        self.y = torch.stack(
            [dealt[r][i][1][j] for i in range(len(dealt[0])) for j in range(SIZE) for r in range(world)]
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def report(named: Any) -> None:
    """The digest of a training state on this rank."""
    digest, finite = hashlib.sha256(), True
    for _, tensor in sorted(dict(named).items()):
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        finite = finite and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()))
        digest.update(tensor.contiguous().cpu().float().numpy().tobytes())
    _say("finite" if finite else "NON-FINITE", digest.hexdigest()[:16])


def _say(kind: str, text: str) -> None:
    sys.stdout.flush()
    file = os.environ.get("RESULTS")
    to = os.open(file, os.O_WRONLY | os.O_APPEND) if file else 1
    os.write(to, f"RESULT {os.environ.get('RANK', '0')} {mode} {kind} {text}\n".encode())  # whole, among other ranks'
