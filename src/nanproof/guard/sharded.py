"""Checkpoints of sharded models (FSDP2): a folder in torch's distributed format, written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoint import scan
from ..errors import FormatError, NonFiniteError, UsageError
from ..files import atomic_file, make_folder, move, remove
from .ranks import Ranks
from .training import Training

REST = "nanproof.pt"


def save_sharded(training: Training, ranks: Ranks, path: Path, rest: dict[str, Any]) -> None:
    """Every rank writes its shards into a hidden folder; the first one makes it visible when all are done."""
    if path.exists():
        raise UsageError(f"{path} exists already", hint="choose another name")
    hidden = path.with_name(f".{path.name}.tmp")
    if ranks.rank == 0:
        remove(hidden)
        make_folder(hidden)
    dist.barrier()
    model, optimizers = get_state_dict(training.model, training.optimizers)
    save({"model": model, "optimizers": optimizers}, checkpoint_id=hidden)
    if ranks.rank == 0:
        with atomic_file(hidden / REST) as file:
            torch.save(rest, file)
        move(hidden, path)
    dist.barrier()


def read_sharded(path: Path) -> dict[str, Any]:
    """What is not sharded: schedules, counters, random states. The shards themselves are scanned first.

    torch reads the index of such a folder with pickle; the scan reads it without executing anything, and a
    folder that holds anything unusual goes no further.
    """
    report = scan(path)
    if report.health == "corrupt":
        raise NonFiniteError(f"{path.name} is corrupt: {'; '.join(report.reasons[:2])}")
    if report.health != "healthy":  # suspect too: its index may call something, and torch would execute that
        raise FormatError(f"{path.name} is refused: {'; '.join(report.reasons[:2])}")
    try:
        state: dict[str, Any] = torch.load(path / REST, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FormatError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error
    return state


class _InertPlanner(DefaultLoadPlanner):
    """Reads plain values without executing what a file may hold in their place; torch's own planner would."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = torch.load(value, weights_only=True)
        plain = io.BytesIO()
        torch.save(checked, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_sharded(training: Training, path: Path) -> None:
    """Load the shards that belong to this rank, however many ranks wrote them."""
    model, optimizers = get_state_dict(training.model, training.optimizers)
    state: dict[str, Any] = {"model": model, "optimizers": optimizers}
    load(state, checkpoint_id=path, planner=_InertPlanner())
    set_state_dict(
        training.model, training.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizers"]
    )
