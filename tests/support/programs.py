"""The labeled set: small training steps that fail on a known line, and healthy ones that only look dangerous.

A program is a function that builds a model, a batch and a step; the step returns the loss. The modules in
``tests/locating/programs`` hold them, one topic each::

    @program(phase="forward", mechanism="pole", op="log")
    def entropy_of_a_dead_unit() -> Case:
        class Entropy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                p = F.relu(x)
                return -(p * p.log())  # BAD

        return nn.Sequential(nn.Linear(4, 4), Entropy()), {"x": torch.randn(3, 4)}, mean_of_squares

``# BAD`` marks the line where a bad value is first made of good ones on the way to the bad loss or gradient. In
backward it is the forward line whose derivative was bad, or the line inside a hook or a custom backward. Where a
program bears several ``# BAD``, each is right. ``# ALSO`` marks further origins, which come second. A deliberate
infinity is never an origin; the line that makes NaN of it is. For a bad leaf the marker is where it enters.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

FOLDER = Path(__file__).parents[1] / "locating" / "programs"
PHASES = ("forward", "backward", "leaf", "outside")
MECHANISMS = (
    "range-overflow",
    "underflow",
    "pole",
    "invalid",
    "where-gradient",
    "masked-row",
    "empty-reduction",
    "bad-leaf",
    "outside-dispatcher",
    "uninitialized",
    "communication",
    "compiled-only",
)

Step = Callable[[nn.Module, Any], Tensor]
Case = tuple[nn.Module, Any, Step]
Names = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One labeled program; ``make()`` gives the same model, batch, step and random state each time."""

    name: str
    topic: str
    file: Path
    make: Callable[[], Case] = field(repr=False)
    phase: tuple[str, ...] = ()
    """Acceptable phases, the one it is counted under first; none when the program is healthy."""
    mechanism: tuple[str, ...] = ()
    op: str = ""
    leaf: tuple[str, ...] = ()
    """Acceptable names of the bad leaf, such as ``parameter body.w``."""
    index: tuple[int, ...] | None = None
    """The first bad element of the leaf."""
    module: str | None = None
    """Dotted path of the module that runs the bad line, where `module_of` cannot tell."""
    bad: frozenset[int] = frozenset()
    also: frozenset[int] = frozenset()

    @property
    def healthy(self) -> bool:
        return not self.phase


def program(
    *,
    phase: Names,
    mechanism: Names,
    op: str = "",
    leaf: Names = (),
    index: tuple[int, ...] | None = None,
    module: str | None = None,
    uses: tuple[Any, ...] = (),
    seed: int = 0,
) -> Callable[[Callable[[], Case]], Program]:
    """Register a failing program; ``uses`` names classes and functions beside it that hold markers of its own."""

    def register(make: Callable[[], Case]) -> Program:
        bad, also = _marked((make, *uses))
        return Program(
            **_described(make, seed),
            phase=_tuple(phase),
            mechanism=_tuple(mechanism),
            op=op,
            leaf=_tuple(leaf),
            index=index,
            module=module,
            bad=bad,
            also=also,
        )

    return register


def healthy(make: Callable[[], Case]) -> Program:
    """Register a program whose loss and gradients are finite, whatever it does on the way."""
    return Program(**_described(make, 0))


def healthy_where_atan2_is(make: Callable[[], Case]) -> Any:
    """Register a program that is healthy where atan2 has a gradient at the origin; torch 2.7's is NaN there."""
    zeros = torch.zeros(2, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.atan2(zeros[0], zeros[1]), zeros)
    return healthy(make) if bool(slope.isfinite().all()) else make


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _described(make: Callable[[], Case], seed: int) -> dict[str, Any]:
    @functools.wraps(make)
    def seeded() -> Case:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return make()

    file = Path(inspect.getfile(make))
    return {"name": make.__name__, "topic": file.stem, "file": file, "make": seeded}


def _marked(sources: tuple[Any, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """The lines that say BAD, and those that say ALSO."""
    found: dict[str, set[int]] = {"BAD": set(), "ALSO": set()}
    for source in sources:
        lines, first = inspect.getsourcelines(source)  # slow: every worker does it for every program
        for number, line in enumerate(lines, first):
            for mark in re.findall(r"#\s*(BAD|ALSO)\b", line):
                found[mark].add(number)
    return frozenset(found["BAD"]), frozenset(found["ALSO"])


@functools.cache
def load() -> tuple[Program, ...]:
    """All programs, in the order of the files and of the lines in each."""
    found: list[Program] = []
    for path in sorted(FOLDER.glob("*.py")):
        name = f"labeled_programs_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # inspect finds the source of a class through its module
        spec.loader.exec_module(module)
        found += [value for value in vars(module).values() if isinstance(value, Program)]
    return tuple(found)


def failing() -> list[Program]:
    return [p for p in load() if not p.healthy]


def controls() -> list[Program]:
    return [p for p in load() if p.healthy]


def named(**modules: nn.Module) -> nn.Sequential:
    """A chain whose links have names: ``named(stem=..., body=...)`` has the module paths ``stem`` and ``body``."""
    chain = nn.Sequential()
    for name, module in modules.items():
        chain.add_module(name, module)
    return chain


def mean_of_squares(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.float().pow(2).mean()


@contextmanager
def quietly() -> Iterator[None]:
    """Torch and numpy warn about some of the programs: std of one element, division by zero."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one step gave."""

    loss: Tensor
    grads: dict[str, Tensor]

    @property
    def loss_finite(self) -> bool:
        return bool(self.loss.isfinite().all())

    @property
    def bad_grads(self) -> list[str]:
        return [name for name, grad in self.grads.items() if not grad.isfinite().all()]


def run(program: Program) -> Outcome:
    """Make a program and take its step, forward and backward."""
    with quietly():
        model, batch, step = program.make()
        loss = step(model, batch)
        if all(p.grad is None for p in model.parameters()):  # else the step has run backward itself
            loss.backward()
    grads = {
        n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in model.named_parameters() if p.grad is not None
    }
    return Outcome(loss=loss.detach(), grads=grads)


def module_of(program: Program) -> str | None:
    """Path of the module that was running when a bad line was reached in forward; None when no forward reaches it.

    The empty path is the model itself, or code outside it.
    """
    if program.module is not None:
        return program.module
    with quietly(), torch.compiler.set_stance("force_eager"):
        model, batch, step = program.make()
        paths = {module: re.sub(r"(^|\.)_orig_mod", "", name) for name, module in model.named_modules()}
        running: list[str] = []
        reached: list[str] = []
        code_file = str(program.file)

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and frame.f_lineno in program.bad:
                reached.append(running[-1] if running else "")
            return line

        def call(frame: FrameType, _event: str, _arg: Any) -> Any:
            return line if frame.f_code.co_filename == code_file else None

        def enter(module: nn.Module, _: Any) -> None:
            running.append(paths.get(module, running[-1] if running else ""))

        def leave(module: nn.Module, _args: Any, _out: Any) -> None:
            running.pop()

        hooks = (
            torch_module.register_module_forward_pre_hook(enter),
            torch_module.register_module_forward_hook(leave),
        )
        before = sys.gettrace()
        sys.settrace(call)
        try:
            step(model, batch)
        finally:
            sys.settrace(before)
            for hook in hooks:
                hook.remove()
    if len(set(reached)) > 1:
        raise ValueError(f"{program.name}: the bad line runs in {sorted(set(reached))}; say which with module=")
    return reached[0] if reached else None
