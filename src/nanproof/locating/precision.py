"""Playing a step again in a wider format, to learn whether precision alone explains its failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_BITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}


class _Widen(TorchFunctionMode):
    """Gives every torch function its narrower arguments in a wider format."""

    def __init__(self, dtype: torch.dtype, leaves: list[nn.Parameter]) -> None:
        super().__init__()
        self.dtype = dtype
        self.widened = False
        self._leaves = leaves

    def gradients(self) -> list[Tensor]:
        """Of the parameters and of what stands in for them."""
        return [p.grad for p in self._leaves if p.grad is not None]

    def narrow(self, dtype: torch.dtype) -> bool:
        return _BITS.get(dtype, 99) < _BITS[self.dtype]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _CASTS and self.narrow(_CASTS[name]):
            self.widened = True
            return args[0].to(self.dtype) if self.narrow(args[0].dtype) else args[0]
        if name.endswith("_") or name in ("__set__", "__get__") or "out" in kwargs:
            return function(*args, **kwargs)  # writes into memory of a fixed format

        def widen(value: Any) -> Any:
            if isinstance(value, Tensor) and self.narrow(value.dtype):
                self.widened = True
                return value.to(self.dtype)
            if isinstance(value, torch.dtype) and self.narrow(value):
                self.widened = True
                return self.dtype
            return value

        return function(*tree_map(widen, args), **tree_map(widen, kwargs))


@contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[_Widen]:
    """A block in which parameters, values and autocast regions of narrower formats are all ``dtype``.

    Yields an object whose ``widened`` says whether anything was narrower at all. Gradients are
    computed in the wide format and thrown away with it. Wide parameters stand in for the narrow ones: were these
    changed themselves, torch would forget who listens to their gradients, and DDP would reduce no more.
    """
    leaves = list(model.parameters())
    mode = _Widen(dtype, leaves)
    wide = {p: nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in leaves if mode.narrow(p.dtype)}
    places = [(m, k, p) for m in model.modules() for k, p in m._parameters.items() if p in wide]
    buffers = [(t, t.data) for t in model.buffers() if mode.narrow(t.dtype)]
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__enter__
    changed: list[tuple[Any, bool]] = []

    def disabled(self: Any) -> Any:
        if self._enabled:
            mode.widened = True
            changed.append((self, True))
            self._enabled = False
        return enter(self)  # type: ignore[no-untyped-call]

    try:
        for module, key, p in places:
            assert p is not None
            module._parameters[key] = wide[p]
        for tensor, data in buffers:
            tensor.data = data.to(dtype)
        leaves += wide.values()
        for p in wide:
            p.grad = None
        mode.widened = bool(wide or buffers)
        autocast.__enter__ = disabled  # type: ignore[method-assign]
        with mode:
            yield mode
    finally:
        autocast.__enter__ = enter  # type: ignore[method-assign]
        for context, was in changed:
            context._enabled = was
        for module, key, p in places:
            module._parameters[key] = p
        for tensor, data in buffers:
            tensor.data = data
        for p in wide:
            p.grad = None
