"""The forecast of a run from its log alone: what a guard would have warned of, for a run that never had one.

    outlook = foresee(series)
    outlook.risk, outlook.warnings
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..forecast import EarlyWarning, Forecast, Trend
from .series import Column, Series

POINTS = 20_000
"""The last points of a log that are looked at: a forecast is about what comes next."""
HALF_MAX = 65504.0
_OUTPUT = re.compile(r"(absmax/.+|(.*[/_.])?(max_?)?(activations?|act_max|abs_?max|hidden_norm)([/_.].*)?)", re.I)
_LOGIT = re.compile(r"(.*[/_.])?max_?(attn_|attention_)?logits?([/_.].*)?", re.I)
_ENTROPY = re.compile(r"(.*[/_.])?entropy", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Where a run was heading when its log ended."""

    risk: float = 0.0
    trends: tuple[Trend, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()


def foresee(series: Series) -> Outlook:
    """Read a log's series as a guard would have: each value once, in the order of its lines."""
    chosen = chosen_columns(series)
    if not chosen:
        return Outlook()
    half = series.loss_scale is not None  # a loss scale means float16, and no log says the dtype of an activation
    limits = {name: HALF_MAX for name in chosen if half and name.startswith(("absmax/", "logits/"))}
    first = max(0, max(int(c.rows[-1]) for c in chosen.values() if len(c)) - POINTS)
    rows: dict[int, tuple[int, dict[str, float]]] = {}
    for name, column in chosen.items():
        after = int(np.searchsorted(column.rows, first))
        for row, step, value in zip(
            column.rows[after:].tolist(), column.steps[after:].tolist(), column.values[after:].tolist(), strict=True
        ):
            rows.setdefault(row, (step, {}))[1][name] = value
    forecast = Forecast()
    found = [forecast.read(step, values, limits) for _, (step, values) in sorted(rows.items())]
    return Outlook(risk=forecast.risk, trends=forecast.trends, warnings=tuple(w for w in found if w is not None))


def chosen_columns(series: Series) -> dict[str, Column]:
    """The columns that say something about the risk, by their names in a forecast."""
    named = ((_name(c, series), c) for c in series.columns.values() if len(c))
    return {name: column for name, column in named if name is not None}


def _name(column: Column, series: Series) -> str | None:
    """What a column is to the forecast; None for one that says nothing about the risk."""
    for name, known in (("loss", series.loss), ("grad_norm", series.grad_norm), ("scale", series.loss_scale)):
        if known is column:
            return name
    if column.name in ("update_ratio",) or column.name.startswith(("update_ratio/", "grad_norm/")):
        return column.name
    if _LOGIT.fullmatch(column.name):
        return f"logits/{column.name}"
    if _OUTPUT.fullmatch(column.name):
        return f"absmax/{column.name.removeprefix('absmax/')}"
    return "entropy" if _ENTROPY.fullmatch(column.name) else None
