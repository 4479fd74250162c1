"""`nanproof run` as a library call: a program under the guard, its own exit code, and what happened.

    outcome = run_program(Program(target="train.py"), Options(run_dir=Path("runs/a")))

Nothing is patched outside of the call, and torch is not imported before the program does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import GuardStop, NanproofError, UsageError
from ..files import make_folder, write_atomic
from ..records import to_json
from .arrivals import Arrivals
from .children import watch_children
from .options import Options
from .program import Program

if TYPE_CHECKING:
    from .session import Session

Begin = Callable[[Options], "Session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """The program's own, or 66 when the guard stopped it on purpose."""
    run_dir: str | None
    """Where its records are; None when nothing was guarded."""
    guarded: tuple[Mapping[str, Any], ...] = ()
    """For each guard its folder, counts and reasons."""
    not_guarded: Mapping[str, str] = field(default_factory=dict)
    """What could not be hooked, by name, and why."""

    @property
    def stopped(self) -> bool:
        return self.exit_code == GuardStop.exit_code


class Stage:
    """The patches around a program, put up before and taken down after it."""

    def __init__(self, options: Options, report: Callable[[Outcome], None], begin: Begin | None = None) -> None:
        self._options, self._report, self._begin = options, report, begin or _begin
        self._session: Session | None = None
        self._undo: list[Callable[[], None]] = []
        self._process = os.getpid()
        self._over = False
        self.children = 0

    def set_up(self) -> None:
        arrivals = Arrivals()
        self._undo.append(arrivals.end)
        self._undo.append(watch_children(self, self._options, self._begin))
        original = os._exit
        self._undo.append(lambda: setattr(os, "_exit", original))

        def leave(code: int) -> None:
            self.end(code)
            original(code)

        os._exit = leave  # type: ignore[assignment]

        def torch_is_here(_: ModuleType) -> None:
            from .patches import Patches
            from .trainers import watch_trainers

            self._session = session = self._begin(self._options)
            patches = Patches(session)
            patches.install()
            self._undo.append(patches.undo)
            watch_trainers(arrivals, patches, session)

        arrivals.await_module("torch", torch_is_here)

    def end(self, exit_code: int) -> Outcome | None:
        """Take everything down and report, once, and only in the process that set it up."""
        if self._over or os.getpid() != self._process:
            return None
        self._over = True
        session = self._session
        if session is not None:
            session.end()
        while self._undo:
            self._undo.pop()()
        outcome = self._outcome(session, exit_code)
        _write(outcome)
        self._report(outcome)
        return outcome

    def _outcome(self, session: Session | None, exit_code: int) -> Outcome:
        accounts = session.guards.accounts if session is not None else []
        missed = dict(session.unhooked) if session is not None else {}
        elsewhere = self.children or (session is not None and session.guarded_elsewhere)
        if not accounts and not missed and not elsewhere:
            missed["the script"] = "no torch optimizer was stepped in this process"
        return Outcome(
            exit_code=exit_code, run_dir=accounts[0]["folder"] if accounts else None, guarded=tuple(accounts),
            not_guarded=missed,
        )  # fmt: skip


def _begin(options: Options) -> Session:
    from .session import Session

    return Session(options)


def run_program(
    program: Program,
    options: Options,
    *,
    report: Callable[[Outcome], None] = lambda _: None,
    begin: Begin | None = None,
) -> Outcome:
    """Run a program as ``python`` would, under the guard. ``report`` hears the outcome even if it calls os._exit.

    As with the interpreter, the program has ``sys.argv`` and is ``__main__`` from then on. ``begin`` makes another
    session than the usual one; it is called once torch has been imported, and again in processes that are spawned.
    """
    program.check()
    options.check()
    if int(os.environ.get("RANK", "0")) == 0:
        options.check_folder()
    stage = Stage(options, report, begin)
    stage.set_up()
    code, begun = 1, False
    try:
        run = program.prepare()
        begun = True
        run()
        code = 0
    except SystemExit as leaving:
        code = _code_of(leaving)
    except KeyboardInterrupt as error:
        code = 130
        own = _own_part(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
        raise
    except BaseException as error:
        code = error.exit_code if isinstance(error, NanproofError) else 1
        if isinstance(error, UsageError) and not begun:
            raise
        own = _own_part(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
    finally:
        outcome = stage.end(code)
    assert outcome is not None
    return outcome


def _code_of(leaving: SystemExit) -> int:
    """What the interpreter makes of an exit: nothing is 0, a number itself, anything else is said and 1."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _own_part(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback as it would be without us: it begins in the program."""
    own = str(Path(__file__).parent)
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(own):
        traceback = traceback.tb_next
    return traceback


def _write(outcome: Outcome) -> None:
    """What happened, beside the run's log: run.json, or run.r1.json and so on for other ranks."""
    if outcome.run_dir is None:
        return
    rank = int(outcome.guarded[0]["rank"])
    folder = make_folder(outcome.run_dir)
    name = "run.json" if rank == 0 else f"run.r{rank}.json"
    record = {
        "command": [sys.executable, *sys.orig_argv[1:]], "exit_code": outcome.exit_code,
        "guarded": list(outcome.guarded), "not_guarded": dict(outcome.not_guarded),
    }  # fmt: skip
    write_atomic(folder / name, json.dumps(to_json(record), indent=1) + "\n")
