"""One module that computes in another way than the model around it: in a wider dtype, eagerly, with math attention."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from ..records import RepairKind
from .widen import Widen, is_narrower, widened


class Island:
    """Takes the place of ``module.forward``.

    What is said below about dtypes is for the kind "float32". An "eager" island only keeps torch.compile out, which
    every island does; a "math-attention" one also keeps fused attention kernels out.

    It refers to the module and closes over nothing, so a deep copy of the model owns an island of its own, a pickled
    model keeps it, and the keys of ``state_dict`` stay what they are. A light island leaves autocast and widens its
    arguments; a heavy one also widens weights and casts inside, where every torch call costs a little. Which of the
    two it is, is decided at each call: FSDP2 shows float32 shards between calls and float16 weights inside one.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        *,
        heavy: bool = False,
        kind: RepairKind = "float32",
    ) -> None:
        self.module, self.dtype, self.heavy, self.kind = module, dtype, heavy, kind
        self.inner: Any = module.__dict__.get("forward")
        """A forward that somebody else (accelerate) has put in the module's own place."""
        self.inside: list[_Inside] = []
        """The modules inside of a heavy island, for activation checkpointing."""
        self.suspended = False
        self.probing = False
        """Whether the largest value that leaves it is measured; a host read per call."""
        self.largest = 0.0
        self.contained = False
        """In a trial: whether an error inside is kept, and the module runs as it is instead, so that ranks which
        wait for each other inside the model go on together."""
        self.error: Exception | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Any:
        return self.inner if self.inner is not None else type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return self._run(args, kwargs)
        # compiled code would trace past the mode, and float16 weights would meet float32 values
        return dynamo.disable(self._run)(args, kwargs)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.suspended or (self.kind == "float32" and _in_heavy_island(self.dtype)):
            return self._forward(*args, **kwargs)
        if not self.contained:
            return self._compute(args, kwargs)
        try:
            return self._compute(args, kwargs)
        except Exception as error:
            self.error = error
            return self._forward(*args, **kwargs)

    def _compute(self, args: Any, kwargs: Any) -> Any:
        if self.kind == "eager":
            return self._forward(*args, **kwargs)
        if self.kind == "math-attention":
            self._prepare_inside()
            with sdpa_kernel(SDPBackend.MATH):
                return self._forward(*args, **kwargs)
        device, dtype = _device_of(self.module, args), self.dtype
        home = self._home(device, args, kwargs)

        def widen(value: Any) -> Any:
            return widened(value, dtype) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(widen, args), tree_map(widen, kwargs)
        heavy = self.is_heavy
        if heavy:
            self._prepare_inside()
        sharded = _is_sharded(self.module)
        inside = Widen(dtype, device, sharded=sharded) if heavy else contextlib.nullcontext()
        with torch.autocast(device, enabled=False), inside:
            out = self._forward(*args, **kwargs)
        if self.probing:
            self.largest = max([self.largest, *(_largest(t) for t in tree_leaves(out) if isinstance(t, Tensor))])
        if home is None:
            return out
        return tree_map(lambda v: v.to(home) if isinstance(v, Tensor) and v.dtype == dtype else v, out)

    def _prepare_inside(self) -> None:
        if not self.inside:
            self.inside = [_Inside(m, self) for m in self.module.modules() if m is not self.module]

    def _home(self, device: str, args: Any, kwargs: Any) -> torch.dtype | None:
        """The dtype that what comes after the module expects; None leaves the result wide.

        Under autocast the next operation narrows what it wants narrow by itself, and a cast here could overflow.
        """
        if torch.is_autocast_enabled(device):
            return torch.float32 if self.dtype is torch.float64 else None
        seen = [v.dtype for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        seen += [p.dtype for p in self.module.parameters()]
        return next((d for d in seen if is_narrower(d, self.dtype)), None)

    @property
    def is_heavy(self) -> bool:
        """Whether it follows weights and casts inside, as far as can be seen between calls."""
        return (
            self.kind != "float32"
            or self.heavy
            or self.dtype is not torch.float32
            or _holds_narrow(self.module, self.dtype)
        )

    def open(self) -> None:
        self.module.forward = self

    def close(self) -> None:
        """Put the module's own forward back; where somebody has wrapped the island since, it only steps aside."""
        self.suspended = True
        for inner in self.inside:
            inner.leave()
        self.inside = []
        if self.module.__dict__.get("forward") is self:
            del self.module.forward
            if self.inner is not None:
                self.module.forward = self.inner


class _Inside:
    """Takes the place of ``forward`` in a module inside of a heavy island, or of one with math attention.

    Activation checkpointing runs such a module again in the backward pass, outside of the island: it must compute
    there as it did. Everywhere else it changes nothing.
    """

    def __init__(self, module: nn.Module, island: Island) -> None:
        self.module, self.island = module, island
        self.inner: Any = module.__dict__.get("forward")
        module.forward = self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    @property
    def _forward(self) -> Any:
        return self.inner if self.inner is not None else type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1
        if not again or self.island.suspended:
            return self._forward(*args, **kwargs)
        if self.island.kind == "math-attention":
            with sdpa_kernel(SDPBackend.MATH):
                return self._forward(*args, **kwargs)
        if _in_heavy_island(self.island.dtype):
            return self._forward(*args, **kwargs)
        device, dtype = _device_of(self.module, args), self.island.dtype
        with torch.autocast(device, enabled=False), Widen(dtype, device, sharded=_is_sharded(self.module)):
            return self._forward(*args, **kwargs)

    def leave(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.forward
            if self.inner is not None:
                self.module.forward = self.inner


def island_of(module: nn.Module) -> Island | None:
    """The open island of a module, also behind a wrapper that has been put around it since."""
    found = module.__dict__.get("forward")
    for _ in range(8):
        if isinstance(found, Island) or found is None:
            break
        inner = found.inner if isinstance(found, _Inside) else None
        found = inner or getattr(found, "__wrapped__", None) or getattr(found, "__func__", None)
    return found if isinstance(found, Island) and not found.suspended else None


def _in_heavy_island(dtype: torch.dtype) -> bool:
    """Whether everything is wide already: an island inside of another must not narrow its result."""
    return any(
        isinstance(mode, Widen) and not is_narrower(mode.dtype, dtype)
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


def _holds_narrow(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether weights are narrow, or may be once they are gathered (shards inside of the module)."""
    return any(is_narrower(p.dtype, dtype) for p in module.parameters()) or _is_sharded(module)


def _is_sharded(module: nn.Module) -> bool:
    return any(hasattr(p, "_local_tensor") for p in module.parameters())


def _device_of(module: nn.Module, args: Any) -> str:
    found = next((t for t in (*module.parameters(), *tree_leaves(args)) if isinstance(t, Tensor)), None)
    return found.device.type if found is not None else "cpu"


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().amax())  # host sync: in trials, and now and then on an open island
