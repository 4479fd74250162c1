"""Where a run is heading: each series against its own history, extrapolated to the value at which it breaks.

>>> forecast = Forecast()
>>> for step in range(60):
...     largest = 20.0 * 1.19 ** max(0, step - 25)
...     warning = forecast.read(step, {"absmax/blocks.7": largest}, {"absmax/blocks.7": 65504.0})
...     if warning: print(warning); break
the largest output of blocks.7 grows 1.19 × per step and reaches 65,504 in about 36 steps (at step ~74)

Pure: numbers in, a risk from 0 to 1 with its reasons out. The guard feeds it what it reads from the device; `watch` and
`diagnose` feed it what a log holds. It never decides about a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["warning", "critical"]
WARN, CRITICAL, CLOSER = 0.65, 0.9, 0.2
"""The risk from which a warning is due; the one from which it is urgent; the one from which to read at every step."""

SMOOTH, GAP, TREND, LEAST = 5, 10, 16, 16
"""Readings that make up a level; the newest that are not history yet; those of a trend; those needed at all."""
SUSTAINED = 3
"""Readings in a row that must be at risk: the lowest of them counts."""
NEWS = 8
"""Readings after a single one that was beyond its history, or at risk, during which to read at every step."""
CALM = 100
"""Readings without risk after which a new rise is news again."""
STEADY = 0.02
"""A level that falls by less per step, as a share, stays where it is."""
HORIZON = 60.0
"""A limit so many steps away is worth a warning."""
FLOAT32_MAX, NORM_MAX = 3.4028235e38, 1.8446743e19
"""The largest float32, and the largest norm whose square is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A kind of series: how it is called in a sentence, where it breaks, and how far it wanders in healthy runs."""

    words: str
    limit: float = FLOAT32_MAX
    margin: float = 2.0
    """A factor beyond everything it has reached: less is no news."""
    far: float = 30.0
    """A factor beyond everything it has reached that is trouble by itself; infinite where it never is."""
    high: float = math.inf
    """A value that is trouble by itself, in any run."""
    falls: bool = False
    """Whether it breaks by falling to its limit."""


QUANTITIES: Mapping[str, Quantity] = {
    "loss": Quantity(words="the loss", margin=3.0),
    "grad_norm": Quantity(words="the gradient norm{}", limit=NORM_MAX, margin=3.0),
    "absmax": Quantity(words="the largest output{}"),
    "logits": Quantity(words="the largest attention logit{}"),
    "column": Quantity(words=""),
    "update_ratio": Quantity(words="the update{}", limit=1.0, margin=math.inf, high=0.05),
    "scale": Quantity(words="the loss scale", limit=1.0, far=math.inf, falls=True),
    "entropy": Quantity(words="the entropy", limit=0.01, far=math.inf, falls=True),
}
"""What is forecast, by the part of a series' name before the slash; other series say nothing about the risk. A
``column`` is an activation or a logit as some log calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One series that leaves its history: how fast, and when it reaches its limit at this rate."""

    name: str
    step: int
    value: float
    limit: float
    rate: float
    """The factor per step."""
    beyond: float
    """The factor beyond everything it had reached before."""
    risk: float

    @property
    def left(self) -> float:
        """Steps until the limit; infinite when it does not move towards it."""
        if self.value == self.limit:
            return 0.0
        rate = math.log(self.rate)
        steps = math.log(self.limit / self.value) / rate if rate else math.inf
        return steps if steps >= 0 else math.inf

    def __str__(self) -> str:
        kind, _, where = self.name.partition("/")
        quantity = QUANTITIES.get(kind)
        if quantity is not None and quantity.high <= self.value:
            matrix = where or "a weight matrix"
            return f"each update changes {matrix} by {self.value:.0%} of its size (healthy: below {quantity.high:.0%})"
        if kind == "column":
            what = where
        else:
            place = f"module {where}" if where.replace(".", "").isdigit() else where
            what = quantity.words.format(f" of {place}" if place else "") if quantity is not None else self.name
        falls = self.rate < 1
        pace = f"falls by {100 * (1 - self.rate):.2g}%" if falls else f"grows {self.rate:.{3 + (self.rate < 1.01)}g} ×"
        if self.left > 2 * HORIZON:
            extreme = (
                f"1/{self.beyond:,.3g} of its previous minimum"
                if falls
                else f"{self.beyond:,.3g} × its previous maximum"
            )
            return f"{what} {pace} per step and is at {extreme}"
        left = max(1, round(self.left))
        steps = f"{left:,} step{'s' if left > 1 else ''}"
        return f"{what} {pace} per step and reaches {self.limit:,.6g} in about {steps} (at step ~{self.step + left:,})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyWarning:
    """A run that is likely to break soon, with the trends that say so, the most pressing first."""

    step: int
    risk: float
    reason: str
    trends: tuple[Trend, ...] = ()
    """None where another rank has seen them."""

    @property
    def severity(self) -> Severity:
        return "critical" if self.risk >= CRITICAL else "warning"

    def __str__(self) -> str:
        return self.reason

    def to_json(self) -> dict[str, object]:
        """For the log: the sentence, and what a chart needs to draw the forecast."""
        drawn = [{k: getattr(t, k) for k in ("name", "value", "limit", "rate", "left")} for t in self.trends[:3]]
        return {
            "step": self.step,
            "risk": round(self.risk, 4),
            "severity": self.severity,
            "reason": self.reason,
            "trends": drawn,
        }


class Forecast:
    """Follows the series of one run."""

    def __init__(self) -> None:
        self.risk = 0.0
        self.trends: tuple[Trend, ...] = ()
        """What the risk consists of, the most pressing first."""
        self._series: dict[str, _Series] = {}
        self._limits: dict[str, float] = {}
        self._reaches: dict[str, float] = {}
        """The most extreme level of all series of a kind."""
        self._said: EarlyWarning | None = None
        self._calm = 0
        self._news = 0

    @property
    def look_closer(self) -> bool:
        """Whether what costs something to read should be read at every step for now."""
        return self.risk >= CLOSER or self._news > 0

    def set_limit(self, name: str, limit: float) -> None:
        """Follow a series that is not one of `QUANTITIES`, or with a limit of its own, approached from either side."""
        self._limits[name] = limit

    def read(
        self, step: int, values: Mapping[str, float], limits: Mapping[str, float] | None = None
    ) -> EarlyWarning | None:
        """Take in what was read at a step; a warning when one is due, once, and again only when it has worsened."""
        self._news = max(0, self._news - 1)
        for name, value in values.items():
            series = self._series.get(name) or self._follow(name, value)
            if series is None:
                continue
            if series.add(step, value, (limits or {}).get(name), self._reaches.get(series.kind, -math.inf)):
                self._news = NEWS
            self._reaches[series.kind] = max(series.reach, self._reaches.get(series.kind, -math.inf))
        found = [s.trend for s in self._series.values() if s.trend is not None]
        self.trends = tuple(sorted(found, key=lambda t: -t.risk))
        # several quantities out of their range are worse than one; several tensors of one quantity are one sign, and so
        # are the loss and its gradient: targets that grow, as in reinforcement learning, raise both
        worst: dict[str, float] = {}
        for trend in found:
            kind = trend.name.partition("/")[0]
            kind = "loss" if kind == "grad_norm" else kind
            worst[kind] = max(worst.get(kind, 0.0), trend.risk)
        self.risk = 1.0 - math.prod(1.0 - r for r in worst.values())
        return self._due(step)

    def _follow(self, name: str, value: float) -> _Series | None:
        quantity, limit = QUANTITIES.get(name.partition("/")[0]), self._limits.get(name)
        if limit is not None and math.isfinite(value):
            words = quantity.words if quantity is not None else name
            quantity = Quantity(words=words, limit=limit, far=math.inf, falls=abs(value) > limit)
        if quantity is None:
            return None
        self._series[name] = _Series(name, quantity)
        return self._series[name]

    def _due(self, step: int) -> EarlyWarning | None:
        if self.risk < WARN:
            self._calm += 1
            if self._calm >= CALM:
                self._said = None
            return None
        self._calm = 0
        reason = "; ".join(map(str, self.trends[:2]))
        found = EarlyWarning(step=step, risk=self.risk, reason=reason, trends=self.trends)
        if self._said is not None and (self._said.severity == "critical" or found.severity == "warning"):
            return None
        self._said = found
        return found

    def know(self, warning: EarlyWarning) -> None:
        """Somebody else has said this of the run: it is not said again."""
        self._said, self._calm = warning, 0


class _Series:
    """One series: its last readings, and the most extreme level of its history."""

    def __init__(self, name: str, quantity: Quantity) -> None:
        self.name, self.quantity = name, quantity
        kind = name.partition("/")[0]
        self.kind = name if kind == "column" else kind  # columns of a log may have any unit
        self.trend: Trend | None = None
        self._sign = -1.0 if quantity.falls else 1.0
        self._margin, self._high = math.log(quantity.margin), math.log(quantity.high)
        self._recent: deque[tuple[int, float]] = deque(maxlen=TREND)
        self._last: deque[float] = deque(maxlen=SMOOTH)
        self._risks: deque[float] = deque(maxlen=SUSTAINED)
        self._young: deque[float] = deque()
        self.reach = -math.inf
        self._count = 0

    def add(self, step: int, value: float, limit: float | None, others: float) -> bool:
        """Take a reading in, and whether it alone is a reason to look closer.

        ``others`` is the most extreme level of its kind: a tensor that begins at nothing may grow up to the size of
        others, however many times its own.

        Zeros and non-finite values say nothing about a trend.
        """
        if not math.isfinite(value) or value == 0:
            return False
        y = self._sign * math.log(abs(value))
        bar = y - self._margin
        news = self._count >= LEAST and (y >= self._high or (bar >= self.reach and bar >= max(self._young)))
        if self._recent and step <= self._recent[-1][0]:  # the run went back
            self._recent.clear()
            self._last.clear()
        self._recent.append((step, y))
        self._last.append(y)
        self._count += 1
        level = _median(self._last)
        self._young.append(level)
        if len(self._young) > GAP:
            self.reach = max(self.reach, self._young.popleft())
        settled = self._count >= LEAST and len(self._recent) > 1
        found = self._judge(step, level, limit, others) if settled else None
        self._risks.append(found.risk if found is not None else 0.0)
        lowest = min(self._risks) if len(self._risks) == SUSTAINED else 0.0
        self.trend = replace(found, risk=lowest) if found is not None and lowest else None
        return news or self._risks[-1] >= CLOSER

    def _judge(self, step: int, level: float, limit: float | None, others: float) -> Trend | None:
        q = self.quantity
        beyond = level - self.reach
        high = self._high
        if beyond < self._margin and level < high:
            return None
        slope = min(_slope(list(self._recent)), _slope(list(self._recent)[-TREND // 2 :]))
        bound = q.limit if limit is None else limit
        end = self._sign * math.log(bound)
        risks = [0.0]
        if beyond >= self._margin and slope > 0:
            away = level - max(self.reach, others)
            risks += [1.0 - max(0.0, end - level) / slope / (2 * HORIZON), away / (2 * math.log(q.far))]
        if level >= high and slope > -STEADY:
            risks.append(0.5 + 0.5 * (level - high) / (end - high))
        risk = min(1.0, max(risks))
        if risk <= 0:
            return None
        return Trend(
            name=self.name,
            step=step,
            value=math.exp(self._sign * level),
            limit=bound,
            rate=math.exp(min(self._sign * slope, 80.0)),
            beyond=math.exp(min(beyond, 80.0)),
            risk=risk,
        )


def _slope(points: list[tuple[int, float]]) -> float:
    """The median of the slopes between all pairs (Theil and Sen): a few outliers cannot turn it."""
    return _median([(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :]])


def _median(values: Collection[float]) -> float:
    """As `statistics.median`, in a fraction of its time: this runs for every series of every reading."""
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
