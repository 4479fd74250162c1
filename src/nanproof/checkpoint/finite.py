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

import numpy as np
from numpy.typing import NDArray

from ..floats import Format

Bytes = NDArray[np.uint8]


_max, _min, _or = np.maximum.reduce, np.minimum.reduce, np.bitwise_or.reduce


@cache
class _Kernel:
    """What the test of one format needs, looked up once."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.unsigned, self.signed = form.storage, np.dtype(f"i{form.storage.itemsize}")
        self.sign = form.sign_bit
        self.top = 1 << (form.bits - 2) if form.signed else 0
        self.limits = form.first_nonfinite
        self.untestable = form.specials == "none"
        # one-byte formats are stored with scales and fill their range: the first test would be for nothing
        self.first_test = self.limits is not None and self.unsigned.itemsize > 1


class Sweep:
    """What the fast test has seen so far of one tensor."""

    __slots__ = ("_bits", "_exact", "_high", "_kernel", "_low", "_probe", "_top", "varied")

    def __init__(self, form: Format) -> None:
        self._kernel = _Kernel(form)
        self.varied = False
        """Whether two codes were seen that differ; False makes a tensor worth a look for being constant."""
        self._probe = -1
        self._exact = not self._kernel.first_test
        # the bitwise OR of codes in the first test; in the second the largest code, and the extremes read as signed
        self._bits = self._top = self._high = self._low = 0

    @property
    def form(self) -> Format:
        return self._kernel.form

    def add(self, data: Bytes) -> None:
        """Look at some bytes, a whole number of elements. Short, for threads wait for one another in here."""
        kernel = self._kernel
        codes = data.view(kernel.unsigned)
        if not len(codes):
            return
        if not self.varied:
            self._probe = int(codes[0]) if self._probe < 0 else self._probe
            self.varied = bool(codes[-1] != self._probe)
        if not self._exact:
            self._bits |= int(_or(codes))
            if not self._bits & kernel.top:
                return
            self._exact = True
        elif kernel.untestable:
            return
        if (top := int(_max(codes))) > self._top:
            self._top = top
        if kernel.sign and (high := int(_max(codes.view(kernel.signed)))) > self._high:
            self._high = high
        if kernel.limits is None and (low := int(_min(codes.view(kernel.signed)))) < self._low:
            self._low = low

    def join(self, other: Sweep) -> None:
        """Take in what another thread saw of the same tensor."""
        self._bits |= other._bits
        self._top, self._high = max(self._top, other._top), max(self._high, other._high)
        self._low = min(self._low, other._low)
        self._exact |= other._exact
        self._probe = other._probe if self._probe < 0 else self._probe
        self.varied |= other.varied or self._probe != other._probe

    @property
    def bad(self) -> bool:
        """Whether any value is NaN or infinite."""
        kernel = self._kernel
        if kernel.untestable:
            return False
        if not kernel.sign:  # e8m0: no sign, no zero, one NaN
            return self._top == 0xFF
        if kernel.limits is None:  # fnuz: its NaN is the code of minus zero, the smallest signed integer
            return self._low == -kernel.sign
        return self._high >= kernel.limits[0] or self._top >= kernel.limits[1]

    @property
    def at_most(self) -> float:
        """No value is larger than this in magnitude. Exact from 2 upwards; below, 2 is all that was asked."""
        kernel = self._kernel
        if self.bad:
            return math.inf
        if kernel.untestable:
            return kernel.form.max
        largest = max(self._high, self._top - kernel.sign)
        if kernel.sign and largest <= 0 and not self._bits & ~kernel.sign:
            return 0.0
        if kernel.limits is not None and not largest & kernel.top:
            return 2.0
        return value_of(kernel.form, largest)

    @property
    def negative(self) -> bool:
        """Whether any code carries a sign; minus zero does too."""
        return bool((self._bits | self._top) & self._kernel.sign)


def value_of(form: Format, code: int) -> float:
    """The value of one positive finite code; like ``Format.decode``, without the cost of an array."""
    mantissa = code & ((1 << form.mantissa_bits) - 1)
    exponent = code >> form.mantissa_bits
    if exponent or form.specials == "e8m0":
        mantissa += 1 << form.mantissa_bits
    else:
        exponent = 1
    return math.ldexp(mantissa, exponent - form.bias - form.mantissa_bits)
