"""Parameters that do not move: training that looks healthy while nothing is learned.

>>> import torch
>>> w = torch.nn.Parameter(torch.zeros(4))
>>> motion = Motion([("w", w)], every=2)
>>> still = []
>>> for step in range(9):
...     part = motion.look(step)
...     signals = part.now() if part is not None else {}
...     still.append("moved" in signals and motion.is_still(bool(signals["moved"])))
>>> still.index(True)
6

A loss scaler that skips every step, a learning rate of zero, an optimizer of the wrong parameters: the log looks
normal. So every ``every`` steps a sample of a few parameters is sent to the host and compared with what it was; if it
has not changed, the bits of all parameters are summed up on the device and compared, before anybody is warned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..tensors import local_values
from .readback import Numbers, Part
from .samples import Views, place_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Motion:
    """Compares parameters on a cadence; the answer is known when the step's numbers are read."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], every: int = 20) -> None:
        self.every = every
        self._all = [p for _, p in parameters if p.requires_grad and not p.is_complex() and p.numel()]
        sampled = [p for p in self._all if place_of(p)]
        few = {id(p): p for p in (*sampled[:1], *sampled[len(sampled) // 2 :][:1], *sampled[-1:])}
        self._few, self._views = list(few.values()), Views()
        self._suspected = not self._few
        self._sample: bytes | None = None
        self._checksums: Tensor | None = None

    def look(self, step: int) -> Part | None:
        """On the cadence: what says on the host whether a parameter has ``moved`` since the last time."""
        if step % self.every or not self._all:
            return None
        if not self._suspected:
            return Part(self._views.of(self._few), self._compare)
        with torch.no_grad():
            now = torch.stack([_checksum(p).to(self._all[0].device) for p in self._all])
            before, self._checksums = self._checksums, now
            return None if before is None else Part([(now != before).any().reshape(1)], _moved)

    def _compare(self, numbers: Numbers) -> Mapping[str, float]:
        before, self._sample = self._sample, numbers.tobytes()
        return {} if before is None else {"moved": float(before != self._sample)}

    def is_still(self, moved: bool) -> bool:
        """Whether it is proved that no parameter moves, given what `look` found."""
        proved = not moved and self._suspected
        if moved == self._suspected:  # look at all of them from now on, or at a few again
            self._suspected, self._sample, self._checksums = not moved or not self._few, None, None
        return proved


def _moved(numbers: Numbers) -> Mapping[str, float]:
    return {"moved": float(numbers[0])}


def _checksum(parameter: nn.Parameter) -> Tensor:
    values = local_values(parameter)
    return values.contiguous().view(-1).view(_BITS[values.element_size()]).sum()
