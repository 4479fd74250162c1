"""Where a step cannot be watched operation by operation: the first module with a bad output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..location import Location, code_frame
from .replay import Replay
from .sandbox import Sandbox
from .values import Stack, current_stack, floats_in, frames_of, is_users, kind_of, own_frame, source_of


def by_modules(
    step: Callable[[], Any], sandbox: Sandbox, weights: Mapping[str, float] | None, reason: str, *, failed: bool
) -> Location:
    """The first module with a bad output; ``failed`` says that the step is known to fail, beside its forward pass."""
    sandbox.reset()
    names = {id(m): n or type(m).__name__ for n, m in sandbox.model.named_modules()}
    bad: list[tuple[nn.Module, Stack]] = []

    def look(module: nn.Module, _: Any, out: Any) -> None:
        if not bad and id(module) in names and any(map(kind_of, floats_in(out))):
            bad.append((module, current_stack()))

    hook = register_module_forward_hook(look)
    try:
        losses = Replay(step, sandbox, weights).forward()
    finally:
        hook.remove()
    notes = (f"only modules were looked at: {reason}",)
    if not bad:
        where = "after the model" if kind_of(losses.total) else "nowhere in the forward pass"
        failed = failed or kind_of(losses.total) > 0
        return Location(reproduced=failed, notes=(*notes, f"the first bad value arises {where}"))
    module, stack = bad[0]
    file, line, function = *source_of(module), "forward"
    if not is_users(type(module).forward.__code__) and stack:  # a module of a library: where it is called
        file, line, function = frames_of(stack)[own_frame(stack)]
    return Location(
        reproduced=True,
        phase="forward",
        op=type(module).__name__,
        file=file,
        line=line,
        function=function,
        module=names[id(module)],
        why="the first module with a bad output",
        code=tuple(code_frame(file, line)),
        notes=notes,
    )
