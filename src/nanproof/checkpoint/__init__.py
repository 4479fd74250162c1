"""Checkpoints: which one is still good, at the speed of memory, executing nothing and without importing torch."""

from __future__ import annotations

from .ranks import scan_spread
from .report import ScanReport, SeriesReport, TensorReport
from .scan import scan, scan_series

__all__ = ["ScanReport", "SeriesReport", "TensorReport", "scan", "scan_series", "scan_spread"]
