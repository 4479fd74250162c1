"""The one table of floating-point formats, from fp64 to fp4.

>>> from nanproof.floats import format_of
>>> f = format_of("torch.float16")
>>> f.max, f.smallest_normal, f.safe_eps
(65504.0, 6.103515625e-05, 0.0078125)
>>> f.exp_limit
11.0898...

Everything that depends on a format follows from its definition: bits, exponent width, bias and which codes
are set aside for NaN and Inf. Nothing is asked of torch, whose ``isfinite`` raises on some 8-bit formats and
is wrong on e8m0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError

Specials = Literal["ieee", "fn", "fnuz", "e8m0", "none"]
Bits = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)  # there is one object per format
class Format:
    """One floating-point format.

    ``specials`` says which codes are not numbers: ``ieee`` the whole top exponent (Inf and NaN), ``fn`` only
    the all-ones code of each sign (NaN), ``fnuz`` only the code of minus zero (NaN), ``e8m0`` only 0xFF
    (NaN; no sign, no zero), ``none`` no code at all.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    aliases: tuple[str, ...] = ()

    @property
    def signed(self) -> bool:
        return self.specials != "e8m0"

    @property
    def storage(self) -> np.dtype[Any]:
        """The unsigned integer that holds one code (fp4 codes are unpacked to one per byte)."""
        return np.dtype(f"u{max(self.bits, 8) // 8}")

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def inf_code(self) -> int | None:
        """The code of +Inf, or None where the format has none."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.specials == "ieee" else None

    @property
    def first_nonfinite(self) -> tuple[int, int] | None:
        """The least positive and the least negative code that is not a number, seen as unsigned integers.

        Where both stand, every code at or above them within its sign is NaN or Inf, so two integer maxima
        over a buffer find any non-finite value. None for the formats where that does not hold.
        """
        match self.specials:
            case "ieee":
                inf = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
                return inf, inf | self.sign_bit
            case "fn":
                return self.sign_bit - 1, 2 * self.sign_bit - 1
            case _:
                return None

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        match self.specials:
            case "ieee":
                return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
            case "fn":
                return self.sign_bit - 2
            case "e8m0":
                return 0xFE
            case _:
                return self.sign_bit - 1

    @cached_property
    def max(self) -> float:
        return float(self.decode(np.array([self.max_code], self.storage))[0])

    @cached_property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, (0 if self.specials == "e8m0" else 1) - self.bias)

    @cached_property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; equal to the smallest normal where there are no subnormals."""
        return self.smallest_normal if not self.mantissa_bits else math.ldexp(self.smallest_normal, -self.mantissa_bits)

    @cached_property
    def machine_eps(self) -> float:
        """The gap between 1 and the next value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @cached_property
    def safe_eps(self) -> float:
        """An eps that still means something in this format.

        The smallest power of two that is not lost beside 1 and for which 1/eps², the slope of 1/x at eps, is
        still finite.
        """
        eps = self.machine_eps
        while 1 / eps**2 > self.max:
            eps *= 2
        return eps

    @cached_property
    def exp_limit(self) -> float:
        """The x above which exp(x) overflows."""
        return math.log(self.max)

    def decode(self, codes: Bits) -> NDArray[np.float64]:
        """The values of codes, from the definition of the format."""
        if self.bits == 64:
            return codes.astype(np.uint64).view(np.float64)
        raw = codes.astype(np.int64)
        mantissa = raw & ((1 << self.mantissa_bits) - 1)
        exponent = (raw >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        normal = np.ldexp(
            (1 << self.mantissa_bits) + mantissa.astype(np.float64), exponent - self.bias - self.mantissa_bits
        )
        if self.specials == "e8m0":
            value = np.ldexp(1.0, exponent - self.bias)
        else:
            subnormal = np.ldexp(mantissa.astype(np.float64), 1 - self.bias - self.mantissa_bits)
            value = np.where(exponent == 0, subnormal, normal)
        negative = (raw & self.sign_bit) != 0
        value = np.where(negative, -value, value)
        value = np.where(self.is_inf(codes), np.where(negative, -np.inf, np.inf), value)
        return np.where(self.is_nan(codes), np.nan, value)

    def is_inf(self, codes: Bits) -> NDArray[np.bool_]:
        """Which codes are +Inf or −Inf."""
        if self.inf_code is None:
            return np.zeros(codes.shape, np.bool_)
        return np.asarray(np.equal(codes & codes.dtype.type(self.sign_bit - 1), self.inf_code), np.bool_)

    def is_nan(self, codes: Bits) -> NDArray[np.bool_]:
        """Which codes are NaN."""
        match self.specials:
            case "ieee":
                assert self.inf_code is not None
                return np.asarray(np.greater(codes & codes.dtype.type(self.sign_bit - 1), self.inf_code), np.bool_)
            case "fn":
                return np.asarray(np.equal(codes & codes.dtype.type(self.sign_bit - 1), self.sign_bit - 1), np.bool_)
            case "fnuz":
                return np.asarray(np.equal(codes, self.sign_bit), np.bool_)
            case "e8m0":
                return np.asarray(np.equal(codes, 0xFF), np.bool_)
            case _:
                return np.zeros(codes.shape, np.bool_)


def _ieee(name: str, bits: int, exponent_bits: int, *aliases: str) -> Format:
    bias = (1 << (exponent_bits - 1)) - 1
    return Format(
        name=name,
        bits=bits,
        exponent_bits=exponent_bits,
        mantissa_bits=bits - 1 - exponent_bits,
        bias=bias,
        specials="ieee",
        aliases=aliases,
    )


def _small(name: str, bits: int, e: int, m: int, bias: int, specials: Specials, *aliases: str) -> Format:
    return Format(name=name, bits=bits, exponent_bits=e, mantissa_bits=m, bias=bias, specials=specials, aliases=aliases)


FORMATS: tuple[Format, ...] = (
    _ieee("float64", 64, 11, "fp64", "f64", "double"),
    _ieee("float32", 32, 8, "fp32", "f32", "float"),
    _ieee("bfloat16", 16, 8, "bf16"),
    _ieee("float16", 16, 5, "fp16", "f16", "half"),
    _ieee("float8_e5m2", 8, 5, "f8_e5m2", "e5m2"),
    _small("float8_e4m3fn", 8, 4, 3, 7, "fn", "f8_e4m3", "e4m3fn", "e4m3"),
    _small("float8_e4m3fnuz", 8, 4, 3, 8, "fnuz", "f8_e4m3fnuz", "e4m3fnuz"),
    _small("float8_e5m2fnuz", 8, 5, 2, 16, "fnuz", "f8_e5m2fnuz", "e5m2fnuz"),
    _small("float8_e8m0fnu", 8, 8, 0, 127, "e8m0", "f8_e8m0", "e8m0", "e8m0fnu"),
    _small("float4_e2m1fn_x2", 4, 2, 1, 1, "none", "f4", "fp4", "e2m1", "float4_e2m1"),
)

_BY_NAME = {alias: f for f in FORMATS for alias in (f.name, *f.aliases)}


def find_format(name: object) -> Format | None:
    """The format called so by torch, numpy, safetensors or people; None when it is not a float format."""
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name]
    return _BY_NAME.get(str(name).lower().removeprefix("torch.").removeprefix("<class 'numpy.").removesuffix("'>"))


def format_of(name: object) -> Format:
    """Like `find_format`, but an unknown name is an error that lists the known ones."""
    found = find_format(name)
    if found is None:
        known = ", ".join(f.name for f in FORMATS)
        raise UsageError(f"{name} is not a floating-point format", hint=f"use one of {known}")
    return found
