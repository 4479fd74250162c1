"""Where torch is listened to under `nanproof run`: each patch hands a call to the session and does nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.utils.data import dataloader

from .session import Session

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_RAW = "_nanproof_raw"
_MISSING = object()
_MESSAGES = ("batch_isend_irecv", "send", "recv")
"""What NCCL's sequence numbers do not count. isend and irecv stay as they are: torch compares them by identity."""


class Patches:
    """Installs the patches; `undo` puts everything back."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._undo: list[tuple[Any, str, Any]] = []
        self._steps: dict[type[Optimizer], Callable[..., Any]] = {}
        """The steps of the classes of optimizers as they were."""

    def put(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Replace ``owner.name`` by ``wrap(original)``."""
        if name not in vars(owner):  # another version of a library; the rest of the guard still works
            self._session.miss(f"{owner.__name__}.{name}", "this version does not have it")
            return
        original = vars(owner)[name]
        self._undo.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(wrap(original)))

    def share(self, owner: Any, name: str, source: Any) -> None:
        """Let a second home of a function have the patched one too."""
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, vars(source)[name])

    def undo(self) -> None:
        for owner, name, original in reversed(self._undo):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._undo.clear()

    def install(self) -> None:
        """Patch torch itself."""
        self._patch_backward_and_clipping()
        self._patch_optimizers()
        self._patch_followers()
        self._patch_scalers()
        self._patch_loaders()
        self._patch_compile()
        self._patch_saves()
        self._patch_communication()

    def _patch_backward_and_clipping(self) -> None:
        session = self._session

        def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
            def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                scaled_by, raw = getattr(tensors, _RAW, (None, None))
                return session.backward(lambda: original(tensors, *args, **kwargs), tensors, scaled_by, raw)

            return backward

        def wrap_clip(original: Callable[..., Any]) -> Callable[..., Any]:
            def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(parameters, *args, **kwargs)
                listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                return session.clip(lambda: original(listed, *args, **kwargs), listed)

            return clip

        self.put(torch.autograd, "backward", wrap_backward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.put(torch.nn.utils.clip_grad, name, wrap_clip)
            self.share(torch.nn.utils, name, torch.nn.utils.clip_grad)
        self.put(torch.nn.utils, "clip_grads_with_norm_", wrap_clip)

    def _patch_optimizers(self) -> None:
        session = self._session

        def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
                original(optimizer, *args, **kwargs)
                self._wrap_class(type(optimizer))
                session.meet_optimizer(optimizer)

            return init

        self.put(Optimizer, "__init__", wrap_init)

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

    def _patch_followers(self) -> None:
        session = self._session

        def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                session.registry.schedulers.add(scheduler)
                optimizer = getattr(scheduler, "optimizer", None)
                return session.follow(scheduler, optimizer, lambda: original(scheduler, *args, **kwargs))

            return step

        def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
                original(scheduler, *args, **kwargs)
                session.registry.schedulers.add(scheduler)

            return init

        def wrap_average(original: Callable[..., Any]) -> Callable[..., Any]:
            def update_parameters(average: Any, *args: Any, **kwargs: Any) -> Any:
                return session.follow(average, None, lambda: original(average, *args, **kwargs))

            return update_parameters

        def wrap_subclass(kind: Any) -> None:
            if "step" in vars(kind):
                self.put(kind, "step", wrap_step)
            if "__init__" in vars(kind):
                self.put(kind, "__init__", wrap_init)

        def init_subclass(cls: type[Any], /, **kwargs: Any) -> None:
            wrap_subclass(cls)

        for kind in _family(lr_scheduler.LRScheduler):
            wrap_subclass(kind)
        # schedulers of the script's own are classes that are yet to come
        self._undo.append((lr_scheduler.LRScheduler, "__init_subclass__", _MISSING))
        setattr(lr_scheduler.LRScheduler, "__init_subclass__", classmethod(init_subclass))  # noqa: B010
        self.put(swa_utils.AveragedModel, "update_parameters", wrap_average)

    def _patch_scalers(self) -> None:
        session, kind = self._session, grad_scaler.GradScaler

        def wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
            def scale(scaler: Any, outputs: Any) -> Any:
                session.registry.scalers.add(scaler)
                scaled = original(scaler, outputs)
                if isinstance(scaled, Tensor) and scaled is not outputs:
                    setattr(scaled, _RAW, (scaler, outputs))
                return scaled

            return scale

        def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                def call() -> Any:
                    return original(scaler, optimizer, *args, **kwargs)

                return session.scaler_step(optimizer, call) if scaler.is_enabled() else call()

            return step

        def wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
            def update(scaler: Any, new_scale: Any = None) -> Any:
                if new_scale is not None:
                    return original(scaler, new_scale)
                return session.scaler_update(scaler, functools.partial(original, scaler))

            return update

        def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
                original(scaler, *args, **kwargs)
                session.registry.scalers.add(scaler)

            return init

        for name, wrap in (
            ("scale", wrap_scale), ("step", wrap_step), ("update", wrap_update), ("__init__", wrap_init)
        ):  # fmt: skip
            self.put(kind, name, wrap)

    def _patch_loaders(self) -> None:
        session = self._session

        def wrap_next(original: Callable[..., Any]) -> Callable[..., Any]:
            def next_batch(iterator: Any) -> Any:
                batch = original(iterator)
                session.deliver(iterator, batch)
                return batch

            return next_batch

        def wrap_index(original: Callable[..., Any]) -> Callable[..., Any]:
            def next_index(iterator: Any) -> Any:
                indices = original(iterator)
                if getattr(iterator, "_in_order", True):
                    session.data.asked(iterator, indices)
                return indices

            return next_index

        self.put(dataloader._BaseDataLoaderIter, "__next__", wrap_next)
        self.put(dataloader._BaseDataLoaderIter, "_next_index", wrap_index)

    def _patch_communication(self) -> None:
        """Count messages between two ranks; a group counts its collectives by itself."""
        if not torch.distributed.is_available():
            return
        session = self._session

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                session.messages += 1
                return original(*args, **kwargs)

            return call

        for name in _MESSAGES:
            if name in vars(torch.distributed):
                self.put(torch.distributed, name, wrap)

    def _patch_compile(self) -> None:
        session = self._session

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
                session.stay_out_of_graphs()
                if model is None:  # a decorator with options
                    return functools.partial(compile, *args, **kwargs)
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

            return compile

        self.put(torch, "compile", wrap)

    def _patch_saves(self) -> None:
        self.put(torch.serialization, "save", self._wrap_save)
        self.share(torch, "save", torch.serialization)

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session, signature = self._session, inspect.signature(original)

        def save(*args: Any, **kwargs: Any) -> Any:
            value, target, *_ = signature.bind(*args, **kwargs).arguments.values()
            return session.save(lambda: original(*args, **kwargs), value, target)

        return save

    def _wrap_save_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        def save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("checkpoint_id", "a distributed checkpoint")
            among = _count_ranks(kwargs.get("process_group")) if not kwargs.get("no_dist") else 1
            return session.save(lambda: original(state_dict, *args, **kwargs), state_dict, target, among=among)

        return save

    # --- libraries, when the script imports them --------------------------------------------------------------

    def patch_safetensors(self, module: ModuleType) -> None:
        self.put(module, "save_file", self._wrap_save)
        self.put(module, "save_model", self._wrap_save)

    def patch_checkpoint(self, module: ModuleType) -> None:
        package = sys.modules.get(module.__package__ or "")
        for name in ("save", "async_save"):
            self.put(module, name, self._wrap_save_all)
            if package is not None and name in vars(package):
                self.share(package, name, module)

    def patch_pretrained(self, module: ModuleType) -> None:
        self.put(module.PreTrainedModel, "save_pretrained", self._wrap_save)


def _count_ranks(group: Any) -> int:
    return torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1


def _family(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(member for child in kind.__subclasses__() for member in _family(child))]
