"""Looking through training data for what breaks training: NaN and Inf, empty targets, labels out of range.

>>> import numpy as np, tempfile, pathlib
>>> with tempfile.TemporaryDirectory() as folder:
...     path = pathlib.Path(folder, "x.npy")
...     np.save(path, np.array([[1.0, 2.0], [np.nan, 3.0]], "f4"))
...     report = scan_data(path)
>>> report.ok, [p.message for p in report.problems]
(False, ['1 NaN of 4 values, first in row 1'])
"""

from .report import Column, DataReport, Problem
from .scan import scan_data

__all__ = ["Column", "DataReport", "Problem", "scan_data"]
