"""Precision islands: single modules that compute in float32 inside a half-precision model.

    nanproof.islands.open(model, "layers.0.mlp")

From then on the module computes in float32: its inputs are widened, autocast is off, and half-precision weights are
widened inside, with gradients flowing back to them. Its parameters keep their dtype. Use it in evaluation too.
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..errors import UsageError
from ..records import RepairKind
from .island import Island, island_of
from .lines import LINES, Place

__all__ = ["OpenIsland", "close", "list", "open"]
_builtin_list = list


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIsland:
    """An island that is open."""

    path: str
    """The module's path in the model; empty for the model itself; FILE:LINE for a line."""
    kind: RepairKind
    dtype: str
    """What it computes in, where that is its kind; else empty."""
    parameters: int
    """How many parameters it holds."""
    share: float
    """The same as a share of the model's."""


def open(
    model: nn.Module,
    *paths: str,
    dtype: torch.dtype = torch.float32,
    kind: Literal["float32", "eager", "math-attention"] = "float32",
) -> None:
    """Let modules compute in float32 from now on; or eagerly, or with the math attention kernel (``kind``).

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    >>> open(model, "1")
    >>> model(torch.full((1, 2), 3e4).half()).dtype, [island.path for island in list(model)]
    (torch.float16, ['1'])
    >>> close(model)

    A path is a name from ``model.named_modules()``, "" for the whole model, or ``FILE:LINE`` for what one line of
    code computes outside of any module. Wrappers (DDP, torch.compile) may be around the model or not. Islands inside
    of an island that is opened are closed: the larger one holds them.
    """
    for path in paths:
        open_one(model, path, dtype=dtype, kind=kind)


def close(model: nn.Module, *paths: str) -> None:
    """Let modules compute as they did before; without paths all islands of the model, and all lines."""
    for path in paths or [island.path for island in list(model)]:
        place = place_in(path)
        if place is not None:
            LINES.remove(place)
        elif (island := island_of(find_module(model, path))) is not None:
            island.close()
    forget_compiled()


def list(model: nn.Module) -> _builtin_list[OpenIsland]:
    """The islands of a model, and the lines that are open in this process."""
    model = unwrap(model)
    total = max(1, sum(p.numel() for p in model.parameters()))
    found = []
    for path, module in model.named_modules():
        island = island_of(module)
        if island is not None:
            inside = sum(p.numel() for p in module.parameters())
            wide = _name(island.dtype) if island.kind == "float32" else ""
            found.append(OpenIsland(path=path, kind=island.kind, dtype=wide, parameters=inside, share=inside / total))
    for (file, line), dtype in LINES.places.items():
        found.append(OpenIsland(path=f"{file}:{line}", kind="float32", dtype=_name(dtype), parameters=0, share=0.0))
    return found


# --- for the guard ---------------------------------------------------------------------------------------------


def open_one(
    model: nn.Module,
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    heavy: bool = False,
    kind: RepairKind = "float32",
) -> Island | None:
    """Open one island; None for a line. ``heavy``: follow weights and casts inside, whatever the weights' dtype."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"an island cannot compute in {dtype}", hint="use torch.float32 or torch.float64")
    if kind not in (kinds := ("float32", "eager", "math-attention")):
        raise UsageError(f"there is no island of kind {kind!r}", hint=f"use {', '.join(kinds)}")
    place = place_in(path)
    if place is not None:
        if kind != "float32":
            raise UsageError(f"{path} is a line, and only modules can be of kind {kind!r}", hint="name its module")
        LINES.add(place, dtype)
        forget_compiled()
        return None
    module = find_module(model, path)
    for inner in module.modules():
        if (old := island_of(inner)) is not None and old.kind == kind:
            old.close()
    island = Island(module, dtype, heavy=heavy, kind=kind)
    island.open()
    forget_compiled()
    return island


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, inside of torch.compile and DDP."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The module at a path of the model."""
    named: dict[str, nn.Module] = dict(unwrap(model).named_modules())
    if path not in named:
        near = difflib.get_close_matches(path, named, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "take a name from model.named_modules(), or FILE:LINE"
        raise UsageError(f"the model has no module {path!r}", hint=hint)
    return named[path]


def place_in(path: str) -> Place | None:
    """The file and line of a path like ``train.py:41``; None when it names a module."""
    file, colon, line = path.rpartition(":")
    return (os.path.abspath(file), int(line)) if colon and line.isdigit() else None  # noqa: PTH100


def forget_compiled() -> None:
    """Code that was compiled before knows nothing of an island: let it be compiled again."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.eval_frame.skip_code(Island.__call__.__code__)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
