"""The forecast of a run from its log alone: what a guard would have warned of, for a run that never had one.

outlook = foresee(series)
outlook.risk, outlook.warnings
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..forecast import CLOSER, FLOAT32_MAX, WARN, EarlyWarning, Forecast, Trend
from .series import Column, Series

POINTS = 5_000
"""The last points of a log that are looked at: a forecast is about what comes next."""
HALF_MAX = 65504.0
AHEAD = 200
"""A limit that is further away than so many steps is not drawn: the axis would be all forecast."""
_WORD = re.compile("[a-z]+")
_OUTPUT = re.compile(r"\b(activations?|acts?|hidden|residual|resid|features?|outputs?|logits?)\b")
_SIZE = re.compile(r"\b(max|absmax|amax|abs|norm|rms|std|mean)\b")
_LARGEST = re.compile(r"\b(activations?|absmax|amax|abs max|max abs)\b")
_OTHER = re.compile(
    r"\b(loss|lr|grad|gradient|reward|action|actor|critic|weight|param|memory|mem|mb|gb|bytes|size|length|len|tokens|sec"
    r"|seconds|time|checkpointing|sparsity|dead|frac|fraction|zeros?|count|num|steps|entropy|scale|error|diff|position)\b"
)
"""What makes a column something else, whatever other words are in its name."""


class Outlook:
    """Where a run is heading, by what its log holds so far; it takes in new lines as they come."""

    def __init__(self) -> None:
        self.warnings: list[EarlyWarning] = []
        self._forecast = Forecast()
        self._names: dict[str, str] = {}
        self._half = False

    @property
    def risk(self) -> float:
        return self._forecast.risk

    @property
    def trends(self) -> tuple[Trend, ...]:
        return self._forecast.trends

    def take(self, new: Series) -> Column | None:
        """Read what is new in a log; returns the risk at each of its lines, unless the log tells it by itself."""
        chosen = chosen_columns(new)
        if not chosen:
            return None
        self._names |= {name: column.name for name, column in chosen.items()}
        self._half |= new.loss_scale is not None
        # a loss scale means float16, and no log says the dtype of an activation
        limits = {n: HALF_MAX for n in chosen if self._half and n.startswith(("absmax/", "logits/", "column/"))}
        first = max(int(c.rows[-1]) for c in chosen.values()) - POINTS
        rows: dict[int, tuple[int, dict[str, float]]] = {}
        for name, column in chosen.items():
            part = column.only(column.rows > first)
            for row, step, value in zip(part.rows.tolist(), part.steps.tolist(), part.values.tolist(), strict=True):
                rows.setdefault(row, (step, {}))[1][name] = value
        risks = []
        for _, (step, values) in sorted(rows.items()):
            warning = self._forecast.read(step, values, limits)
            self.warnings += [warning] if warning is not None else []
            risks.append(self._forecast.risk)
        if "risk" in new.columns:
            return None
        ordered = sorted(rows)
        return Column(
            name="risk",
            role="other",
            rows=np.array(ordered),
            steps=np.array([rows[r][0] for r in ordered]),
            values=np.array(risks),
            total=len(risks),
        )

    @property
    def warning(self) -> str:
        """What the run is heading for, while it is; else empty."""
        return "; ".join(map(str, self.trends[:2])) if self.risk >= WARN else ""

    def drawn(self, row: int) -> list[Column]:
        """For each trend at risk, the values that its series is going to have, as a column ``forecast/…``."""
        found = []
        for trend in self.trends:
            if trend.risk < CLOSER or trend.name not in self._names or trend.left > AHEAD:
                continue
            ahead = np.unique(np.linspace(0, max(trend.left, 1.0), 20).round())
            values = trend.value * trend.rate**ahead
            whole = values < FLOAT32_MAX
            found.append(
                Column(
                    name=f"forecast/{self._names[trend.name]}",
                    role="other",
                    rows=np.full(int(whole.sum()), row),
                    steps=(trend.step + ahead[whole]).astype(np.int64),
                    values=values[whole],
                    total=int(whole.sum()),
                )
            )
        return found


def joined(columns: Sequence[Column]) -> Column:
    """Columns of one quantity, one after the other."""
    rows, steps, values = (np.concatenate([getattr(c, k) for c in columns]) for k in ("rows", "steps", "values"))
    return replace(columns[0], total=sum(c.total for c in columns), rows=rows, steps=steps, values=values)


def foresee(series: Series) -> Outlook:
    """The outlook of a whole log."""
    outlook = Outlook()
    outlook.take(series)
    return outlook


def chosen_columns(series: Series) -> dict[str, Column]:
    """The columns that say something about the risk, by their names in a forecast."""
    named = ((_name(c, series), c) for c in series.columns.values() if len(c))
    return {name: column for name, column in named if name is not None}


def _name(column: Column, series: Series) -> str | None:
    """What a column is to the forecast; None for one that says nothing about the risk."""
    for name, known in (("loss", series.loss), ("grad_norm", series.grad_norm), ("scale", series.loss_scale)):
        if known is column:
            return name
    if column.name in ("update_ratio",) or column.name.startswith(
        ("update_ratio/", "grad_norm/", "absmax/", "logits/")
    ):
        return column.name
    return _kind(column.name)


def _kind(name: str) -> str | None:
    """What some log means by a name: the size of an activation or an attention logit, an entropy, or nothing known.

    >>> _kind("model/act_max/blocks.3"), _kind("activation_memory"), _kind("rollout/entropy")
    ('column/model/act_max/blocks.3', None, 'entropy')
    """
    words = " ".join(_WORD.findall(name.lower()))
    if words.endswith("entropy") and "cross" not in words:  # that is a loss
        return "entropy"
    found = _LARGEST.search(words) or (_OUTPUT.search(words) and _SIZE.search(words))
    return f"column/{name}" if found and not _OTHER.search(words) else None
