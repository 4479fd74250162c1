"""The largest attention logit of modules that compute attention eagerly: what goes into their softmax.

    logits = Logits(model, [], automatic=8)
    logits.listen(None)                 # before a forward pass: to all modules
    logits.seen                         # {"blocks.7.attn": a device scalar}

Fused attention keeps its logits to itself. A softmax over tensors of three dimensions or more counts as attention, and
belongs to the innermost module that it is called in. The first pass that is read finds these modules; from then on
only their forward passes are looked into, and only at steps that are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..floats import format_of
from ..tensors import local_values
from .hooks import Hook, anything_compiled, unwatched

COMPILES = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether code compiles under a mode. Where it does not (torch 2.7), only modules that were asked for are watched."""


class Logits:
    """Hooks around modules; between them a mode sees each softmax."""

    def __init__(self, model: nn.Module, names: Sequence[str], automatic: int) -> None:
        self.names = list(names)
        self.seen: dict[str, Tensor] = {}
        self.limits: dict[str, float] = {}
        self.hooks: list[RemovableHandle] = []
        self._automatic = automatic = automatic if COMPILES else 0
        self._inside: list[str] = []
        self._thread = 0
        """That of the step; a mode belongs to a single thread."""
        self._mode = _Softmax(self._see)
        found = {n: m for n, m in model.named_modules() if (n and automatic) or n in names}
        compiled = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())
        self._modules = {n: m for n, m in found.items() if next(m.children(), None) is not None and not compiled}

    def listen(self, names: Collection[str] | None) -> None:
        """Begin a forward pass in which these modules are read (None: all), or end it: without hooks, at no cost."""
        while self._inside:  # an interrupt left a forward pass without its hooks
            self._leave()
        for hook in self.hooks:
            hook.remove()
        self.hooks, self._thread = [], threading.get_ident()
        if names != () and not anything_compiled():  # a mode around compiled code would keep it from running compiled
            read = {n: m for n, m in self._modules.items() if names is None or n in names}
            self.hooks = [hook for n, m in read.items() for hook in self._around(n, m)]

    def choose(self, largest: Mapping[str, float]) -> None:
        """After the first pass: keep the modules that were asked for, and those with the least headroom."""
        nearest = sorted((n for n in largest if n not in self.names), key=lambda n: -largest[n] / self.limits[n])
        self.names += nearest[: self._automatic]
        self._modules = {n: m for n, m in self._modules.items() if n in self.names}

    def _around(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(*_: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return
            if not self._inside:
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._inside.append(name)

        def leave(*_: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return
            if self._inside and self._inside[-1] == name:
                self._leave()

        return (
            module.register_forward_pre_hook(Hook(enter, unwatched)),
            module.register_forward_hook(Hook(leave, unwatched), always_call=True),
        )

    def _leave(self) -> None:
        self._inside.pop()
        if not self._inside:
            self._mode.last_cast = None
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _see(self, scores: Tensor, dtype: torch.dtype) -> None:
        with suppress(Exception):  # what cannot be read is not watched; it never ends the forward pass
            name = self._inside[-1]
            # the largest, not the largest magnitude: masks are large and negative
            found = (scores if type(scores) is Tensor else local_values(scores)).amax()
            self.seen[name] = torch.maximum(self.seen[name], found) if name in self.seen else found
            self.limits[name] = format_of(dtype).max


class _Softmax(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes on what goes into each softmax, with the dtype that it had before autocast made it float32."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Tensor, torch.dtype], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self.last_cast: tuple[Tensor, torch.dtype] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions inside of the module run as ever, and are not looked into."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cast, self.last_cast = self.last_cast, None
        if func is torch.ops.aten._softmax.default and args[0].dim() >= 3 and args[0].numel():
            self._see(args[0], cast[1] if cast is not None and cast[0] is args[0] else args[0].dtype)
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.last_cast = out, args[0].dtype
        return out
