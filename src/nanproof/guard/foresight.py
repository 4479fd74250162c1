"""Early signs of trouble in a guarded run: read on the device with the step's other numbers, forecast on the host.

    foresight.begin(step)                        # before a forward pass: whether this step is read
    foresight.read()                             # device scalars, sent together with loss and gradient norm
    foresight.forecast(reading, signals)         # on the host: the reading with its risk, and a warning when one is due

It decides nothing about a step.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError
from ..floats import format_of
from ..forecast import EarlyWarning, Forecast
from ..records import Reading
from ..tensors import local_values
from .hooks import Hook
from .options import Watch
from .precursors import Precursors
from .signals import absmax
from .training import Training

BEGINNING = 20
"""The first steps are all read: without a history there is no forecast."""
_LARGEST = ("update_ratio", "g2_over_v")
"""Of each, the log has the largest over all weight matrices; the forecast has every one."""
_BY_MATRIX = ("grad_norm", "update_ratio")
"""Of the parameters that are watched, the log has these one by one."""


class Foresight:
    """Reads chosen outputs, parameters and weight matrices every so many steps, and at every step under suspicion."""

    def __init__(self, training: Training, watch: Watch) -> None:
        self._outputs = Outputs(training.model, watch.modules, watch.automatic)
        self._params = [(n, p) for n, p in training.model.named_parameters() if _matches(n, watch.params)]
        for pattern in watch.params:
            if not any(_matches(n, [pattern]) for n, _ in self._params):
                raise UsageError(f"no parameters match {pattern!r}", hint="look at model.named_parameters()")
        self._precursors = Precursors(training.parameters, training.optimizers) if watch.automatic else None
        self._gradient_max = training.gradient_max()
        self._every = watch.every
        self._forecast = Forecast()
        self._observed: dict[str, Tensor] = {}
        self._on = self._after = False
        """Whether this step is read; whether the last one was, so that its update is known now."""

    @property
    def hooks(self) -> list[RemovableHandle]:
        """The hooks on modules that are still there."""
        return list(self._outputs.hooks.values())

    def observe(self, name: str, value: Tensor | float, limit: float | None) -> None:
        """Take a number of the loop's own in; it is sent with the next step."""
        number = value.detach().reshape(-1) if isinstance(value, Tensor) else torch.tensor([float(value)])
        if number.numel() != 1:
            raise UsageError(f"guard.observe({name!r}) got {number.numel()} values", hint="give a single number")
        self._observed[name] = number.float()
        if limit is not None:
            self._forecast.set_limit(name, limit)

    def begin(self, step: int) -> None:
        """A forward pass of the step begins."""
        self._after, last = False, self._on
        self._on = step < BEGINNING or step % self._every == 0 or self._forecast.look_closer
        self._after = last and not self._on
        self._outputs.listen(self._on)

    def read(self, *, gradients: bool) -> tuple[list[str], list[Tensor]]:
        """Names and the tensors of their values, in the same order; ``gradients`` when they are not scaled."""
        names, values = list(self._observed), list(self._observed.values())
        self._observed = {}
        if self._on:
            for name, value in self._outputs.seen.items():
                names.append(f"absmax/{name}")
                values.append(value.reshape(1))
            for name, p in self._params:
                names.append(f"param/{name}")
                values.append((p.detach() if p.numel() == 1 else absmax(p)).reshape(1))
                if p.dim() > 1:
                    names.append(f"weight_norm/{name}")
                    values.append(torch.linalg.vector_norm(local_values(p.detach()), dtype=torch.float32).reshape(1))
        if self._precursors is not None and (self._on or self._after):
            found = self._precursors.read(gradients=gradients and self._on)
            if found is not None:
                names += found[0]
                values.append(found[1])
        elif self._precursors is not None:
            self._precursors.forget()
        self._outputs.listen(False)
        return names, values

    def forecast(self, reading: Reading, signals: Mapping[str, float]) -> tuple[Reading, EarlyWarning | None]:
        """The reading with its risk and what of the signals belongs into the log; a warning when one is due."""
        limits = {f"absmax/{k}": v for k, v in self._outputs.limits.items()}
        if self._gradient_max < 1e30:  # half-precision gradients, as they are in memory
            limits["grad_norm"] = self._gradient_max / (reading.scale or 1.0)
        values = {"loss": reading.loss, "grad_norm": reading.grad_norm}
        values |= {"scale": reading.scale} if reading.scale is not None else {}
        outputs = {k.removeprefix("absmax/"): v for k, v in signals.items() if k.startswith("absmax/")}
        if outputs and not self._outputs.chosen:
            self._outputs.choose(outputs)
        kept = {f"absmax/{name}" for name in self._outputs.names}
        known = {k: v for k, v in signals.items() if not k.startswith("absmax/") or k in kept}
        foreseen = {k: v for k, v in known.items() if not k.startswith("weight_norm/")}
        warning = self._forecast.read(reading.step, {**values, **foreseen}, limits)
        watched = {f"{kind}/{name}" for name, _ in self._params for kind in _BY_MATRIX}
        logged = {k: v for k, v in known.items() if k.partition("/")[0] not in (*_LARGEST, "grad_norm") or k in watched}
        logged |= {
            f"headroom/{n}": room
            for n in self._outputs.names
            if (room := self._outputs.room(n, outputs.get(n))) is not None
        }
        for kind in _LARGEST:
            found = [v for k, v in known.items() if k.startswith(f"{kind}/") and math.isfinite(v)]
            logged |= {kind: max(found)} if found else {}
        return dataclasses.replace(reading, watched=logged, risk=round(self._forecast.risk, 4)), warning

    def close(self) -> None:
        self._outputs.close()


class Outputs:
    """The largest magnitudes of modules' outputs: those asked for, and those with the least headroom at the start."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], automatic: int) -> None:
        every = {n: m for n, m in model.named_modules() if n}
        self.names = [n for n in every if _matches(n, patterns)]
        for pattern in patterns:
            if not any(_matches(n, [pattern]) for n in every):
                raise UsageError(f"no modules match {pattern!r}", hint="look at model.named_modules()")
        self.seen: dict[str, Tensor] = {}
        self.limits: dict[str, float] = {}
        self.chosen = not automatic
        self._automatic = automatic
        self._on = False
        hooked = every if automatic else {n: every[n] for n in self.names}
        self.hooks: dict[str, RemovableHandle] = {
            n: m.register_forward_hook(Hook(self._hook(n))) for n, m in hooked.items()
        }

    def listen(self, on: bool) -> None:
        """Begin a forward pass that is read, or end it: replays pass the same hooks."""
        self._on = on
        if on:
            self.seen = {}

    def room(self, name: str, largest: float | None) -> float | None:
        """The headroom of an output: powers of two up to its dtype's maximum."""
        if largest is None or not 0 < largest < math.inf or name not in self.limits:
            return None
        return math.log2(self.limits[name] / largest)

    def choose(self, largest: Mapping[str, float]) -> None:
        """Keep the outputs that could overflow first, of those that were seen; the other hooks are removed."""
        rooms = {n: room for n, v in largest.items() if (room := self.room(n, v)) is not None}
        nearest = [n for n in sorted(rooms, key=lambda n: rooms[n]) if n not in self.names]
        self.names += nearest[: self._automatic]
        self.chosen = True
        for name in set(self.hooks) - set(self.names):
            self.hooks.pop(name).remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._on:
                return
            out = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return
            if torch._C._functorch.is_functorch_wrapped_tensor(out):
                return  # inside of torch.func: it has no memory of its own, and must not outlive the transform
            with suppress(Exception):  # what cannot be read is not watched; it never ends the forward pass
                found = absmax(out.detach())
                self.seen[name] = torch.maximum(self.seen[name], found) if name in self.seen else found
                self.limits[name] = format_of(out.dtype).max

        return hook

    def close(self) -> None:
        for hook in self.hooks.values():
            hook.remove()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)
