"""`assert_stable`: feed a function the edge values of its dtype, and look at both passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, UsageError
from ..floats import format_of
from ..records import TensorFacts
from ..tensors import nonfinite

Fill = tuple[str, Callable[[Tensor], Tensor]]


def edge_values(dtype: torch.dtype) -> dict[str, float]:
    """The values at which formulas break, by name.

    >>> edge_values(torch.float16)["max"], edge_values(torch.float16)["subnormal"]
    (65504.0, 5.960464477539063e-08)
    """
    f = format_of(dtype)
    sizes = {
        "subnormal": f.smallest_subnormal,
        "tiny": f.smallest_normal,
        "eps": f.machine_eps,
        "1": 1.0,
        "max/2": f.max / 2,
        "max": f.max,
    }
    return {"0": 0.0, **sizes, **{f"-{name}": -size for name, size in sizes.items()}}


def assert_stable(
    fn: Callable[..., Any], inputs: Tensor | Sequence[Tensor], *, edges: Sequence[float] | None = None
) -> None:
    """Raise NonFiniteError unless ``fn`` and its gradient are finite wherever its floating inputs are.

    >>> from nanproof import ops
    >>> assert_stable(ops.safe_sqrt, torch.ones(4))
    >>> assert_stable(torch.sqrt, torch.ones(4), edges=[0.0, 1.0])
    Traceback (most recent call last):
    nanproof.errors.NonFiniteError: sqrt breaks at 2 of 3 edge inputs (float32), first where input 0 is 0.0: \
gradient of input 0 has 4 +Inf of 4 values, first at [0] (float32). Next: ...

    ``inputs`` are examples: their shapes and dtypes are kept, and integer inputs stay as they are. Each floating
    input in turn, and each pair of them, is filled with each edge value (0, ±subnormal, ±tiny, ±eps, ±1, ±max/2,
    ±max, or your ``edges``) and with all of them side by side. The backward pass starts from ones. When ``fn``
    is a module the gradients of its parameters are looked at, too.
    """
    examples = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    floating = [i for i, x in enumerate(examples) if x.is_floating_point()]
    if not floating:
        raise UsageError("inputs hold no floating-point tensor", hint="pass at least one to vary")
    name = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", str(fn))
    broken, tried = [], 0
    for fills in _plans(floating, examples, edges):
        tried += 1
        fed = [fills[i][1](x) if i in fills else x.detach().clone() for i, x in enumerate(examples)]
        where = " and ".join(f"input {i} is {label}" for i, (label, _) in sorted(fills.items()))
        try:
            found = _first_break(fn, fed)
        except Exception as error:
            error.add_note(f"raised by assert_stable({name}) where {where}")
            raise
        if found:
            broken.append(f"{where}: {found}")
    if broken:
        formats = ", ".join(sorted({str(examples[i].dtype).removeprefix("torch.") for i in floating}))
        raise NonFiniteError(
            f"{name} breaks at {len(broken):,} of {tried:,} edge inputs ({formats}), first where {broken[0]}",
            hint="replace the operation that breaks; nanproof.ops has safe ones",
        )


def _plans(floating: list[int], examples: list[Tensor], edges: Sequence[float] | None) -> Iterator[dict[int, Fill]]:
    """Which inputs to fill with what: one at a time, then two at a time."""
    fills = {i: _fills(examples[i], edges) for i in floating}
    for i in floating:
        yield from ({i: fill} for fill in fills[i])
    for i, j in itertools.combinations(floating, 2):
        yield from ({i: a, j: b} for a, b in itertools.product(fills[i], fills[j]))


def _fills(example: Tensor, edges: Sequence[float] | None) -> list[Fill]:
    named = {repr(e): e for e in edges} if edges is not None else edge_values(example.dtype)
    if not named:
        raise UsageError("edges is empty", hint="give at least one value, or leave it out")

    def mixed(x: Tensor) -> Tensor:
        # Largest beside most negative: differences and sums of neighbors overflow here and nowhere else.
        values = sorted(named.values(), key=lambda v: (-abs(v), -v))
        repeated = (values * (x.numel() // len(values) + 1))[: x.numel()]
        return torch.tensor(repeated, dtype=x.dtype, device=x.device).reshape(x.shape)

    alone = [(label, lambda x, v=value: torch.full_like(x, v)) for label, value in named.items()]
    return [*alone, ("all edges side by side", mixed)]


def _first_break(fn: Callable[..., Any], fed: list[Tensor]) -> str | None:
    """What was the first to be non-finite: an output, then a gradient; None when nothing was."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in fed]
    outputs = _outputs(fn(*leaves))
    for i, out in enumerate(outputs):
        if found := nonfinite("output", out):
            return _say("forward" if len(outputs) == 1 else f"forward output {i}", found)
    wanted = {f"input {i}": x for i, x in enumerate(leaves) if x.requires_grad}
    if isinstance(fn, nn.Module):
        wanted |= {f"parameter {n}": p for n, p in fn.named_parameters() if p.requires_grad}
    differentiable = [out for out in outputs if out.requires_grad]
    if not differentiable:
        return None
    ones = [torch.ones_like(out) for out in differentiable]
    grads = torch.autograd.grad(differentiable, list(wanted.values()), ones, allow_unused=True)
    for label, grad in zip(wanted, grads, strict=True):
        if grad is not None and (found := nonfinite(label, grad)):
            return _say(f"gradient of {label}", found)
    return None


def _say(place: str, found: TensorFacts) -> str:
    return f"{place} has {found.census}"


def _outputs(out: Any) -> list[Tensor]:
    match out:
        case Tensor():
            return [out]
        case dict():
            return [t for value in out.values() for t in _outputs(value)]
        case list() | tuple():
            return [t for value in out for t in _outputs(value)]
        case _:
            raise UsageError(f"the function gave a {type(out).__name__}", hint="let it return tensors")
