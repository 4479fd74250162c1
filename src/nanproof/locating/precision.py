"""Replaying a step in a wider format, to learn whether precision alone explains its failure."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..location import call_name
from ..tensors import parts_of
from .bounds import Endless
from .mode import ReplayMode, run_carefully
from .trace import Event, Site, operation_of
from .values import NAN, current_stack, floats_in, is_own, key_of, kind_of

_BITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}


class _Widen(TorchFunctionMode):
    """Gives every torch function its narrower arguments in a wider format."""

    def __init__(self, dtype: torch.dtype, leaves: list[nn.Parameter]) -> None:
        super().__init__()
        self.dtype = dtype
        self.widened = False
        self._leaves = leaves

    def gradients(self) -> list[Tensor]:
        """Of the parameters and of what stands in for them."""
        found = (p.grad for p in self._leaves if p.grad is not None)
        whole = (g.coalesce() if g.layout is torch.sparse_coo else g for g in found)  # entries of one place add up
        return [part for g in whole for part in parts_of(g)]

    def narrow(self, dtype: torch.dtype) -> bool:
        return _BITS.get(dtype, 99) < _BITS[self.dtype]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "data_ptr" and not is_own(sys._getframe(1).f_code):
            raise TypeError("code that takes the memory of a tensor would take float64 for what it expects")
        if name in _CASTS and self.narrow(_CASTS[name]):
            self.widened = True
            return args[0].to(self.dtype) if self.narrow(args[0].dtype) else args[0]
        if name.endswith("_") or name in ("__set__", "__get__") or "out" in kwargs:
            return function(*args, **kwargs)  # writes into memory of a fixed format

        def widen(value: Any) -> Any:
            if isinstance(value, Tensor) and self.narrow(value.dtype):
                self.widened = True
                return value.to(self.dtype)
            if isinstance(value, torch.dtype) and self.narrow(value):
                self.widened = True
                return self.dtype
            return value

        return function(*tree_map(widen, args), **tree_map(widen, kwargs))


def eagerly() -> AbstractContextManager[Any]:
    """A block in which nothing is compiled: torch would trace our modes, break its graphs and compile them again."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[_Widen]:
    """A block in which parameters, values and autocast regions of narrower formats are all ``dtype``.

    Yields an object whose ``widened`` says whether anything was narrower at all. Gradients are
    computed in the wide format and thrown away with it. Wide parameters stand in for the narrow ones: were these
    changed themselves, torch would forget who listens to their gradients, and DDP would reduce no more.
    """
    leaves = list(model.parameters())
    mode = _Widen(dtype, leaves)
    wide = {p: nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in leaves if mode.narrow(p.dtype)}
    places = [(m, k, p) for m in model.modules() for k, p in m._parameters.items() if p in wide]
    buffers = [(t, t.data) for _, t in model.named_buffers() if mode.narrow(t.dtype)]
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__enter__
    changed: list[tuple[Any, bool]] = []

    def disabled(self: Any) -> Any:
        if self._enabled:
            mode.widened = True
            changed.append((self, True))
            self._enabled = False
        return enter(self)  # type: ignore[no-untyped-call]

    try:
        for module, key, p in places:
            assert p is not None
            module._parameters[key] = wide[p]
        for tensor, data in buffers:
            tensor.data = data.to(dtype)
        leaves += wide.values()
        for p in wide:
            p.grad = None
        mode.widened = bool(wide or buffers)
        autocast.__enter__ = disabled  # type: ignore[method-assign]
        with eagerly(), mode:
            yield mode
    finally:
        autocast.__enter__ = enter  # type: ignore[method-assign]
        for context, was in changed:
            context._enabled = was
        for module, key, p in places:
            module._parameters[key] = p
        for tensor, data in buffers:
            tensor.data = data
        for p in wide:
            p.grad = None


class _UpTo(ReplayMode):  # type: ignore[no-untyped-call]
    """Runs a step up to one operation, the nth of its kind on its line, and keeps that operation's arguments.

    With ``count`` it also keeps, of every result on the way, where it was made, from what, and its `_signs`.
    """

    def __init__(self, site: Site, most: float, *, count: bool = False) -> None:
        super().__init__(most)
        self._site = site
        self._counts = count
        self._seen: Counter[tuple[str, Any]] = Counter()
        self._maker: dict[int, _Result] = {}
        self.caught: tuple[Any, Any, Any, bool] | None = None
        self.signs: dict[_Result, Tensor] = {}
        self.sizes: dict[_Result, tuple[Tensor, Tensor]] = {}
        """The largest magnitude of each result, and that of what it was made from."""
        self.inputs: dict[_Result, list[_Result]] = {}
        self.operands: list[tuple[_Result | None, Tensor]] = []

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        self._next()
        out = run_carefully(function, args, kwargs)
        op = operation_of(function).name
        if not (self._counts or op == self._site.op) or torch._C._current_autograd_node() is not None:
            return out
        stack = current_stack()
        if not stack:
            return out
        place = (op, stack[0])
        self._seen[place] += 1
        result = (*place, self._seen[place])
        given = floats_in((args, kwargs)) if self._counts else []
        if result == (self._site.op, self._site.stack[0], self._site.nth):
            finite = not any(map(kind_of, floats_in(out)))
            self.caught = (function, tree_map(_detached, args), kwargs, finite)
            self.operands = [(self._maker.get(key_of(t)), _signs(t)) for t in given]
            raise _Enough
        views = {key_of(t) for t in given} if not operation_of(function).mutates else set()
        if self._counts and (made := [t for t in floats_in(out) if key_of(t) not in views]):
            self.inputs[result] = [self._maker[k] for t in given if (k := key_of(t)) in self._maker]
            self.signs[result] = _signs(made[0])
            self.sizes[result] = _size(made), _size(given)
            self._maker |= dict.fromkeys(map(key_of, made), result)
        return out


_Result = tuple[str, Any, int]
"""A result of a pass: the operation, its line, and which of its kind on that line."""


def _signs(tensor: Tensor) -> Tensor:
    """How many elements are zero, negative, and of magnitude one or more: what poles and roots stumble over."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return torch.stack([(values == 0).sum(), (values < 0).sum(), (values.abs() >= 1).sum()])


def _size(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.detach().abs().max().double() for t in tensors]).max() if tensors else torch.zeros(())


class _Enough(BaseException):
    """Ends a replay that has shown what was asked; no user code should catch it."""


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True)
class InFloat64:
    """What an operation that failed does where the step, up to it, runs in float64."""

    finite: bool = False
    elsewhere: bool = False
    """Whether it is given quite another operand there."""
    fails_rounded: bool = False
    """Whether it fails when nothing but its operand is rounded to the format of the step."""


def in_float64(step: Callable[[], Any], model: nn.Module, origin: Event, *, keep_grad: bool, most: float) -> InFloat64:
    """Run a step in float64 up to an operation that failed: what comes after it cannot change the answer.

    For a bad gradient the derivative of the forward call behind it is asked, with a gradient of one: where that is not
    finite, no other gradient helps. Only the forward pass is run.
    """
    site = origin.site
    dtype = getattr(torch, origin.output.dtype, None) if origin.output else None
    if not site.stack or not site.nth or origin.by_user or dtype is None:
        return InFloat64()
    catch = _UpTo(site, most)
    try:
        with torch.set_grad_enabled(keep_grad), in_precision(model, torch.float64), catch:
            step()
    except _Enough:
        pass
    except (Exception, Endless):
        return InFloat64()  # code that insists on its dtype gives no answer
    if catch.caught is None:
        return InFloat64()
    function, args, kwargs, finite = catch.caught
    rounded = tree_map(lambda v: v.to(dtype) if _differentiable(v) else v, args)
    if origin.phase == "forward":
        fails = not origin.parents and not _is_finite(function, rounded, kwargs)
        return InFloat64(finite, not _agrees(origin, args), fails)
    if not finite:
        return InFloat64()
    fails = not has_slope(function, rounded, kwargs)
    # the same operand, rounded, must fail: else something other than rounding does
    return InFloat64(fails and has_slope(function, args, kwargs), False, fails)


def where_rounded(
    step: Callable[[], Any], model: nn.Module, origin: Event, reset: Callable[[], Any], *, keep_grad: bool, most: float
) -> tuple[str, bool]:
    """Where the operand that an operation stumbles over became zero, negative or one by rounding; empty if unknown.

    The forward pass runs twice, as it is and in float64, and the results on the way are compared. The second value
    says that the difference is what rounding can do to numbers of that size: large ones cancel there.
    """
    passes = []
    for wide in (False, True):
        reset()
        seen = _UpTo(origin.site, most, count=True)
        try:
            with torch.set_grad_enabled(keep_grad), in_precision(model, torch.float64) if wide else nullcontext(), seen:
                step()
        except _Enough:
            pass
        except (Exception, Endless):
            return "", False
        passes.append(seen)
    narrow, exact = passes
    operands = zip(narrow.operands, exact.operands, strict=False)
    more = [(maker, (now > then).tolist()) for (maker, now), (_, then) in operands if maker is not None]
    likely = (1, 2, 0) if origin.kind == NAN else (0, 1, 2)  # a zero makes infinities, the other two NaN
    found = next(((maker, i) for maker, which in more for i in likely if which[i]), None)
    if found is None:
        return "", False
    result, which = found

    def rounded(candidate: _Result) -> bool:
        then = exact.signs.get(candidate)
        return then is not None and bool(narrow.signs[candidate][which] > then[which])

    seen_results = {result}
    while before := [r for r in narrow.inputs.get(result, ()) if r not in seen_results and rounded(r)]:
        result = before[0]
        seen_results.add(result)
    op, (code, line), _ = result
    became = ("0", "negative", "1 or more in magnitude")[which]
    (now, _), (then, given) = narrow.sizes[result], exact.sizes.get(result, (torch.tensor(math.nan),) * 2)
    step_size = torch.finfo(getattr(torch, origin.output.dtype)).eps if origin.output else 0.0
    cancels = bool((now - then).abs() <= 64 * step_size * given)
    return f"the result of {call_name(op)} at {code.co_filename}:{line} is {became} by rounding", cancels


def _agrees(origin: Event, args: Any) -> bool:
    """Whether the operands are about those of the original: another way through the code answers nothing."""
    for facts, value in zip(origin.inputs, floats_in(args), strict=False):
        if tuple(value.shape) != facts.shape:
            return False
        largest = max((abs(v) for v in (facts.finite_min, facts.finite_max) if v is not None), default=0.0)
        now = float(value.abs().max()) if kind_of(value) == 0 else 0.0
        if now > 10 * largest + 1e-3 or largest > 10 * now + 1e-3:
            return False
    return True


def _is_finite(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is finite at these arguments; taken as finite when it cannot be made."""
    try:
        return not any(map(kind_of, floats_in(function(*args, **kwargs))))
    except Exception:
        return True


def has_slope(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the derivative of a call is finite at these arguments; taken as finite when it cannot be had."""
    try:
        with torch.enable_grad():
            given = tree_map(lambda v: v.clone().requires_grad_() if _differentiable(v) else v, args)
            outputs = [t for t in floats_in(function(*given, **kwargs)) if t.requires_grad]
            slopes = torch.autograd.grad([t.sum() for t in outputs], [t for t in floats_in(given) if t.requires_grad])
    except Exception:
        return True
    return not any(map(kind_of, slopes))


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
