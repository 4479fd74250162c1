"""What each layer really computes in, measured on its output, and how near that comes to the format's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ...floats import find_format
from ...tensors import local_values, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One module without children, as it ran."""

    name: str
    kind: str
    weight: str
    """The dtype of its parameters; empty when it has none."""
    output: str
    """The dtype that came out, which is the one it computed in under autocast."""
    largest: float
    """The largest magnitude that came out."""

    @property
    def headroom(self) -> float:
        """How many times larger the output could be before it overflows."""
        form = find_format(self.output)
        return form.max / self.largest if form is not None and self.largest > 0 else float("inf")


@contextmanager
def watch_layers(model: nn.Module, listening: Callable[[], bool] = lambda: True) -> Iterator[dict[str, Layer]]:
    """Measure every innermost layer that runs inside the block; the largest output of several calls counts."""
    found: dict[str, Layer] = {}

    def look(name: str, module: nn.Module, output: object) -> None:
        if not listening():
            return
        tensors = [t for _, t in tensors_in(output) if t.is_floating_point() and t.numel() and not t.is_meta]
        if not tensors:
            return
        weight = next((_dtype(p) for p in module.parameters(recurse=False)), "")
        values = local_values(tensors[0])
        largest = float(values.double().abs().nan_to_num(nan=float("inf")).max())  # host sync: a test, not a training
        before = found.get(name)
        if before is None or largest > before.largest:
            found[name] = Layer(
                name=name, kind=type(module).__name__, weight=weight, output=_dtype(tensors[0]), largest=largest
            )

    def hook(name: str) -> object:
        return lambda module, inputs, output: look(name, module, output)

    leaves = [(n, m) for n, m in model.named_modules() if not any(True for _ in m.children())]
    handles = [m.register_forward_hook(hook(n or type(m).__name__)) for n, m in leaves]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
