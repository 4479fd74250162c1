"""The base of the dispatch modes that watch a replay."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import the compiler: that alone takes longer than a replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
