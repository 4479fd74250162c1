"""Loops without a closure: what went into the model and which gradient came back, enough to play that part again."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..locating import Location
from ..tensors import is_finite, tensors_in

_INNER = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
KEPT_BYTES = 64 << 20
"""Larger gradients of outputs are not kept: to hold those of an LLM's logits could cost a run its memory."""


class Seam:
    """Keeps references, no copies, from a forward pass to the verdict on it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._module: nn.Module | None = None
        self._inputs: tuple[Any, Any] | None = None
        self._autocast: dict[str, torch.dtype] = {}
        self._several = False
        self._gradients: dict[int, Tensor] = {}
        self._outputs = 0
        self._backward: tuple[str, int, str] = ("", 0, "")
        self._node = ""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A root module is about to run."""
        if self._module is None:
            self._module, self._inputs, self._autocast = module, (args, kwargs), _autocast_in_force()
        else:
            self._several = True

    def after(self, module: nn.Module, output: Any) -> None:
        """It has run: the gradients of its outputs will come by here."""
        if module is not self._module or self._outputs:
            self._several = True  # what runs in several calls cannot be played again as one
            return
        found = _differentiable(output)
        self._outputs = len(found)
        for i, tensor in enumerate(found):
            tensor.register_hook(functools.partial(self._keep, i))  # type: ignore[no-untyped-call]

    def _keep(self, i: int, gradient: Tensor | None) -> None:
        # an output that the loss leaves out gets none, as behind DDP with find_unused_parameters
        if gradient is not None and gradient.nbytes <= KEPT_BYTES:
            self._gradients[i] = gradient.detach()

    def meet_backward(self, loss: Any) -> None:
        """Where the loop calls backward, and what kind of expression the loss is."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_INNER):
            frame = frame.f_back
        if frame is not None:
            self._backward = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        self._node = node.name() if node is not None else ""

    def step(self) -> Callable[[], Tensor] | None:
        """The model's part of the step as a closure: its loss is linear in the outputs, with the same gradients."""
        if self._module is None or self._inputs is None or self._outputs == 0 or self._several:
            return None
        # what is compiled is played eagerly
        model, (args, kwargs) = getattr(self._module, "_orig_mod", self._module), self._inputs
        autocast = dict(self._autocast)

        def play() -> Tensor:
            with contextlib.ExitStack() as precision:  # loops open autocast around the model, not inside of it
                for kind, dtype in autocast.items():
                    precision.enter_context(torch.autocast(kind, dtype=dtype))
                outputs = _differentiable(model(*args, **kwargs))
            bad = [o for o in outputs if not is_finite(o)]
            if bad:
                return bad[0].sum()
            good = {i: g for i, g in self._gradients.items() if is_finite(g)}  # a bad one was born after the model
            parts = [(o * good[i]).sum() for i, o in enumerate(outputs) if i in good]
            return torch.stack([p.float() for p in parts]).sum() if parts else outputs[0].sum() * 0

        return play

    def between(self) -> Location | None:
        """The culprit when the model's outputs were good and the gradient that came back to them was not."""
        if not any(not is_finite(g) for g in self._gradients.values()):
            return None
        file, line, function = self._backward
        note = "the model's output is finite, the gradient that came back is not: look at the loss expression"
        return Location(
            reproduced=True, phase="backward", op=self._node, file=file, line=line, function=function,
            why=f"between the model's output and the loss, whose last operation is {self._node}", notes=(note,),
        )  # fmt: skip


def _autocast_in_force() -> dict[str, torch.dtype]:
    """By kind of device, the dtype of the autocast regions that the call stands in."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _differentiable(output: Any) -> list[Tensor]:
    """The outputs that the loss is made of; a model that returns its loss needs no more than that."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    return [t for _, t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
