"""Keep a replay from communicating: one rank that reduces alone waits for the others forever."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import NanproofError
from .mode import ReplayMode

_CALLS = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "new_group",
)


class CollectiveRefused(NanproofError):
    """A replay of one rank was about to communicate with the others."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the step communicates ({name}), and only this rank replays it", hint="replay on all ranks")


class _Refuse(ReplayMode):  # type: ignore[no-untyped-call]
    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = function._schema.name.split("::")[1]
            if name not in ("wait_tensor",):
                raise CollectiveRefused(name)
        return function(*args, **kwargs)


@contextmanager
def no_collectives(*models: nn.Module) -> Iterator[None]:
    """A block in which a collective raises `CollectiveRefused` before it starts; DDP does not reduce.

    >>> with no_collectives():
    ...     torch.ones(2).sum().item()
    2.0

    Does nothing in a process that has no peers.
    """
    if not has_peers():
        yield
        return
    for model in models:
        refuse_sharded(model)
    with ExitStack() as stack:
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):
                    stack.enter_context(_alone(module))
        for name in _CALLS:
            if hasattr(torch.distributed, name):
                stack.callback(setattr, torch.distributed, name, getattr(torch.distributed, name))
                setattr(torch.distributed, name, _refusing(name))
        stack.enter_context(_Refuse())
        yield


def has_peers() -> bool:
    """Whether this process is one of several ranks."""
    distributed = sys.modules.get("torch.distributed")
    return bool(
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def refuse_sharded(model: nn.Module) -> None:
    """FSDP left half-way by an exception could not go on: it is refused before it starts."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "_local_tensor"):
            raise CollectiveRefused(f"{name} is sharded")
    for module in model.modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine", "PipelineStage"):
            raise CollectiveRefused(type(module).__name__)


def _refusing(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.distributed, name))
    def refuse(*_: Any, **__: Any) -> Any:
        raise CollectiveRefused(name)

    return refuse


class _KeepsBuckets:
    """DDP's reducer, except that it leaves its buckets: after its first backward it rebuilds them with a broadcast."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def _alone(module: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """DDP neither broadcasts buffers nor reduces gradients, as in its own no_sync(), nor agrees on buckets."""
    backward, forward, reducer = module.require_backward_grad_sync, module.require_forward_param_sync, module.reducer
    module.require_backward_grad_sync = module.require_forward_param_sync = False
    module.reducer = _KeepsBuckets(reducer)  # type: ignore[assignment]
    try:
        yield
    finally:
        module.require_backward_grad_sync, module.require_forward_param_sync = backward, forward
        module.reducer = reducer
