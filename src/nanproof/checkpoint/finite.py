"""The fast test: are all numbers of a buffer finite, at the speed of memory?

>>> import numpy as np
>>> from nanproof.floats import format_of
>>> sweep = Sweep(format_of("float32"))
>>> sweep.add(np.array([0.5, -1.5], "<f4").view("u1")); sweep.bad, sweep.at_most
(False, 2.0)
>>> sweep.add(np.array([3.0, -np.inf], "<f4").view("u1")); sweep.bad
True

Most chunks need one pass: the bitwise OR of all codes. While the top bit of the exponent is in none of them,
every value is below 2 and so finite. From the first chunk with a larger value on, two integer maxima decide:
the non-finite codes are the largest integers of their sign, which also gives the exact largest magnitude.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..floats import Format

Bytes = NDArray[np.uint8]


@cache
class _Kernel:
    """What the test of one format needs, looked up once."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.unsigned, self.signed = form.storage, np.dtype(f"i{form.storage.itemsize}")
        self.sign = form.sign_bit
        self.top = 1 << (form.bits - 2) if form.signed else 0
        self.limits = form.first_nonfinite


class Sweep:
    """What the fast test has seen so far of one tensor."""

    __slots__ = ("_exact", "_kernel", "_largest", "_probe", "bad", "bits", "varied")

    def __init__(self, form: Format) -> None:
        self._kernel = _Kernel(form)
        self.bits = 0
        """The bitwise OR of codes, as far as the test needed it."""
        self.bad = False
        self.varied = False
        """Whether two codes were seen that differ; False makes a tensor worth a look for being constant."""
        self._probe = -1
        self._largest = 0
        # one-byte formats are stored with scales and fill their range: the first test would be for nothing
        self._exact = self._kernel.limits is None or self._kernel.unsigned.itemsize == 1

    @property
    def form(self) -> Format:
        return self._kernel.form

    def add(self, data: Bytes) -> None:
        """Look at some bytes, a whole number of elements."""
        codes = data.view(self._kernel.unsigned)
        if not len(codes):
            return
        if not self.varied:
            self._probe = int(codes[0]) if self._probe < 0 else self._probe
            self.varied = bool(codes[-1] != self._probe)
        if not self._exact:
            bits = int(np.bitwise_or.reduce(codes))
            self.bits |= bits
            if not bits & self._kernel.top:
                return
            self._exact = True
        self._look_closer(codes)

    def _look_closer(self, codes: NDArray[Any]) -> None:
        kernel = self._kernel
        top = int(np.maximum.reduce(codes))
        if not kernel.sign:  # e8m0: no sign, no zero, one NaN
            self.bad |= top == 0xFF
            self._largest = max(self._largest, top)
            self.bits |= top
            return
        if kernel.form.specials == "none":
            return
        signed = codes.view(kernel.signed)
        high = max(int(np.maximum.reduce(signed)), 0)
        self._largest = max(self._largest, high, top - kernel.sign)
        self.bits |= top | high
        if kernel.limits is None:  # fnuz: its NaN is the code of minus zero, the smallest signed integer
            self.bad |= int(np.minimum.reduce(signed)) == -kernel.sign
        else:
            self.bad |= high >= kernel.limits[0] or top >= kernel.limits[1]

    def join(self, other: Sweep) -> None:
        """Take in what another thread saw of the same tensor."""
        self.bits |= other.bits
        self.bad |= other.bad
        self._exact |= other._exact
        self._largest = max(self._largest, other._largest)
        self._probe = other._probe if self._probe < 0 else self._probe
        self.varied |= other.varied or self._probe != other._probe

    @property
    def at_most(self) -> float:
        """No value is larger than this in magnitude. Exact from 2 upwards; below, 2 is all that was asked."""
        kernel = self._kernel
        if self.bad:
            return math.inf
        if kernel.form.specials == "none":
            return kernel.form.max
        if kernel.sign and not self._largest and not self.bits & ~kernel.sign:
            return 0.0
        if kernel.limits is not None and not self._largest & kernel.top:
            return 2.0
        return value_of(kernel.form, self._largest)

    @property
    def negative(self) -> bool:
        """Whether any code carries a sign; minus zero does too."""
        return bool(self.bits & self._kernel.sign)


def value_of(form: Format, code: int) -> float:
    """The value of one positive finite code; like ``Format.decode``, without the cost of an array."""
    mantissa = code & ((1 << form.mantissa_bits) - 1)
    exponent = code >> form.mantissa_bits
    if exponent or form.specials == "e8m0":
        mantissa += 1 << form.mantissa_bits
    else:
        exponent = 1
    return math.ldexp(mantissa, exponent - form.bias - form.mantissa_bits)
