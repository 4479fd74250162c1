"""Optimizers whose eps is 0 in the dtype of their state: an eps that works, proved on copies of the next update.

Adam divides by sqrt(v) + eps. In float16 an eps of 1e-8 is 0, and so is v wherever a gradient is below about 5e-3: the
first update is 0 / 0. An eps that is merely not 0 is no repair: 1e-7 makes updates thousands of times too large. So
the eps is taken whose update comes closest to the one that the same optimizer makes in float32 with its own eps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UsageError
from ..locating.update import Healthy, updated
from ..records import Repair
from ..tensors import is_finite, local_values

CANDIDATES = tuple(float(f"{digit}e{power}") for power in range(-7, 0) for digit in (1, 3))
_PARTS = 10**6
"""Errors are compared in millionths."""


def repaired_eps(optimizer: Optimizer, number: int, largest: Callable[[int], int] = int) -> Repair | None:
    """The repair of an update that would be non-finite because eps is 0; None when it would not be, or none works.

    ``largest`` of a number on all ranks that hold a shard: each looks at its own, and all take the same eps.
    """
    vanishing = [p for g in optimizer.param_groups for p in g["params"] if _vanishes(optimizer, p)]
    if not vanishing or not type(optimizer).__module__.startswith("torch.optim"):
        return None
    narrow = [p for p in vanishing if p.grad is not None and local_values(p).numel()]
    before = Healthy(
        update=number,
        values={p: local_values(p) for p in narrow},
        state={p: {k: _local(v) for k, v in optimizer.state[p].items()} for p in narrow if p in optimizer.state},
        gradients={p: local_values(p.grad) for p in narrow if p.grad is not None},
    )
    broken = largest(sum(not is_finite(_update(optimizer, before, p)) for p in narrow))
    if not broken:
        return None
    error, best = min((largest(_error(optimizer, before, narrow, eps)), eps) for eps in CANDIDATES)
    if error >= _PARTS:  # it would not even go the same way
        return None
    eps = optimizer.param_groups[0]["eps"]
    dtype = str(vanishing[0].dtype).removeprefix("torch.")
    return Repair(
        path=type(optimizer).__name__,
        kind="eps",
        step=number,
        value=best,
        was=dtype,
        why=f"eps {eps:g} is 0 in {dtype}, so the update divides by 0",
        proof=f"on copies, the update is non-finite in {broken} of {len(vanishing)} parameters with eps {eps:g}; with"
        f" {best:g} it is finite and differs from the update in float32 by {error / _PARTS:.2f} of its norm",
    )


def set_eps(optimizers: Sequence[Optimizer], repair: Repair) -> None:
    """Put a repaired eps in force, wherever the present one is 0 in the parameters' dtype."""
    mine = [o for o in optimizers if type(o).__name__ == repair.path]
    if not mine:
        raise UsageError(f"there is no optimizer {repair.path} to set eps {repair.value:g} of")
    for optimizer in mine:
        for group in optimizer.param_groups:
            if any(_vanishes(optimizer, p) for p in group["params"]):
                group["eps"] = repair.value


def _vanishes(optimizer: Optimizer, parameter: Tensor) -> bool:
    eps = next((g.get("eps") for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    return isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=parameter.dtype)) == 0


def _update(
    optimizer: Optimizer, before: Healthy, parameter: Tensor, *, eps: float | None = None, wide: bool = False
) -> Tensor:
    """What one update would add to a parameter; one at a time, so that memory holds one copy."""
    after, _ = updated(optimizer, before, [parameter], torch.float32 if wide else None, eps=eps)
    return after[parameter].float() - before.values[parameter].float()


def _error(optimizer: Optimizer, before: Healthy, parameters: Sequence[Tensor], eps: float) -> int:
    """How far an eps's update is from the one in float32, in millionths of its norm."""
    gap = size = 0.0
    for p in parameters:
        exact = _update(optimizer, before, p, wide=True)
        gap += float((_update(optimizer, before, p, eps=eps) - exact).norm() ** 2)
        size += float(exact.norm() ** 2)
    error = (gap / size) ** 0.5 if size else 0.0
    return int(_PARTS * error) if error < 1 else _PARTS  # NaN is not below 1


def _local(value: object) -> object:
    return local_values(value) if isinstance(value, Tensor) else value
