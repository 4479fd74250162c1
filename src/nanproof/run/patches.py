"""Where torch is listened to under `nanproof run`: each patch hands a call to the session and does nothing else."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.data import dataloader

from .session import Session

Call = Callable[..., Any]
_RAW = "_nanproof_raw"
_MISSING = object()
_MESSAGES = ("batch_isend_irecv", "send", "recv")
"""What NCCL's sequence numbers do not count. isend and irecv stay as they are: torch compares them by identity."""


class Patches:
    """Installs the patches; `undo` puts everything back."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._undo: list[tuple[Any, str, Any]] = []
        self._steps: dict[type[Optimizer], Call] = {}
        """The steps of the classes of optimizers as they were."""

    def put(self, owner: Any, name: str, around: Call) -> None:
        """Let calls of ``owner.name`` go to ``around``, which gets the original before the arguments."""
        if name not in vars(owner):  # another version of a library; the rest of the guard still works
            self._session.miss(f"{owner.__name__}.{name}", "this version does not have it")
            return
        original = vars(owner)[name]

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._set(owner, name, patched)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def share(self, owner: Any, name: str, source: Any) -> None:
        """Let a second home of a function have the patched one too."""
        if name in vars(owner):
            self._set(owner, name, vars(source)[name])

    def undo(self) -> None:
        for owner, name, original in reversed(self._undo):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()

    def install(self) -> None:
        """Patch torch itself."""
        clipping = torch.nn.utils.clip_grad
        self.put(torch.autograd, "backward", self._backward)
        self.put(torch.autograd, "grad", self._grad)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.put(clipping, name, self._clip)
            self.share(torch.nn.utils, name, clipping)
        self.put(torch.nn.utils, "clip_grads_with_norm_", self._clip)
        self.put(Optimizer, "__init__", self._make_optimizer)
        self.put(Optimizer, "zero_grad", self._zero_grad)
        for name in ("scale", "step", "update", "__init__"):
            self.put(grad_scaler.GradScaler, name, getattr(self, f"_scaler_{name.strip('_')}"))
        self.put(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        self.put(dataloader._BaseDataLoaderIter, "_next_index", self._next_index)
        self.put(torch, "compile", self._compile)
        self.put(torch.serialization, "save", self.save)
        self.share(torch, "save", torch.serialization)
        for name in _MESSAGES if torch.distributed.is_available() else ():
            self.put(torch.distributed, name, self._message)
        self._patch_followers()

    # --- passes and steps -------------------------------------------------------------------------------------

    def _backward(self, original: Call, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        scaled_by, raw = getattr(tensors, _RAW, (None, None))
        return self._session.backward(lambda: original(tensors, *args, **kwargs), tensors, scaled_by, raw)

    def _grad(self, original: Call, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._session.look(outputs)
        return original(outputs, *args, **kwargs)

    def _clip(self, original: Call, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self._session.clip(lambda: original(listed, *args, **kwargs), listed)

    def _make_optimizer(self, original: Call, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._wrap_class(type(optimizer))
        self._session.meet_optimizer(optimizer)

    def _zero_grad(self, original: Call, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._session.holds(
            optimizer, lambda: original(optimizer, *args, **kwargs)
        ):
            original(optimizer, *args, **kwargs)

    def _wrap_class(self, kind: type[Optimizer]) -> None:
        """Listen to the steps of a class of optimizers; torch itself hooks them per class, when first one is made."""
        if kind in self._steps:
            return
        session, original = self._session, kind.step
        self._steps[kind] = original

        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            first = bool(args) and callable(args[0])
            closure = args[0] if first else kwargs.get("closure")

            def call(*closures: Any) -> Any:
                if not closures:
                    return original(optimizer, *args, **kwargs)
                if first:
                    return original(optimizer, *closures, *args[1:], **kwargs)
                return original(optimizer, *args, **{**kwargs, "closure": closures[0]})

            return session.step(optimizer, call, closure if callable(closure) else None)

        self._undo.append((kind, "step", original))
        setattr(kind, "step", step)  # noqa: B010  as torch itself does

    def _scaler_init(self, original: Call, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        self._session.registry.scalers.add(scaler)

    def _scaler_scale(self, original: Call, scaler: Any, outputs: Any) -> Any:
        self._session.registry.scalers.add(scaler)
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and scaled is not outputs:
            setattr(scaled, _RAW, (scaler, outputs))
        return scaled

    def _scaler_step(self, original: Call, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            return original(scaler, optimizer, *args, **kwargs)

        return self._session.scaler_step(optimizer, call) if scaler.is_enabled() else call()

    def _scaler_update(self, original: Call, scaler: Any, new_scale: Any = None) -> Any:
        if new_scale is not None:
            return original(scaler, new_scale)
        return self._session.scaler_update(scaler, functools.partial(original, scaler))

    def _compile(self, original: Call, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        session.stay_out_of_graphs()
        if model is None:  # a decorator with options
            return lambda model: self._compile(original, model, *args, **kwargs)
        owner = getattr(model, "__self__", None)
        if isinstance(owner, Optimizer) and type(owner) in self._steps:
            made = original(types.MethodType(self._steps[type(owner)], owner), *args, **kwargs)
            return lambda closure=None: session.step(owner, made, closure)
        made = original(model, *args, **kwargs)
        if isinstance(made, nn.Module):
            session.registry.watch(made)  # hooks of what is inside are compiled away
        elif isinstance(owner, nn.Module):  # module.compile(): the same, in place
            return lambda *a, **k: session.forward(owner, made, a, k)
        return made

    # --- what follows a step ----------------------------------------------------------------------------------

    def _patch_followers(self) -> None:
        def wrap_subclass(kind: Any) -> None:
            for name, around in (("step", self.schedule), ("__init__", self._make_schedule)):
                if name in vars(kind):
                    self.put(kind, name, around)

        for kind in _family(lr_scheduler.LRScheduler):
            wrap_subclass(kind)
        # schedulers of the script's own are classes that are yet to come
        self._set(lr_scheduler.LRScheduler, "__init_subclass__", classmethod(lambda cls, **_: wrap_subclass(cls)))
        self.put(swa_utils.AveragedModel, "update_parameters", self.average)

    def _make_schedule(self, original: Call, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        self._session.registry.schedulers.add(scheduler)

    def schedule(self, original: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """A schedule moves on."""
        self._session.registry.schedulers.add(scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        return self._session.follow(scheduler, optimizer, lambda: original(scheduler, *args, **kwargs))

    def schedule_at(self, original: Call, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """A schedule goes to the rate for a number of updates; those that were skipped are none."""

        def call(scheduler: Any) -> Any:
            given = inspect.signature(original).bind(scheduler, *args, **kwargs)
            _, number = list(given.arguments)[:2]
            given.arguments[number] -= self._session.skipped(scheduler.optimizer)
            return original(*given.args, **given.kwargs)

        return self.schedule(call, scheduler)

    def average(self, original: Call, average: Any, *args: Any, **kwargs: Any) -> Any:
        """An average takes the weights in."""
        return self._session.follow(average, None, lambda: original(average, *args, **kwargs))

    # --- data, messages, saves --------------------------------------------------------------------------------

    def _next_batch(self, original: Call, iterator: Any) -> Any:
        batch = original(iterator)
        self._session.deliver(iterator, batch)
        return batch

    def _next_index(self, original: Call, iterator: Any) -> Any:
        indices = original(iterator)
        if getattr(iterator, "_in_order", True):
            self._session.data.asked(iterator, indices)
        return indices

    def _message(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """Count messages between two ranks; a group counts its collectives by itself."""
        self._session.messages += 1
        return original(*args, **kwargs)

    def save(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """Something is written: a value, and where to."""
        value, target, *_ = inspect.signature(original).bind(*args, **kwargs).arguments.values()
        return self._session.save(lambda: original(*args, **kwargs), value, target)

    def save_together(self, original: Call, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """A distributed checkpoint is written."""
        target = kwargs.get("checkpoint_id", "a distributed checkpoint")
        among = 1
        if torch.distributed.is_initialized() and not kwargs.get("no_dist"):
            among = torch.distributed.get_world_size(kwargs.get("process_group"))
        return self._session.save(lambda: original(state_dict, *args, **kwargs), state_dict, target, among=among)


def _family(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(member for child in kind.__subclasses__() for member in _family(child))]
