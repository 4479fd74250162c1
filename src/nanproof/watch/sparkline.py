"""A curve in one line of text.

>>> sparkline([1, 2, 3, 4], 4)
'▁▃▆█'
>>> sparkline([1.0, float("nan"), 3.0, 2.0], 4)
'▁✗█▄'
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
BAD = "✗"


def sparkline(values: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]], width: int) -> str:
    """At most ``width`` cells; a cell that holds anything non-finite says so, whatever else is in it."""
    data = np.asarray(values, np.float64)
    if not len(data) or width < 1:
        return ""
    finite = data[np.isfinite(data)]
    if len(finite):
        data = data / (np.abs(finite).max() or 1.0)  # means and spans of the largest numbers would overflow
        finite = data[np.isfinite(data)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    cells = []
    for part in np.array_split(data, min(width, len(data))):
        if not np.isfinite(part).all():
            cells.append(BAD)
        elif high > low:
            cells.append(BARS[min(7, int((float(part.mean()) - low) / (high - low) * 7.999))])
        else:
            cells.append(BARS[0])
    return "".join(cells)
