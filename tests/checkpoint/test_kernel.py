"""The fast test against the definition of each format, on any bytes whatever."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.checkpoint.checksum import combine, crc32
from nanproof.checkpoint.finite import Sweep, value_of
from nanproof.checkpoint.sweep import _buffer, _placed
from nanproof.floats import FORMATS, Format

SMALL = [f for f in FORMATS if f.bits in (8, 16)]
ALL = [f for f in FORMATS if f.bits >= 8]


def swept(form: Format, codes: np.ndarray) -> Sweep:  # type: ignore[type-arg]
    sweep = Sweep(form)
    sweep.add(np.ascontiguousarray(codes).view(np.uint8))
    return sweep


@pytest.mark.parametrize("form", SMALL, ids=lambda f: f.name)
def test_every_single_code(form: Format) -> None:
    values = form.decode(np.arange(1 << form.bits, dtype=form.storage))
    for code in range(1 << form.bits):
        sweep = swept(form, np.array([code], form.storage))
        assert sweep.bad == (not np.isfinite(values[code])), hex(code)
        if not sweep.bad:
            assert abs(values[code]) <= sweep.at_most, hex(code)
            if abs(values[code]) >= 2:
                assert sweep.at_most == abs(values[code]), hex(code)
            assert (sweep.at_most == 0.0) == (values[code] == 0), hex(code)


@pytest.mark.parametrize("form", ALL, ids=lambda f: f.name)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes(form: Format, data: st.DataObject) -> None:
    width = form.storage.itemsize
    raw = data.draw(st.binary(min_size=width, max_size=40 * width).map(lambda b: b[: len(b) // width * width]))
    codes = np.frombuffer(raw, form.storage)
    values = form.decode(codes)
    cut = data.draw(st.integers(0, len(codes)))
    sweep = swept(form, codes[:cut])
    sweep.add(codes[cut:].view(np.uint8))
    other = swept(form, codes[:cut])
    other.join(swept(form, codes[cut:]))
    for found in (sweep, other):
        assert found.bad == (not np.isfinite(values).all())
        if not found.bad:
            largest = float(np.abs(values).max())
            assert found.at_most >= largest
            assert found.at_most == largest or (found.at_most == 2.0 and largest < 2)
        assert found.varied or bool((codes == codes[0]).all()) or len(codes) > 2


@pytest.mark.parametrize("form", SMALL, ids=lambda f: f.name)
def test_value_of_one_code_is_what_decode_says(form: Format) -> None:
    codes = np.arange(form.max_code + 1, dtype=form.storage)
    assert [value_of(form, int(c)) for c in codes] == form.decode(codes).tolist()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_make_the_checksum_of_the_whole(a: bytes, b: bytes) -> None:
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    assert crc32(b, crc32(a)) == zlib.crc32(a + b), "the fast one, where it is installed, is the same checksum"


@pytest.mark.parametrize("start", [0, 1, 63, 64, 4095, 4096, 16 << 20, (16 << 20) + 17])
def test_bytes_are_placed_at_a_cache_line_and_away_from_their_place_in_the_file(start: int) -> None:
    buffer = _buffer(1 << 18)
    placed = _placed(buffer, start, start + (1 << 18))
    address = placed.__array_interface__["data"][0]
    assert len(placed) == 1 << 18
    assert address % 64 == 0
    assert 64 <= (address - start) % 4096 <= 4096 - 64
