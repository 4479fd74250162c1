"""Processes that the program starts: those that train are guarded too, the workers of its loaders are left alone."""

from __future__ import annotations

import atexit
import dataclasses
import json
import multiprocessing.process
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import Options

if TYPE_CHECKING:
    from .launcher import Begin

_LEFT_ALONE = ("torch.utils.data", "multiprocessing.", "torch.multiprocessing.pool", "concurrent.")
_VARIABLE = "NANPROOF_RUN"
"""Tells Python processes that are started by whatever means which run they belong to."""
_STARTUP = str(Path(__file__).parent / "startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The target of a process that starts from scratch, with the guard set up around it."""

    target: Callable[..., Any]
    options: Options
    begin: Begin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .console import show_messages
        from .launcher import Stage, log_summary

        with show_messages():
            stage = Stage(dataclasses.replace(self.options, child=True), log_summary, self.begin)
            stage.set_up()
            code: int | None = 1
            try:
                result = self.target(*args, **kwargs)
                code = 0
                return result
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
                stage.died = leaving.__context__ if code else None  # torch's own wrapper exits for an exception
                raise
            except BaseException as error:
                stage.died = error
                raise
            finally:
                stage.end(code)


def watch_children(options: Options, begin: Begin) -> Callable[[], None]:
    """Wrap the targets of processes that are spawned; forked ones bring the patches along and are left alone."""
    base: Any = multiprocessing.process.BaseProcess
    original = base.__init__

    def init(process: Any, *args: Any, **kwargs: Any) -> None:
        original(process, *args, **kwargs)
        target = process._target
        home = getattr(target, "__module__", None) or ""
        if target is None or getattr(process, "_start_method", None) == "fork" or home.startswith(_LEFT_ALONE):
            return
        there = dataclasses.replace(options, run_dir=options.run_dir.absolute())
        process._target = Child(target=target, options=there, begin=begin)

    base.__init__ = init

    def undo() -> None:
        base.__init__ = original

    return undo


def invite(options: Options) -> Callable[[], None]:
    """Let Python processes that the program starts as commands, or a cluster for it, join the run."""
    fields = {**dataclasses.asdict(options), "run_dir": str(options.run_dir.absolute()), "child": True}
    path = os.environ.get("PYTHONPATH")
    before = {"PYTHONPATH": path, _VARIABLE: os.environ.get(_VARIABLE)}
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *([path] if path else [])])
    os.environ[_VARIABLE] = json.dumps({"prefix": sys.prefix, "options": fields})

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return undo


def join() -> None:
    """In a process that was started: guard what it trains, as part of the run that it was invited to."""
    given = json.loads(os.environ.get(_VARIABLE, "{}"))
    words = sys.orig_argv[1:6]
    if given.get("prefix") != sys.prefix or any("multiprocessing" in w or Path(w).name == "nanproof" for w in words):
        return  # another environment; a process that brings a target of its own; a run of its own
    from .console import show_messages
    from .launcher import Stage, log_summary, without_ours

    show = sys.excepthook

    def show_theirs(kind: Any, error: BaseException, traceback: Any) -> None:
        own = without_ours(traceback)
        show(kind, error.with_traceback(own), own)

    sys.excepthook = show_theirs  # an exception that ends the program shows its own frames, as without us
    fields = given["options"]
    stage = Stage(Options(**{**fields, "run_dir": Path(fields["run_dir"])}), log_summary)
    messages = show_messages()
    messages.__enter__()
    stage.set_up()

    def leave() -> None:
        stage.died = getattr(sys, "last_value", None)  # of an exception that nothing has caught
        stage.end(1 if stage.died is not None else None)
        messages.__exit__(None, None, None)

    atexit.register(leave)


_at_fork: list[Callable[[], None]] = []
_registered: list[bool] = []


def after_fork(call: Callable[[], None]) -> Callable[[], None]:
    """Call something in every process that is forked from now on; what is returned ends that."""
    if not _registered:  # for good: Python has no way to take it back
        _registered.append(True)
        os.register_at_fork(after_in_child=lambda: [one() for one in list(_at_fork)])
    _at_fork.append(call)
    return lambda: _at_fork.remove(call)
