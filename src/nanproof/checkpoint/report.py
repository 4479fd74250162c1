"""What a scan says: frozen records, made to be iterated, compared and written as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..cards import card
from ..floats import find_format
from .flaws import Health

if TYPE_CHECKING:
    from ..records import TensorFacts

State = Literal["finite", "nonfinite", "not applicable"]
Role = Literal["parameter", "buffer", "moment", "ema", "mask", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """One tensor. ``state`` is "not applicable" for integers, which is not the same as finite."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    role: Role
    state: State
    at_most: float | None = None
    """No value is larger in magnitude. Exact from 2 upwards; 2.0 says no more than "below 2"."""
    facts: TensorFacts | None = None
    """Counts, range and first bad index, for a tensor that was looked at closely."""

    @property
    def bad(self) -> bool:
        """Non-finite where it must not be: −Inf in a mask and Inf as a "best so far" are meant."""
        return self.state == "nonfinite" and self.role not in ("mask", "other")

    @property
    def headroom(self) -> float | None:
        """How many times larger the values could be before they overflow."""
        form = find_format(self.dtype)
        if form is None or not self.at_most:
            return None
        return form.max / self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the checkpoint would restore besides tensors; None where it does not say."""

    lr: float | None = None
    initial_lr: float | None = None
    max_lr: float | None = None
    betas: tuple[float, ...] | None = None
    cycled: bool = False
    """Whether the schedule moves beta1 up and down, so that its momentary value says nothing."""
    eps: float | None = None
    weight_decay: float | None = None
    last_lr: float | None = None
    base_lr: float | None = None
    warmup: float | None = None
    scheduler_step: int | None = None
    scale: float | None = None
    step: int | None = None
    trainer_step: int | None = None
    """The step of the HF Trainer, which counts optimizer steps; other counters may count batches."""
    epoch: int | None = None
    optimizer_steps: tuple[int, int] | None = None
    """The lowest and the highest step counter of the optimizer."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The numerics of saved training arguments: lr, eps, precision, clipping, the NaN filter of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanReport:
    """The verdict on one checkpoint, with everything that led to it. Iterating yields its tensors."""

    name: str
    path: str
    format: str
    health: Health
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: tuple[TensorReport, ...] = ()
    settings: Settings = field(default_factory=Settings)
    bytes: int = 0
    files: tuple[str, ...] = ()
    step: int | None = None
    checksums: Literal["verified", "skipped", "none"] = "none"
    repairable: bool = False
    calls: tuple[str, ...] = ()
    """What loading it as a pickle would call that checkpoints do not need; each is among the reasons too."""
    against: tuple[str, ...] | None = None
    """Why torch.load(weights_only=True) would refuse it, empty if it would not; None if not asked, or no torch file."""

    def __iter__(self) -> Iterator[TensorReport]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __bool__(self) -> bool:
        return True  # a report without tensors is still a report

    def _repr_html_(self) -> str:
        facts = {f"reason {n}": words for n, words in enumerate(self.reasons[:6], 1)}
        facts |= {"tensors": f"{len(self.tensors):,}", "format": self.format, "notes": "; ".join(self.notes[:3])}
        return card(f"{self.name}: {self.health}", facts, good=self.ok)

    @property
    def ok(self) -> bool:
        return self.health == "healthy"

    @property
    def bad(self) -> tuple[TensorReport, ...]:
        """The tensors that hold NaN or Inf."""
        return tuple(t for t in self.tensors if t.bad)

    @property
    def tightest(self) -> TensorReport | None:
        """The parameter, buffer or moment nearest to overflow; scaled 8- and 4-bit formats do not count."""
        judged = (t for t in self.tensors if t.state == "finite" and t.role not in ("mask", "other"))
        found = [t for t in judged if t.headroom is not None and not small(t.dtype)]
        return min(found, key=lambda t: t.headroom or 0.0, default=None)


def small(dtype: str) -> bool:
    """Formats of 8 bits and less are stored with scales and use their whole range on purpose."""
    form = find_format(dtype)
    return form is not None and form.bits <= 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where one series turned bad, by the names of checkpoints."""

    last_healthy: str | None
    first_bad: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesReport:
    """Several checkpoints, each series in the order of training."""

    reports: tuple[ScanReport, ...]
    turns: tuple[Turn, ...] = ()
    """One for each series: checkpoints of one folder whose names differ in numbers only."""
    total: int = 0
    """How many checkpoints there are; with bisection fewer are read."""

    def __iter__(self) -> Iterator[ScanReport]:
        return iter(self.reports)

    @property
    def last_healthy(self) -> str | None:
        """The newest healthy checkpoint, if all belong to one series."""
        return self.turns[0].last_healthy if len(self.turns) == 1 else None

    @property
    def first_bad(self) -> str | None:
        """The oldest bad checkpoint, if all belong to one series."""
        return self.turns[0].first_bad if len(self.turns) == 1 else None

    @property
    def ok(self) -> bool:
        return bool(self.reports) and all(r.ok for r in self.reports)
