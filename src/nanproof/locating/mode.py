"""The base of the dispatch modes that watch a replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .indices import check_indices


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import the compiler: that alone takes longer than a replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def run_carefully(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on values that the step itself never had: what would end the process raises instead."""
    if args and isinstance(args[0], Tensor) and not _recovers(args[0].device):
        check_indices(function._opname, args)
    return function(*args, **kwargs)


def _recovers(device: torch.device) -> bool:
    """Whether a kernel that meets an index out of range raises, and the process goes on."""
    return device.type in ("cpu", "meta")
