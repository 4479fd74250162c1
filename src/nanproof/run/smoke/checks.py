"""What the trial must show; pure functions from a `Trial` to PASS or FAIL with a reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...floats import format_of
from .trial import Trial

Result = Literal["PASS", "FAIL", "NOTE"]
ROOM = 4.0  # an output within this factor of its format's maximum is about to overflow
NORMS = (1e-10, 1e4)
JUMP = 100.0  # a gradient norm this many times the median of the others is out of band
SCATTER = 1.5  # losses of different batches rise when their last third lies this many deviations above the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. NOTE says something that is neither good nor bad."""

    name: str
    result: Result
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeReport:
    """All checks, and the measurements that they judged."""

    checks: tuple[Check, ...]
    trial: Trial

    @property
    def ok(self) -> bool:
        return not any(c.result == "FAIL" for c in self.checks)


def judge(trial: Trial) -> SmokeReport:
    """Every check on one trial; of a training that made no step only those that need none."""
    asked = CHECKS if trial.losses else (*((parameters_finite,) if trial.bad_at_start else ()), all_steps, not_seen)
    return SmokeReport(checks=tuple(c for check in asked if (c := check(trial)) is not None), trial=trial)


def _said(name: str, good: bool, reason: str) -> Check:
    return Check(name=name, result="PASS" if good else "FAIL", reason=reason)


def parameters_finite(t: Trial) -> Check:
    told = f"{t.parameters:,} parameters finite at the start, {t.trainable:,} of them train"
    return _said("parameters", not t.bad_at_start, "; ".join(t.bad_at_start[:3]) or told)


def loss_finite(t: Trial) -> Check:
    bad = [i for i, v in enumerate(t.losses) if not math.isfinite(v)]
    told = f"{t.losses[0]:.4g} in the first step" + (
        f", {t.losses[-1]:.4g} after {len(t.losses) - 1}" if t.losses[1:] else ""
    )
    return _said("loss finite", not bad, f"{t.losses[bad[0]]} in step {bad[0] + 1}" if bad else told)


def loss_at_chance(t: Trial) -> Check | None:
    """A fresh model that does worse than guessing has a broken forward, a wrong scale, or wrong labels."""
    if not math.isfinite(t.losses[0]):
        return None
    if t.chance.level is None:
        return Check(name="chance level", result="NOTE", reason="unknown: the step calls no loss function that tells")
    limit = 2 * t.chance.level + 0.5
    told = f"first loss {t.losses[0]:.4g}, {t.chance.words}"
    good = t.losses[0] <= limit
    if t.chance.summed and not good:
        return Check(name="chance level", result="NOTE", reason=f"{told} for a mean, and the loss function adds up")
    return _said(
        "chance level", good, told if good else f"{told}: worse than guessing, look at the scale of the output"
    )


def gradients_finite(t: Trial) -> Check:
    return _said("gradients finite", not t.bad_gradients, "; ".join(t.bad_gradients[:3]) or f"norm {t.norms[0]:.4g}")


def gradients_reach(t: Trial) -> Check | None:
    if t.bad_gradients:
        return None
    if not t.without_gradient:
        return _said("gradients reach", True, "every trained parameter gets one")
    names = ", ".join(t.without_gradient[:3])
    told = f"{len(t.without_gradient):,} parameters get none or zero: {names}"
    dead = t.norms[0] == 0
    return Check(name="gradients reach", result="FAIL" if dead else "NOTE", reason=told)


def norms_in_band(t: Trial) -> Check | None:
    finite = sorted(v for v in t.norms if math.isfinite(v))
    if len(finite) < len(t.norms) or not finite:
        bad = next((i for i, v in enumerate(t.norms) if not math.isfinite(v)), 0)
        return _said("gradient norms", False, f"{t.norms[bad]} in step {bad + 1}")
    low, high, middle = finite[0], finite[-1], finite[len(finite) // 2]
    told = f"{low:.3g} to {high:.3g}"
    if t.unclipped:
        told += f" after clipping ({min(t.unclipped):.3g} to {max(t.unclipped):.3g} before)"
    if high > NORMS[1] or high < NORMS[0]:
        return _said("gradient norms", False, f"{told}: outside {NORMS[0]:g} to {NORMS[1]:g}")
    # parts that take turns have norms of their own
    return _said("gradient norms", bool(t.turns) or high <= JUMP * max(middle, NORMS[0]), told)


def loss_falls(t: Trial) -> Check | None:
    if len(t.losses) < 3 or not all(map(math.isfinite, t.losses)):
        return None
    third = max(1, len(t.losses) // 3)
    first, last = sum(t.losses[:third]) / third, sum(t.losses[-third:]) / third
    told = f"{first:.4g} → {last:.4g} over {len(t.losses) - 1} steps"
    if t.turns:
        told = f"{' and '.join(t.turns)} take turns, each with its own loss: nobody knows which should fall"
        return Check(name="loss falls", result="NOTE", reason=told)
    if last < first:
        return _said("loss falls", True, told)
    if not t.same_batch and (third < 3 or last - first < SCATTER * statistics.pstdev(t.losses)):
        return Check(name="loss falls", result="NOTE", reason=f"{told}, within the scatter of batches: try more steps")
    return _said("loss falls", False, f"{told}: nothing was learnt" if t.same_batch else f"{told}: it rises")


def parameters_move(t: Trial) -> Check | None:
    if len(t.losses) < 2:
        return None
    told = f"largest relative change {t.largest_move:.2g}"
    if t.largest_move == 0:
        return _said("parameters move", False, "no parameter changed")
    if t.largest_move > 10:
        return _said("parameters move", False, f"{told}: steps are far too large")
    if t.unmoved:
        told += f"; {len(t.unmoved):,} did not move: {', '.join(t.unmoved[:3])}"
    return _said("parameters move", True, told)


def effective_precision(t: Trial) -> Check | None:
    if not t.layers:
        return None
    counts: dict[str, int] = {}
    for layer in t.layers:
        counts[layer.output] = counts.get(layer.output, 0) + 1
    told = "layers compute in " + ", ".join(f"{d} ({n})" for d, n in sorted(counts.items(), key=lambda c: -c[1]))
    halves = [x for x in t.layers if x.weight == "float16"]
    if halves and t.eps is not None and "Adam" in t.optimizer and t.eps < format_of("fp16").smallest_subnormal:
        why = f"{told}; weights are float16, where {t.optimizer}'s eps {t.eps:g} rounds to 0: 0/0 in the first step"
        return _said("precision", False, why)
    if "float16" in counts and not t.scaler:
        share = f"; {t.zero_gradients:.0%} of half gradients are zero" if t.zero_gradients > 0.5 else ""
        return Check(name="precision", result="NOTE", reason=f"{told}, without a GradScaler{share}")
    return _said("precision", True, told)


def headroom(t: Trial) -> Check | None:
    if not t.layers:
        return None
    tight = min(t.layers, key=lambda x: x.headroom)
    told = f"{tight.name} ({tight.kind}) reaches {tight.largest:.4g} in {tight.output}"
    if not math.isfinite(tight.largest):
        return _said("headroom", False, f"{tight.name} ({tight.kind}) gives NaN or Inf in {tight.output}")
    room = f"2^{math.floor(math.log2(tight.headroom))}" if math.isfinite(tight.headroom) else "all"
    return _said("headroom", tight.headroom >= ROOM, f"{told}, room {room}")


def watched(t: Trial) -> Check | None:
    if not t.watched:
        return None
    told = ", ".join(f"{n} {a:.4g} → {b:.4g}" for n, (a, b) in list(t.watched.items())[:8])
    return _said("watched", all(math.isfinite(b) for _, b in t.watched.values()), told)


def all_steps(t: Trial) -> Check | None:
    if t.stopped:
        return _said("steps", False, t.stopped)
    overflows = f"a GradScaler left {t.overflows} steps out, looking for its scale" if t.overflows else ""
    told = "; ".join(words for words in (t.short, overflows) if words)
    return Check(name="steps", result="NOTE", reason=told) if told else None


def not_seen(t: Trial) -> Check | None:
    told = "; ".join(f"{what}: {why}" for what, why in t.not_seen.items())
    return Check(name="not seen", result="NOTE", reason=told) if told else None


CHECKS: tuple[Callable[[Trial], Check | None], ...] = (
    parameters_finite,
    loss_finite,
    loss_at_chance,
    gradients_finite,
    gradients_reach,
    norms_in_band,
    loss_falls,
    parameters_move,
    effective_precision,
    headroom,
    watched,
    all_steps,
    not_seen,
)
