"""Loops without a closure: the model's inputs and the gradients of its outputs, enough to replay that part."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..locating.values import current_stack, frames_of, own_frame
from ..location import Location, call_name
from ..tensors import bytes_of, device_kinds, is_finite, tensors_in
from .hooks import Hook
from .loss_graph import LossGraph

log = logging.getLogger("nanproof")
KEPT_BYTES = 64 << 20
"""Larger gradients of outputs are not kept: to hold those of an LLM's logits could cost a run its memory."""


class ForwardCapture:
    """References, no copies, kept from a forward pass to the verdict on it."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._inputs: tuple[Any, Any] | None = None
        self._autocast: dict[str, torch.dtype] = {}
        self._several = False
        self._calls: tuple[ForwardCapture, ...] = ()
        self._gradients: dict[int, Tensor] = {}
        self._outputs = 0
        self._hooks: list[weakref.ref[Hook]] = []
        """On its outputs; they live as long as the graph behind them."""
        self._backward: tuple[str, int, str] = ("", 0, "")
        self._node = ""
        self._returned = 0
        """Autograd's sequence number when the model had returned: younger nodes compute the loss."""
        self._graph: LossGraph | None = None
        self.reached = False
        """Whether a backward pass came by."""
        self._outputs_were_good = False
        """Whether a replay has come to the model's outputs and found them finite."""

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any, output: Any) -> ForwardCapture:
        """A call that has just ended, with the autocast regions that are still around it."""
        found = cls()
        found.before(module, args, kwargs)
        found._outputs = len(differentiable(output))
        return found

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A root module is about to run."""
        if self._module is None:
            self._module, self._inputs, self._autocast = module, (args, kwargs), autocast_in_force()
        else:
            self._several = True

    def after(self, module: nn.Module, output: Any) -> None:
        """It has run: the gradients of its outputs will come by here."""
        self._returned = torch._C._autograd._get_sequence_nr()
        if module is not self._module or self._outputs:
            self._several = True  # several calls cannot be replayed as one
            return
        found = differentiable(output)
        self._outputs = len(found)
        for i, tensor in enumerate(found):
            hook = Hook(functools.partial(self._keep, i), self._cannot_keep)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self._hooks.append(weakref.ref(hook))

    @property
    def hooked(self) -> bool:
        """Whether a backward pass would be heard of."""
        return self._outputs > 0

    @property
    def held(self) -> bool:
        """Whether the loop still holds an output with its graph, so that a backward pass can come by."""
        return any(hook() is not None for hook in self._hooks)

    @classmethod
    def of_several(cls, calls: Sequence[ForwardCapture]) -> ForwardCapture:
        """Calls of one pass, in their order: each can be replayed by itself, up to the first that is bad."""
        found = cls()
        found._several, found._calls = True, tuple(calls)
        last = calls[-1]
        found._backward, found._node, found._graph = last._backward, last._node, last._graph
        return found

    def _keep(self, i: int, gradient: Tensor | None) -> None:
        self.reached = True
        # an output that the loss leaves out gets none, as behind DDP with find_unused_parameters
        if gradient is not None and bytes_of(gradient) <= KEPT_BYTES:
            self._gradients[i] = gradient.detach()

    def _cannot_keep(self, error: Exception) -> None:
        self._several = True  # without all gradients the pass cannot be replayed
        log.error("nanproof: guard-failed, keeping a gradient: %s: %s", type(error).__name__, error)

    def before_backward(self, loss: Any) -> None:
        """Where the loop calls backward, and what kind of expression the loss is."""
        stack = current_stack()
        if stack:
            self._backward = frames_of(stack)[own_frame(stack)]
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        self._node = node.name() if node is not None else ""
        self._graph = LossGraph(loss, max([self._returned, *(call._returned for call in self._calls)]))

    def step(self, *, probe: bool = False, alone: bool = False) -> Callable[[], Tensor] | None:
        """The model's part of the step as a closure: its loss is linear in the outputs, with the same gradients.

        With ``probe`` an output whose gradient is not known, or bad, has a small one, so that a backward pass runs.
        Several calls are replayed only ``alone``: ranks would stop at different ones, and wait for each other.
        """
        if self._calls and alone and all(c._inputs is not None and not c._several for c in self._calls):
            return self._one_by_one
        if self._module is None or self._inputs is None or self._outputs == 0 or self._several:
            return None
        # a repair is looked for in eager code; a location asks as well whether only compiled code fails
        model = getattr(self._module, "_orig_mod", self._module) if probe else self._module
        call = self._call(model)

        def play() -> Tensor:
            outputs = differentiable(call())
            bad = [o for o in outputs if not is_finite(o)]
            self._outputs_were_good = not bad
            if bad:
                return bad[0].sum()
            good = {i: g for i, g in self._gradients.items() if is_finite(g)}  # a bad one was born after the model
            parts = [(o * good[i]).sum() for i, o in enumerate(outputs) if i in good]
            if probe:
                parts += [o.float().mean() for i, o in enumerate(outputs) if i not in good]
            return torch.stack([p.float() for p in parts]).sum() if parts else outputs[0].sum() * 0

        return play

    def _one_by_one(self) -> Tensor:
        """Several calls again, each with the inputs that it had: the first bad output, or nothing bad."""
        self._outputs_were_good = False
        outputs = [torch.zeros((), requires_grad=True)]
        for call in self._calls:
            assert call._module is not None
            outputs = differentiable(call._call(call._module, detached=True)()) or outputs
            if bad := [o for o in outputs if not is_finite(o)]:
                return bad[0].sum()
        self._outputs_were_good = True
        return outputs[0].sum() * 0

    def forward_only(self) -> Callable[[], Tensor] | None:
        """The forward pass up to a bad output, on views of the parameters: hooks on their gradients stay silent."""
        if self._module is None or self._inputs is None or self._several:
            return None
        views = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self._module.named_parameters()}
        call = self._call(functools.partial(_call_with, self._module, views))

        def play() -> Tensor:
            outputs = differentiable(call())
            bad = [o for o in outputs if not is_finite(o)]
            return bad[0].sum() if bad else outputs[0].sum() * 0

        return play

    def _call(self, model: Callable[..., Any], *, detached: bool = False) -> Callable[[], Any]:
        """The call of the model again, in the autocast regions that were around it: loops open them outside of it.

        ``detached``: without the graphs behind its inputs, which a backward pass has used up.
        """
        assert self._inputs is not None
        autocast = dict(self._autocast)
        args, kwargs = tree_map_only(Tensor, Tensor.detach, self._inputs) if detached else self._inputs

        def call() -> Any:
            with contextlib.ExitStack() as precision:
                for kind, dtype in autocast.items():
                    precision.enter_context(torch.autocast(kind, dtype=dtype))
                return model(*args, **kwargs)

        return call

    @property
    def gradients_are_finite(self) -> bool:
        """Whether what came back from the loss to the model's outputs was finite."""
        return all(is_finite(g) for g in self._gradients.values())

    @property
    def called(self) -> tuple[str, int, str]:
        """The file, line and function that called backward."""
        return self._backward

    def between(self, loss: Any) -> Location | None:
        """The culprit when the model's outputs were good, and the loss or the gradient that came back was not."""
        # the loss first: on several ranks a bad one is sent back as NaN, whatever its gradient is
        bad_loss = isinstance(loss, Tensor) and not is_finite(loss)
        if not bad_loss and self.gradients_are_finite:
            return None
        file, line, function = self._backward
        origin = (
            self._graph.find(backward=not bad_loss, outputs_good=self._outputs_were_good)
            if self._graph is not None
            else None
        )
        if origin is None and not self._outputs_were_good:
            return None
        bad, last = "loss" if bad_loss else "gradient that came back", call_name(self._node)
        why = f"the model's output is finite, the {bad} is not; the last operation of the loss is {last}"
        return Location(
            reproduced=True,
            phase="forward" if bad_loss else "backward",
            op=origin.op if origin is not None else last,
            file=file,
            line=line,
            function=function,
            mechanism=origin.mechanism if origin is not None else "loss-expression",
            why=origin.why if origin is not None else why,
            leaf=origin.leaf if origin is not None else "",
            doubt="read from what autograd had saved of the loss, which cannot be replayed"
            if origin is not None
            else "",
        )


def _call_with(module: nn.Module, parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return torch.func.functional_call(module, parameters, args, kwargs)


def autocast_in_force() -> dict[str, torch.dtype]:
    """By kind of device, the dtype of the autocast regions around the call."""
    return {kind: torch.get_autocast_dtype(kind) for kind in device_kinds() if torch.is_autocast_enabled(kind)}


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A block outside of the autocast regions around it, and of what they have cached."""
    with contextlib.ExitStack() as stack:
        for kind in autocast_in_force():
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.clear_autocast_cache()
        yield
        torch.clear_autocast_cache()


def differentiable(output: Any) -> list[Tensor]:
    """The outputs that the loss is made of; a model that returns its loss needs no more than that."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    return [t for _, t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
