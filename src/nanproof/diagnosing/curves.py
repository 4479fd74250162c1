"""What a few rows of numbers show: growth, leaps, recovery, halvings, zeros, jumps of the rate.

>>> rows = [{"step": 1, "loss": 2.3}, {"step": 2, "loss": math.nan}]
>>> sorted(f.name for f in read_rows(rows, where="series"))
['loss-first-step-finite', 'loss-nan', 'nan-after-first-step']
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from .evidence import Fact

Row = Mapping[str, float]

MAX_ROWS = 5_000
BOUNDED = ("iou", "acc", "dice", "accuracy", "f1")
_NOT_LOSSES = {"step", "loss", "grad_norm", "lr", "loss_scale", "reward", "error", "epoch", *BOUNDED}


def read_rows(rows: Sequence[Row], *, where: str, whole: bool = False) -> Iterator[Fact]:
    """The flags that the numbers show. ``whole``: the rows are all of the run, from its first step on."""
    rows = rows[:MAX_ROWS]
    found = [
        *_nonfinite(rows, whole),
        *_zeros(rows),
        *_growth(rows),
        *_spike(rows),
        *_scale(rows),
        *_rate(rows),
        *_bounds(rows),
        *_components(rows),
    ]
    for name, words in found:
        yield Fact(name=name, where=where, words=words)


def _column(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Pairs of step and value; the step is NaN where the row does not tell it."""
    return [(r.get("step", math.nan), r[name]) for r in rows if name in r]


def _at(step: float) -> str:
    return f" at step {step:,.0f}" if math.isfinite(step) else ""


Found = Iterator[tuple[str, str]]


def _nonfinite(rows: Sequence[Row], whole: bool) -> Found:
    loss, norm = _column(rows, "loss"), _column(rows, "grad_norm")
    bad = next((i for i, (_, v) in enumerate(loss) if not math.isfinite(v)), None)
    norm_bad = next((i for i, r in enumerate(rows) if not math.isfinite(r.get("grad_norm", 0.0))), None)
    if bad is not None:
        step = loss[bad][0]
        yield "loss-nan", f"loss {loss[bad][1]}{_at(step)}"
        if bad == 1 and loss[0][0] <= 1 and step <= 2:
            yield "loss-first-step-finite", f"first loss {loss[0][1]:.4g}"
            yield "nan-after-first-step", f"loss {loss[0][1]:.4g}{_at(loss[0][0])}, then {loss[1][1]}"
        if whole and bad == 0 and step <= 1:
            yield "nan-before-first-update", f"loss {loss[0][1]}{_at(step)}, before any update"
        after = [math.isfinite(v) for _, v in loss[bad:]]
        if any(after):
            yield "intermittent-nan", f"{after.count(False)} of {len(after)} losses are NaN, the first{_at(step)}"
            yield "keeps-training", "finite losses follow"
    if norm_bad is not None:
        row = rows[norm_bad]
        finite_before = all(math.isfinite(r.get("loss", 0.0)) for r in rows[: norm_bad + 1])
        step = row.get("step", math.nan)
        if math.isnan(row["grad_norm"]) and finite_before and row.get("loss", 0.0) != 0.0:
            lasting = bad is None
            name = "grad-nan-loss-finite" if lasting else "grad-nan-loss-finite-first"
            yield name, f"grad_norm nan{_at(step)} with loss {row.get('loss', math.nan):.4g}"
        elif math.isnan(row["grad_norm"]):
            yield "grad-nan", f"grad_norm nan{_at(step)}"
        recovered = any(math.isfinite(v) for _, v in norm[-3:])
        if math.isinf(row["grad_norm"]) and norm_bad < 20 and recovered:
            yield "grad-inf-early", f"grad_norm inf{_at(step)}"


def _zeros(rows: Sequence[Row]) -> Found:
    for row in rows:
        if row.get("loss") == 0.0 and "grad_norm" in row:
            if math.isnan(row["grad_norm"]):
                yield "loss-zero-grad-nan", f"loss 0.0 with grad_norm nan{_at(row.get('step', math.nan))}"
                return
            if row["grad_norm"] == 0.0:
                yield "loss-zero-grad-zero", f"loss 0.0 with grad_norm 0.0{_at(row.get('step', math.nan))}"
                return
    losses = [v for _, v in _column(rows, "loss")]
    if losses and losses.count(0.0) > len(losses) // 2:
        yield "loss-zero", f"loss 0.0 in {losses.count(0.0)} of {len(losses)} rows"
    norms = [v for _, v in _column(rows, "grad_norm") if math.isfinite(v)]
    if len(norms) >= 5 and len(set(norms)) == 1 and norms[0] > 0:
        yield "constant-grad-norm", f"grad_norm {norms[0]:.6g} in all {len(norms)} rows"


def _growth(rows: Sequence[Row]) -> Found:
    """How the finite losses right before the first bad one went, and slow drifts of the gradient norm."""
    loss = _column(rows, "loss")
    bad = next((i for i, (_, v) in enumerate(loss) if not math.isfinite(v)), None)
    zero = next((i for i, (_, v) in enumerate(loss) if v == 0.0 and i), None)
    end = bad if bad is not None else zero
    before = [v for _, v in loss[:end] if math.isfinite(v)] if end is not None else []
    if len(before) >= 2:
        usual = median(before[:-1]) or 1e-12
        last = [v for v in before[-4:] if v > 1.5 * usual]
        if len(last) >= 3 and before[-1] > 2 * usual:
            yield "loss-explodes-before-nan", f"loss grew from {usual:.4g} to {before[-1]:.4g} before NaN"
        elif before[-1] > 3 * abs(usual):
            yield "loss-jump-before", f"loss leapt from {before[-2]:.4g} to {before[-1]:.4g} just before"
    norms = [v for _, v in _column(rows, "grad_norm") if math.isfinite(v)]
    if len(norms) >= 12:
        parts = [median(norms[i * len(norms) // 4 : (i + 1) * len(norms) // 4]) for i in range(4)]
        if parts[0] > 0 and all(b > 1.3 * a for a, b in pairwise(parts)):
            yield "grad-norm-drift", f"median grad_norm by quarter: {', '.join(f'{p:.3g}' for p in parts)}"


def _spike(rows: Sequence[Row]) -> Found:
    """A peak far above both ends: it recovered when the end is near the beginning again."""
    loss = [(s, v) for s, v in _column(rows, "loss") if math.isfinite(v)]
    if len(loss) < 3 or len(loss) < len(_column(rows, "loss")):
        return
    first, last = loss[0][1], loss[-1][1]
    step, peak = max(loss, key=lambda p: p[1])
    if first <= 0 or peak < 1.4 * first or peak == last:
        return
    if last <= 1.05 * first:
        yield "recovers", f"loss {first:.4g}, {peak:.4g}{_at(step)}, {last:.4g} at the end"
        norms = [(s, v) for s, v in _column(rows, "grad_norm") if math.isfinite(v)]
        usual = norms[0][1] if norms else math.inf
        lead = next((s for s, v in norms if v > 3 * usual), math.inf)
        if lead < step:
            yield "grad-norm-leads", f"grad_norm left its level{_at(lead)}, loss peak{_at(step)}"
    elif last > 1.08 * first:
        yield "spike-then-plateau", f"loss {first:.4g}, {peak:.4g}{_at(step)}, {last:.4g} afterwards"


def _scale(rows: Sequence[Row]) -> Found:
    scale = [(s, v) for s, v in _column(rows, "loss_scale") if math.isfinite(v) and v >= 0]
    drops = [(s, a, b) for (_, a), (s, b) in pairwise(scale) if b < a]
    if not drops or len(scale) < 3:
        return
    rises = sum(b > a for (_, a), (_, b) in pairwise(scale))
    start, end, low = scale[0][1], scale[-1][1], min(v for _, v in scale)
    if start > 0 and end == low and (low <= 1.0 or start / max(low, 1e-30) >= 2**10) and not rises:
        yield "loss-scale-collapse", f"loss scale {start:g} → {end:g} without a rise"
    elif rises and len(drops) <= max(1, len(scale) // 10):
        yield "loss-scale-halving-sparse", f"{len(drops)} halvings in {len(scale)} rows, and rises again"
    elif drops[-1][0] <= scale[len(scale) // 4][0]:
        yield (
            "loss-scale-halving-at-start",
            f"loss scale {start:g} → {end:g}, the last drop{_at(drops[-1][0])}, then level",
        )


def _rate(rows: Sequence[Row]) -> Found:
    """A jump upwards by more than warm-ups do from row to row; a rate of 0 with NaN."""
    rate = [(s, v) for s, v in _column(rows, "lr") if math.isfinite(v)]
    for (_, a), (step, b) in pairwise(rate):
        if a > 0 and b > 3 * a and len(rate) > 2 and not _warming(rate):
            yield "lr-discontinuity", f"lr {a:.3g} → {b:.3g}{_at(step)}"
            break
    else:
        if len(rate) >= 2 and all(0.5 * a <= b <= 2 * a for (_, a), (_, b) in pairwise(rate)):
            yield "lr-continuous", f"lr {rate[0][1]:.3g} … {rate[-1][1]:.3g} without a jump"
    for row in rows:
        if row.get("lr") == 0.0 and math.isnan(row.get("loss", 0.0)):
            yield "nan-at-lr-0", f"loss nan{_at(row.get('step', math.nan))} with lr 0"
            break


def _warming(rate: Sequence[tuple[float, float]]) -> bool:
    """A ramp from the very start: each value above the one before, beginning at the first step."""
    return rate[0][0] <= 1 and all(b >= a for (_, a), (_, b) in pairwise(rate))


def _bounds(rows: Sequence[Row]) -> Found:
    for name in BOUNDED:
        high = [(s, v) for s, v in _column(rows, name) if v > 1.0]
        percent = [v for _, v in high if v > 20]
        if high and len(percent) < len(high):
            yield "metric-above-bound", f"{name} {high[-1][1]:.4g}{_at(high[-1][0])}"
            break
    losses = _column(rows, "loss")
    below = [(s, v) for s, v in losses if v < 0]
    if below and losses[0][1] > 0 and min(v for _, v in below) < -1:
        yield "negative-loss", f"loss {below[-1][1]:.4g}{_at(below[-1][0])}"


def _components(rows: Sequence[Row]) -> Found:
    """Named loss terms: one that is NaN while another is not, or terms that are exactly 0."""
    for row in rows:
        terms = {k: v for k, v in row.items() if k not in _NOT_LOSSES}
        bad = [k for k, v in terms.items() if not math.isfinite(v)]
        if bad and len(bad) < len(terms):
            yield "one-component-nan", f"{', '.join(bad[:3])} nan{_at(row.get('step', math.nan))}, others finite"
            if any(v == 0.0 for v in terms.values()):
                yield "some-losses-zero", "other terms are exactly 0"
            return
