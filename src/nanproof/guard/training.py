"""Everything that a training run consists of: what to look at, what to keep, what to step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..captured import Slot, buffer_slots
from ..errors import NonFiniteError, UsageError
from ..floats import format_of
from ..records import TensorFacts
from ..tensors import facts_of, is_finite, local_values
from .loss_scale import scale_of

_Statistics = torch.nn.modules.batchnorm._NormBase

Named = tuple[str, Tensor]


class Training:
    """The model with its optimizers, schedulers, scaler and averaged copy."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        # a container has no forward pass of its own: its members have
        container = isinstance(self.model, nn.ModuleList | nn.ModuleDict)
        self.roots: list[nn.Module] = list(self.model.children()) if container else [self.model]
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.schedulers = (
            [] if scheduler is None else list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
        )
        self.scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self.scalers = [self.scaler] if self.scaler is not None else []
        """Every scaler whose state belongs to the training."""
        self.ema = ema
        self._check()
        owned = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        self.parameters = [(n, p) for n, p in self.model.named_parameters() if id(p) in owned]
        self.unstepped = [(n, p) for n, p in self.model.named_parameters() if id(p) not in owned and p.requires_grad]
        """Parameters with gradients that no optimizer uses, and none clears."""
        self.slots: list[Slot] = buffer_slots(self.model)
        self._intentional = {n for n, m, k in self.slots if _is_intentional(m, m._buffers[k])}

    def _check(self) -> None:
        ema = self.ema
        if ema is not None and not (hasattr(ema, "update_parameters") or hasattr(ema, "update") or callable(ema)):
            raise UsageError(
                f"{type(ema).__name__} has no update_parameters(model) or update(model)",
                hint="pass torch.optim.swa_utils.AveragedModel, an object with update(model), or a function of the"
                " model",
            )
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise UsageError(
                    f"{type(optimizer).__name__} is not a torch optimizer", hint="pass the optimizer itself, or a list"
                )
        names = {id(p): n for n, p in self.model.named_parameters()}
        strangers = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if id(p) not in names]
        if not names or strangers:
            raise UsageError(
                f"the optimizer holds {len(strangers)} parameters that are not the model's",
                hint="build the optimizer from the parameters of the model given to Guard, after wrapping it",
            )

    @property
    def device(self) -> torch.device:
        return self.parameters[0][1].device

    @property
    def sharded(self) -> bool:
        """Whether parameters are shards over ranks (FSDP2)."""
        return any(hasattr(p, "_local_tensor") for _, p in self.parameters)

    def buffers(self) -> list[Named]:
        """The buffers as they are now, without walking the module tree again."""
        return [(name, b) for name, m, k in self.slots if (b := m._buffers.get(k)) is not None]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def optimizer_state(self) -> Iterator[Named]:
        """Moments, named by parameter, and whatever else the optimizers keep (MADGRAD: one counter for all)."""
        names = {id(p): n for n, p in self.parameters}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                name = names.get(id(p), "state" if isinstance(p, Tensor) else str(p))
                parts = {f"{name}.{k}": v for k, v in state.items()} if isinstance(state, dict) else {name: state}
                yield from ((key, value) for key, value in parts.items() if isinstance(value, Tensor))

    def averaged(self) -> Iterator[Named]:
        if self.ema is not None and hasattr(self.ema, "state_dict"):
            for key, value in self.ema.state_dict().items():
                if isinstance(value, Tensor):
                    yield f"ema.{key}", value

    def everything(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every tensor of the state as (kind, name, tensor)."""
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, parameter
        for name, buffer in self.buffers():
            if name not in self._intentional:
                yield "buffer", name, buffer
        for name, moment in self.optimizer_state():
            yield "optimizer state", name, moment
        for name, copy in self.averaged():
            yield "averaged parameter", name, copy

    def nonfinite(self) -> list[tuple[str, TensorFacts]]:
        """Every tensor of the state that is not finite, with its statistics."""
        return [(kind, facts_of(name, t)) for kind, name, t in self.everything() if not is_finite(t)]

    def is_intentional(self, name: str) -> bool:
        """Whether a buffer of this name holds infinities on purpose."""
        return name in self._intentional

    def require_finite(self, doing: str, hint: str) -> None:
        """Raise `NonFiniteError` naming the first bad tensor."""
        bad = self.nonfinite()
        if bad:
            kind, facts = bad[0]
            more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
            raise NonFiniteError(f"{doing}: {kind} {facts}{more}", hint=hint)

    def health_flag(self) -> Tensor:
        """One device flag, true when parameters, floating buffers and moments are all finite; no host read."""
        tensors = [local_values(t) for _, _, t in self.everything()]
        wide = [t for t in tensors if t.is_floating_point() and t.element_size() > 1 and t.numel()]
        # the infinity norm: finite exactly when every element is, and it cannot overflow
        norms = torch._foreach_norm(wide, float("inf"))
        return torch.isfinite(torch.stack([n.float().to(self.device) for n in norms])).all()

    def gradient_max(self) -> float:
        """The largest value that every gradient can hold."""
        return min(format_of(p.dtype).max if p.is_floating_point() else math.inf for _, p in self.parameters)

    def updates_so_far(self) -> int:
        """How many updates optimizers and schedulers have counted: a guard may join a run that has begun."""
        states = [s for o in self.optimizers for s in o.state.values() if isinstance(s, dict)]
        steps = [int(s["step"]) for s in states if "step" in s]
        return max([*steps, *(getattr(s, "last_epoch", 0) for s in self.schedulers), 0])

    def learning_rate(self) -> float:
        lr = self.optimizers[0].param_groups[0]["lr"]
        return float(lr)

    def scaler_tensors(self) -> list[Tensor]:
        """The loss scales and their growth counters on the device."""
        for scaler in self.scalers:
            scale_of(scaler, self.device)
        return [t for s in self.scalers for t in (s._scale, s._growth_tracker)]


def gradients_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[Named]:
    """The gradients of some parameters; of sparse ones their coalesced values, which alias them."""
    found = []
    for name, p in parameters:
        if p.grad is None:
            continue
        if p.grad.layout == torch.sparse_coo:
            p.grad = p.grad.coalesce()
            found.append((name, p.grad._values()))
        else:
            found.append((name, p.grad))
    return found


def _is_intentional(module: nn.Module, buffer: Tensor | None) -> bool:
    """Whether a buffer starts with infinities on purpose: an attention mask does, running statistics never do."""
    if buffer is None or buffer.is_meta or isinstance(module, _Statistics) or is_finite(buffer):
        return False
    return not facts_of("buffer", buffer).nan
