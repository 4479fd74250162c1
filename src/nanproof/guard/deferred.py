"""Deferred timing: the device vetoes by itself, the host learns of it one step later and never waits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError
from ..records import Verdict
from .engine import Engine
from .step import OpenStep
from .training import Training
from .update import clip, make_update


class Deferred:
    """Makes every update under the device's veto, and finishes each step when the next one comes."""

    def __init__(self, engine: Engine, max_norm: float | None) -> None:
        self._engine, self._max_norm = engine, max_norm
        self._pending: OpenStep | None = None
        self._schedules: list[dict[str, object]] = []
        self._rates: list[float | Tensor] = []

    def step(self, step: OpenStep) -> Verdict:
        """Update unless the device says no: a bad step changes neither parameters, moments, counters nor buffers."""
        engine, t = self._engine, self._engine.context.training
        decision = engine.judge(step, wait=False)
        clip(step.parameters, self._max_norm, decision.norm)
        if decision.good is None:  # the guard itself failed: the plainest check has decided
            if decision.go:
                make_update(t, decision, engine.lowered)
            return engine.finish(step, decision, carried_out=decision.go)
        veto = ~decision.good
        step.before.select_buffers(decision.good)
        # the schedule moves on before the verdict is known
        self._schedules = [s.state_dict() for s in t.schedulers]
        self._rates = [g["lr"] for o in t.optimizers for g in o.param_groups]
        make_update(t, decision, engine.lowered, veto=veto)
        self._pending = step
        return decision.verdict

    def catch_up(self) -> Verdict | None:
        """Finish the step before; its verdict when the run went back, so that the current step is void."""
        step, self._pending = self._pending, None
        if step is None:
            return None
        engine, t = self._engine, self._engine.context.training
        decision = engine.judge(step)
        if not decision.go:
            for scheduler, state in zip(t.schedulers, self._schedules, strict=True):
                scheduler.load_state_dict(state)
            for group, lr in zip((g for o in t.optimizers for g in o.param_groups), self._rates, strict=True):
                group["lr"] = lr
        engine.finish(step, decision, carried_out=decision.go)
        return decision.verdict if decision.action.kind not in ("commit", "skip") else None


def check_deferred(training: Training, dropping: bool) -> None:
    """What the device cannot hold back by itself is refused, not done wrongly."""
    for optimizer in training.optimizers:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"timing='deferred' needs an optimizer that can leave a step out on the device;"
                f" {type(optimizer).__name__} cannot",
                hint="build it with fused=True (Adam, AdamW, SGD, Adagrad), or use timing='exact'",
            )
    if training.ema is not None:
        raise UsageError("timing='deferred' cannot hold back an averaged model", hint="use timing='exact' with ema")
    if dropping:
        raise UsageError("dropping single micro-batches needs their verdict at once", hint="use timing='exact'")
    if any(isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) for s in training.schedulers):
        raise UsageError("ReduceLROnPlateau needs the loss at once", hint="use timing='exact'")
