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
from ..guard import Guard
from ..guard.escort import Escort
from .deliveries import Deliveries
from .shadows import Shadows

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
) -> Escort:
    """Guard what was prepared: bad steps are left out, the schedule held, poisoned saves not carried out.

    ``options`` are those of `Guard`. The guard's memory travels with ``accelerator.save_state``.
    """
    escort = escort_accelerator(accelerator, model, optimizer, scheduler=scheduler, divided=False, **options)
    accelerator.register_for_checkpointing(escort)
    return escort


def escort_accelerator(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: AcceleratedOptimizer | Iterable[AcceleratedOptimizer],
    *,
    scheduler: Any,
    divided: bool,
    make: Callable[..., Guard] = Guard,
    **options: Any,
) -> Escort:
    """The same for a trainer built on Accelerate, which may hand over losses that are divided already."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UsageError(
            "DeepSpeed steps inside its own engine, where a step cannot be vetoed",
            hint="let its own overflow check work, and look at its checkpoints with nanproof scan",
        )
    prepared = [optimizer] if isinstance(optimizer, AcceleratedOptimizer) else list(optimizer)
    for found in prepared:
        if not isinstance(found, AcceleratedOptimizer):
            raise UsageError(
                f"{type(found).__name__} was not prepared", hint="pass what accelerator.prepare returned, after it"
            )
    guard = make(
        model, [o.optimizer for o in prepared], scheduler=scheduler, scaler=accelerator.scaler, **options
    )  # fmt: skip
    escort = Escort(guard, divided=divided)
    shadows = Shadows()
    shadows.cast(accelerator, "backward", lambda original: _backward(original, escort))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        shadows.cast(accelerator, name, lambda original: _clip(original, escort, prepared))
    for name in ("save_state", "save_model"):
        shadows.cast(accelerator, name, lambda original: _save(original, escort))
    for one in prepared:
        shadows.cast(one, "step", functools.partial(_step, escort=escort, optimizer=one))
    if make is Guard:  # nanproof run watches all loaders by itself
        deliveries = Deliveries()
        guard._post.feed.delivered = deliveries.recent
        for loader in accelerator._dataloaders:
            base = getattr(loader, "base_dataloader", loader)
            if hasattr(base, "_get_iterator"):  # a torch loader, or one that is built on it
                shadows.watch_loader(base, deliveries)
    escort.on_close(shadows.lift)
    return escort


def _backward(original: Callable[..., Any], escort: Escort) -> Callable[..., Any]:
    def backward(loss: Any, **kwargs: Any) -> Any:
        escort.meet(loss)
        try:
            return original(loss, **kwargs)
        finally:
            escort.passed()

    return backward


def _clip(original: Callable[..., Any], escort: Escort, prepared: list[Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        names = {id(p) for p in listed}
        owner = next((o for o in prepared if any(id(p) in names for g in o.param_groups for p in g["params"])), None)
        if owner is None or escort.judge(owner.optimizer):
            return original(listed, *args, **kwargs)
        # a vetoed step keeps its gradients as they are: clipping would spread one NaN over all of them
        return torch.nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])

    return clip


def _step(original: Callable[..., Any], escort: Escort, optimizer: Any) -> Callable[..., Any]:
    def step(closure: Callable[[], Any] | None = None) -> Any:
        if not optimizer.gradient_state.sync_gradients:
            return original(closure)
        optimizer._is_overflow = False
        result = escort.step(optimizer.optimizer, original, closure)
        if not escort.carried_out:
            optimizer._is_overflow = True  # schedulers ask for it: this is how Accelerate says that a step was skipped
            held = escort.held_scale(optimizer.scaler)
            if held is not None:
                optimizer.scaler.update(held)
        return result

    return step


def _save(original: Callable[..., Any], escort: Escort) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        target = next((a for a in (*args, *kwargs.values()) if not isinstance(a, nn.Module)), "the state")
        return None if escort.blocks_save(target, agree=True) else original(*args, **kwargs)

    return save
