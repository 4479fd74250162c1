"""The search for a cure: reproduce the death, try single changes, halve, pair, prove the smallest on three seeds.

    surface = read_surface(read_command(["python", "train.py"]), Path("."))
    with open_pool(jobs=2) as pool:
        outcome = Search(surface, Plan(out=Path("runs/cure-a")), pool, tell=print).run()
    outcome.answer, outcome.winner

Everything that ran is on disk before the next trial begins: the same call with the same folder resumes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .change import ORIGINAL, Change
from .evidence import Evidence, read_evidence
from .judge import ORDER, Reference, Verdict, horizon, judge, score, together
from .kinds import propose
from .kinds.precision import pairs as precision_pairs
from .metric import Wanted
from .outcome import Line, Outcome, answer_of
from .pool import Pool
from .surface import Surface
from .trial import Bench, Ran, Trial

Tell = Callable[[str], None]
SEEDS = (0, 1, 2)
FEWEST = 4
"""Candidates that are run to their end at least, if so many live."""
PAIRED = 5
"""Kinds whose best changes are tried in pairs."""
RATE = "learning rate"
WITH_RATES = 2
"""So many of them are tried with every learning rate."""
CONTENDERS = 5
"""Changes that are run on all seeds where nothing cures: the best on one seed may be luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much may be tried, and where it goes."""

    out: Path
    budget: float = 900.0
    """Seconds."""
    wanted: Wanted = dataclasses.field(default_factory=Wanted)
    launcher: tuple[str, ...] = ()
    threads: int = 1
    seeds: tuple[int, ...] = SEEDS


class Search:
    """One search; what it learns is in ``lines``."""

    def __init__(self, surface: Surface, plan: Plan, pool: Pool, tell: Tell = lambda words: None) -> None:
        self.surface = surface
        self.bench = Bench(
            command=surface.command,
            project=surface.folder,
            out=plan.out,
            wanted=plan.wanted,
            launcher=plan.launcher,
            threads=plan.threads,
        )
        self.plan, self._pool, self._tell = plan, pool, tell
        self._began = time.monotonic()
        self._deadline = self._began + plan.budget
        self._changes: dict[str, Change] = {}
        self._short: dict[str, Ran] = {}
        self._full: dict[str, list[Ran]] = {}
        self._trials = 0
        self._part: str | None = None
        self.reference = Reference(best_loss=math.inf, died_at=None)
        self.evidence = Evidence()

    def run(self) -> Outcome:
        original = self._reproduce()
        if original.end == "finished" and judge(original, self.reference).standing == "cured":
            return self._outcome(original, None, healthy=True)
        singles = propose(self.evidence, self.surface)
        self._tell(f"{len(singles)} candidates: {', '.join(c.name for c in singles)}")
        stages: tuple[Callable[[], list[Change]], ...] = (
            lambda: singles,
            lambda: [*precision_pairs(singles), *self._pairs_of_best()],
        )
        winner = None
        for stage in stages:  # the next one also where what cured the program's own seed fails on others
            if winner is None:
                self._try(stage())
                winner = self._prove()
        if winner is None:
            self._finish(self._alive())
            winner = self._prove() or self._best()
        return self._outcome(original, winner)

    # -- the stages --------------------------------------------------------------------------------------------------

    def _reproduce(self) -> Ran:
        """Step 1: the original, until it breaks."""
        self._tell(f"the original: {self.bench.command.shown}")
        [ran] = self._run([Trial(change=ORIGINAL, locate=True)])
        if ran.steps == 0:
            raise UsageError(
                f"the program made no training step: {ran.said or ran.end}",
                hint=f"its output is in {self.bench.folder(Trial(change=ORIGINAL)) / 'output.txt'}",
            )
        if ran.end == "cut":
            raise UsageError(
                f"the original lived for {ran.steps} steps, all the time there was", hint="give a larger --budget"
            )
        self._part = ran.part
        run_dir = self.bench.out / "trials" / ran.slug / "guard" / ran.part
        scratch = self.bench.out / "trials" / ran.slug / "project"
        self.evidence = read_evidence(run_dir).seen_from(scratch, self.surface.folder)
        self.reference = Reference(
            best_loss=ran.best_loss, died_at=ran.died_at, step_seconds=ran.step_seconds, opening=ran.opening
        )
        why = f": {self.evidence.told}" if self.evidence.told else ""
        if ran.died_at is not None:
            self._tell(f"it dies at step {ran.died_at}{why}")
        else:
            self._tell(f"it lives: {judge(ran, self.reference).why}")
        return ran

    def _try(self, changes: Sequence[Change]) -> None:
        """Step 3: a look at each, then the better half to the end, best first."""
        changes = [c for c in changes if c.name not in self._changes]
        self._changes |= {c.name: c for c in changes}
        look = horizon(self.reference.died_at, self.surface.schedule())
        ran = self._run([Trial(change=c, horizon=look) for c in changes])
        for change, result in zip(changes, ran, strict=True):
            if result.end == "finished":
                self._full[change.name] = [result]
            else:
                self._short[change.name] = result
        alive = sorted((r for r in ran if r.end == "horizon"), key=score)
        keep = alive[: max(FEWEST, math.ceil(len(alive) / 2))]
        if keep:
            self._tell(
                f"{len(alive)} of {len(changes)} live to step {look}; to the end: {', '.join(r.name for r in keep)}"
            )
        self._finish([self._changes[r.name] for r in keep])

    def _finish(self, changes: Iterable[Change]) -> None:
        """Run candidates to their end, as far as the budget goes."""
        left = [c for c in changes if c.name not in self._full]
        for change, ran in zip(left, self._run([Trial(change=c) for c in left]), strict=True):
            if ran.end == "cut":
                continue
            self._full[change.name] = [ran]

    def _alive(self) -> list[Change]:
        """Those that lived through a first look and were not run to their end."""
        left = [r for name, r in self._short.items() if r.end == "horizon" and name not in self._full]
        return [self._changes[r.name] for r in sorted(left, key=score)]

    def _pairs_of_best(self) -> list[Change]:
        """The best of each kind with the best of each other; a repair that only postponed the death counts, too."""
        first = [ran for name in self._changes if (ran := self._first(name)) is not None]
        alive = sorted((r for r in first if r.alive), key=score)
        late = [r for r in first if (r.died_at or 0) > (self.reference.died_at or math.inf)]
        best: dict[str, Change] = {}
        for ran in [*alive, *sorted(late, key=lambda r: -(r.died_at or 0))]:
            change = self._changes[ran.name]
            best.setdefault(change.kind, change)
        chosen = [c for c in best.values() if c.kind not in ("pair", "guard")][:PAIRED]  # what lives needs no guard
        pairs = [(a, b) for i, a in enumerate(chosen) for b in chosen[i + 1 :]]
        # once another change has ended the overflow, the best learning rate need not be the one that is best alone
        rates = [c for c in self._changes.values() if c.kind == RATE and c not in chosen]
        pairs += [(a, b) for a in [c for c in chosen if c.kind != RATE][:WITH_RATES] for b in rates]
        return [a + b for a, b in pairs if a.fits(b)]

    def _first(self, name: str) -> Ran | None:
        return self._full[name][0] if name in self._full else self._short.get(name)

    def _ranked(self) -> list[str]:
        """What lived to its end on its own seed, the best first: of several seeds the worst counts."""
        alive = [n for n, runs in self._full.items() if n != ORIGINAL.name and runs[0].end == "finished"]
        return sorted(
            alive, key=lambda n: (ORDER[self._verdict(self._full[n]).standing], *max(map(score, self._full[n])))
        )

    def _cured(self) -> list[Change]:
        """The changes that cure so far, the smallest first."""
        found = [n for n, runs in self._full.items() if self._verdict(runs).standing == "cured"]
        return sorted((self._changes[n] for n in found), key=lambda c: (c.size, *score(self._full[c.name][0])))

    def _prove(self) -> Change | None:
        """Step 4: the smallest cure on three seeds, and the next one if it fails there."""
        while cured := [c for c in self._cured() if len(self._full[c.name]) < len(self.seeds)]:
            self._tell(f"{cured[0].name} on {len(self.seeds)} seeds")
            if not self._on_seeds(cured[:1]):
                break
            if self._verdict(self._full[cured[0].name]).standing == "cured":
                break
        best = self._cured()
        return max(best, key=lambda c: (len(self._full[c.name]), -c.size)) if best else None

    def _best(self) -> Change | None:
        """What learns best where nothing cures: the one whose worst seed is the best."""
        first = [self._changes[n] for n in self._ranked()[:CONTENDERS]]
        if not first:
            return None
        self._tell(f"nothing cures it; on {len(self.seeds)} seeds: {', '.join(c.name for c in first)}")
        self._on_seeds(first)
        most = max(len(self._full[c.name]) for c in first)  # time may have ended before all had their seeds
        return next(self._changes[n] for n in self._ranked() if len(self._full[n]) == most)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The program's own seed counts as the first; others only where the program takes them."""
        held = self.surface.meaning.number("seed")
        own = int(held) if held is not None else self.plan.seeds[0]
        others = [s for s in (*self.plan.seeds, own + 1) if s != own]
        return (own, *others[: len(self.plan.seeds) - 1]) if self.surface.seed(own + 1) is not None else (own,)

    def _on_seeds(self, changes: Sequence[Change]) -> bool:
        """Run changes and the original on the other seeds; False when there was no time for the first of them."""
        more = self.seeds[1:]
        held = {(name, ran.seed) for name, runs in self._full.items() for ran in runs}
        wanted = [(c, s) for c in (*changes, ORIGINAL) for s in more if (c.name, s) not in held]
        trials = [Trial(change=c, seed=s, seed_edit=self.surface.seed(s)) for c, s in wanted]
        for trial, ran in zip(trials, self._run(trials), strict=True):
            if ran.end != "cut":
                self._full.setdefault(trial.change.name, []).append(ran)
        return len(self._full[changes[0].name]) > len(more) > 0

    # -- its parts ---------------------------------------------------------------------------------------------------

    def _run(self, trials: Sequence[Trial]) -> list[Ran]:
        self._trials += len(trials)
        trials = [dataclasses.replace(t, part=self._part) for t in trials]

        def heard(trial: Trial, ran: Ran) -> None:
            verdict = judge(ran, self.reference)
            seed = f", seed {trial.seed}" if trial.seed is not None else ""
            self._tell(f"  {trial.change.name}{seed}: {verdict.standing}, {verdict.why}")

        return self._pool.run(self.bench, trials, self._deadline, heard) if trials else []

    def _verdict(self, runs: Sequence[Ran]) -> Verdict:
        return together([judge(r, self.reference) for r in runs])

    def _outcome(self, original: Ran, winner: Change | None, *, healthy: bool = False) -> Outcome:
        lines = []
        for name, change in self._changes.items():
            runs = self._full.get(name) or [self._short[name]] if name in self._full or name in self._short else []
            if runs:
                lines.append(self._line(change, runs))
        lines.sort(key=lambda line: (ORDER[line.standing], line.change.size))
        first = [self._line(ORIGINAL, [original, *self._full.get(ORIGINAL.name, [])])]
        standing = next((line.standing for line in lines if winner is not None and line.change == winner), None)
        return Outcome(
            answer="cured" if healthy else answer_of(standing),
            healthy=healthy,
            command=self.bench.command.shown,
            died_at=original.died_at,
            why=self.evidence.told,
            lines=(*first, *lines),
            winner=winner.name if winner is not None else None,
            trials=self._trials,
            seconds=time.monotonic() - self._began,
            seeds=self.seeds if winner is not None else (),
            schedule=self.surface.schedule(),
            horizon=horizon(original.died_at, self.surface.schedule()),
        )

    def _line(self, change: Change, runs: Sequence[Ran]) -> Line:
        verdict = self._verdict(runs)
        if change is ORIGINAL:
            verdict = judge(runs[0], Reference(best_loss=self.reference.best_loss, died_at=None))
        base = self.reference.step_seconds
        return Line(
            change=change,
            standing=verdict.standing,
            why=verdict.why,
            died_at=runs[0].died_at,
            steps=runs[0].steps,
            loss=runs[0].loss,
            metrics=tuple(r.metric for r in runs if r.metric is not None),
            cost=runs[0].step_seconds / base if base > 0 else math.nan,
            step_seconds=runs[0].step_seconds,
            skipped=runs[0].skipped,
            trials=tuple(r.slug for r in runs),
            part=runs[0].part,
        )
