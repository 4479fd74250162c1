"""Playing a step again without leaving a trace: model, gradients, random states and batch stay as they were."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..rng import random_states, set_random_states
from ..tensors import tensors_in

T = TypeVar("T")


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


class Scene:
    """The state around a step: restored before every replay, and left as found at the end."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        self._buffers = [(b, b.detach().clone()) for b in model.buffers()]
        self._parameters = [(p, p._version) for p in model.parameters()]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._batch = [(name, t, t.detach().clone(), t._version) for name, t in batch_tensors(batch)]
        self._random = random_states()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which everything is as it was, whatever happened in it."""
        try:
            yield
        finally:
            self.reset()
            for p, grad in self._gradients:
                p.grad = grad

    def reset(self) -> None:
        """Go back to the moment before the step."""
        with torch.no_grad():
            for buffer, copy in self._buffers:
                if buffer.shape == copy.shape:
                    buffer.copy_(copy)
            for _, tensor, copy, _ in self._batch:
                if not torch.equal(tensor, copy) and not (tensor.is_floating_point() and bool(tensor.isnan().any())):
                    tensor.copy_(copy)
        for p, _ in self._gradients:
            p.grad = None
        set_random_states(self._random)

    def healed(self, leaf: str, batch: Any, play: Callable[[], T]) -> T:
        """What a replay says once the bad entries of one leaf are zero; they come back after that."""
        named: list[tuple[str, Tensor]] = [(f"parameter {n}", p) for n, p in self.model.named_parameters()]
        named += [(f"buffer {n}", b) for n, b in self.model.named_buffers()] + batch_tensors(batch)
        tensor = next(t for n, t in named if n == leaf)
        kept = tensor.data.clone()
        copies = [copy for _, t, copy, _ in self._batch if t is tensor] + [c for b, c in self._buffers if b is tensor]
        originals = [c.clone() for c in copies]
        try:
            for t in (tensor.data, *copies):
                t.nan_to_num_(0.0, 0.0, 0.0)
            return play()
        finally:
            tensor.data.copy_(kept)
            for copy, original in zip(copies, originals, strict=True):
                copy.copy_(original)

    def complain(self) -> None:
        """Raise when the step changed what it must not."""
        for name, tensor, _, version in self._batch:
            if tensor._version != version:
                raise UsageError(
                    f"step_fn changes the batch in place ({name})", hint="work on a copy: a replay needs the same batch"
                )
        for p, version in self._parameters:
            if p._version != version:
                raise UsageError(
                    "step_fn changes the parameters",
                    hint="return the loss; leave backward and optimizer.step out of it",
                )


@dataclass
class Played:
    """What a step returned: its loss, and by name the terms that it is the sum of."""

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)


def run_step(step: Callable[[], Any]) -> Tensor:
    """The loss of one replay."""
    return play_step(step).loss


def play_step(step: Callable[[], Any]) -> Played:
    """One replay; what the user's code raises is named, not hidden."""
    terms: dict[str, Tensor] = {}
    try:
        loss = step()
    except UsageError:
        raise
    except StopIteration as error:
        raise UsageError(
            "step_fn reads from a loader that has ended", hint="fetch the batch before, and pass it as batch="
        ) from error
    except Exception as error:
        raise UsageError(
            f"step_fn raised {type(error).__name__}: {error}", hint="make step_fn() run on its own first"
        ) from error
    if isinstance(loss, dict) and loss and all(isinstance(v, Tensor) for v in loss.values()):
        terms = loss
        loss = torch.stack([v.reshape(()) for v in loss.values()]).sum()
    if isinstance(loss, tuple) and loss and isinstance(loss[0], Tensor):
        loss = loss[0]
    loss = getattr(loss, "loss", loss) if not isinstance(loss, Tensor) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"step_fn returned {found}, not a loss", hint="return the loss as a tensor of one element")
    return Played(loss, terms)


def batch_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch with their paths."""
    if isinstance(batch, Tensor):
        return [("batch", batch)]
    return [(f"batch {name}", tensor) for name, tensor in tensors_in(batch)]
