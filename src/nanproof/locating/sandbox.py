"""The state around a step: restored before every replay, and left as it was found."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..rng import random_states, set_random_states
from ..tensors import tensors_in
from .bounds import SECONDS, Endless, within

T = TypeVar("T")
_NOT_STATE = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_backward_hooks", "_forward_pre_hooks")
_STREAMS = (torch.Generator, random.Random, np.random.Generator)
_LOOKED_AT = 1 << 26
"""Larger tensors in the variables of a step, such as a whole dataset, are not looked through."""
_LISTED = 64
"""Of a list or dictionary of tensors so many are looked at."""
_COPIED_ATTRIBUTE = 64 << 20
"""Larger tensors that a module holds as plain attributes are not copied."""


class OutOfTime(Endless):
    """Ends a search whose time is used up; what was found so far is the answer."""


class Sandbox:
    """What a step reads and writes, to be put back.

    To it belong the model, other modules and torch objects that the step uses (a discriminator, a loss with
    weights, a loss scaler), and every parameter that its gradients reach.
    """

    def __init__(
        self, model: nn.Module, batch: Any, step: Callable[..., Any] | None = None, seconds: float | None = None
    ) -> None:
        self.model = model
        self.batch = batch
        self._began: float | None = None
        self._first = math.inf
        """Seconds that the first replay took, which has the step's own values."""
        self._until = None if seconds is None else time.monotonic() + seconds
        used = _used_by(step) if step is not None else {}
        self.others = {n: m for n, m in used.items() if isinstance(m, nn.Module) and not _same(m, model)}
        self.tensors = [(n, t) for n, t in used.items() if isinstance(t, Tensor) and t.numel() <= _LOOKED_AT]
        self._modules = [model, *self.others.values()]
        # not m.buffers(): Megatron-Core's DDP has a list of that name
        self._buffers = [(b, b.detach().clone()) for m in self._modules for _, b in m.named_buffers()]
        self._parameters = [(p, _version(p)) for p in model.parameters()]
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        for p in (p for m in self._modules for p in m.parameters()):
            self.hold(p)
        self._batch = [(name, t, t.detach().clone(), _version(t)) for name, t in batch_tensors(batch)]
        self._streams = [rewind for o in used.values() if (rewind := _rewinding(o)) is not None]
        objects = [o for o in used.values() if _trains(o)]
        self._attributes = [_Attributes(o) for o in [*(o for m in self._modules for o in m.modules()), *objects]]
        self._random = random_states()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which everything is as it was, whatever happened in it."""
        try:
            yield
        finally:
            self.reset()
            for p, grad in self._gradients.values():
                p.grad = grad

    def allow(self) -> None:
        """Raise when the time for replays is used up: after the first, no further one is begun."""
        if self._began is None:
            self._began = time.monotonic()
        elif self._until is not None and time.monotonic() > self._until:
            raise OutOfTime("the time for locating was used up")

    def reproduced(self) -> None:
        """The first replay has ended: those that follow may have other values."""
        if math.isinf(self._first) and self._began is not None:
            self._first = time.monotonic() - self._began

    def in_time(self, play: Callable[[], T]) -> T:
        """Run a part of the step; after the first replay within a time that only a loop without end takes."""
        now = time.monotonic()
        left = self._until - now if self._until is not None else SECONDS
        seconds = max(left, 10 * self._first)
        try:
            return within(seconds, play)
        finally:
            if time.monotonic() - now >= seconds:  # whether or not the step has caught what ended it
                self._until = now
                raise OutOfTime("a replay with other values than the step's did not end") from None

    def hold(self, leaf: Tensor) -> bool:
        """Remember the gradient of a leaf that the step reaches; whether it is seen for the first time."""
        new = id(leaf) not in self._gradients
        if new:
            self._gradients[id(leaf)] = (leaf, leaf.grad)
        return new

    @property
    def sharded(self) -> bool:
        """Whether a parameter lies on several ranks in parts."""
        return any(hasattr(p, "_local_tensor") for p, _ in self._parameters)

    def trained(self) -> list[Tensor]:
        """Every leaf that may have a gradient now."""
        return [leaf for leaf, _ in self._gradients.values()]

    def modules(self) -> list[tuple[str, nn.Module]]:
        """The modules by path; those outside the model begin with the name of the variable that holds them."""
        found = list(self.model.named_modules())
        for variable, other in self.others.items():
            found += [(f"{variable}.{n}".rstrip("."), m) for n, m in other.named_modules()]
        return found

    def names(self) -> dict[int, str]:
        """The parameters by name; those outside the model carry the name of the variable that holds them."""
        named = {id(p): f"parameter {n}" for n, p in self.model.named_parameters()}
        for variable, module in self.others.items():
            for n, p in module.named_parameters():
                named.setdefault(id(p), f"parameter {variable}.{n}")
        for variable, tensor in self.tensors:
            named.setdefault(id(tensor), f"parameter {variable}" if tensor.requires_grad else f"input {variable}")
        return named

    def reset(self) -> None:
        """Go back to the moment before the step."""
        for attributes in self._attributes:
            attributes.restore()
        with torch.no_grad():
            for buffer, copy in self._buffers:
                if buffer.shape == copy.shape:
                    buffer.copy_(copy)
            for _, tensor, copy, version in self._batch:
                if _version(tensor) != version:
                    tensor.copy_(copy)
        self.clear()
        set_random_states(self._random)
        for rewind in self._streams:
            rewind()

    def clear(self) -> None:
        """Take every gradient away; `kept` puts them back."""
        for p, _ in self._gradients.values():
            p.grad = None

    def leaves(self) -> list[tuple[str, Tensor]]:
        """What a step starts from, by name: parameters, buffers, the batch, attributes and variables."""
        named: list[tuple[str, Tensor]] = [(f"parameter {n}", p) for n, p in self.model.named_parameters()]
        named += [(f"buffer {n}", b) for n, b in self.model.named_buffers()]
        named += batch_tensors(self.batch)
        for variable, module in self.others.items():
            named += [(f"parameter {variable}.{n}", p) for n, p in module.named_parameters()]
            named += [(f"buffer {variable}.{n}", b) for n, b in module.named_buffers()]
        for path, module in self.modules():
            held = ((k, v) for k, v in vars(module).items() if k not in _NOT_STATE and not k.startswith("__"))
            for key, value in held:
                name = f"attribute {f'{path}.{key}'.lstrip('.')}"
                if isinstance(value, Tensor):
                    named.append((name, value))
                elif isinstance(value, list | tuple | dict):
                    named += itertools.islice(tensors_in(value, name), _LISTED)
        names = self.names()
        named += [(names.get(id(t), f"input {n}"), t) for n, t in self.tensors]
        return [(n, t.detach()) for n, t in named if t.is_floating_point() or t.is_complex()]

    def repaired(self, leaf: str, play: Callable[[], T]) -> T:
        """What a replay says once the bad entries of one leaf are zero; they come back after that."""
        tensor = next(t for n, t in self.leaves() if n == leaf)
        kept = tensor.data.clone()
        copies = [c for t, c in self._buffers if t.data_ptr() == tensor.data_ptr()]
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
            if _version(tensor) != version:
                raise UsageError(
                    f"step_fn changes the batch in place ({name})", hint="work on a copy: a replay needs the same batch"
                )
        for p, version in self._parameters:
            if _version(p) != version:
                raise UsageError(
                    "step_fn changes the parameters", hint="return the loss, and leave optimizer.step out of it"
                )


class _Attributes:
    """The plain attributes of an object, such as a module's counters and lists."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values = {k: v for k, v in vars(owner).items() if k not in _NOT_STATE}
        self._contents = {k: _copy(v) for k, v in self._values.items() if isinstance(v, list | dict | set | deque)}
        self._tensors = [
            (v, v.detach().clone(), _version(v))
            for v in self._values.values()
            if isinstance(v, Tensor) and not v.is_meta and v.layout is torch.strided and v.nbytes <= _COPIED_ATTRIBUTE
        ]

    def restore(self) -> None:
        now = vars(self._owner)
        for key in [k for k in now if k not in self._values and k not in _NOT_STATE]:
            del now[key]
        now.update(self._values)
        for key, content in self._contents.items():
            held = self._values[key]
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(_copy(content))
        with torch.no_grad():
            for tensor, copy, version in self._tensors:
                if _version(tensor) != version:
                    tensor.copy_(copy)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _copy(value: Any) -> Any:
    """A copy of a container, and of the plain dictionaries in it (an optimizer's parameter groups)."""
    if isinstance(value, list) and value and all(type(v) is dict for v in value):
        return _Groups([(v, dict(v)) for v in value])
    return value.copy()


class _Groups(list[Any]):
    """Dictionaries of a list with their contents; they are put back as the same objects."""

    def copy(self) -> Any:
        for held, content in self:
            held.clear()
            held.update(content)
        return [held for held, _ in self]


def _same(module: nn.Module, model: nn.Module) -> bool:
    return module is model or getattr(module, "_orig_mod", None) is model or any(module is m for m in model.modules())


def _trains(value: Any) -> bool:
    """Whether it is an optimizer, a learning-rate scheduler or a loss scaler."""
    return type(value).__module__.startswith(("torch.optim", "torch.amp", "torch.cuda.amp")) and hasattr(
        value, "__dict__"
    )


def _rewinding(value: Any) -> Callable[[], Any] | None:
    """A function that puts a random generator back to where it is now; None for anything else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _used_by(step: Callable[..., Any]) -> dict[str, Any]:
    """The modules, tensors, torch objects and random generators that a function reaches by name."""
    found: dict[str, Any] = {}

    def take(name: str, value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor | nn.Module):
            found.setdefault(name, value)
        elif isinstance(value, FunctionType | MethodType | functools.partial) and depth < 3:
            look(value, depth + 1)
        elif _trains(value) or isinstance(value, _STREAMS):
            found.setdefault(name, value)
        elif isinstance(value, Mapping | list | tuple) and depth < 2:
            for path, tensor in itertools.islice(tensors_in(value, name), _LISTED):
                found.setdefault(path, tensor)
        elif depth < 1 and hasattr(value, "__dict__") and not isinstance(value, type) and not inspect.ismodule(value):
            for key, item in list(vars(value).items())[:64]:
                if isinstance(item, (Tensor, nn.Module, *_STREAMS)) or _trains(item):
                    take(f"{name}.{key}", item, depth + 1)

    def look(function: Any, depth: int = 0) -> None:
        if isinstance(function, functools.partial):
            for i, value in enumerate((*function.args, *function.keywords.values())):
                take(f"argument {i}", value, depth)
            function = function.func
        if isinstance(function, MethodType):
            take("self", function.__self__, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                take(name, cell.cell_contents, depth)
            except ValueError:
                continue  # not assigned yet
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        for name, value in zip(arguments[::-1], (function.__defaults__ or ())[::-1], strict=False):
            take(name, value, depth)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                take(name, function.__globals__[name], depth + 1)

    look(step)
    return found


def batch_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch with their paths."""
    if isinstance(batch, Tensor):
        return [("batch", batch)]
    return [(f"batch {name}", tensor) for name, tensor in tensors_in(batch)]
