"""The variants of a case side by side, and every old recommendation judged by what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .catalogue import VARIANTS, Case
from .claims import Judgement, Runs
from .result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A recommendation, and what it did."""

    advice: str
    before: str
    after: str
    why: str
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was measured, at one seed."""

    case: str
    seed: int
    results: tuple[Result, ...]
    """Original, advised, stable."""
    judged: tuple[Judged, ...]


def compare(case: Case, folder: Path, *, seed: int = 0, tell: Callable[[str], None] = lambda words: None) -> Comparison:
    """Train the three variants and whatever the recommendations need; minutes, not seconds."""
    runs = Runs(case, folder, seed, tell)
    results = tuple(runs.result(variant) for variant in VARIANTS)
    judged = tuple(
        Judged(advice=c.advice, before=c.before, after=c.after, why=c.why, judgement=c.judge(runs)) for c in case.claims
    )
    return Comparison(case=case.name, seed=seed, results=results, judged=judged)


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def variants_table(results: tuple[Result, ...]) -> Table:
    """A row for each thing that can be compared, a column for each variant."""
    metric = results[0].metric
    rows: dict[str, list[str]] = {
        "outcome": [r.outcome for r in results],
        "steps survived": [f"{r.survived} of {r.steps}" for r in results],
        "steps left out": [str(r.skipped) for r in results],
        f"{metric} (chance {results[0].chance:.2f})": [f"{r.value:.3f}" for r in results],
        "dead model": ["yes" if r.guessing or r.bad_parameters else "no" for r in results],
        "parameters, buffers not finite": [f"{r.bad_parameters}, {r.bad_buffers}" for r in results],
        "largest activation": [f"{r.largest_activation:.3g}" for r in results],
        "growth of activations": [f"{r.growth:.3g} ×" for r in results],
        "learning rate at the end": [f"{r.lr:.3g}" for r in results],
        "CPU seconds": [f"{r.cpu_seconds:.0f}" for r in results],
    }
    return ("", *[r.config for r in results]), [(name, *cells) for name, cells in rows.items()]


def claims_table(judged: tuple[Judged, ...]) -> Table:
    """Before, after, why; and what it did."""
    rows: list[tuple[str, ...]] = [
        (j.advice, j.before, j.after, j.judgement.verdict, j.judgement.measured, j.why) for j in judged
    ]
    return ("recommended", "before", "after", "judged", "measured", "why"), rows


def changes_table(case: Case) -> Table:
    """What the stable variant does differently."""
    return ("original", "stable", "why"), [(c.before, c.after, c.why) for c in case.changes]
