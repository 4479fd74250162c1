"""The guard beside a loop that takes its steps itself: a trainer's, or a script's under `nanproof run`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ..errors import DesyncError
from .closure_step import ClosureSteps
from .data import DataSource
from .guard import Guard
from .loss_scale import is_scaled, scale_of
from .optimizer_groups import Members, OptimizerGroup
from .passes import Passes
from .signals import total_norm
from .step import Decision, OpenStep
from .training import gradients_of
from .update import clip


@dataclass
class Judged:
    """One decision about a group of optimizers, and which of them have acted on it."""

    step: OpenStep
    decision: Decision
    members: Members
    stepped: set[int] = field(default_factory=set)
    finished: bool = False


def attach(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    divided: bool | None = False,
    scaled: bool = True,
    hook: Sequence[nn.Module] | None = None,
    data: DataSource | None = None,
    max_norm: float | None = None,
    **options: Any,
) -> ExternalLoop:
    """Put a guard beside a loop that takes its steps itself; ``options`` are those of `Guard`.

    ``divided``: losses of micro-batches come divided by their number (None: seen from the loss itself).
    ``scaled``: every loss goes through the guard's scaler; else `Passes.before_backward` says through which one.
    ``hook``: the modules whose forward passes begin steps, if not the model's own. ``data``: where batches come from.
    ``max_norm``: clip to this, besides what the loop does.
    """
    guard = Guard(model, optimizer, external=True, **options)
    loop = ExternalLoop(guard, divided=divided, scaled=scaled, data=data, max_norm=max_norm)
    for module in guard.training.roots if hook is None else hook:
        loop.passes.add_hooks(module)
    return loop


class ExternalLoop:
    """Translates the steps of a loop into steps of the engine, and decisions into go or no go.

    `passes` hears what the loop runs; `judge` is asked before clipping, and `step` carries an optimizer step out or
    leaves it. Several optimizers may step together or take turns; which of them do is learned from the loop.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        divided: bool | None,
        scaled: bool,
        data: DataSource | None,
        max_norm: float | None,
    ) -> None:
        self.guard = guard
        self._engine, self._context, t = guard._engine, guard._context, guard.training
        self._max_norm = max_norm
        scaler = t.scaler if scaled else None
        self.passes = Passes(guard, divided=divided, scaler=scaler, data=data, settle=self._new_step)
        self.in_backward = self.passes.in_backward
        self._closures = ClosureSteps(self)
        self._numbers = {id(o): i for i, o in enumerate(t.optimizers)}
        self._judged: list[Judged] = []
        self._beside: list[tuple[str, nn.Parameter]] = []
        self._held: dict[int, float] = {}
        self._tries, self._updates = [0] * len(t.optimizers), [0] * len(t.optimizers)
        self._followers: weakref.WeakKeyDictionary[Any, tuple[int, int, bool]] = weakref.WeakKeyDictionary()
        self.carried_out = True
        """Whether the last step was carried out."""
        self._at_close: list[Callable[[], None]] = []
        self._parts = [part for root in t.roots for part in root.children()]

    # --- judging ----------------------------------------------------------------------------------------------

    def owns(self, optimizer: Any) -> bool:
        return id(optimizer) in self._numbers

    def judge(self, optimizer: Optimizer) -> bool:
        """Whether the step may be carried out: asked before clipping, and again at the step itself."""
        self._context.require_running()  # a loop that catches everything does not go on unguarded
        if not self.guard.open:
            return True
        number = self._numbers[id(optimizer)]
        for judged in self._judged:
            if number in judged.members and number not in judged.stepped:
                return judged.decision.go
        try:
            self._settle()
            return self._decide(self._context.groups.of(number)).go
        except DesyncError:
            raise
        except Exception as error:
            return self._engine.fall_back(self.passes.step or self._engine.begin(capture=False), error).go

    def judge_clip(self, parameters: Sequence[Tensor]) -> bool:
        """Whether gradients may be clipped: those of a vetoed step stay as they are, or one NaN would spread."""
        wanted = {id(p) for p in parameters}
        self._beside = [(n, p) for n, p in self.guard.training.unstepped if id(p) in wanted]
        for optimizer in self.guard.training.optimizers:
            if any(id(p) in wanted for g in optimizer.param_groups for p in g["params"]):
                return self.judge(optimizer)
        return True

    def norm_of(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The norm that was judged, when it is exactly that of these parameters' gradients: clipping can share it."""
        last = self._judged[-1] if self._judged else None
        if last is None or last.step.sent is None or last.step.scaler is not None:
            return None
        mine = [p for _, p in last.step.parameters if p.grad is not None]
        theirs = [p for p in parameters if p.grad is not None]
        same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))
        single = {(p.dtype, p.device, p.layout) for p in mine} <= {
            (torch.float32, p.device, p.layout) for p in mine[:1]
        }
        return last.step.sent.norm if same and single else None

    def _decide(self, group: OptimizerGroup) -> Decision:
        """Ask the engine about the gradients that a group of optimizers has now."""
        passes, groups = self.passes, self._context.groups
        opened = passes.step if passes.step is not None else passes.new_step(capture=False)
        step = dataclasses.replace(opened, group=group, number=self._context.tally.steps + 1, sent=None)
        step.data = passes.data.number  # no position: ranks may have different numbers of micro-batches or stages
        step.beside, self._beside = self._beside, []
        step.measure = None if step.scaler is None else lambda: self._norm(step)
        passes.end()
        held = passes.held_buffers()
        kept = [b.detach().clone() for b in held]
        with passes.at_work(), _unsafe_preserve_version_counter(held):
            decision = self._engine.judge(step)
            if decision.action.kind == "skip":  # what a later step uses is no part of this one
                for buffer, copy in zip(held, kept, strict=True):
                    buffer.detach().copy_(copy)
        if groups.several and step.signals.losses:
            parts = {f"loss {groups.name(group)}": decision.reading.loss}
            decision = dataclasses.replace(decision, reading=dataclasses.replace(decision.reading, components=parts))
        if decision.go:
            clip(step.parameters, self._max_norm, decision.norm)
        elif decision.scale is not None and step.scaler is not None:
            self._held[id(step.scaler)] = decision.scale
        judged = Judged(step, decision, group.members)
        self._judged.append(judged)
        passes.judged = True
        if not decision.go:
            self._finish(judged)
        return decision

    def _norm(self, step: OpenStep) -> Tensor:
        """The gradient norm with the loss scale taken out, where the loop has not done that yet."""
        t = self.guard.training
        scale = scale_of(step.scaler, t.device)
        assert scale is not None
        groups = self._context.groups
        still = [i for i in step.group.members if is_scaled(step.scaler, t.optimizers[i])]
        rest = [i for i in step.group.members if i not in still]
        norms = []
        if still:
            norms.append(total_norm([g for _, g in gradients_of(groups.get(still).parameters)]) / scale)
        if rest:
            norms.append(total_norm([g for _, g in gradients_of(groups.get(rest).parameters)]))
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]

    # --- steps ------------------------------------------------------------------------------------------------

    def step(
        self, optimizer: Optimizer, carry_out: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Carry a step out, or leave it; with a closure the verdict comes after its first run."""
        if closure is not None:
            return self._closures.step(optimizer, carry_out, closure)
        if not self.judge(optimizer):
            self.left(optimizer)
            return None
        with self._engine.lowered(optimizer):
            result = carry_out()
        self._stepped(optimizer, done=True)
        return result

    def left(self, optimizer: Optimizer) -> None:
        """The loop has left a vetoed step out."""
        self._stepped(optimizer, done=False)

    def _stepped(self, optimizer: Optimizer, *, done: bool) -> None:
        """The loop has taken a step, or left it out."""
        number = self._numbers[id(optimizer)]
        self.carried_out = done
        self._tries[number] += 1
        self._updates[number] += done
        judged = next((j for j in reversed(self._judged) if number in j.members), None)
        if judged is not None:
            judged.stepped.add(number)
            if judged.stepped >= set(judged.members):
                with self._context.surviving("accounting for a step"):
                    self._settle()

    def held_scale(self, scaler: Any) -> float | None:
        """The scale that a scaler is to take at its next update, after a veto; said once."""
        return self._held.pop(id(scaler), None)

    def advances(self, follower: Any, optimizer: Any = None) -> bool:
        """Whether a schedule or an average may move on: only if an update was carried out since it last did."""
        some = [self._numbers[id(optimizer)]] if optimizer is not None else range(len(self._tries))
        tries, updates = sum(self._tries[i] for i in some), sum(self._updates[i] for i in some)
        known_tries, known_updates, answer = self._followers.get(follower, (0, 0, True))
        if tries != known_tries:
            answer = updates > known_updates
        self._followers[follower] = (tries, updates, answer)
        return answer

    def count_skipped(self, optimizer: Optimizer) -> int:
        """How many steps of an optimizer were not carried out."""
        number = self._numbers[id(optimizer)]
        return self._tries[number] - self._updates[number]

    @property
    def last_decision(self) -> Decision | None:
        return self._judged[-1].decision if self._judged else None

    def drop_step(self) -> None:
        """Forget the step that is open or judged, without an account of it."""
        self.passes.step, self.passes.judged = None, False
        self._judged.clear()

    def _new_step(self) -> None:
        self._settle()
        self._judged.clear()

    def _settle(self) -> None:
        """Finish the last decision once its steps are taken: learn who stepped."""
        for judged in self._judged:
            if judged.stepped:
                self._context.groups.learn(judged.stepped)
            self._finish(judged)

    def _finish(self, judged: Judged) -> None:
        """Close a step; one that the loop itself left out was none."""
        if judged.finished:
            return
        judged.finished = True
        with self.passes.at_work():
            self._engine.finish(judged.step, judged.decision, carried_out=bool(judged.stepped))
            if not judged.decision.go or not judged.stepped:
                return
            if judged.step.undoable:
                judged.step.before.forget()
            else:  # a forward pass that nobody saw: buffers, at least, can be put back the next time
                with self._context.surviving("capturing the state before a step"):
                    judged.step.before.capture()
                parts, self._parts = self._parts, []
                for part in parts:
                    self.passes.add_hooks(part)

    # --- saves, state, the end --------------------------------------------------------------------------------

    def blocks_save(self, target: Any) -> bool:
        """Whether a save of the training state must not happen, because the state is not finite on some rank."""
        self._settle()
        bad = self.guard.training.nonfinite()
        return self.guard.blocks_save(target, f"{bad[0][0]} {bad[0][1]}" if bad else "")

    def summary(self) -> str:
        """What happened so far, in a few lines."""
        return self.guard.summary()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guard.load_state_dict(state)

    def close(self) -> None:
        """End the run: account for what is pending, leave the model, write the log, say what happened."""
        surviving = self._context.surviving
        for pending in (self._settle, self.passes.settle) if self.guard.open else ():
            with surviving("accounting for the last step"):
                pending()
        with surviving("leaving the model as it was"):
            self.passes.remove_hooks()
        with surviving("accounting for the last step"):
            self.drop_step()
        while self._at_close:
            with surviving("leaving the trainer as it was"):
                self._at_close.pop()()
        self.guard.close()

    def release(self) -> None:
        """Let go of optimizers and schedules: torch may hold hooks of a closed loop until the running call returns."""
        t = self.guard.training
        t.optimizers.clear()
        t.schedulers.clear()
        self._context.groups.clear()

    def on_close(self, action: Callable[[], None]) -> None:
        """What is to be done at the end, such as to leave a trainer as it was."""
        self._at_close.append(action)
