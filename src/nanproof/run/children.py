"""Processes that the program starts: those that train are guarded too, the workers of its loaders are left alone."""

from __future__ import annotations

import dataclasses
import multiprocessing.process
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .options import Options

if TYPE_CHECKING:
    from .launcher import Begin, Stage

_LEFT_ALONE = ("torch.utils.data", "multiprocessing.", "torch.multiprocessing.pool", "concurrent.")


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
            code = 1
            try:
                result = self.target(*args, **kwargs)
                code = 0
                return result
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
                raise
            except BaseException as error:
                stage.died = error
                raise
            finally:
                stage.end(code)


def watch_children(stage: Stage, options: Options, begin: Begin) -> Callable[[], None]:
    """Wrap the targets of processes that are spawned; forked ones bring the patches along and are left alone."""
    base: Any = multiprocessing.process.BaseProcess
    original = base.__init__

    def init(process: Any, *args: Any, **kwargs: Any) -> None:
        original(process, *args, **kwargs)
        target = process._target
        home = getattr(target, "__module__", None) or ""
        if target is None or getattr(process, "_start_method", None) == "fork" or home.startswith(_LEFT_ALONE):
            return
        stage.children += 1
        there = dataclasses.replace(options, run_dir=options.run_dir.absolute())
        process._target = Child(target=target, options=there, begin=begin)

    base.__init__ = init

    def undo() -> None:
        base.__init__ = original

    return undo


_at_fork: list[Callable[[], None]] = []
_registered: list[bool] = []


def after_fork(call: Callable[[], None]) -> Callable[[], None]:
    """Call something in every process that is forked from now on; what is returned ends that."""
    if not _registered:  # for good: Python has no way to take it back
        _registered.append(True)
        os.register_at_fork(after_in_child=lambda: [one() for one in list(_at_fork)])
    _at_fork.append(call)
    return lambda: _at_fork.remove(call)
