"""Early signs of trouble in a guarded run: read on the device with the step's other numbers, forecast on the host.

    foresight.begin(step)                        # before a forward pass: whether this step is read
    foresight.read(...)                          # on the device, sent together with loss and gradient norm
    foresight.forecast(reading, signals)         # on the host: the reading with its risk, and a warning when one is due

It decides nothing about a step.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Collection, Mapping, Sequence
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
from .attention import Logits
from .hooks import Hook, anything_compiled, unwatched
from .options import Watch
from .precursors import Precursors
from .readback import Numbers, Part
from .signals import absmax
from .training import Training

BEGINNING = 20
"""The first steps are all read: without a history there is no forecast."""
AT_ONCE = 4
"""So many outputs are read in one step of a calm run: each costs an operation, and others wait for the next step."""
_LARGEST = ("update_ratio", "g2_over_v")
"""Of each, the log has the largest over all weight matrices; the forecast has every one."""
_BY_MATRIX = ("grad_norm", "update_ratio", "g2_over_v")
"""The log has these one by one only of the parameters that are watched."""
_ONLY_LOGGED = ("g2_over_v", "param", "unmoved", "weight_norm")


class Cadence:
    """What is read at a step: everything under suspicion, else every so many steps, and a few modules at a time."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.on = self.sampled = False
        """Whether gradients are read; whether weights are: then, too, when they were read a step before."""
        self.modules: Collection[str] | None = ()
        """The modules whose outputs are read; None for all."""

    def next(self, step: int, *, closer: bool, names: Sequence[str] | None) -> None:
        """A step begins; ``names`` are those of the watched modules, None before they are chosen."""
        closer = closer or step < BEGINNING
        turn, last = step % self._every, self.on
        self.on = closer or turn == 0
        self.sampled = self.on or last
        self.modules = None
        if not closer and names is not None:
            count = max(AT_ONCE, -(-len(names) // self._every))
            self.modules = tuple(names[turn * count : (turn + 1) * count])


class Foresight:
    """Reads chosen outputs, parameters and weight matrices every so many steps, and at every step under suspicion."""

    def __init__(self, training: Training, watch: Watch) -> None:
        self._outputs = Outputs(training.model, watch.modules, watch.automatic)
        self._logits = Logits(training.model, self._outputs.names, watch.automatic)
        self._params = [(n, p) for n, p in training.model.named_parameters() if _matches(n, watch.params)]
        for pattern in watch.params:
            if not any(_matches(n, [pattern]) for n, _ in self._params):
                raise UsageError(f"no parameters match {pattern!r}", hint="look at model.named_parameters()")
        self._watched = {f"{kind}/{name}" for name, _ in self._params for kind in _BY_MATRIX}
        self._precursors = Precursors(training.parameters, training.optimizers) if watch.automatic else None
        self._matrices = {n for n, p in training.parameters if p.dim() > 1 and watch.automatic}
        self._gradient_max = training.gradient_max()
        self._cadence = Cadence(watch.every)
        self._forecast = Forecast()
        self._observed: dict[str, Tensor] = {}
        self._step = -1

    @property
    def hooks(self) -> list[RemovableHandle]:
        """The hooks on modules that are still there."""
        return [*self._outputs.hooks, *self._logits.hooks]

    def observe(self, name: str, value: Tensor | float, limit: float | None) -> None:
        """Take a number of the loop's own in; it is sent with the next step."""
        number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        if number.numel() != 1:
            raise UsageError(f"guard.observe({name!r}) got {number.numel()} values", hint="give a single number")
        self._observed[name] = number.reshape(())
        if limit is not None:
            self._forecast.set_limit(name, limit)

    def begin(self, step: int) -> None:
        """A forward pass of the step begins: the only one, or one of several micro-batches."""
        if step != self._step:
            self._step = step
            names = [*dict.fromkeys([*self._outputs.names, *self._logits.names])]
            closer = self._forecast.look_closer
            self._cadence.next(step, closer=closer, names=names if self._outputs.chosen else None)
            self._outputs.seen, self._logits.seen = {}, {}
        self._listen(self._cadence.modules)

    def _listen(self, names: Collection[str] | None) -> None:
        """Replays pass the same hooks, and are not read."""
        self._outputs.listen(names)
        self._logits.listen(names)

    def read(self, gradients: Sequence[tuple[str, Tensor]], norms: Tensor | None) -> list[Part]:
        """What is to be sent with the step's other numbers.

        ``gradients`` are those of the step, none where they are still scaled; ``norms`` theirs, where they are known.
        """
        named = [(name, value) for name, value in self._observed.items()]
        self._observed = {}
        for name, pair in self._outputs.seen.items():
            named += [(f"absmax/{name}", value) for value in pair]
        named += [(f"logits/{name}", value) for name, value in self._logits.seen.items()]
        found: list[Part] = []
        if self._cadence.on and self._matrices and gradients:
            if norms is None:
                gradients = [(n, g) for n, g in gradients if n in self._matrices]
                named += [(f"grad_norm/{n}", _norm(local_values(g))) for n, g in gradients]
            else:
                names = [f"grad_norm/{n}" for n, _ in gradients]
                found.append(Part([norms], functools.partial(_by_name, names)))
        for name, p in self._params if self._cadence.on else ():
            named.append((f"param/{name}", (p.detach().reshape(()) if p.numel() == 1 else absmax(p))))
            if p.dim() > 1:
                named.append((f"weight_norm/{name}", _norm(local_values(p))))
        if named:
            names = [name for name, _ in named]
            found.append(Part([value for _, value in named], functools.partial(_by_name, names)))
        if self._precursors is not None and self._cadence.sampled:
            sample = self._precursors.sample(self._step)
            found += [sample] if sample is not None else []
        self._listen(())
        return found

    def forecast(self, reading: Reading, signals: Mapping[str, float]) -> tuple[Reading, EarlyWarning | None]:
        """The reading with its risk and what of the signals belongs into the log; a warning when one is due."""
        values = {"loss": reading.loss, "grad_norm": reading.grad_norm}
        values |= {"scale": reading.scale} if reading.scale is not None else {}
        limits: dict[str, float] = {}
        if self._gradient_max < 1e30:  # half-precision gradients, as they are in memory
            limits["grad_norm"] = self._gradient_max / (reading.scale or 1.0)
        if not signals:
            warning = self._forecast.read(reading.step, values, limits)
            return dataclasses.replace(reading, risk=round(self._forecast.risk, 4)), warning
        limits |= {f"absmax/{k}": v for k, v in self._outputs.limits.items()}
        limits |= {f"logits/{k}": v for k, v in self._logits.limits.items()}
        outputs = {k.removeprefix("absmax/"): v for k, v in signals.items() if k.startswith("absmax/")}
        if outputs and not self._outputs.chosen:
            self._outputs.choose(outputs)
            self._logits.choose({k.removeprefix("logits/"): v for k, v in signals.items() if k.startswith("logits/")})
        logged: dict[str, float] = {}
        known = {"absmax": self._outputs.names, "logits": self._logits.names, "grad_norm": self._matrices}
        for key, value in signals.items():
            kind, _, name = key.partition("/")
            if kind in known and name not in known[kind]:
                continue
            if kind not in _ONLY_LOGGED:
                values[key] = value
            if kind in _LARGEST and math.isfinite(value):
                logged[kind] = max(value, logged.get(kind, value))
            if kind not in _BY_MATRIX or key in self._watched:
                logged[key] = value
            if kind == "absmax" and (room := self._outputs.room(name, value)) is not None:
                logged[f"headroom/{name}"] = room
        warning = self._forecast.read(reading.step, values, limits)
        return dataclasses.replace(reading, watched=logged, risk=round(self._forecast.risk, 4)), warning

    def know(self, warning: EarlyWarning) -> None:
        """Another rank has warned."""
        self._forecast.know(warning)

    def close(self) -> None:
        self._listen(())
        self._outputs.unhook()


class Outputs:
    """The largest magnitudes of modules' outputs: those asked for, and those with the least headroom at the start."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], automatic: int) -> None:
        every = {n: m for n, m in model.named_modules() if n}
        self.names = [n for n in every if _matches(n, patterns)]
        for pattern in patterns:
            if not any(_matches(n, [pattern]) for n in every):
                raise UsageError(f"no modules match {pattern!r}", hint="look at model.named_modules()")
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}
        """The smallest and the largest value of each output."""
        self.limits: dict[str, float] = {}
        self.chosen = not automatic
        self._automatic = automatic
        self.hooks: list[RemovableHandle] = []
        self._hooked: set[str] = set()
        self._read_now: Collection[str] | None = ()
        self._modules = every if automatic else {n: every[n] for n in self.names}

    def listen(self, names: Collection[str] | None) -> None:
        """Begin a forward pass in which these modules are read (None: all), or end it: without hooks, at no cost."""
        self._read_now = names
        compiled = anything_compiled()  # it would be compiled again when hooks come and go
        wanted = set(self._modules) if names is None or compiled else set(names) & set(self._modules)
        if wanted == self._hooked or (compiled and names == ()):
            return
        self.unhook()
        self._hooked = wanted
        self.hooks = [
            m.register_forward_hook(Hook(self._hook(n), unwatched)) for n, m in self._modules.items() if n in wanted
        ]

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self._hooked = [], set()

    def room(self, name: str, largest: float | None) -> float | None:
        """The headroom of an output: powers of two up to its dtype's maximum."""
        if largest is None or not 0 < largest < math.inf or name not in self.limits:
            return None
        return math.log2(self.limits[name] / largest)

    def choose(self, largest: Mapping[str, float]) -> None:
        """Keep the outputs that could overflow first, of those that were seen."""
        rooms = {n: room for n, v in largest.items() if (room := self.room(n, v)) is not None}
        nearest = [n for n in sorted(rooms, key=lambda n: rooms[n]) if n not in self.names]
        self.names += nearest[: self._automatic]
        self.chosen = True
        self._modules = {n: m for n, m in self._modules.items() if n in self.names}
        self.unhook()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            read = self._read_now
            if torch.compiler.is_compiling() or (read is not None and name not in read):
                return
            out = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return
            with suppress(Exception):  # what cannot be read is not watched; it never ends the forward pass
                with torch.no_grad():
                    low, high = _range(out)
                    if name in self.seen:
                        low, high = torch.minimum(low, self.seen[name][0]), torch.maximum(high, self.seen[name][1])
                self.seen[name] = low, high
                self.limits[name] = format_of(out.dtype).max

        return hook


def _range(out: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value: one operation, where the largest magnitude takes three."""
    if type(out) is Tensor and out.numel() and out.element_size() > 1:
        low, high = torch.aminmax(out)
        return low, high
    largest = absmax(out.detach())
    return largest, largest


def _norm(values: Tensor) -> Tensor:
    half = values.element_size() < 4  # a float16 norm overflows at 65,504
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if half else None)
    return norm.float()


def _by_name(names: Sequence[str], numbers: Numbers) -> dict[str, float]:
    """Numbers by their names; of two of the same name, the smallest and the largest value, the largest magnitude."""
    found: dict[str, float] = {}
    for name, value in zip(names, numbers.tolist(), strict=True):
        if name.startswith("logits/"):
            value = max(value, 0.0)
        found[name] = max(abs(found[name]), abs(value)) if name in found else value
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in patterns)
