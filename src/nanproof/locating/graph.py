"""What the autograd graph tells about a backward pass: who feeds gradients into whom, and which gradients are dead."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# backward nodes of operations that leave values out, and so send them a gradient of exactly zero
_SELECTING = (
    "Where",
    "Masked",
    "NanToNum",
    "Index",
    "Select",
    "Slice",
    "Gather",
    "Clamp",
    "Relu",
    "Threshold",
    "HardTanh",
    "Maximum",
    "Minimum",
    "Max",
    "Min",
    "Take",
    "Narrow",
    "Split",
    "Unbind",
    "Tril",
    "Triu",
)


class Graph:
    """The backward nodes of one pass; empty until `learn` is told the loss's node."""

    def __init__(self) -> None:
        self.nodes: set[Any] = set()
        self._feeders: dict[Any, list[Any]] = {}
        self.masks: set[int] = set()
        """Sequence numbers of products with a constant that has zeros, as a mask has."""
        self._incoming: tuple[Any, tuple[Tensor | None, ...]] = (None, ())
        """The node that runs, and the gradients that came into it."""

    def learn(self, root: Any) -> None:
        """Walk the graph once, and hear from now on what comes into each node."""
        todo = [root]
        while todo:
            node = todo.pop()
            if node is None or node in self.nodes:
                continue
            self.nodes.add(node)
            if not adds_gradients(node):
                node.register_prehook(functools.partial(self._arrive, node))
            for child, _ in node.next_functions:
                if child is not None:
                    self._feeders.setdefault(child, []).append(node)
                    todo.append(child)

    def _arrive(self, node: Any, gradients: tuple[Tensor | None, ...]) -> None:
        self._incoming = (node, gradients)

    def incoming(self, node: Any) -> tuple[Tensor, ...]:
        """The gradients that came into the node that runs now."""
        at, gradients = self._incoming
        return tuple(g for g in gradients if g is not None) if at is node else ()

    def feeders(self, node: Any) -> list[Any]:
        """The nodes that hand this one its gradients."""
        return self._feeders.get(node, [])

    def _selects(self, node: Any) -> bool:
        """Whether the operation behind a node leaves values out."""
        return number_of(node) in self.masks or bool(node.name().startswith(_SELECTING))

    def left_out(self, node: Any, out: Tensor) -> Tensor | None:
        """Where the forward may leave the value behind a bad derivative out; None when it does nowhere.

        The gradient that comes in is exactly zero there, and something after it in the forward selects.
        """
        at, gradients = self._incoming
        if at is not node or node.name().startswith("Linalg"):
            return None
        same = (g for g in gradients if g is not None and g.shape == out.shape)
        where = next((w for g in same if bool((w := (g == 0) & ~torch.isfinite(out)).any())), None)
        if where is None:
            return None
        todo, seen = list(self.feeders(node)), set()
        while todo:
            feeder = todo.pop()
            if feeder not in seen:
                seen.add(feeder)
                if self._selects(feeder):
                    return where
                todo += self.feeders(feeder)
        return None


def number_of(node: Any) -> int:
    """The sequence number of a backward node; writing into a view is wrapped in a node made right after its own."""
    number: int = node._sequence_nr()
    return number - 1 if node.name() == "torch::autograd::CopySlices" else number


def adds_gradients(node: Any) -> bool:
    """Whether a node adds to the ``.grad`` of a parameter."""
    return node is not None and bool(node.name().endswith("AccumulateGrad"))


def runs_again(node: Any) -> bool:
    """Whether Python code below a backward node repeats a part of the forward pass, as checkpointing does.

    Autograd records it again, which it does not do for a backward pass; and where it does (create_graph), that of
    a custom function is no forward pass.
    """
    custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return torch.is_grad_enabled() and (not custom or node.name().startswith("CheckpointFunction"))
