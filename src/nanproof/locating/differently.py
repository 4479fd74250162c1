"""Failures of one way to compute only: of compiled code, of one kernel, of memory that nobody wrote."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..location import Location, code_frame
from .replay import Replay
from .sandbox import Sandbox
from .values import Frame, is_users, kind_of, source_of

if TYPE_CHECKING:
    from .find import _Search
    from .trace import Event

_STAGES = ("eager", "aot_eager")


def compiled_only(step: Callable[[], Any], sandbox: Sandbox, weights: Mapping[str, float] | None) -> Location | None:
    """A failure that only compiled code has: the first stage of the compiler that shows it, the smallest module."""
    if "torch._dynamo" not in sys.modules or not _compiles(sandbox):
        return None
    fails = _failing(step, sandbox, weights)
    with torch.compiler.set_stance("default"):
        if not fails():
            return None
        stage = "the backend (Inductor, unless another was chosen)"
        for name in _STAGES:
            torch._dynamo.reset()
            with torch.compiler.set_stance("default", force_backend=name):
                if fails():
                    stage = {
                        "eager": "TorchDynamo (backend='eager' fails too)",
                        "aot_eager": "AOTAutograd (backend='aot_eager' fails too)",
                    }[name]
                    break
        torch._dynamo.reset()
        fails()
        compiled = _compiled_functions()
        module, kind = _smallest(sandbox, fails)
        torch._dynamo.reset()
    if kind:
        root = getattr(sandbox.model, "_orig_mod", sandbox.model)
        file, line, function = *source_of(root.get_submodule(module)), "forward"
        if not is_users(type(root.get_submodule(module)).forward.__code__):  # one of torch's own
            file, line, function = _first_line(step)
        where = f"with {module} ({kind}) run eagerly it is finite"
    else:
        file, line, function = compiled[0] if len(compiled) == 1 else _first_line(step)
        where = "no single submodule heals it when run eagerly"
        if len(compiled) == 1:
            where = f"the only function that is compiled is {function}"
    return Location(
        reproduced=True,
        phase="outside",
        mechanism="compiled-only",
        module=module,
        op="torch.compile",
        file=file,
        line=line,
        function=function,
        code=tuple(code_frame(file, line)),
        why=f"the step is finite eagerly and not when compiled; it begins in {stage}; {where}",
        verified=True if kind else None,
    )


def _compiled_functions() -> list[Frame]:
    """The user's functions that TorchDynamo has compiled since it was reset."""
    seen = getattr(getattr(torch._dynamo.convert_frame, "input_codes", None), "seen", ())
    codes = (ref() for ref in seen)
    return [(c.co_filename, c.co_firstlineno, c.co_name) for c in codes if c is not None and is_users(c)]


def _first_line(step: Any) -> Frame:
    """Where a step function is written."""
    code = getattr(inspect.unwrap(getattr(step, "func", step)), "__code__", None)
    return (code.co_filename, code.co_firstlineno, code.co_name) if code is not None else ("", 0, "")


def _compiles(sandbox: Sandbox) -> bool:
    modules = [m for root in (sandbox.model, *sandbox.others.values()) for m in root.modules()]
    wrapped = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in modules)
    return wrapped or bool(torch._dynamo.utils.counters["frames"].get("total"))


def _failing(step: Callable[[], Any], sandbox: Sandbox, weights: Mapping[str, float] | None) -> Callable[..., bool]:
    def fails(eager: Sequence[nn.Module] = ()) -> bool:
        sandbox.reset()  # which takes away, too, what was changed in a module before
        for module in eager:
            module.forward = torch._dynamo.disable(module.forward)
        replay = Replay(step, sandbox, weights, compiling=True)
        try:
            losses = replay.forward()
            if kind_of(losses.total):
                return True
            replay.backward(losses)
        except Exception:
            return False  # what does not compile is another matter
        return any(kind_of(g) for _, g in replay.gradients())

    return fails


def _smallest(sandbox: Sandbox, fails: Callable[..., bool]) -> tuple[str, str]:
    """The smallest module whose eager run heals the compiled step, as a path and a class; empty when none does."""

    def heals(modules: list[tuple[str, nn.Module]]) -> bool:
        torch._dynamo.reset()
        return bool(modules) and not fails([m for _, m in modules])

    def descend(path: str, module: nn.Module) -> tuple[str, nn.Module]:
        left = list(_called_by(module, path))
        if not heals(left):
            return path, module
        while len(left) > 1:
            half = len(left) // 2
            left = next((part for part in (left[:half], left[half:]) if heals(part)), [])
        return descend(*left[0]) if left else (path, module)

    path, module = descend("", getattr(sandbox.model, "_orig_mod", sandbox.model))
    return (path, type(module).__name__) if path else ("", "")


def _called_by(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules right below one, by path; lists and dictionaries of modules are not called themselves."""
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if type(child).forward is nn.Module.forward:
            yield from _called_by(child, below)
        else:
            yield below, child


_DETERMINISTIC = frozenset(
    [
        "index_add",
        "index_copy",
        "index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "put",
        "cumsum",
        "bmm",
        "convolution",
        "convolution_backward",
        "embedding_dense_backward",
        "ctc_loss_backward",
    ]
)
"""Operations of which torch has a second kernel for `torch.use_deterministic_algorithms`."""


def other_kernels(origin: Event) -> list[tuple[AbstractContextManager[Any], str]]:
    """Other kernels for an operation that failed, each with what to say when the step is finite with it."""
    if origin.op.startswith("_scaled_dot_product"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        said = "only the fused attention kernel fails: with SDPBackend.MATH the step is finite"
        return [(sdpa_kernel(SDPBackend.MATH), said)]
    if origin.op.strip("_") in _DETERMINISTIC:
        said = "only one kernel fails: with torch.use_deterministic_algorithms(True) the step is finite"
        return [(_deterministic(), said)]
    return []


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels where there are any; uninitialized memory stays as it is."""
    chosen, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(chosen, warn_only=warns)
        memory.fill_uninitialized_memory = fills


def uninitialized(search: _Search) -> Location | None:
    """A step that reads memory which nobody wrote: with NaN in such memory it fails, and says where."""
    trace, losses, sinks = search._traced(fill_empty=True)
    if not sinks:
        return None
    found = search._told(trace, losses, sinks)
    if found.mechanism != "uninitialized":
        return None
    note = "what the memory holds differs from run to run: it was replayed with NaN in it"
    return dataclasses.replace(found, notes=(*found.notes, note), verified=True)
