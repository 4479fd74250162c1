"""One pass over a step, forward and backward, that remembers every operation which produced a bad value.

Backward operations are tied to the forward line that they belong to by autograd's sequence numbers, so a bad
gradient is located at the line whose derivative it is, without anomaly mode.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..records import TensorFacts
from ..tensors import facts_of, local_values
from .graph import Graph, number_of
from .patch import Frame, Patch

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120
FINITE, INF, NAN = 0, 1, 2
# they write their running statistics in place, which their schemas do not say
_WRITES_UNSAID = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


@dataclass(slots=True)
class Event:
    """One operation that produced a bad value, or a value that was bad on arrival."""

    number: int
    op: str
    phase: str
    kind: int
    frames: list[Frame]
    module: str
    parents: list[tuple[int, int]] = field(default_factory=list)
    """Which bad inputs it had: their kind, and the event that made them (−1: nobody knows)."""
    node: str = ""
    seq: int = -1
    """The autograd sequence number of its node, counted from the beginning of the pass."""
    call: int = -1
    """Which operation of the pass it was."""
    function: Any = None
    args: Any = None
    kwargs: Any = None
    inputs: list[TensorFacts] = field(default_factory=list)
    output: TensorFacts | None = None
    leaf: str = ""
    makers: tuple[tuple[str, str], ...] = ()
    """Which operations made its inputs, and in which phase."""
    literals: tuple[float, ...] = ()
    """The plain numbers among its arguments."""
    by_user: bool = False
    """In backward: whether it runs in the user's own code (a hook, a custom backward)."""
    dead_branch: bool = False
    """In backward: whether the value was selected away in forward: its incoming gradient is exactly zero there."""


class Trace(TorchDispatchMode):
    """Watches a step; with ``patch`` one operation is neutralised while it runs."""

    def __init__(
        self,
        model: nn.Module,
        leaves: list[tuple[str, Tensor]],
        *,
        max_bytes: int = 256 << 20,
        patch: Patch | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.producer: dict[int, int] = {}
        self.component = ""
        """The loss term that was bad, when the step names its terms."""
        self.sinks: list[int] = []
        """Events whose bad values were about to be reduced over ranks."""
        self._maker: dict[int, tuple[str, str]] = {}
        self._names = {id(m): n or type(m).__name__ for n, m in model.named_modules()}
        self._modules: list[str] = []
        self._sites: dict[int, tuple[str, list[Frame], str]] = {}
        self.graph = Graph()
        self._count = 0
        self._base = torch._C._autograd._get_sequence_nr()
        self._left = max_bytes
        self._patch = patch
        self._hooks: list[Any] = []
        for name, tensor in leaves:
            kind = kind_of(tensor)
            if kind:
                facts = facts_of(name, tensor)
                event = Event(len(self.events), "", "leaf", kind, [], "", leaf=name, output=facts)
                self.producer[key_of(tensor)] = event.number
                self.events.append(event)

    def __enter__(self) -> Trace:
        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._modules.pop()

        self._hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._count += 1
        number = self._count
        node = torch._C._current_autograd_node()
        seq = torch._C._autograd._get_sequence_nr() - 1
        base = function._schema.name.split("::")[1]
        frames = user_frames()
        site = self._sites.get(number_of(node)) if node is not None else None
        if site and (not frames or not self._modules):  # a checkpointed function may run again outside its module
            module = site[2]
        else:
            module = self._modules[-1] if self._modules else ""
        if frames or site is None:
            here = (base, frames, module)
        else:
            here = site
        self._sites.setdefault(seq, here)
        mutates = function._schema.is_mutable
        tensors = floats_in((args, kwargs))
        changes = mutates or base in _WRITES_UNSAID
        before = [(kind_of(t), key_of(t), t.detach().clone()) for t in tensors] if changes else None
        if function.namespace == "c10d" and "reduce" in base:
            self._meet_reduction(base, args)
        patch = self._patch
        if patch is not None:
            own = number_of(node) - self._base if node is not None else None
            if not patch.covers(number, own, base, (frames or here[1])[:1]) or self._brings_bad_gradient(tensors):
                patch = None
        out = function(*args, **kwargs)
        outputs = floats_in(out)
        if mutates:  # what it wrote into need not be among what it returns
            returned = {id(t) for t in outputs}
            outputs += [t for t in floats_in(written(function, args, kwargs)) if id(t) not in returned]
        if patch is not None:
            for t in outputs:
                patch.apply(t)
        if base.startswith(("empty", "new_empty")):
            return out  # memory that nobody has written is not a value
        inside = {key_of(t) for t in tensors_in((args, kwargs))}
        for o in tensors_in(out):
            if key_of(o) not in inside:
                self._maker[key_of(o)] = (base, "forward" if node is None else "backward")
        for o in outputs:
            key = key_of(o)
            if key in inside and not mutates:
                continue  # a view: its producer is that of the viewed
            kind = kind_of(o)
            if not kind:
                if not mutates or o.nbytes >= o.untyped_storage().nbytes():
                    self.producer.pop(key, None)  # all of that memory is good now; of a slice we do not know
                continue
            known = before or [(kind_of(t), key_of(t), t) for t in tensors]
            self._record(number, function, base, args, kwargs, known, o, kind, node, seq, frames, here)
        return out

    def _record(
        self, number: int, function: Any, base: str, args: Any, kwargs: Any, known: list[tuple[int, int, Tensor]],
        out: Tensor, kind: int, node: Any, seq: int, frames: list[Frame], here: tuple[str, list[Frame], str],
    ) -> None:  # fmt: skip
        parents = [(k, self.producer.get(key, -1)) for k, key, _ in known if k]
        if node is not None and parents and all(p == -1 for _, p in parents):
            outside = self._outside(node)
            parents = [(k, outside) for k, _ in parents]
        size = sum(t.nbytes for _, _, t in known)
        keep = size <= self._left
        self._left -= size if keep else 0
        mutates = function._schema.is_mutable
        event = Event(
            len(self.events), base, "forward" if node is None else "backward", kind, frames or here[1], here[2],
            parents=parents, call=number, node=node.name() if node is not None else "",
            seq=(number_of(node) if node is not None else seq) - self._base, function=function,
            args=args if keep and not mutates else None, kwargs=kwargs,
            inputs=[facts_of(f"input {i}", t) for i, (_, _, t) in enumerate(known)] if keep else [],
            output=facts_of("output", out),
            makers=tuple(self._maker.get(key_of(t), ("", "")) for t in tensors_in(args)),
            literals=tuple(v for v in tree_leaves((args, kwargs)) if isinstance(v, float)),
            by_user=node is not None and bool(frames), dead_branch=node is not None and self.graph.left_out(node, out),
        )  # fmt: skip
        self.events.append(event)
        self.producer[key_of(out)] = event.number

    def _brings_bad_gradient(self, tensors: list[Tensor]) -> bool:
        """Whether a gradient is bad already as it comes in: then another origin made it so, and it must show.

        Autograd sums the gradients of a value that is used twice within the node that arrives last.
        """
        return any(self._maker.get(key_of(t), ("", ""))[1] == "backward" and kind_of(t) for t in tensors)

    def _outside(self, node: Any) -> int:
        """The event for a value that came out of an autograd node without any operation that torch saw."""
        for feeder in self.graph.feeders(node):
            site = self._sites.get(feeder._sequence_nr())
            frames = list(site[1]) if site else []
            if isinstance(feeder, torch.autograd.function.BackwardCFunction) and len(frames) > 1:
                frames = frames[1:]  # not the line inside its forward: the line that applied it
            event = Event(
                len(self.events), feeder.name(), "outside", NAN, frames, site[2] if site else "", node=feeder.name()
            )
            self.events.append(event)
            return event.number
        return -1

    def _meet_reduction(self, base: str, args: Any) -> None:
        sent = args[1] if "scatter" in base else args[0]
        for t in floats_in(sent):
            if kind_of(t) and key_of(t) in self.producer:
                self.sinks.append(self.producer[key_of(t)])


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a call that have memory."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided]


def floats_in(value: Any) -> list[Tensor]:
    """The floating and complex tensors of a call, empty ones left out."""
    return [
        t for t in tree_leaves(value)
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel()
    ]  # fmt: skip


def written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes into."""
    found = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def kind_of(tensor: Tensor) -> int:
    """Finite, with infinities, or with NaN: one pass for a finite tensor."""
    values = local_values(tensor)
    if not values.is_floating_point() or not values.numel():
        return FINITE
    if values.element_size() == 1:
        values = values.float()
    largest = float(torch.linalg.vector_norm(values, float("inf")))
    if largest != largest:
        return NAN
    return INF if largest == float("inf") else FINITE


def key_of(tensor: Tensor) -> int:
    """What identifies the memory behind a tensor and all its views."""
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


def user_frames() -> list[Frame]:
    """The user's lines behind the current operation, innermost first, up to the autograd engine's border."""
    frame: Any = sys._getframe(2)
    found: list[Frame] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward" and code.co_filename.startswith(_TORCH):
            break
        if not code.co_filename.startswith((_TORCH, _HERE)) and not code.co_filename.startswith("<frozen "):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found
