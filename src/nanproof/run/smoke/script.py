"""A smoke test of a script's own training, unmodified: its first steps under the guard, then it is ended.

report = smoke_program(Program(target="train.py", arguments=("--lr", "3e-4")), steps=10)

Nothing of torch is imported here: that is for the script to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..launcher import Outcome, run_program
from ..options import Options, choose_run_dir
from ..overwritten import Overwritten
from ..program import Program

if TYPE_CHECKING:
    from ..session import Session
    from .checks import SmokeReport
    from .short import Witness


def smoke_program(
    program: Program,
    *,
    steps: int = 10,
    watch: tuple[str, ...] = (),
    run_dir: Path | None = None,
    report: Callable[[SmokeReport, Outcome], None] = lambda _, __: None,
) -> SmokeReport:
    """Let a script make one step and ``steps`` more, as it is, and check everything that can be checked.

    ``run_dir`` gets the log, and the incident if there is one. ``report`` hears the result even if the script calls
    os._exit.
    """
    if steps < 0:
        raise UsageError(f"steps is {steps}", hint="give 0 or more")
    found: list[SmokeReport] = []
    begin = Beginning(steps, watch)

    folder = run_dir or choose_run_dir(f"smoke-{program.name}")
    kept = Overwritten(folder)

    def judged(outcome: Outcome) -> None:
        if outcome.state == "interrupted":
            kept.restore()
            return
        found.append(_with_files(_judge(begin.witness, outcome, steps), kept))
        report(found[0], outcome)

    options = Options(
        run_dir=folder,
        run_dir_given=run_dir is not None,
        policy_changes={"spikes": "observe", "snapshot_every": None},
        guard={},
    )
    with kept:
        run_program(program, options, report=judged, begin=begin)
    if not found:
        raise KeyboardInterrupt
    return found[0]


def _with_files(report: SmokeReport, kept: Overwritten) -> SmokeReport:
    """The files of the user are as they were, and that is said."""
    from .checks import Check

    restored = kept.restore()
    notes = [f"{', '.join(restored)}: overwritten by the script, put back as before"] if restored else []
    notes += [f"{path}: overwritten by the script, and too large to be kept" for path in kept.too_large]
    checks = [Check(name="your files", result="NOTE", reason=words) for words in notes]
    return dataclasses.replace(report, checks=(*report.checks, *checks))


class Beginning:
    """Begins the session once torch is there; a process that the script spawns gets one of its own."""

    def __init__(self, steps: int, watch: tuple[str, ...]) -> None:
        self._given = (steps, watch)
        self.witness: Witness | None = None

    def __call__(self, options: Options) -> Session:
        from .short import ShortSession, Witness

        self.witness = Witness(*self._given)
        return ShortSession(options, self.witness)

    def __reduce__(self) -> tuple[type[Beginning], tuple[int, tuple[str, ...]]]:
        return Beginning, self._given


def _judge(witness: Witness | None, outcome: Outcome, steps: int) -> SmokeReport:
    """The checks on what was seen before the script ended, in whichever way."""
    from .checks import judge
    from .trial import Trial

    if witness is None:
        return judge(Trial(losses=(), norms=(), stopped="the script did not import torch"))
    trial = witness.trial(dict(outcome.not_guarded))
    done = max(len(trial.losses) - 1, 0)
    stopped, short = trial.stopped, ""
    if not stopped and outcome.exit_code != 0:
        stopped = f"the script ended by itself with exit code {outcome.exit_code}, after {len(trial.losses)} steps"
    elif not stopped and not trial.losses:
        stopped = "the script ended without a training step in this process"
    elif not witness.over:
        short = f"the script ended by itself after {done} of {steps} steps"
    return judge(dataclasses.replace(trial, stopped=stopped, short=short))
