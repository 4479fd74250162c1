"""The search for modules that must compute in another way for a bad step to be finite, replay by replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from .. import islands
from ..islands.island import Island, island_of
from ..islands.lines import LINES
from ..islands.widen import is_narrower
from ..locating import Location
from ..records import Repair, RepairKind
from .heal_replay import Replay
from .ranks import Ranks
from .training import Training

TRIALS = 16
"""How many replays a search may take."""
_FUSED_ATTENTION = "scaled_dot_product"
"""What is in the name of each fused kernel; the math kernel is made of other operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a step fails, as ranks tell each other."""

    bad: bool = False
    path: str | None = None
    """The module's path in the model; None for an operation in no module of it."""
    file: str = ""
    line: int = 0
    dtype: str = ""
    """The dtype in which it fails."""
    kind: RepairKind | Literal[""] = ""
    """What may repair it; empty when nothing here can."""
    op: str = ""
    why: str = ""
    raised: str = ""


class Search:
    """Opens islands until a step, replayed, is finite; on all ranks the same ones."""

    def __init__(self, training: Training, ranks: Ranks, replay: Replay | None, *, lockstep: bool) -> None:
        self._training, self._ranks, self._replay, self.lockstep = training, ranks, replay, lockstep
        self.commits = not ranks.any(replay is None or not replay.commits)
        self._model = islands.unwrap(training.model)
        self._islands: dict[tuple[RepairKind, str], Island] = {}
        self._lines: list[str] = []
        self._replaced: list[Island] = []
        """Islands of earlier steps that a larger one has taken over."""
        self.dtype = ""
        self.first: Location | None = None
        """Where the step failed before anything was tried."""
        self.given_up = ""
        self._why = ""

    # --- the search ------------------------------------------------------------------------------------------

    def find(self, location: Location | None) -> bool:
        """Whether islands were found that make the step finite, and whose results fit the weights' dtype."""
        known = self._place(location) if location is not None and location.reproduced else None
        if self.lockstep and self._ranks.any(known is not None):  # all ranks replay together, or none does
            known = known or _Place()
        for _ in range(TRIALS):
            place = self._agree(known if known is not None else self._look())
            known = None
            if place.raised:
                if not self._grow_last():
                    self.given_up = f"the step could not be replayed with it: {place.raised}" if self._why else ""
                    return False
            elif not place.bad:
                leak = self._agree_path(self._leaking())
                if leak is None:
                    return bool(self._islands or self._lines)
                if not self._grow("float32", leak):
                    return False
            elif not place.kind or not self._add(place):
                if self._why or place.kind == "float32":
                    self.given_up = _no_island(place)
                return False
        return False

    def _look(self) -> _Place:
        for island in self._islands.values():
            island.probing, island.largest, island.error, island.contained = True, 0.0, None, self.lockstep
        try:
            if self._replay is None:
                return _Place()
            found = self._replay.locate()
            if not self._islands and not self._lines:
                self.first = found
            error = next((i.error for i in self._islands.values() if i.error is not None), None)
            if error is not None:
                return _Place(raised=f"{type(error).__name__}: {error}")
            return self._place(found)
        except Exception as error:
            if self.lockstep:
                raise
            return _Place(raised=f"{type(error).__name__}: {error}")
        finally:
            for island in self._islands.values():
                island.probing = island.contained = False

    def _place(self, found: Location) -> _Place:
        if not found.reproduced:
            return _Place()
        return _Place(
            bad=True,
            path=self._path(found.module),
            file=found.file,
            line=found.line,
            dtype=found.outputs[0].dtype if found.outputs else "float32",
            kind=repairable(found),
            op=found.op,
            why=found.why,
        )

    def _path(self, name: str) -> str | None:
        """The path of a located module in the model without its wrappers."""
        named = {
            n or type(m).__name__: m for n, m in (*self._model.named_modules(), *self._training.model.named_modules())
        }
        module = named.get(name) if name else None
        if module is None:
            return None
        return next((n for n, m in self._model.named_modules() if m is module), "")

    def _agree(self, mine: _Place) -> _Place:
        """What the first rank with something bad has found."""
        if self._ranks.alone:
            return mine
        short = replace(mine, why=mine.why[:200], raised=mine.raised[:200])
        rank = self._ranks.lowest(bool(mine.raised))
        rank = self._ranks.lowest(mine.bad) if rank is None else rank
        if rank is None:
            return mine
        _, told = self._ranks.hear(rank, 0, json.dumps({k: getattr(short, k) for k in _Place.__slots__}))
        return _Place(**json.loads(told))

    def _agree_path(self, path: str | None) -> str | None:
        if self._ranks.alone:
            return path
        rank = self._ranks.lowest(path is not None)
        return self._ranks.hear(rank, 0, path or "")[1] if rank is not None else None

    def _add(self, place: _Place) -> bool:
        """One more island for a located failure, or a larger one; False when there is none left to try."""
        self.dtype = self.dtype or place.dtype
        self._why = self._why or place.why
        kind = place.kind or "float32"
        line = f"{place.file}:{place.line}" if place.line and kind == "float32" else ""
        if not place.path and line and line not in self._lines:
            LINES.add(islands.place_in(line) or ("", 0), torch.float32)
            self._lines.append(line)
            return True
        path = place.path or ""
        over = next((p for p in self._open_paths(kind) if _covers(p, path)), None)
        return self._grow(kind, over) if over is not None else self._open(kind, path)

    def _grow(self, kind: RepairKind, path: str) -> bool:
        """A light island becomes heavy, a heavy one its parent's."""
        island = self._islands.get((kind, path)) or island_of(islands.find_module(self._model, path))
        if island is not None and not island.is_heavy:
            return self._open(kind, path, heavy=True)
        if path == "":
            return False
        return self._open(kind, path.rpartition(".")[0])

    def _grow_last(self) -> bool:
        return bool(self._islands) and self._grow(*next(reversed(self._islands)))

    def _open(self, kind: RepairKind, path: str, *, heavy: bool = False) -> bool:
        module = islands.find_module(self._model, path)
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and path:  # it has no forward of its own
            return self._open(kind, path.rpartition(".")[0])
        for key in [(k, p) for k, p in self._islands if k == kind and _covers(path, p)]:
            self._islands.pop(key).close()
        for m in module.modules():
            old = island_of(m)
            if old is not None and old.kind == kind:
                old.close()
                self._replaced.append(old)
        self._islands[kind, path] = island = Island(module, torch.float32, heavy=heavy, kind=kind)
        island.open()
        return True

    def _open_paths(self, kind: RepairKind) -> list[str]:
        return [n for n, m in self._model.named_modules() if (i := island_of(m)) is not None and i.kind == kind]

    def _leaking(self) -> str | None:
        """An island whose result does not fit the weights' dtype.

        Under autocast nobody minds. In evaluation, which runs outside of it, the result is cast back and the next
        module would overflow instead.
        """
        limits = [torch.finfo(p.dtype).max for p in self._model.parameters() if p.is_floating_point()]
        limit = min(limits, default=float("inf"))
        return next((p for (_, p), i in self._islands.items() if p and i.largest > limit), None)

    # --- the repair ------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Run the bad step for real, on all ranks; one that has nothing to replay waits for the answer."""
        return self._replay.run() if self._replay is not None else not self._ranks.any(False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A block in which the model computes as it does without the repair."""
        places = [place for line in self._lines if (place := islands.place_in(line)) is not None]
        for island in self._islands.values():
            island.suspended = True
        for place in places:
            LINES.remove(place)
        try:
            yield
        finally:
            for island in self._islands.values():
                island.suspended = False
            for place in places:
                LINES.add(place, torch.float32)

    def repairs(self, number: int, proof: str) -> list[Repair]:
        total = max(1, sum(p.numel() for p in self._model.parameters()))
        found = [
            Repair(
                path=path,
                kind=kind,
                heavy=island.heavy,
                step=number,
                why=self._why,
                was=self.dtype,
                proof=proof,
                share=sum(p.numel() for p in island.module.parameters()) / total,
                largest=island.largest,
            )
            for (kind, path), island in self._islands.items()
        ]
        found += [
            Repair(path=line, kind="float32", step=number, why=self._why, was=self.dtype, proof=proof)
            for line in self._lines
        ]
        return found

    def close(self) -> None:
        """Leave everything as it was before the search."""
        for island in self._islands.values():
            island.close()
        for line in self._lines:
            LINES.remove(islands.place_in(line) or ("", 0))
        for old in self._replaced:
            old.suspended = False
            old.open()
        self._islands, self._lines, self._replaced = {}, [], []


def too_small(location: Location) -> str:
    """The dtype whose range or rounding broke the step, if float32 has more of it; else empty."""
    if location.mechanism not in ("range-overflow", "underflow") or not location.outputs:
        return ""
    dtype = getattr(torch, location.outputs[0].dtype, None)
    return location.outputs[0].dtype if dtype is not None and is_narrower(dtype, torch.float32) else ""


def repairable(location: Location) -> RepairKind | Literal[""]:
    """What may repair a located failure while the run goes on; empty when nothing can."""
    if too_small(location):
        return "float32"
    if location.mechanism == "compiled-only" and location.module:
        return "eager"
    if _FUSED_ATTENTION in location.op and location.mechanism in ("range-overflow", "invalid"):
        return "math-attention"
    return ""


def _covers(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


def _no_island(place: _Place) -> str:
    """What no island can heal, with the way out."""
    where = f" at {place.file}:{place.line}" if place.line else ""
    return (
        f"no island heals {place.op}{where} ({place.why}): a gradient or result that does not fit the weights' own"
        " dtype stays too large. Keep float32 weights (autocast), or scale the loss (GradScaler)"
    )
