"""One trial: the changed program in its scratch copy, under ``nanproof run``, watched until it ends or has told enough.

A trial without changes of the guard runs under ``--policy strict``: its first bad step is its death, and ends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import files
from ..errors import FormatError
from ..files import file_text, open_file
from ..records import from_json, to_json
from .change import Change, Edit
from .command import Command
from .curve import LOG, Row, best_loss, last_loss, part_that_died, read_rows, step_seconds
from .metric import Metric, Wanted, find_metric
from .scratch import Scratch, make_scratch, python_path
from .starter import Starter

End = Literal["finished", "died", "stopped", "horizon", "failed", "cut"]
"""Ended by itself; at its first bad step; by the guard; after its horizon; with an error; when the time was over."""
POLL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is to be run."""

    change: Change
    seed: int | None = None
    """None: the program's own."""
    horizon: int | None = None
    """Stop after this step; None: run to the end."""
    locate: bool = False
    seed_edit: Edit | None = None
    part: str | None = None
    """Which of the trainings of the program counts: that in which the original dies; None: find out."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (*self.change.edits, *((self.seed_edit,) if self.seed_edit is not None else ()))

    @property
    def slug(self) -> str:
        """A name for its folder: readable, and different for every other trial."""
        digest = hashlib.sha256(json.dumps(to_json(self.edits)).encode()).hexdigest()[:6]
        name = re.sub(r"[^\w.=-]+", "-", self.change.name).strip("-")[:40]
        end = "" if self.horizon is None else f"-{self.horizon}"
        return f"{name}-{digest}{'' if self.seed is None else f'-s{self.seed}'}{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came out of a trial."""

    name: str
    slug: str
    seed: int | None
    horizon: int | None
    end: End
    exit_code: int | None
    steps: int
    died_at: int | None
    """Its first step that was not finite."""
    skipped: int
    """Steps that the guard left out."""
    spikes: int
    best_loss: float
    loss: float
    """The median of the last fifth."""
    step_seconds: float
    seconds: float
    metric: Metric | None
    said: str = ""
    """The last line of an error."""
    part: str = ""
    """Which training of the program this is about."""
    opening: str = ""
    """A digest of the losses up to the original's death: equal ones mean that the change had no effect."""

    @property
    def alive(self) -> bool:
        return self.end in ("finished", "horizon") and self.steps > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all trials of a cure share."""

    command: Command
    project: Path
    out: Path
    wanted: Wanted
    launcher: tuple[str, ...] = ()
    threads: int = 1

    def folder(self, trial: Trial) -> Path:
        return self.out / "trials" / trial.slug

    def known(self, trial: Trial) -> Ran | None:
        """The result of an earlier trial that answers for this one; one that ran longer does, too."""
        for name in dict.fromkeys((trial.slug, _whole(trial))):
            ran = read_ran(self.out / "trials" / name)
            if ran is not None and ran.end != "cut":
                return ran
        return None

    def rows(self, ran: Ran, horizon: int | None = None) -> list[Row]:
        return read_rows(self.out / "trials" / ran.slug / "guard" / ran.part / LOG, horizon)


def _whole(trial: Trial) -> str:
    return Trial(change=trial.change, seed=trial.seed, seed_edit=trial.seed_edit).slug


def read_ran(folder: Path) -> Ran | None:
    """The result that a trial left; None when it did not come to its end."""
    try:
        return from_json(Ran, json.loads(file_text(folder / "trial.json")))
    except (OSError, ValueError, TypeError, KeyError, FormatError):
        return None


def run_trial(
    bench: Bench, trial: Trial, starter: Starter, deadline: float, over: Callable[[], bool] = lambda: False
) -> Ran:
    """Run a trial, or return what it gave before; ``deadline`` is in seconds of `time.monotonic`."""
    ran = bench.known(trial)
    if ran is not None:
        return ran
    folder = bench.folder(trial)
    if folder.exists():
        files.remove(folder)  # of a cure that was killed
    files.make_folder(folder)
    scratch = make_scratch(bench.project, folder / "project", bench.command, trial.edits)
    began = time.monotonic()
    try:
        end, code = _watch(bench, trial, scratch, folder, starter, deadline, over)
    finally:
        files.remove(folder / "project")
    ran = _result(bench, trial, folder, end, code, time.monotonic() - began)
    files.write_atomic(folder / "trial.json", json.dumps(to_json(ran), indent=1))
    return ran


def words_of(bench: Bench, trial: Trial, scratch: Scratch, run_dir: Path) -> list[str]:
    """The command line of a trial."""
    policy = [] if trial.change.guarded else ["--policy=strict", "--set=policy.spikes=observe"]
    policy += [] if trial.locate or trial.change.guarded else ["--set=policy.locate_seconds=None"]
    policy += [] if any(e.name == "--heal" for e in trial.edits) else ["--no-heal"]
    ranks = [f"--nproc={scratch.command.processes}"] if scratch.command.processes else []
    return [
        *bench.launcher,
        scratch.command.python,
        "-m",
        "nanproof",
        "run",
        "--quiet",
        f"--run-dir={run_dir.absolute()}",
        "--set=records.log_every=1",
        *policy,
        *scratch.options,
        *ranks,
        *scratch.command.program,
    ]


def _watch(
    bench: Bench,
    trial: Trial,
    scratch: Scratch,
    folder: Path,
    starter: Starter,
    deadline: float,
    over: Callable[[], bool],
) -> tuple[End, int | None]:
    """Start it, and wait until it ends, has reached its horizon, or the time is over."""
    words = words_of(bench, trial, scratch, folder / "guard")
    files.write_atomic(folder / "command.txt", f"{shlex.join(words)}\n")
    threads = str(bench.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if path := python_path():
        environment["PYTHONPATH"] = path
    environment |= scratch.environment
    log = folder / "guard" / (trial.part or "") / LOG
    output = folder / "output.txt"
    files.write_atomic(output, b"")
    warm = not (bench.launcher or scratch.command.processes or scratch.environment) and words[0] == sys.executable
    start = words[3:] if warm else words
    child = starter.start(start, cwd=scratch.folder, environment=environment, output=output, warm=warm)
    size = -1
    try:
        while not child.wait(POLL):
            if over() or time.monotonic() > deadline:
                return "cut", None
            now = log.stat().st_size if trial.horizon is not None and log.exists() else -1
            if trial.horizon is not None and now != size:
                size = now
                if _last_step(log) > trial.horizon:
                    return "horizon", None
    finally:
        child.stop()
    return ("finished" if child.code == 0 else "failed"), child.code


def _last_step(log: Path) -> int:
    try:
        with open_file(log) as file:
            file.seek(max(0, log.stat().st_size - 4000))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _result(bench: Bench, trial: Trial, folder: Path, end: End, code: int | None, seconds: float) -> Ran:
    part = part_that_died(folder / "guard") if trial.part is None else trial.part
    rows = read_rows(folder / "guard" / part / LOG, trial.horizon)
    text = file_text(folder / "output.txt", errors="replace")
    stopped = next((r.step for r in rows if r.stopped), None)
    if stopped is not None or code == 66:
        end = "stopped" if trial.change.guarded else "died"
    return Ran(
        name=trial.change.name,
        slug=trial.slug,
        seed=trial.seed,
        horizon=trial.horizon,
        end=end,
        exit_code=code,
        steps=len(rows),
        died_at=stopped,
        skipped=sum(r.skipped for r in rows),
        spikes=sum(r.spike for r in rows),
        best_loss=best_loss(rows),
        loss=last_loss(rows),
        step_seconds=step_seconds(rows),
        seconds=seconds,
        metric=find_metric(text, bench.wanted) if end == "finished" else None,
        said=_error(text) if end == "failed" else "",
        part=part,
        opening=_opening(rows),
    )


def _error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("nanproof:")]
    return lines[-1][:200] if lines else "it said nothing"


OPENING = 8


def _opening(rows: list[Row]) -> str:
    """The first losses, to the last bit."""
    if len(rows) < OPENING:
        return ""
    return hashlib.sha256(" ".join(float(r.loss).hex() for r in rows[:OPENING]).encode()).hexdigest()[:12]
