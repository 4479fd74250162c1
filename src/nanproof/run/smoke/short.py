"""A session of `nanproof run` that looks closely at a few steps and then ends the script where it stands."""

from __future__ import annotations

import fnmatch
import math
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...errors import NonFiniteError
from ...guard import Guard
from ...guard.external import ExternalLoop
from ...guard.observers import Observer
from ...guard.signals import total_norm
from ...records import Action, Incident, Reading, Verdict
from ..guards import Guards
from ..options import Options
from ..session import Session
from .chance import Chance, Seen, watch_chance
from .layers import Layer, watch_layers
from .measures import copy_of, largest_in, relative_change, zero_share
from .trial import Trial


class Enough(SystemExit):
    """Ends a script as ``sys.exit()`` would: its clean-up runs, and no ``except Exception`` holds it back."""


class Witness(Observer):
    """Writes down what the guard reads of each step, and what the guard does not look at."""

    def __init__(self, steps: int, watch: tuple[str, ...]) -> None:
        self._steps, self._watch = steps, watch
        self.closing = ExitStack()
        self.seen = Seen()
        self.over = False
        self.stopped = ""
        self._bad_at_start: tuple[str, ...] = ()
        self._bad_gradients: tuple[str, ...] = ()
        self._why = ""
        self._replaying = False
        self._series: dict[str, list[float]] = {}
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._unclipped: list[float] = []
        self._overflows = 0
        self._chance = Chance()
        self._layers: dict[str, Layer] = {}
        self._trained: dict[str, nn.Parameter] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._before: dict[str, float] = {}
        self._with_gradient: set[str] = set()
        self._zeros = 0.0
        self._counts = (0, 0)
        self._optimizer: tuple[str, float | None] = ("", None)
        self._scaler = False

    def refuse(self, error: NonFiniteError) -> None:
        """The model is bad before anything ran."""
        self._bad_at_start = (error.message.partition(": ")[2] or error.message,)
        self.over, self.stopped = True, "stopped before the first step: the model is bad already"

    def watch(self, guard: Guard) -> None:
        """A guard was made, so training begins: look at its model now, and at each of its steps."""
        t = guard.training
        if not self._losses:  # what is trained later in the same script is counted, and not measured
            self._trained = {n: p for n, p in t.parameters if p.requires_grad}
            self._start = {n: copy_of(p) for n, p in self._trained.items()}
            self._before = {n: largest_in(p) for n, p in self._watched()}
            everything = list(t.model.parameters())
            self._counts = (sum(p.numel() for p in everything), sum(p.numel() for p in self._trained.values()))
            first = t.optimizers[0]
            self._optimizer = (type(first).__name__, first.defaults.get("eps"))
            self._layers = self.closing.enter_context(watch_layers(t.model, lambda: not self._replaying))
            self.seen.levels.clear()
        self._scaler = t.scaler is not None
        guard.subscribe(self)

    def examining(self, on: bool) -> None:
        self._replaying = on  # the guard replays the step, in other precisions too

    def _watched(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._trained.items() if any(fnmatch.fnmatchcase(n, w) for w in self._watch)]

    def incident(self, incident: Incident) -> None:
        self._bad_gradients = tuple(str(f) for f in incident.tensors if f.name.startswith("grad "))
        why = incident.location.why if incident.location is not None else ""
        self._why = "; ".join(words for words in (why, *incident.notes) if words)

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        if verdict.kind == "overflow" and verdict.origin == "scale":
            self._overflows += 1  # GradScaler looks for its scale
            return
        if self.over:
            return
        self._losses.append(reading.loss)
        received = self._received(reading.grad_norm)
        self._norms.append(received)
        self._unclipped.append(reading.grad_norm)
        name = next((k.removeprefix("loss ") for k in reading.components if k.startswith("loss ")), "")
        self._series.setdefault(name, []).append(reading.loss)
        # optimizers may take turns: a parameter is measured when it first has a gradient
        fresh = {n: p for n, p in self._trained.items() if n not in self._with_gradient and p.grad is not None}
        if fresh:
            self._with_gradient |= set(fresh)
            self._zeros = max(self._zeros, zero_share(fresh))
        self.seen.levels.clear()
        if action.kind not in ("commit", "rerun"):
            self.over = True
            self.stopped = f"stopped, {verdict}" + (f"; {self._why}" if self._why else "")
        self.over = self.over or max(map(len, self._series.values())) > self._steps

    def _received(self, judged: float) -> float:
        """The norm that the optimizer worked with: smaller than the judged one where the script clips."""
        grads = [p.grad for p in self._trained.values() if p.grad is not None]
        if not grads or not math.isfinite(judged):
            return judged
        norm = float(total_norm(grads))  # host sync: a test, not a training
        return norm if 0 < norm < 0.99 * judged else judged

    def meet_backward(self) -> None:
        """The losses of a forward pass are computed."""
        if self._chance.level is None:
            self._chance = self.seen.chance

    def trial(self, not_seen: dict[str, str]) -> Trial:
        """Everything, once the script has ended."""
        carried_out = bool(self._losses) and not (self.stopped and len(self._losses) == 1)
        moved = {n: relative_change(p, self._start[n]) for n, p in self._trained.items()} if carried_out else {}
        parts = tuple(name for name in self._series if name)
        missing = [n for n in self._trained if n not in self._with_gradient] if self._losses else []
        return Trial(
            losses=tuple(self._losses),
            norms=tuple(self._norms),
            unclipped=tuple(self._unclipped) if self._unclipped != self._norms else (),
            chance=self._chance,
            layers=tuple(self._layers.values()),
            bad_at_start=self._bad_at_start,
            bad_gradients=self._bad_gradients,
            without_gradient=tuple(missing),
            unmoved=tuple(n for n, m in moved.items() if m == 0),
            largest_move=max((m for m in moved.values() if math.isfinite(m)), default=0.0),
            zero_gradients=self._zeros,
            optimizer=self._optimizer[0],
            eps=self._optimizer[1],
            parameters=self._counts[0],
            trainable=self._counts[1],
            watched={n: (self._before[n], largest_in(p)) for n, p in self._watched()},
            same_batch=False,
            turns=parts if len(parts) > 1 else (),
            scaler=self._scaler,
            overflows=self._overflows,
            stopped=self.stopped,
            not_seen=not_seen,
        )


class WatchedGuards(Guards):
    """Guards that a witness hears of."""

    witness: Witness

    def make(self, model: Any, optimizer: Any, **options: Any) -> ExternalLoop:
        try:
            loop = super().make(model, optimizer, **options)
        except NonFiniteError as error:
            self.witness.refuse(error)
            raise Enough from None
        self.witness.watch(loop.guard)
        return loop


class ShortSession(Session):
    """Lets the script make some steps, and ends it at the first call of torch's after them."""

    def __init__(self, options: Options, witness: Witness) -> None:
        super().__init__(options)
        self.witness = witness
        guards = WatchedGuards(options, self.data)
        guards.witness = witness
        self.guards = guards
        # outside of whatever the script enters, so that contexts close in order
        if threading.current_thread() is threading.main_thread():
            witness.seen = witness.closing.enter_context(watch_chance())

    def _leave(self) -> None:
        if self.witness.over and self.here:
            raise Enough

    def stay_out_of_graphs(self) -> None:
        """Compiled code runs as it was written: inside of a graph no layer can be looked at."""
        super().stay_out_of_graphs()
        torch.compiler.set_stance("force_eager")
        self.witness.closing.callback(torch.compiler.set_stance, "default")

    def backward(self, *args: Any) -> Any:
        self._leave()
        self.witness.meet_backward()
        return super().backward(*args)

    def step(self, *args: Any) -> Any:
        result = super().step(*args)
        if not self._stepping and not self._in_backward:
            self._leave()
        return result

    def scaler_update(self, *args: Any) -> Any:
        result = super().scaler_update(*args)
        self._leave()
        return result

    def follow(self, *args: Any) -> Any:
        self._leave()
        return super().follow(*args)

    def deliver(self, *args: Any) -> None:
        self._leave()
        super().deliver(*args)

    def end(self) -> None:
        if self.here:
            self.witness.closing.close()
        super().end()
