"""One pass over a step, forward and backward, that remembers every operation which produced a bad value.

Backward operations are tied to the forward line that they belong to by autograd's sequence numbers, so a bad
gradient is located at the line whose derivative it is, without anomaly mode.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..records import TensorFacts
from ..tensors import facts_of
from .graph import Graph, adds_gradients, number_of, runs_again
from .mode import ReplayMode
from .values import INF, NAN, Stack, current_stack, floats_in, key_of, kind_of, stack_and_module, tensors_in

# they write their running statistics in place, which their schemas do not say
_WRITES_UNSAID = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
# they write over what a tensor held without reading it, which their schemas do not say either
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"})
# operations that make a finite value of an infinite one without being told to: x / inf is 0
_SWALLOWS = frozenset(
    {
        "div",
        "div_",
        "reciprocal",
        "exp",
        "exp_",
        "tanh",
        "sigmoid",
        "erf",
        "erfc",
        "atan",
        "rsqrt",
        "pow",
        "_softmax",
        "native_layer_norm",
    }
)
_ELEMENTWISE = frozenset(
    {"div", "mul", "add", "sub", "rsub", "pow", "square", "exp", "log", "sqrt", "rsqrt", "reciprocal", "to_copy"}
)
_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional")
_KEPT_BEFORE = 16 << 20
"""Memory that is written in place is copied before, so that the operation can be examined, up to this size."""
_LEVELS = 5
"""Transforms of torch.func within each other."""
_COPIED = 1 << 16
"""Smaller inputs of a bad operation are copied as evidence."""


@dataclass(slots=True)
class Operation:
    """What is known of a kind of operation before it runs."""

    name: str
    namespace: str
    mutates: bool
    changes: bool
    written: list[tuple[int, str]]
    unread: list[tuple[int, str]]
    """What is written without being read: whatever garbage it held before is no input."""
    empty: bool
    reduces: bool
    """Over ranks."""

    def inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The values that a call reads."""
        positions, names = {i for i, _ in self.unread}, {n for _, n in self.unread}
        read = [a for i, a in enumerate(args) if i not in positions]
        return floats_in((read, {k: v for k, v in kwargs.items() if k not in names}))


_known: dict[Any, Operation] = {}


def operation_of(function: Any) -> Operation:
    """The description of a dispatched function, from its schema."""
    found = _known.get(function)
    if found is None:
        schema = function._schema
        name = schema.name.split("::")[1]
        written = [
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        reduces = function.namespace in _COMMUNICATION and "reduce" in name
        mutable = schema.is_mutable
        if reduces and function.namespace == "c10d":  # writes over its first argument, which its schema does not say
            mutable, written = True, [(0, schema.arguments[0].name)]
        unread = [
            (i, n)
            for i, n in written
            if schema.arguments[i].is_out or name in _OVERWRITES or (reduces and "scatter" in name)
        ]
        found = _known[function] = Operation(
            name,
            function.namespace,
            mutable,
            mutable or name in _WRITES_UNSAID,
            written,
            unread,
            name.startswith(("empty", "new_empty")),
            reduces,
        )
    return found


@dataclass(slots=True)
class Site:
    """A forward operation: where it stands, and which of its kind on its line it is."""

    op: str
    stack: Stack
    module: str
    nth: int = 0
    call: int = -1
    """The number of its operation in the pass."""


@dataclass(slots=True)
class Made:
    """How a value was made: enough to tell a count from a norm, long after its inputs are gone."""

    op: str
    backward: bool
    inputs: tuple[int, ...] = ()
    whole_numbers: bool = False
    """Whether an input is boolean or integer: the value counts something."""
    learned: bool = False
    """Whether it depends on what is trained."""
    literals: tuple[float, ...] = ()
    before: tuple[Made, ...] = ()
    """How its inputs were made."""


@dataclass(slots=True)
class Event:
    """One operation that produced a bad value, or a value that was already bad."""

    number: int
    op: str
    phase: str
    kind: int
    site: Site
    parents: list[tuple[int, int]] = field(default_factory=list)
    """Which bad inputs it had: their kind, and the event that made them."""
    node: str = ""
    seq: int = -1
    """The autograd sequence number of its node, counted from the beginning of the pass."""
    call: int = -1
    """Which operation of the pass it was."""
    function: Any = None
    args: Any = None
    kwargs: Any = None
    versions: tuple[int, ...] = ()
    """Of the tensors among the arguments, by which one sees that they were overwritten later."""
    inputs: list[TensorFacts] = field(default_factory=list)
    output: TensorFacts | None = None
    leaf: str = ""
    makers: tuple[Made | None, ...] = ()
    """How its tensor inputs were made."""
    literals: tuple[float, ...] = ()
    """The plain numbers among its arguments."""
    by_user: bool = False
    """In backward: whether it runs in Python code (a hook, a custom backward)."""
    dead: Tensor | None = None
    """In backward: where the value was selected away in forward: its incoming gradient is exactly zero there."""
    communicates: bool = False
    swallowed: int = -1
    """An earlier infinity that an input goes back to, though the input itself is finite."""
    fresh: bool = False
    """Whether it made bad values of finite ones too, beside those that came in."""
    numel: int = 0
    widest: int = 0
    """Elements of its output, and of its largest input."""


class Trace(ReplayMode):  # type: ignore[no-untyped-call]
    """Watches a step, operation by operation.

    ``fill_empty`` writes NaN into memory that a step asks for without initializing it.
    """

    def __init__(
        self,
        modules: list[tuple[str, nn.Module]],
        leaves: list[tuple[str, Tensor]],
        *,
        max_bytes: int = 256 << 20,
        fill_empty: bool = False,
        most: float = math.inf,
    ) -> None:
        super().__init__(most)
        self.events: list[Event] = []
        self.producer: dict[int, int] = {}
        self.graph = Graph()
        self.sinks: list[int] = []
        """Events whose bad values were about to be reduced over ranks."""
        self.skipped: dict[str, str] = {}
        """Operations whose values could not be read, and why."""
        self.formats: dict[int, tuple[torch.dtype, ...]] = {}
        """Of the tensors that each operation returned."""
        self.empties: dict[int, Site] = {}
        """Memory that was asked for uninitialized and has not been written since."""
        self._made: dict[int, Made] = {}
        self._numbers: dict[int, int] = {}
        """By kind: the event behind the last bad value that the code took out of a tensor as a plain number."""
        self._tainted: dict[int, int] = {}
        """Finite values that go back to an infinity which was divided away."""
        self._names: dict[int, str] = {}
        for name, module in modules:
            self._names.setdefault(id(module), name or type(module).__name__)
        self._running: dict[tuple[str, Any], str] = {}
        """The module in which a line ran in the forward pass."""
        self.sites: dict[int, Site] = {}
        self._lines: Counter[tuple[str, Any]] = Counter()
        self.base = torch._C._autograd._get_sequence_nr()
        self._left = max_bytes
        self._fill_empty = fill_empty
        for name, tensor in leaves:
            self._arrive(name, tensor)

    def _arrive(self, name: str, tensor: Tensor) -> None:
        try:
            kind = kind_of(tensor)
            if kind:
                self.producer.setdefault(key_of(tensor), self._leaf(name, tensor, kind).number)
        except Exception as error:  # what cannot be read is named, and not looked at
            self.skipped[name] = f"{type(error).__name__}: {error}"

    def _leaf(self, name: str, tensor: Tensor, kind: int, phase: str = "leaf", site: Site | None = None) -> Event:
        event = Event(
            len(self.events),
            site.op if site else "",
            phase,
            kind,
            site or Site("", [], ""),
            leaf=name,
            output=facts_of(name or "value", tensor),
            numel=tensor.numel(),
        )
        self.events.append(event)
        return event

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        call = self._next()
        node = torch._C._current_autograd_node()
        seq = torch._C._autograd._get_sequence_nr() - 1
        op = operation_of(function)
        before: list[tuple[int, int, Tensor]] | None = None
        shown = args
        if op.changes:
            try:
                before, shown = self._look_before(op, args, kwargs)
            except Exception as error:
                self.skipped.setdefault(op.name, f"{type(error).__name__}: {error}")
        if op.reduces:
            self._meet_reduction(op.name, args)
        out = function(*args, **kwargs)
        if op.reduces:
            _wait(op, out)
        try:
            self._look_after(call, function, op, args, shown, kwargs, before, out, node, seq)
        except Exception as error:  # a tensor of an unknown kind must never end the step that is examined
            self.skipped.setdefault(op.name, f"{type(error).__name__}: {error}")
        return out

    def _look_before(self, op: Operation, args: Any, kwargs: Any) -> tuple[list[tuple[int, int, Tensor]], Any]:
        """Inputs of an operation that writes in place: their kinds, and copies of what it will write into."""
        written = {id(t) for t in floats_in([args[i] if i < len(args) else kwargs.get(n) for i, n in op.written])}
        if op.name in _WRITES_UNSAID:
            written = {id(t) for t in floats_in(args)}
        copies = {
            id(t): t.detach().clone()
            for t in floats_in((args, kwargs))
            if id(t) in written and t.nbytes <= _KEPT_BEFORE
        }
        seen = [(kind_of(t), key_of(t), copies.get(id(t), t)) for t in op.inputs(args, kwargs)]
        complete = len(copies) == len(written)
        return seen, tree_map(lambda v: copies.get(id(v), v), args) if complete else None

    def _look_after(
        self,
        call: int,
        function: Any,
        op: Operation,
        args: Any,
        shown: Any,
        kwargs: Any,
        before: list[tuple[int, int, Tensor]] | None,
        out: Any,
        node: Any,
        seq: int,
    ) -> None:
        stack, called = stack_and_module()
        own = self._forward_of(node) if node is not None else None
        module = self._names.get(id(called), type(called).__name__) if called is not None else ""
        if called is None and node is not None:  # a checkpointed function may run again outside its module
            earlier = self._running.get((op.name, stack[0])) if stack else None
            module = earlier if earlier is not None else own.module if own else ""
        site = own if own is not None and not stack else Site(op.name, stack, module)
        if adds_gradients(node) and not stack:  # no forward call stands behind it, but the call of backward does
            site = Site(op.name, current_stack(beyond=True), "")
        if node is None and stack:
            place = (op.name, stack[0])
            self._lines[place] += 1
            self._running[place] = module
            site.nth, site.call = self._lines[place], call
        self.sites.setdefault(seq, site)
        outputs = floats_in(out)
        if op.mutates:  # what it wrote into need not be among what it returns
            known_already = {id(t) for t in outputs}
            wrote = [args[i] if i < len(args) else kwargs.get(n) for i, n in op.written]
            outputs += [t for t in floats_in(wrote) if id(t) not in known_already]
        if op.empty:
            self._meet_empty(outputs, site)
            return
        if op.name == "_local_scalar_dense" and (kind := kind_of(args[0])) and key_of(args[0]) in self.producer:
            self._numbers[kind] = self.producer[key_of(args[0])]
        given, returned = tensors_in((args, kwargs)), tensors_in(out)
        self.formats[call] = tuple(t.dtype for t in returned)
        if node is None and op.name in ("mul", "mul_") and any(t.requires_grad for t in given):
            constants = (t for t in given if not t.requires_grad and t.numel() > 1)
            if any(bool((t == 0).any()) for t in constants):
                self.graph.masks.add(seq)
        inside = {key_of(t): t for t in given}
        made: Made | None = None
        for o in returned:
            key = key_of(o)
            if key not in inside or op.mutates:
                if made is None:
                    made = self._how(op, given, args, kwargs, node is not None)
                self._made[key] = made
        for o in outputs:
            key = key_of(o)
            if key in inside and not op.mutates:
                continue  # a view: its producer is that of the viewed
            kind = kind_of(o)
            if op.mutates and key in self.empties and o.numel() * o.element_size() >= _storage_bytes(o):
                del self.empties[key]
            if not kind:
                self._taint(op, key, inside)
                if not op.mutates or o.numel() * o.element_size() >= _storage_bytes(o):
                    self.producer.pop(key, None)  # all of that memory is good now; of a slice we do not know
                continue
            known = before if before is not None else [(kind_of(t), key_of(t), t) for t in op.inputs(args, kwargs)]
            self._record(call, function, op, shown, kwargs, known, o, kind, node, seq, stack, site)

    def _taint(self, op: Operation, key: int, inside: dict[int, Tensor]) -> None:
        source = next((self._tainted[k] for k in inside if k in self._tainted), -1)
        if source < 0 and op.name in _SWALLOWS:
            made = (self.producer[k] for k in inside if k in self.producer)
            source = next((n for n in made if self.events[n].kind == INF and self.events[n].phase == "forward"), -1)
        if source >= 0:
            self._tainted[key] = source
        else:
            self._tainted.pop(key, None)

    def _meet_reduction(self, name: str, args: Any) -> None:
        sent = args[1] if "scatter" in name and len(args) > 1 else args[0]
        for tensor in floats_in(sent):
            if kind_of(tensor) and key_of(tensor) in self.producer:
                self.sinks.append(self.producer[key_of(tensor)])

    def _meet_empty(self, outputs: list[Tensor], site: Site) -> None:
        for o in outputs:
            self.empties[key_of(o)] = site
            self.producer.pop(key_of(o), None)
            self._made.pop(key_of(o), None)
            if self._fill_empty and site.stack:
                o.detach().fill_(float("nan"))

    def _how(self, op: Operation, given: list[Tensor], args: Any, kwargs: Any, backward: bool) -> Made:
        keys = tuple(key_of(t) for t in given)
        literals = tuple(v for v in (*args, *kwargs.values()) if isinstance(v, float))
        whole = any(not t.is_floating_point() and not t.is_complex() for t in given)
        learned = any(t.requires_grad for t in given)
        before = tuple(m for k in keys[:2] if (m := self._made.get(k)))
        return Made(op.name, backward, keys, whole, learned, literals, before)

    def _record(
        self,
        call: int,
        function: Any,
        op: Operation,
        args: Any,
        kwargs: Any,
        known: list[tuple[int, int, Tensor]],
        out: Tensor,
        kind: int,
        node: Any,
        seq: int,
        stack: Stack,
        site: Site,
    ) -> None:
        parents = [(k, self._parent(k, key, t, node)) for k, key, t in known if k]
        literals = _literals(args, kwargs)
        if not parents and (number := self._number(op, literals)) is not None:
            parents = [number]
        backward = node is not None and not (stack and runs_again(node))
        event = Event(
            0,
            op.name,
            "backward" if backward else "forward",
            kind,
            site,
            parents=parents,
            call=call,
            node=node.name() if backward else "",
            seq=(number_of(node) if backward else seq) - self.base,
            function=function,
            literals=literals,
            by_user=backward and bool(stack),
            communicates=op.namespace in _COMMUNICATION,
            numel=out.numel(),
            widest=max((t.numel() for _, _, t in known), default=0),
        )
        if not any(k == NAN for k, _ in parents):  # what only passes a NaN on is never an origin: no evidence is kept
            size = sum(t.numel() * t.element_size() for _, _, t in known)
            if size <= self._left:
                self._left -= size
                event.args, event.kwargs = tree_map(_kept, args), tree_map(_kept, kwargs)
                event.versions = versions_of(event.args)
                event.inputs = [facts_of(f"input {i}", t) for i, (_, _, t) in enumerate(known)]
            event.swallowed = next((self._tainted[k] for _, k, _ in known if k in self._tainted), -1)
            event.output = facts_of("output", out)
            event.fresh = (
                bool(parents) and op.name.strip("_") in _ELEMENTWISE and _made_more([t for *_, t in known], out)
            )
            event.makers = tuple(self._made.get(key_of(t)) for t in tensors_in(args))
            event.dead = self.graph.left_out(node, out) if backward else None
        event.number = len(self.events)
        self.events.append(event)
        self.producer[key_of(out)] = event.number

    def _number(self, op: Operation, literals: tuple[float, ...]) -> tuple[int, int] | None:
        """A bad plain number among the arguments, as a parent, when the code has taken it out of a tensor before.

        An infinity is that only in a product: elsewhere code writes infinities itself, into masks.
        """
        if NAN in self._numbers and any(v != v for v in literals):
            return NAN, self._numbers[NAN]
        factors = op.name.startswith(("mul", "div")) and any(map(math.isinf, literals))
        return (INF, self._numbers[INF]) if factors and INF in self._numbers else None

    def _parent(self, kind: int, key: int, tensor: Tensor, node: Any) -> int:
        """The event that made a bad input; one is put down for values that no operation of the step made."""
        if key in self.producer:
            return self.producer[key]
        site = self.empties.get(key)
        if site is None and kind == NAN == max(self._numbers, default=0) and not tensor.ndim and node is None:
            return self._numbers[NAN]  # torch.tensor of a plain number
        if site is not None:
            event = self._leaf("", tensor, kind, "uninitialized", site)
        else:
            came = node is not None and any(key == key_of(g) for g in self.graph.incoming(node))
            event = self._leaf("", tensor, kind, "outside", self._feeder(node) if came else None)
        self.producer[key] = event.number
        return event.number

    def orphan(self, leaf: Tensor, gradient: Tensor) -> int:
        """The event for a bad gradient that reached a parameter without any operation that torch saw."""
        node = next((n for n in self.graph.nodes if getattr(n, "variable", None) is leaf), None)
        event = self._leaf("", gradient, kind_of(gradient), "outside", self._feeder(node) if node is not None else None)
        return event.number

    def _forward_of(self, node: Any) -> Site | None:
        """The forward operation behind a backward node.

        Under torch.func each transform has a node of its own; the number of the last is that of the operation.
        """
        number, name = number_of(node), node.name().lower()
        if number in self.sites:
            return self.sites[number]
        near = (self.sites.get(number + level) for level in range(1, _LEVELS))
        return next((s for s in near if s is not None and s.op.replace("_", "") in name), None)

    def _feeder(self, node: Any) -> Site | None:
        """The site of the autograd node that handed this one a value which no torch operation computed."""
        for feeder in self.graph.feeders(node):
            site = self.sites.get(feeder._sequence_nr())
            stack = list(site.stack) if site else []
            if isinstance(feeder, torch.autograd.function.BackwardCFunction) and len(stack) > 1:
                stack = stack[1:]  # not the line inside its forward: the line that applied it
            return Site(feeder.name(), stack, site.module if site else "")
        return None


def _wait(op: Operation, out: Any) -> None:
    """Wait for a reduction: its values are there only then."""
    if op.namespace == "c10d":
        out[-1].wait()
        return
    for tensor in tensors_in(out):
        torch.ops._c10d_functional.wait_tensor(tensor)


def versions_of(args: Any) -> tuple[int, ...]:
    """How often each tensor was written so far."""
    return tuple(-1 if t.is_inference() else t._version for t in floats_in(args))


def _made_more(inputs: list[Tensor], out: Tensor) -> bool:
    """Whether an elementwise operation is bad where its inputs are finite; the sum of two masks is meant to be −inf."""
    plain = all(
        type(t) is Tensor and t.layout is torch.strided and not t.is_complex() and t.element_size() > 1
        for t in (*inputs, out)
    )
    # not torch.broadcast_shapes, which imports SymPy: that alone takes longer than a replay
    if not plain or np.broadcast_shapes(*(tuple(t.shape) for t in inputs)) != tuple(out.shape):
        return False
    bad, lowest = ~out.isfinite(), torch.finfo(out.dtype).min
    for t in inputs:
        bad = bad & t.isfinite() & ~((t <= lowest / 4) & (out == -math.inf))
    return bool(bad.any())


def _kept(value: Any) -> Any:
    """A copy of what is small: a buffer that the step updates afterwards would show its new values."""
    if type(value) is Tensor and value.layout is torch.strided and value.nbytes <= _COPIED:
        return value.detach().clone()
    return value


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def _literals(args: Any, kwargs: Any) -> tuple[float, ...]:
    return tuple(v for v in tree_leaves((args, kwargs)) if isinstance(v, float))


__all__ = ["INF", "NAN", "Event", "Made", "Site", "Trace", "versions_of"]
