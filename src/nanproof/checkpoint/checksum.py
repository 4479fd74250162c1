"""CRC-32 of a whole from the CRC-32 of its parts, so that threads can share one large member."""

from __future__ import annotations

from functools import lru_cache

try:
    from isal.isal_zlib import crc32  # of the extra "fast"
except ImportError:
    from zlib import crc32

__all__ = ["combine", "crc32"]

_POLYNOMIAL = 0xEDB88320
Matrix = tuple[int, ...]


def _times(matrix: Matrix, vector: int) -> int:
    total = 0
    for row in matrix:
        if vector & 1:
            total ^= row
        vector >>= 1
    return total


def _product(a: Matrix, b: Matrix) -> Matrix:
    return tuple(_times(a, row) for row in b)


@lru_cache(maxsize=64)
def _append_zeros(count: int) -> Matrix:
    """What appending ``count`` zero bytes does to a CRC, as a matrix over bits."""
    power: Matrix = (_POLYNOMIAL, *(1 << i for i in range(31)))  # one zero bit
    for _ in range(3):
        power = _product(power, power)
    result: Matrix = tuple(1 << i for i in range(32))
    while count:
        if count & 1:
            result = _product(power, result)
        power = _product(power, power)
        count >>= 1
    return result


def combine(first: int, second: int, second_size: int) -> int:
    """The CRC of two stretches from the CRC of each.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return _times(_append_zeros(second_size), first) ^ second
