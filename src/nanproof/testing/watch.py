"""`FiniteWatch`: sees the first non-finite module output or gradient while it is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..tensors import nonfinite


class FiniteWatch:
    """Watches every module that runs while it is open; ``first`` says what broke first, or is None.

    >>> import torch
    >>> with FiniteWatch() as watch:
    ...     _ = nn.Sequential(nn.ReLU(), nn.Softplus())(torch.tensor([1.0, torch.inf]))
    >>> watch.first
    'output of 0 (ReLU): 1 +Inf of 2 values, first at [1] (float32)'

    In the forward pass it looks at what each module returns; in the backward pass at the gradient that reaches
    each such output, and at the gradient of each parameter once it is accumulated. Everything is looked at
    when it is made, so the first is the first in time.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self._handles: list[RemovableHandle] = []
        # Held, not only counted: the id of a dead object may come back as another's.
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, Tensor] = {}

    def __enter__(self) -> FiniteWatch:
        self._handles.append(register_module_forward_pre_hook(self._before_forward))
        self._handles.append(register_module_forward_hook(self._after_forward))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        self._parameters.clear()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._modules.setdefault(id(module), module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_leaf and parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = parameter
                look = partial(self._look_at_parameter, module, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._look(tensor, "output", module)
            if tensor.requires_grad:
                look = partial(self._look_at_gradient, module)
                self._handles.append(tensor.register_hook(look))  # type: ignore[no-untyped-call]

    def _look_at_gradient(self, module: nn.Module, grad: Tensor) -> None:
        self._look(grad, "gradient of the output", module)

    def _look_at_parameter(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._look(parameter.grad, f"gradient of {name}", module)

    def _look(self, tensor: Tensor, what: str, module: nn.Module) -> None:
        if self.first is None and (found := nonfinite(what, tensor)):
            self.first = f"{what} of {self._place(module)}: {found.census}"

    def _place(self, module: nn.Module) -> str:
        """Its path from the outermost module that has run, and its class."""
        kind = type(module).__name__
        paths = [name for root in self._modules.values() for name, m in root.named_modules() if m is module]
        path = max(paths, key=lambda p: p.count(".") + bool(p), default="")
        return f"{path} ({kind})" if path else kind


def _tensors(output: Any) -> Iterator[Tensor]:
    match output:
        case Tensor():
            yield output
        case Mapping():
            for value in output.values():
                yield from _tensors(value)
        case list() | tuple():
            for value in output:
                yield from _tensors(value)
