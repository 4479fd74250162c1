"""Accelerate: the loop stays as it is written.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
guard = guard_accelerator(accelerator, model, optimizer, scheduler=scheduler, run_dir="runs/a")
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_fn(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
guard.close()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..guard.external import ExternalLoop, attach
from .object_patches import ObjectPatches

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise UsageError("accelerate is not installed", hint="pip install 'nanproof[hf]'") from error


def guard_accelerator(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: AcceleratedOptimizer | Iterable[AcceleratedOptimizer],
    *,
    scheduler: Any = None,
    **options: Any,
) -> ExternalLoop:
    """Guard what was prepared: bad steps are left out, the schedule held, poisoned saves not carried out.

    ``options`` are those of `Guard`. The guard's memory travels with ``accelerator.save_state``.
    """
    loop = attach_accelerator(accelerator, model, optimizer, scheduler=scheduler, divided=False, **options)
    accelerator.register_for_checkpointing(loop)
    return loop


def attach_accelerator(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: AcceleratedOptimizer | Iterable[AcceleratedOptimizer],
    *,
    scheduler: Any,
    divided: bool,
    make: Callable[..., ExternalLoop] = attach,
    **options: Any,
) -> ExternalLoop:
    """The same for a trainer built on Accelerate, which may hand over losses that are divided already."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UsageError(
            "DeepSpeed steps inside its own engine",
            hint="use nanproof.integrations.deepspeed.guard_engine(engine), or nanproof run",
        )
    prepared = [optimizer] if isinstance(optimizer, AcceleratedOptimizer) else list(optimizer)
    for found in prepared:
        if not isinstance(found, AcceleratedOptimizer):
            raise UsageError(
                f"{type(found).__name__} was not prepared", hint="pass what accelerator.prepare returned, after it"
            )
    optimizers = [o.optimizer for o in prepared]
    loop = make(model, optimizers, scheduler=scheduler, scaler=accelerator.scaler, divided=divided, **options)
    patches = ObjectPatches()
    patches.put(accelerator, "backward", lambda original: _backward(original, loop))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.put(accelerator, name, functools.partial(_clip, loop=loop, shares=name == "clip_grad_norm_"))
    for name in ("save_state", "save_model"):
        patches.put(accelerator, name, lambda original: _save(original, loop))
    for one in prepared:
        patches.put(one, "step", functools.partial(_step, loop=loop, optimizer=one))
    if make is attach:  # nanproof run watches all loaders by itself
        for loader in accelerator._dataloaders:
            base = getattr(loader, "base_dataloader", loader)
            if hasattr(base, "_get_iterator"):  # a torch loader, or one that is built on it
                patches.watch_loader(base, loop.passes.data)
    loop.on_close(patches.undo)
    return loop


def _backward(original: Callable[..., Any], loop: ExternalLoop) -> Callable[..., Any]:
    def backward(loss: Any, **kwargs: Any) -> Any:
        with loop.passes.in_backward(loss):
            return original(loss, **kwargs)

    return backward


def _clip(original: Callable[..., Any], *, loop: ExternalLoop, shares: bool) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not loop.judge_clip(listed):
            return torch.nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])
        norm = loop.norm_of(listed) if shares and len(args) == 1 and not kwargs else None
        if norm is None:
            return original(listed, *args, **kwargs)
        torch.nn.utils.clip_grads_with_norm_(listed, args[0], norm)
        return norm

    return clip


def _step(original: Callable[..., Any], loop: ExternalLoop, optimizer: Any) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        if not optimizer.gradient_state.sync_gradients:
            return original(closure)
        optimizer._is_overflow = False
        result = loop.step(optimizer.optimizer, original, closure)
        if not loop.carried_out:
            optimizer._is_overflow = True  # schedulers ask for it: this is how Accelerate says that a step was skipped
            held = loop.held_scale(optimizer.scaler)
            if held is not None:
                optimizer.scaler.update(held)
        return result

    return step


def _save(original: Callable[..., Any], loop: ExternalLoop) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        target = next((a for a in (*args, *kwargs.values()) if not isinstance(a, nn.Module)), "the state")
        return None if loop.blocks_save(target) else original(*args, **kwargs)

    return save
