"""Whether a script's training is guarded: said once when it is, and loudly, at once, when it is not."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..guard import Guard
from ..guard.observers import Observer
from ..guard.samples import place_of, view_of
from ..location import shown_path
from ..records import Action, Reading, Verdict
from .module_lookup import Loose, find_owners, leaves_of

log = logging.getLogger("nanproof")
PASSES = 3
"""After so many backward passes it must be clear who updates the weights."""
SECONDS = 60.0
"""After so much training without an optimizer step it is said that there was none."""
SAMPLED, VALUES = 8, 512
NEXT = ", so bad steps will not be skipped. Next: step them with a torch.optim optimizer"
KERAS = "Keras", "its optimizers are not torch's, and a step of theirs cannot be vetoed"


class NotGuarded(SystemExit):
    """Ends a script that must be guarded and is not (``--require``)."""

    def __init__(self) -> None:
        super().__init__(2)


class Checked(SystemExit):
    """Ends a script once it is known to be guarded (``--check``)."""

    def __init__(self) -> None:
        super().__init__(0)


class FirstStep(Observer):
    """Reports the first step that a guard has judged."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell()


class Attachment:
    """Compares the weights between backward passes: what changes without a guarded step is not guarded."""

    def __init__(self, *, require: bool, miss: Callable[[str, str], None], known: Callable[[], set[int]]) -> None:
        """``miss`` says what is not guarded and why; ``known`` are the parameters of the optimizers that were seen."""
        self._require, self._miss, self._known = require, miss, known
        self.attached = False
        self.reason = "no optimizer has stepped yet"
        self.on_change: Callable[[], None] = lambda: None
        self._said: set[str] = set()
        self._passes, self._inside, self._since, self._waited = 0, 0, 0.0, False
        self._samples: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.stepping = False
        """Whether a guard was asked about a step, even if that step is not over yet."""

    def say(self, line: str) -> None:
        """A guard has judged its first step."""
        self.attached, self.reason = True, ""
        if line and line not in self._said:  # a new optimizer per epoch needs no new line
            self._said.add(line)
            log.info("nanproof: %s", line)
        self.on_change()

    def refuse(self, reason: str) -> None:
        """Something that trains is not guarded."""
        if not self.attached:
            self.reason = reason
        self.on_change()
        if self._require:
            log.error("nanproof: --require: the script ends here, unguarded training is not allowed")
            raise NotGuarded

    @property
    def looking(self) -> bool:
        """Whether backward passes are still to be looked at."""
        return self._passes <= PASSES or not (self.attached or self._waited)

    def look(self, losses: Any) -> None:
        """A backward pass begins: see whether the last one's weights were changed by something that is not guarded."""
        self._passes += 1
        self._since = self._since or time.monotonic()
        if self._passes > PASSES:
            self._wait()
            return
        if self._passes == PASSES:
            known, held = self._known(), [(ref(), old) for ref, old in self._samples.values()]
            here = [(p, old) for p, old in held if p is not None and place_of(p)]
            changed = [p for p, old in here if not torch.equal(view_of(p, VALUES), old)]
            guarded = self.attached or self.stepping
            unguarded = [p for p in changed if not guarded or (id(p) not in known and not _is_gathered(p))]
            self._samples.clear()
            if unguarded:
                self._tell(unguarded, known)
            return
        leaves = leaves_of(losses)
        parameters = [p for p in leaves if isinstance(p, nn.Parameter)] or leaves
        parameters = [p for p in parameters if place_of(p)]  # not those that FSDP has gathered and freed
        for p in sorted(parameters, key=lambda p: p.numel())[:SAMPLED]:
            self._samples.setdefault(id(p), (weakref.ref(p), view_of(p, VALUES).clone()))

    def look_inside(self, *, optimizers: bool) -> None:
        """A backward pass of torch.func begins: with no optimizer around, nothing that can be guarded uses it."""
        self._inside += 1
        if self._inside == PASSES and not optimizers:
            self._miss("weights that torch.func differentiates", "no torch optimizer steps them" + NEXT)

    def _tell(self, changed: list[Tensor], known: set[int]) -> None:
        if "keras" in sys.modules:
            self._miss(*KERAS)
            return
        owners = [type(o).__name__ for o in find_owners(changed) if not isinstance(o, Loose)]
        whose = f"the weights of {', '.join(dict.fromkeys(owners))}" if owners else "the weights"
        if any(id(p) in known for p in changed):
            why = "they change, but no step of their torch optimizer was seen (a step in C++ or in a compiled graph)"
        else:
            why = "they are updated without a torch optimizer (written by hand, or by another library)"
        self._miss(whose, why + NEXT)

    def _wait(self) -> None:
        """Training goes on, and nothing was stepped for a long time."""
        if not self.attached and not self._waited and time.monotonic() - self._since > SECONDS:
            self._waited = True
            log.warning(
                "nanproof: nothing is guarded yet: %d backward passes in %.0f s and no optimizer step; this is as it"
                " should be only if gradients are accumulated that long",
                self._passes,
                time.monotonic() - self._since,
            )


def describe(guard: Guard) -> str:
    """What is guarded, in a line.

    >>> model = nn.Linear(4, 2)
    >>> describe(Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    'guarding SGD (2 tensors, 10 parameters) of Linear'
    """
    t = guard.training
    kinds = [type(o).__name__ for o in t.optimizers]
    counted = [k if kinds.count(k) == 1 else f"{kinds.count(k)} × {k}" for k in dict.fromkeys(kinds)]
    models = [_name(m) for m in t.roots if not isinstance(m, Loose)]
    of = f" of {', '.join(dict.fromkeys(models))}" if models else ""
    count = len(t.parameters)
    size = f"{count} tensor{'' if count == 1 else 's'}, {_short(sum(p.numel() for _, p in t.parameters))} parameters"
    where = f"; records in {shown_path(str(guard.run_dir))}" if guard.run_dir is not None else ""
    return f"guarding {' and '.join(counted)} ({size}){of}{where}"


def _name(module: nn.Module) -> str:
    inner, own = getattr(module, "module", getattr(module, "_orig_mod", None)), type(module).__name__
    return f"{type(inner).__name__} in {own}" if isinstance(inner, nn.Module) else own


def _short(n: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.3g} {letter}"
    return str(n)


def parameters_in(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}


def _is_gathered(tensor: Tensor) -> bool:
    """Whether this is what FSDP has gathered for a pass: it changes with the shards, which the optimizer steps."""
    inside = (m for owner in find_owners([tensor]) for m in owner.modules())
    return any(hasattr(m, "unshard") or type(m).__name__ == "FullyShardedDataParallel" for m in inside)
