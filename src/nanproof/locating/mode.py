"""The base of the dispatch modes that watch a replay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from .bounds import Endless
from .indices import check_indices


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts operations, and ends a replay that runs more than ``most`` of them.

    Subclasses say what it does with an `operation`. It does not import the compiler, which takes longer than a replay.
    """

    supports_higher_order_operators = True

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._most = 0, most

    def _next(self) -> int:
        """The number of the operation that is about to run."""
        self.count += 1
        if self.count > self._most:
            raise Endless(f"more than {self._most:,} operations")
        return self.count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(function, HigherOrderOperator):
            return self._branch(function, args, kwargs or {})
        return self.operation(function, args, kwargs or {})

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and do with it what this mode is for."""
        raise NotImplementedError

    def _branch(self, function: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """An operator that calls functions, such as torch.cond: what it calls is seen as any other code."""
        if function.__name__ == "cond":
            condition, yes, no, operands = args
            with self:
                return (yes if condition else no)(*operands)
        if function.__name__ == "while_loop":
            goes_on, body, carried, more = args
            with self:
                while goes_on(*carried, *more):
                    carried = tuple(body(*carried, *more))
            return carried
        return function(*args, **kwargs)

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
