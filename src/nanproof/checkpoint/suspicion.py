"""Finite, but wrong: what makes a single tensor suspect."""

from __future__ import annotations

import math
import re

from ..floats import find_format
from .contents import Stored
from .detail import chunks, look
from .finite import Sweep
from .report import TensorReport, small
from .roles import SECOND_MOMENTS, last
from .source import Source

# Far above anything that training leaves behind, far below what uninitialized memory looks like.
ABSURD = {"parameter": 1e6, "buffer": 1e10, "moment": 1e10, "ema": 1e6}
_ZERO_BY_DESIGN = re.compile(r"lora_B|lora_up|zero_|_zero|adaLN|ada_ln|position_ids|pad")


def suspicion(source: Source, stored: Stored, sweep: Sweep, report: TensorReport) -> str | None:
    """The words for what is wrong with a finite tensor, or None."""
    if report.role == "moment" and last(stored.name) in SECOND_MOMENTS and sweep.negative:
        facts = look(source, stored, stored.name)
        if facts.finite_min is not None and facts.finite_min < 0:
            return f"a second moment is negative ({facts.finite_min:.3g})"
    if stored.stride is not None and stored.numel > max(1 << 31, 1000 * stored.nbytes):
        return f"is a view of {stored.numel:,} elements over {stored.nbytes:,} bytes, too large to be copied"
    size = report.at_most or 0.0
    form = find_format(stored.dtype)
    if form is not None and not small(stored.dtype) and size >= form.max / 2 and report.role != "mask":
        return f"values up to {size:.4g} stand within a factor of 2 of the largest {form.name}"
    limit = ABSURD.get(report.role, math.inf)
    if size > limit and not small(stored.dtype):
        return f"values up to {size:.3g} are absurd for a {report.role}"
    if report.role in ("parameter", "ema") and _is_matrix(stored):
        return _lifeless(source, stored, sweep)
    return None


def _is_matrix(stored: Stored) -> bool:
    """At least two real dimensions: vectors of zeros and ones are how biases and norms begin."""
    return stored.numel >= 16 and sum(n > 1 for n in stored.shape) >= 2 and stored.stride is None and not stored.columns


def _lifeless(source: Source, stored: Stored, sweep: Sweep) -> str | None:
    if sweep.varied or _ZERO_BY_DESIGN.search(stored.name):
        return None
    if sweep.at_most == 0.0:
        return "is all zero, as only an untrained or dead matrix is"
    width = stored.nbytes // stored.numel
    number = b""
    for _, data in chunks(source, stored):
        number = number or data[:width].tobytes()
        if data.tobytes() != number * (len(data) // max(width, 1)):
            return None
    return "holds the same number everywhere"
