"""What a search has found: the answer, a line for every candidate, the smallest cure. Its JSON form is documented."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..cards import card
from .change import Change
from .judge import Answer, Standing
from .metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One candidate: a row of the table."""

    change: Change
    standing: Standing
    why: str
    died_at: int | None
    steps: int
    loss: float
    metrics: tuple[Metric, ...]
    """One for each seed that was run to the end."""
    cost: float
    """Time of a step, as a multiple of the original's; NaN when that died too soon to tell."""
    step_seconds: float
    skipped: int
    trials: tuple[str, ...]
    """Folders below ``trials/``."""
    part: str = ""
    """Which training of the program this is about; '' for the only one."""

    @property
    def values(self) -> str:
        """The metric on every seed."""
        return ", ".join(f"{m.value:.3f}" for m in self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to "what cures this run?"."""

    answer: Answer
    healthy: bool
    """The original itself trains: there is nothing to cure."""
    command: str
    died_at: int | None
    why: str
    """The located operation, or the verdict of the guard."""
    lines: tuple[Line, ...]
    """The original first, then the candidates, the best first."""
    winner: str | None
    """The smallest cure; or, when nothing cures, the best of what lives."""
    trials: int
    seconds: float
    seeds: tuple[int, ...]
    schedule: int | None
    horizon: int | None
    remedy: str | None = None
    """The winner as a command."""
    diff: str = ""
    """The winner as a difference of files."""
    written: tuple[str, ...] = ()
    """Files that were written for it."""
    report: str | None = None

    @property
    def line(self) -> Line | None:
        """The winner's line."""
        return next((line for line in self.lines if line.change.name == self.winner), None)

    @property
    def cures(self) -> tuple[str, ...]:
        """All changes that cure, the smallest first."""
        return tuple(line.change.name for line in self.lines if line.standing == "cured")

    @property
    def told(self) -> str:
        """The answer in one sentence."""
        line = self.line
        if self.healthy:
            return "nothing to cure: the original trains"
        if line is None:
            return self._none()
        values = f": {line.metrics[0].name} {line.values}" if line.metrics else ""
        chance = line.metrics[0].chance if line.metrics else None
        beside = f" (chance {chance:.3g})" if chance is not None else ""
        if self.answer == "cured":
            return f"cured by {line.change.name}{values}{beside}{self._seeds(len(line.metrics))}"
        loss = f", loss {line.loss:.4g}" if not line.metrics and math.isfinite(line.loss) else ""
        return f"{self.answer}: nothing tried cures it; the best was {line.change.name}{values}{beside}{loss}"

    def _none(self) -> str:
        open_ = [line for line in self.lines[1:] if line.standing in ("alive so far", "cut")]
        if not open_:
            return f"none: nothing tried brings it back to life{f'; {self.why}' if self.why else ''}"
        alive = [line.change.name for line in open_ if line.standing == "alive so far"]
        lived = f" ({', '.join(alive)} lived through a first look)" if alive else ""
        return (
            f"none so far: the time was over before {len(open_)} of {len(self.lines) - 1} changes had come to their end"
            f"{lived}; the same command with a larger --budget goes on from here"
        )

    def _seeds(self, tried: int) -> str:
        if len(self.seeds) == 1:
            return ", on its own seed only: no other was found to set"
        if tried < len(self.seeds):
            return f" on {tried} of {len(self.seeds)} seeds: the time was over, give a larger --budget"
        return f" on {tried} seeds"

    def _repr_html_(self) -> str:
        rows = [("change", "result", "died at", "loss", "metric", "time per step")]
        for line in self.lines:
            died = f"{line.died_at:,}" if line.died_at is not None else ""
            loss = f"{line.loss:.4g}" if math.isfinite(line.loss) else str(line.loss)
            cost = f"× {line.cost:.2f}" if math.isfinite(line.cost) else ""
            rows.append((line.change.name, line.standing, died, loss, line.values, cost))
        return card(
            self.told,
            {"why it died": self.why},
            good=self.healthy or self.answer == "cured",
            rows=rows,
            commands=[self.remedy] if self.remedy else [],
        )


def answer_of(standing: Standing | None) -> Answer:
    """The answer that a winner's standing makes."""
    if standing in ("cured", "alive, learning", "alive, not learning"):
        return standing
    return "none"
