"""From what was found in the files to the verdict on a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

from .flaws import WORST_FIRST, Health, worst
from .layout import Checkpoint
from .part import PartResult
from .report import ScanReport, Settings, TensorReport
from .roles import BATCHNORM, last
from .settings import Gatherer

TINY_SCALE = 1e-3


def judge(
    checkpoint: Checkpoint,
    results: list[PartResult],
    *,
    extra: list[tuple[Health, str]],
    gatherer: Gatherer,
    fast: bool,
) -> ScanReport:
    """The report of one checkpoint. ``extra`` is what the folder as a whole got wrong."""
    many = len(results) > 1
    reasons: list[tuple[Health, str]] = list(extra)
    notes: list[str] = []
    for result in results:
        where = f"{result.file}: " if many else ""
        if result.flaw is not None:
            reasons.append((cast(Health, result.flaw[0]), f"{where}{result.flaw[1]}"))
        reasons += [("suspect", f"{where}{words}") for words in result.calls]
        for name in result.unread[:3]:
            reasons.append(("unreadable", f"{where}{name} is a tensor that cannot be read"))
        notes += [f"{where}{note}" for note in result.notes]
        for key, value in result.found.items():
            gatherer.add(key, value)
        gatherer.steps += result.steps
        gatherer.arguments = {**result.arguments, **gatherer.arguments}
    settings = gatherer.finish()
    tensors = tuple(t for result in results for t in result.tensors)
    reasons += [("corrupt", words) for words in _corrupt(tensors, settings)]
    suspicions = [words for result in results for words in result.suspicions] + _disagreements(settings)
    floats = [t for t in tensors if t.state != "not applicable"]
    empty = [t for t in floats if not math.prod(t.shape)]
    if not reasons and len(empty) == len(floats):
        suspicions.append(f"holds {len(tensors):,} tensors and no floating-point number to judge it by")
    elif empty and not any(math.prod(t.shape) > 1 for t in floats):
        suspicions.append(f"{len(empty):,} of {len(floats):,} tensors are empty, the others single numbers")
    reasons += [("suspect", words) for words in suspicions]
    health = worst([h for h, _ in reasons] or ["healthy"])
    notes += _notes(tensors)
    return ScanReport(
        name=checkpoint.name,
        path=checkpoint.path,
        format=_format(results),
        health=health,
        reasons=tuple(words for h, words in sorted(reasons, key=lambda r: WORST_FIRST.index(r[0]))),
        notes=tuple(notes),
        tensors=tensors,
        settings=settings,
        bytes=sum(r.size for r in results),
        files=tuple(r.file for r in results),
        step=settings.step if settings.step is not None else checkpoint.step,
        checksums="skipped" if fast else "verified" if any(r.verified for r in results) else "none",
        repairable=health == "corrupt" and is_repairable(tensors, settings),
        calls=tuple(words for r in results for words in r.calls),
        against=None if all(r.against is None for r in results) else tuple(w for r in results for w in r.against or ()),
    )


def _format(results: list[PartResult]) -> str:
    return " + ".join(sorted({r.format for r in results if r.format}))


def _words(tensors: list[TensorReport]) -> str:
    """Which there is: "NaN", "Inf" or "NaN and Inf"."""
    nan = any(t.facts and t.facts.nan for t in tensors)
    inf = any(t.facts and t.facts.posinf + t.facts.neginf for t in tensors)
    return "NaN and Inf" if nan and inf else "NaN" if nan else "Inf"


def _corrupt(tensors: tuple[TensorReport, ...], settings: Settings) -> list[str]:
    reasons = []
    total = Counter(t.role for t in tensors if t.state != "not applicable")
    bad: dict[str, list[TensorReport]] = {}
    for t in tensors:
        if t.bad:
            bad.setdefault(t.role, []).append(t)
    for role, found in bad.items():
        noun = {"parameter": "parameter", "buffer": "buffer", "moment": "optimizer moment", "ema": "EMA tensor"}[role]
        of = f" of {total[found[0].role]:,}" if role == "parameter" or len(found) == total[found[0].role] > 1 else ""
        plural = noun + ("s" if len(found) != 1 or of else "")
        more = " …" if len(found) > 1 else ""
        shown = "" if len(found) == total[found[0].role] and len(found) > 1 else f" ({found[0].name}{more})"
        reasons.append(f"{len(found):,}{of} {plural} {_words(found)}{shown}")
    if bad and "parameter" not in bad and total["parameter"]:
        reasons[-1] += ", parameters finite"
    for name in ("lr", "last_lr", "base_lr", "eps", "betas", "weight_decay", "scale"):
        value = getattr(settings, name)
        if value is not None and not all(map(math.isfinite, value if isinstance(value, tuple) else (value,))):
            reasons.append(f"{name} is {value}")
    return reasons


def _disagreements(settings: Settings) -> list[str]:
    found = []
    scale, steps = settings.scale, settings.optimizer_steps
    if scale is not None and scale < TINY_SCALE:
        found.append(f"the loss scale has fallen to {scale:.3g}; gradients underflow before that helps")
    if steps is not None and steps[0] != steps[1]:
        found.append(f"step counters of the optimizer disagree: {steps[0]:,} to {steps[1]:,}")
    elif scale is None and steps is not None and settings.trainer_step and steps[1] != settings.trainer_step:
        # with a loss scaler, skipped steps make the optimizer lag behind; without one nothing may
        found.append(f"the optimizer has made {steps[1]:,} steps, the trainer {settings.trainer_step:,}")
    return found


def _notes(tensors: tuple[TensorReport, ...]) -> list[str]:
    notes = []
    meant = [t for t in tensors if t.state == "nonfinite" and not t.bad]
    if meant:
        notes.append(f"Inf or NaN in {meant[0].name}{' …' if len(meant) > 1 else ''}, where it can be meant")
    return notes


def is_repairable(tensors: tuple[TensorReport, ...], settings: Settings) -> bool:
    """Whether nothing is lost that only training can make: no parameter is bad."""
    bad = [t for t in tensors if t.bad]
    scale = settings.scale is not None and not math.isfinite(settings.scale)
    fixable = all(t.role in ("moment", "ema") or last(t.name) in BATCHNORM for t in bad)
    return bool(bad or scale) and fixable
