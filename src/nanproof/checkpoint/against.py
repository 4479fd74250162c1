"""Comparing a checkpoint with a reference: what is missing, what changed shape, what moved and what did not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from .contents import Stored, element
from .detail import chunks, values
from .flaws import Flaw
from .layout import Checkpoint
from .part import open_part
from .roles import last, role_of
from .source import Source

_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How far one tensor moved: ‖new − old‖ / ‖old‖, and whether every bit is the same."""

    name: str
    relative: float
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A checkpoint beside its reference."""

    name: str
    reference: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    changes: tuple[Change, ...]
    stuck: tuple[str, ...]
    """Parameters that are bit for bit the same."""
    should_move: bool
    """Whether they should have moved: the optimizer holds moments for every parameter, or nothing moved at all."""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped or (self.stuck and self.should_move))


@contextmanager
def opened(checkpoint: Checkpoint) -> Iterator[dict[str, tuple[Source, Stored, str]]]:
    """Every tensor of a checkpoint by name, with the open file that holds it; what is damaged is left out."""
    from .scan import plan

    with ExitStack() as stack:
        found: dict[str, tuple[Source, Stored, str]] = {}
        for part in plan(checkpoint)[0]:
            try:
                source = checkpoint.store.open(part.path)
                stack.callback(source.close)
                for stored in open_part(source, part, check=False).tensors:
                    key = stored.name if stored.name not in found else f"{part.file}:{stored.name}"
                    found[key] = (source, stored, part.file)
            except Flaw:
                continue
        yield found


def compare(checkpoint: Checkpoint, reference: Checkpoint) -> Comparison:
    """Put a checkpoint beside its reference."""
    with opened(checkpoint) as new, opened(reference) as old:
        both = [n for n in new if n in old]
        reshaped = [
            f"{n} {list(old[n][1].shape)} → {list(new[n][1].shape)}" for n in both if new[n][1].shape != old[n][1].shape
        ]
        changes = [c for n in both if (c := _change(n, new[n], old[n])) is not None]
        parameters = {n for n in both if role_of(new[n][1].name, new[n][2]) == "parameter"}
        moments = sum(last(s.name) in ("exp_avg", "momentum_buffer") for _, s, _ in new.values())
    moved = any(not c.identical for c in changes if c.name in parameters)
    return Comparison(
        name=checkpoint.name,
        reference=reference.name,
        missing=tuple(n for n in old if n not in new),
        unexpected=tuple(n for n in new if n not in old),
        reshaped=tuple(reshaped),
        changes=tuple(changes),
        stuck=tuple(c.name for c in changes if c.identical and c.name in parameters),
        should_move=not moved or moments >= len(parameters),
    )


def _change(name: str, new: tuple[Source, Stored, str], old: tuple[Source, Stored, str]) -> Change | None:
    (source, a, _), (other, b, _) = new, old
    left, right = element(a.dtype), element(b.dtype)
    if a.shape != b.shape or a.columns or b.columns or left is None or right is None or not a.numel:
        return None
    if left.format is None or right.format is None or a.stride != b.stride or left.parts != right.parts:
        return None
    same, distance, length = a.dtype == b.dtype, 0.0, 0.0
    pairs = zip(
        chunks(source, a, _ELEMENTS * left.bits // 8), chunks(other, b, _ELEMENTS * right.bits // 8), strict=True
    )
    with np.errstate(all="ignore"):
        for (_, x), (_, y) in pairs:
            same = same and x.tobytes() == y.tobytes()
            reference = values(y, right.format).astype(np.float64)
            distance += float(((values(x, left.format).astype(np.float64) - reference) ** 2).sum())
            length += float((reference**2).sum())
    relative = math.sqrt(distance / length) if length else (0.0 if same else math.inf)
    return Change(name=name, relative=relative, identical=same)
