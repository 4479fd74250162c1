"""Parameters that do not move: training that looks healthy while nothing is learned.

>>> import torch
>>> w = torch.nn.Parameter(torch.zeros(4))
>>> motion = Motion([("w", w)], every=2)
>>> still = []
>>> for step in range(9):
...     flag = motion.look(step)
...     still.append(flag is not None and motion.is_still(bool(flag)))
>>> still.index(True)
6

A loss scaler that skips every step, a learning rate of zero, an optimizer of the wrong parameters: the log looks
normal. So every ``every`` steps the bits of a few parameters are summed up and compared with what they were; if they
have not changed, those of all parameters are, before anybody is warned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLE = 3


class Motion:
    """Compares checksums of parameters on a cadence; the answer stays on the device until it is read."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], every: int = 20) -> None:
        self.every = every
        self._all = [p for _, p in parameters if p.requires_grad and not p.is_complex() and p.numel()]
        middle = len(self._all) // 2
        self._few = list(
            {id(p): p for p in (*self._all[:1], *self._all[middle : middle + 1], *self._all[-1:])}.values()
        )
        self._suspected = False
        self._before: Tensor | None = None

    @torch.no_grad()
    def look(self, step: int) -> Tensor | None:
        """On the cadence: a flag, true when a parameter has changed since the last time."""
        if step % self.every or not self._all:
            return None
        looked = self._all if self._suspected else self._few
        now = torch.stack([_checksum(p).to(looked[0].device) for p in looked])
        before, self._before = self._before, now
        return None if before is None else (now != before).any()

    def is_still(self, moved: bool) -> bool:
        """Whether it is proved that no parameter moves, given what `look` found."""
        proved = not moved and self._suspected
        if moved == self._suspected:  # look at all of them from now on, or at a few again
            self._suspected, self._before = not moved, None
        return proved


def _checksum(parameter: nn.Parameter) -> Tensor:
    values = getattr(parameter.detach(), "_local_tensor", parameter.detach())
    return values.contiguous().view(-1).view(_BITS[values.element_size()]).sum()
