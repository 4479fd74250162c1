"""Whether an optimizer wrote a bad parameter: by the state that it left, or by an update replayed from a snapshot."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .values import INF, kind_of

_COPIED = 256 << 20
"""Parameters beyond this are not copied for a replay of their update."""
_GROWN = 10.0
"""A parameter that one update makes larger by this factor has outgrown it."""


def writer_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> tuple[str, bool]:
    """One sentence on how an optimizer made a parameter bad, empty when it cannot be told; and whether it did.

    >>> p = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    >>> adam = torch.optim.Adam([p])
    >>> p.grad = torch.full_like(p, 1e-5)
    >>> adam.step()
    >>> writer_of(p, adam)
    ('Adam wrote it: exp_avg_sq is 0 there and eps 1e-08 is 0 in float16: m / 0', True)
    """
    group = next((g for g in optimizer.param_groups if _holds(g, parameter)), None)
    if group is None:
        return "", False
    name, state, lr = type(optimizer).__name__, dict(optimizer.state.get(parameter, {})), float(group.get("lr", 0.0))
    if math.isfinite(lr) and not state:
        return f"{name} has not updated it yet: it was bad when it was made (torch.empty, nn.init) or loaded", False
    if reason := _reason(parameter, group, state, lr):
        return f"{name} wrote it: {reason}", True
    return f"{name} updated it last (lr {lr:g})", False


def _reason(parameter: Tensor, group: dict[str, Any], state: dict[str, Any], lr: float) -> str:
    """Why an optimizer wrote a bad value, by its settings and its state; empty when these do not tell."""
    if not math.isfinite(lr):
        return f"its learning rate is {lr}"
    for key, value in state.items():
        if isinstance(value, Tensor) and kind_of(value):
            return f"its {key} is not finite, so a gradient of an earlier step was not"
    return _moments(group, state) or _decay(parameter, group, lr)


def _holds(group: dict[str, Any], parameter: Tensor) -> bool:
    return any(p is parameter for p in group["params"])


def _moments(group: dict[str, Any], state: dict[str, Any]) -> str:
    """Adam and its kin: lr · m / (sqrt(v) + eps), in the format of the state."""
    mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
    if not isinstance(square, Tensor) or "eps" not in group:
        return ""
    eps = torch.tensor(group["eps"], dtype=square.dtype)
    if float(eps) == 0 and bool((square == 0).any()):
        return f"exp_avg_sq is 0 there and eps {group['eps']:g} is 0 in {_format(square)}: m / 0"
    if isinstance(mean, Tensor):
        step = float(group.get("lr", 0.0)) * mean / (square.sqrt() + eps.to(square.device))
        if kind_of(step):
            return f"the update is not finite in {_format(square)} (lr {float(group['lr']):g})"
    return ""


def _decay(parameter: Tensor, group: dict[str, Any], lr: float) -> str:
    decay = float(group.get("weight_decay", 0.0))
    if lr * decay > 2:
        return f"lr · weight_decay = {lr * decay:.3g} makes every weight grow without bound"
    if kind_of(parameter) == INF:
        return f"the parameter left the range of {_format(parameter)} (lr {lr:g})"
    return ""


def _format(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """A finite state from before: the values of the parameters, what the optimizer kept, gradients at those values."""

    update: int
    values: Mapping[Tensor, Tensor]
    state: Mapping[Tensor, Mapping[str, Any]]
    gradients: Mapping[Tensor, Tensor]


def replayed_update(optimizer: torch.optim.Optimizer, before: Healthy, names: Mapping[Tensor, str]) -> tuple[str, bool]:
    """What one update, made again from a healthy state on copies, says about parameters that are bad or huge now.

    The second value says whether the update writes every parameter that is bad now: then the optimizer is proved to be
    the origin. Optimizers of other packages are not run: what they hold besides their state may not be copied.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or any(map(kind_of, before.gradients.values())):
        return "", False
    owned = [p for g in optimizer.param_groups for p in g["params"] if p in before.gradients]
    bad = [p for p in owned if kind_of(p)]
    if not bad:
        return _outgrown(optimizer, before, owned, names), False
    looked_at = [p for i, p in enumerate(bad) if sum(q.nbytes for q in bad[: i + 1]) <= _COPIED]
    after, state = updated(optimizer, before, looked_at)
    wrote = [p for p in looked_at if kind_of(after[p])]
    name = type(optimizer).__name__
    told = f"one update of {name}, replayed from the finite snapshot of update {before.update} with finite gradients"
    if not wrote:
        return f"{told}, is finite: it was not the optimizer alone", False
    reason = _moments(_group(optimizer, wrote[0]), state[wrote[0]])
    wide, _ = updated(optimizer, before, wrote, torch.float32)
    if wrote[0].dtype != torch.float32 and not any(map(kind_of, wide.values())):
        reason += f"{'; ' if reason else ''}in float32 the same update is finite"
    why = f" ({reason})" if reason else ""
    return f"{told}, makes {len(wrote)} of {len(bad)} bad parameters non-finite again{why}", len(wrote) == len(bad)


def _outgrown(
    optimizer: torch.optim.Optimizer, before: Healthy, owned: list[Tensor], names: Mapping[Tensor, str]
) -> str:
    """Parameters that are finite, but many times as large as in the snapshot; and what makes them so."""
    sizes = {p: max(_size(before.values[p]), 1e-3) for p in owned}
    most = max(owned, key=lambda p: _size(p) / sizes[p], default=None)
    if most is None or _size(most) < _GROWN * sizes[most] or most.nbytes > _COPIED:
        return ""
    name, group = type(optimizer).__name__, _group(optimizer, most)
    lr, decay = float(group.get("lr", 0.0)), float(group.get("weight_decay", 0.0))
    said = (
        f"parameter {names.get(most, '')} grew from {_size(before.values[most]):.3g} to {_size(most):.3g} since the "
        f"snapshot of update {before.update}"
    )
    nothing = dataclasses.replace(before, gradients={most: torch.zeros_like(before.gradients[most])})
    if decay and _size(updated(optimizer, nothing, [most])[0][most]) > _GROWN * sizes[most]:
        return f"{said}: weight decay alone does that, lr · weight_decay = {lr * decay:.3g}"
    then = _size(updated(optimizer, before, [most])[0][most])
    if then > _GROWN * sizes[most]:
        return f"{said}: one update of {name} from there already makes it {then:.3g} (lr {lr:g})"
    return said


def _group(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = next(g for g in optimizer.param_groups if _holds(g, parameter))
    return found


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def updated(
    optimizer: torch.optim.Optimizer,
    before: Healthy,
    parameters: list[Tensor],
    dtype: torch.dtype | None = None,
    *,
    eps: float | None = None,
) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
    """Some parameters and their state after one update, made on copies; the optimizer itself is not touched."""

    def own(value: Any, like: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        device = like.device if isinstance(like, Tensor) else value.device
        wide = dtype is not None and value.is_floating_point()
        return value.detach().to(device, dtype if wide else value.dtype, copy=True)

    twins = {p: nn.Parameter(own(before.values[p], p)) for p in parameters}
    again = copy.copy(optimizer)
    again.param_groups = [
        {**g, "params": [twins[p] for p in g["params"] if p in twins]} for g in optimizer.param_groups
    ]
    if eps is not None:
        again.param_groups = [{**g, "eps": eps} for g in again.param_groups]
    again.state = defaultdict(dict)
    for p, twin in twins.items():
        twin.grad = own(before.gradients[p], p)
        live = optimizer.state.get(p, {})
        if p in before.state:
            again.state[twin] = {k: own(v, live.get(k, p)) for k, v in before.state[p].items()}
    # the bare function: not the hooks around it, nor what a scheduler has put in its place
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(again)
    return {p: t.detach() for p, t in twins.items()}, {p: dict(again.state[t]) for p, t in twins.items()}
