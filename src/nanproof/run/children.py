"""Processes that the program starts: those that train are guarded too, the workers of its loaders are left alone."""

from __future__ import annotations

import multiprocessing.process
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
        from .launcher import Stage
        from .voice import speak

        with speak():
            stage = Stage(self.options, lambda _: None, self.begin)
            stage.set_up()
            code = 1
            try:
                result = self.target(*args, **kwargs)
                code = 0
                return result
            except SystemExit as leaving:
                code = leaving.code if isinstance(leaving.code, int) else 1
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
        process._target = Child(target=target, options=options, begin=begin)

    base.__init__ = init

    def undo() -> None:
        base.__init__ = original

    return undo
