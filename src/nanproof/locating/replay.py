"""Replay a step once: what it returned, and which backward passes it ran itself."""

from __future__ import annotations

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import NanproofError, UsageError
from ..losses import Losses, losses_of
from .sandbox import Sandbox


def bind(step_fn: Callable[..., Any], model: nn.Module, batch: Any) -> Callable[[], Any]:
    """``step_fn()``, ``step_fn(model)`` or ``step_fn(model, batch)``, whichever it can be called as."""
    try:
        signature = inspect.signature(step_fn)
    except (TypeError, ValueError):
        return lambda: step_fn()
    for given in ((), (model, batch), (model,)):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return functools.partial(step_fn, *given)
    raise UsageError(
        f"step_fn{signature} needs arguments that locate does not have",
        hint="write it as step_fn() or step_fn(model, batch), returning the loss",
    )


class Replay:
    """One replay of a step: what it returned, and which backward passes it ran itself."""

    def __init__(
        self,
        step: Callable[[], Any],
        sandbox: Sandbox,
        weights: Mapping[str, float] | None = None,
        *,
        compiling: bool = False,
    ) -> None:
        """``compiling``: it is not ended in time, which would leave the compiler half-way."""
        sandbox.allow()
        self._in_time: Callable[[Callable[[], Any]], Any] = operator.call if compiling else sandbox.in_time
        self._step, self._sandbox, self._weights = step, sandbox, weights
        self.roots: list[Tensor] = []
        """Losses on which the step called backward."""
        self.differentiates = False
        """Whether the step runs autograd itself."""
        self.applied: list[tuple[Tensor, Tensor]] = []
        """Parameters and gradients that the step handed to an optimizer."""
        self.elsewhere: set[str] = set()
        """Other threads in which the step runs modules or a backward pass; no dispatch mode is in force there."""
        self._thread = threading.get_ident()
        self._nodes: set[Any] = set()
        self.learn: Callable[[Any], None] | None = None
        """Told the root of every backward pass before it runs."""

    def forward(self) -> Losses:
        """Run the step; what the user's code raises is named, not hidden."""
        with self._listening():
            returned = self._in_time(lambda: play(self._step))
        try:
            return losses_of(returned, self._weights, needs_grad=False)
        except UsageError:
            if not self.roots:
                raise
            return Losses(total=self.roots[-1].detach().reshape(()), components={})

    def backward(self, losses: Losses) -> None:
        """Run backward, unless the step has done it already."""
        roots = [t.grad_fn for t in (losses.total, *losses.components.values()) if t.grad_fn is not None]
        below = [child for node in roots for child, _ in node.next_functions]
        if losses.total.grad_fn is None or any(node in self._nodes for node in (*roots, *below)):
            return
        with self._listening():
            self._in_time(lambda: play(losses.total.backward, "backward"))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def listen(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.differentiates = True
            self._meet_thread()
            if kwargs.get("accumulate_grad"):
                self._meet(outputs)
            with torch.autograd.set_detect_anomaly(False):  # it would stop at the first NaN, far from the origin
                return run(outputs, *args, **kwargs)

        def apply(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:  # without gradients the optimizer changes nothing
                for p in group["params"]:
                    if p.grad is not None:
                        self._sandbox.hold(p)
                        self.applied.append((p, p.grad))
                        p.grad = None

        hook = register_optimizer_step_pre_hook(apply)
        autograd._engine_run_backward = listen
        try:
            yield
        finally:
            autograd._engine_run_backward = run
            hook.remove()

    @contextmanager
    def hearing_threads(self) -> Iterator[None]:
        """A block in which `elsewhere` gets to know modules that run in other threads."""
        hook = register_module_forward_pre_hook(self._meet_thread)
        try:
            yield
        finally:
            hook.remove()

    def _meet_thread(self, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere.add(threading.current_thread().name)

    def _meet(self, outputs: Any) -> None:
        tensors = [t for t in outputs if isinstance(t, Tensor)]
        self.roots += tensors
        todo = [t.grad_fn for t in tensors]
        while todo:
            node = todo.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and self._sandbox.hold(leaf):
                leaf.grad = None  # autograd adds in place: the gradient that was there must stay as it is
            todo += [child for child, _ in node.next_functions]
        if self.learn is not None:
            for tensor in tensors:
                self.learn(tensor.grad_fn)

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Each leaf with the gradient that the step left in it or handed to an optimizer."""
        left = [(leaf, leaf.grad) for leaf in self._sandbox.trained() if leaf.grad is not None]
        return [*self.applied, *left]


def play(step: Callable[[], Any], name: str = "step_fn") -> Any:
    """Call a step; an error of the user's code is named as such."""
    try:
        return step()
    except NanproofError:
        raise
    except StopIteration as error:
        raise UsageError(
            "step_fn reads from a loader that has ended", hint="fetch the batch before, and pass it as batch="
        ) from error
    except (Exception, SystemExit) as error:  # "loss is nan, stopping training": sys.exit must not end the replay
        raise UsageError(
            f"{name} raised {type(error).__name__}: {error}", hint="make the step run on its own first"
        ) from error


def run_step(step: Callable[[], Any]) -> Tensor:
    """The loss of one call."""
    return losses_of(play(step), needs_grad=False).total
