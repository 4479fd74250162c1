"""`nanproof run` as a library call: a program under the guard, its own exit code, and what happened.

    outcome = run_program(Program(target="train.py"), Options(run_dir=Path("runs/a")))

Nothing is patched outside of the call, and torch is not imported before the program does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import GuardStop, NanproofError, UsageError
from ..launch import is_first_process, rank_and_world
from ..location import shown_path
from .children import after_fork, invite, watch_children
from .import_hooks import ImportHooks
from .options import Options
from .overwritten import Overwritten
from .program import Program
from .record import RunRecord
from .signals import before_sigterm, heard_ctrl_c

if TYPE_CHECKING:
    from .session import Session

Begin = Callable[[Options], "Session"]
State = Literal["finished", "failed", "interrupted", "terminated", "stopped", "ended"]
log = logging.getLogger("nanproof")
_OURS = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int | None
    """The program's own, or 66 when the guard stopped it on purpose; None where it is not known: in processes that the
    program has started as commands."""
    state: State
    run_dir: str | None
    """Where its records are; None when nothing was guarded in this process."""
    attached: bool = False
    """Whether a guard has judged a step."""
    reason: str = ""
    """Why nothing was guarded."""
    guarded: tuple[Mapping[str, Any], ...] = ()
    """For each guard its folder, counts and reasons."""
    not_guarded: Mapping[str, str] = field(default_factory=dict)
    """What could not be hooked, by name, and why."""
    not_held: Mapping[str, str] = field(default_factory=dict)
    """What moves on when a step is skipped, by name, and why."""
    processes: tuple[Mapping[str, Any], ...] = ()
    """The records of processes that the program has started and that trained."""

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
        self._record = RunRecord()
        self.died: BaseException | None = None
        self.nothing = "torch was not imported"
        """Why nothing was guarded, where this process has not trained."""
        self._as_usual: Callable[[], None] = lambda: None
        """Lets SIGTERM do what it does without us."""

    @property
    def here(self) -> bool:
        """Whether this is the process that it was set up in."""
        return os.getpid() == self._process

    @property
    def blocked_saves(self) -> int:
        """How many saves were not carried out so far, because what they would have saved is not finite."""
        return self._session.blocked_saves if self._session is not None else 0

    def set_up(self) -> None:
        self._write_state()
        hooks = ImportHooks()
        self._undo.append(hooks.end)
        self._undo.append(watch_children(self._options, self._begin))
        if self._begin is _begin and not self._options.child:
            self._undo.append(invite(self._options))
            kept = Overwritten(self._options.run_dir, logs_only=True).__enter__()
            self._undo.append(kept.__exit__)
            several = rank_and_world()[1] > 1
            self._as_usual = before_sigterm(self._terminated if several else self._terminate, blocked=several)
            self._undo.append(self._as_usual)
        self._undo.append(after_fork(self._forked))
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
            session.attachment.on_change = self._write_state
            session.guards.tell = session.attachment.say
            patches = Patches(session)
            patches.install()
            self._undo.append(patches.undo)
            watch_trainers(hooks, patches, session)

        hooks.await_module("torch", torch_is_here)

    def _forked(self) -> None:
        """In a process that was forked: if it trains, it is guarded by itself."""
        if self._over:
            return
        self._as_usual()  # it may be blocked on another process, and must still be easy to end
        self._process = os.getpid()
        self._report = log_summary
        self._record = RunRecord()
        self._options = dataclasses.replace(self._options, child=True, run_dir=self._options.run_dir.absolute())
        if self._session is not None:
            self._session.forked(self._options)

    def _write_state(self) -> None:
        """What is known while the program runs."""
        session = self._session
        attachment = session.attachment if session is not None else None
        folder, name, guarded = self._options.run_dir, "run.json", []
        if self._options.child:  # it may be killed when the program ends, as Ray does with its actors
            first = next(iter(session.guards.accounted()), None) if session is not None else None
            if first is None:
                return
            folder, guarded = Path(first["folder"]), [{k: first[k] for k in ("folder", "rank")}]
            name = self._name(int(first["rank"]), folder)  # where the end will be written, too
        elif not is_first_process():
            return
        self._record.write(
            folder,
            name,
            {
                "state": "running",
                "exit_code": None,
                "attached": attachment is not None and attachment.attached,
                "reason": attachment.reason if attachment is not None else "torch is not imported yet",
                "guarded": guarded,
                "not_guarded": dict(session.unhooked) if session is not None else {},
            },
        )

    def _name(self, rank: int, folder: Path) -> str:
        """The file of this process beside the run's log: run.json, or run.r1.json and so on for other ranks."""
        of_ranks = self._options.child and folder.resolve() == self._options.run_dir.resolve()
        return f"run.r{rank}.json" if rank or of_ranks else "run.json"

    def end(self, exit_code: int | None, state: State | None = None) -> Outcome | None:
        """Take everything down and report, once, and only in the process that set it up."""
        if self._over or not self.here:
            return None
        self._over = True
        session = self._session
        if session is not None:
            if self.died is not None:
                session.died(self.died)
            session.end()
        while self._undo:
            self._undo.pop()()
        outcome = self._outcome(session, exit_code, state or _state(exit_code))
        self._write_end(outcome)
        self._report(outcome)
        return outcome

    def _terminate(self) -> None:
        self.end(128 + signal.SIGTERM, "terminated")

    def _terminated(self) -> None:
        """Beside a rank that may be blocked: nothing is closed, only what happened so far is written and said."""
        outcome = self._outcome(self._session, 128 + signal.SIGTERM, "terminated")
        self._write_end(outcome)
        self._report(outcome)

    def _outcome(self, session: Session | None, exit_code: int | None, state: State) -> Outcome:
        accounts = session.guards.accounted() if session is not None else []
        missed = dict(session.unhooked) if session is not None else {}
        processes = [] if self._options.child else self._record.processes(self._options.run_dir)
        attached = session is not None and session.attachment.attached
        attached = attached or any(a.get("abandoned") for a in accounts)  # it died within its first step
        reason = ""
        if not attached and not any(p.get("attached") for p in processes):
            reason = session.attachment.reason if session is not None else self.nothing
            if reason == "no optimizer has stepped yet":
                reason = "no torch optimizer was stepped"
            if not missed:
                missed["the script"] = reason
        return Outcome(
            exit_code=exit_code,
            state=state,
            run_dir=accounts[0]["folder"] if accounts else None,
            attached=not reason,
            reason=reason,
            guarded=tuple(accounts),
            not_guarded=missed,
            not_held=dict(session.unheld) if session is not None else {},
            processes=tuple(processes),
        )

    def _write_end(self, outcome: Outcome) -> None:
        """What happened, beside the run's log."""
        if not outcome.guarded and (self._options.child or not is_first_process()):
            return
        folder, name = self._options.run_dir, "run.json"
        if outcome.guarded:
            rank, folder = int(outcome.guarded[0]["rank"]), Path(outcome.guarded[0]["folder"])
            name = self._name(rank, folder)
            if name == "run.json" and not self._options.child and is_first_process():
                folder = self._options.run_dir
        fields = dataclasses.asdict(outcome)
        del fields["run_dir"]
        self._record.write(folder, name, fields)


def log_summary(outcome: Outcome) -> None:
    """The end of a process that is not the program itself."""
    for account in outcome.guarded:
        if account["rank"] == 0:
            clean = not account.get("kinds") and not account.get("failures")
            log.log(
                logging.INFO if clean else logging.WARNING,
                "%s; records in %s",
                account["summary"],
                shown_path(account["folder"]),
            )


def _state(exit_code: int | None) -> State:
    signals: dict[int | None, State] = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}
    known: dict[int | None, State] = {0: "finished", GuardStop.exit_code: "stopped", None: "ended", **signals}
    return known.get(exit_code, "failed")


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
    if is_first_process():
        options.claim_folder()
    stage = Stage(options, report, begin)
    stage.set_up()
    code, begun = 1, False
    state: State | None = None
    try:
        run = program.prepare()
        begun = True
        run()
        code = 0
    except SystemExit as leaving:
        code = _code_of(leaving)
        stage.died = leaving if code and not isinstance(leaving, GuardStop) else None
    except KeyboardInterrupt:
        heard_ctrl_c()
        code, state = 130, "interrupted"
    except BaseException as error:
        code = error.exit_code if isinstance(error, NanproofError) else 1
        if isinstance(error, UsageError) and not begun:
            raise
        stage.died = error
        _show(error)
    finally:
        outcome = stage.end(code, state)
    if outcome is None:  # a forked process that has come to the end of the program
        sys.exit(code)
    return outcome


@contextmanager
def guarding(options: Options) -> Iterator[Stage]:
    """A block whose training is guarded, for frameworks that call a function in processes of their own."""
    options.check()
    stage, code = Stage(options, log_summary), 1
    stage.set_up()
    try:
        yield stage
        code = 0
    except NanproofError as error:
        code = error.exit_code
        raise
    finally:
        stage.end(code)


def _show(error: BaseException) -> None:
    own = without_ours(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(own), own)


def _code_of(leaving: SystemExit) -> int:
    """What the interpreter makes of an exit: nothing is 0, a number itself, anything else is said and 1."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback as it would be without us: none of its frames is nanproof's."""
    if traceback is None:
        return None
    rest = without_ours(traceback.tb_next)
    if traceback.tb_frame.f_code.co_filename.startswith(_OURS):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
