"""One attempt at a stage: a child process, its output in a file, ended after its steps or its minutes."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ... import files
from ...errors import NanproofError, UsageError
from ...files import file_bytes
from ...logs import read
from ...logs.series import Series
from .plan import Plan, Stage

OUTPUT = "output.log"
GRACE = 20.0  # seconds between asking a process to end and ending it
POLL = 0.5

Tell = Callable[[str], None]
_OURS = {
    "python": [sys.executable],
    "python3": [sys.executable],
    "nanproof": [sys.executable, "-m", "nanproof"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ON_DEATH = 1  # prctl: the signal for when the parent dies


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended."""

    code: int | None
    """None when it was ended from here because its steps or minutes were over."""
    series: Series | None
    incidents: int
    complaint: str


def words_of(plan: Plan, stage: Stage, extra: Mapping[str, str], run_dir: Path) -> list[str]:
    """The command line of an attempt, with its settings."""
    filled = {"{run_dir}": str(run_dir), "{steps}": str(stage.steps or "")}
    words = shlex.split(stage.command)
    for mark, text in filled.items():
        words = [w.replace(mark, text) for w in words]
    # the interpreter that runs this, and what is installed there
    words[:1] = _OURS.get(words[0], words[:1])
    for key, value in {**stage.set, **extra}.items():
        words += [f"{key}={value}"] if plan.style == "dotted" else [f"--{key}", value]
    return words


def attempt(
    plan: Plan, stage: Stage, run_dir: Path, setting: Mapping[str, str], env: Mapping[str, str], tell: Tell
) -> Ended:
    """Run a stage once, from start to end."""
    files.make_folder(run_dir)
    words = words_of(plan, stage, setting, run_dir)
    environment = {**os.environ, **stage.env, **env, "NANPROOF_RUN_DIR": str(run_dir)}
    log = Path(stage.log.replace("{run_dir}", str(run_dir)))
    log = log if log.is_absolute() else plan.folder / log
    with files.output_file(run_dir / OUTPUT) as output:
        try:
            process = subprocess.Popen(
                words,
                cwd=plan.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent if _LIBC is not None else None,
            )
        except OSError as error:
            raise UsageError(
                f"stage {stage.name!r} cannot start {words[0]!r}: {error.strerror}", hint="check command:"
            ) from None
        code, why = _wait(process, stage, log, run_dir, tell)
    if why:
        for folder in {run_dir, log if log.is_dir() else run_dir}:
            _note_end(folder, {"command": words, "cwd": str(plan.folder)}, f"nanproof rollout ended it: {why}")
    series, incidents = _series(log, run_dir), _incidents(log, run_dir)
    complaint = f"exit code {code}, see {run_dir / OUTPUT}" if code not in (0, None) else ""
    return Ended(code=code, series=series, incidents=incidents, complaint=complaint)


def _end_with_parent() -> None:
    """In the child: a rollout that is killed must not leave a training behind that the next one runs into."""
    assert _LIBC is not None
    _LIBC.prctl(_ON_DEATH, signal.SIGTERM)


def _wait(
    process: subprocess.Popen[bytes], stage: Stage, log: Path, run_dir: Path, tell: Tell
) -> tuple[int | None, str]:
    """Wait until the process ends or its stage is over; None, and why, when it was ended from here."""
    deadline = time.monotonic() + 60 * stage.minutes
    # a command that was told its steps ends by itself, after its last save and evaluation
    last = None if "{steps}" in stage.command else stage.steps
    try:
        while True:
            try:
                return process.wait(timeout=POLL), ""
            except subprocess.TimeoutExpired:
                pass
            series = _series(log, run_dir)
            done = _progress(series, tell)
            if last is not None and done >= last:
                _end(process)
                return None, f"its {last:,} steps were done"
            if time.monotonic() > deadline:
                _end(process)
                return None, f"its {stage.minutes:g} minutes were over"
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, politely first."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ask)
            process.wait(timeout=GRACE)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _note_end(folder: Path, begun: Mapping[str, object], why: str) -> None:
    """In the run's record, so that nobody takes it for a run that was killed."""
    path = folder / "run.json"
    with suppress(OSError, ValueError):
        begun = {**begun, **json.loads(file_bytes(path))}
    files.write_atomic(path, json.dumps({**begun, "ended": why}, indent=1) + "\n")


def _progress(series: Series | None, tell: Tell) -> int:
    if series is None or series.loss is None or not len(series.loss):
        return 0
    step, loss = int(series.loss.steps[-1]), float(series.loss.values[-1])
    tell(f"step {step:,}  loss {loss:.4g}")
    return step


def _series(log: Path, run_dir: Path) -> Series | None:
    """The log with a loss in it: the named one, or else what the command printed."""
    for path in (log, run_dir / OUTPUT):
        try:
            series = read(path)
        except NanproofError:
            continue
        if series.loss is not None and len(series.loss):
            return series
    return None


def _incidents(log: Path, run_dir: Path) -> int:
    folders = {p for base in (log, run_dir) for p in base.glob("**/incidents/*/incident.json") if base.is_dir()}
    return len(folders)
