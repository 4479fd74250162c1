"""The zip container of torch: stored members only, checked against its own central directory.

Python's ``zipfile`` is not used: it believes more than one directory, inflates, and spends half a kilobyte on
each member. torch writes every member stored (not compressed), once, and without gaps in the meaning; anything
else is refused.
"""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from itertools import pairwise

from .flaws import Flaw, damaged, refused
from .source import RemoteFile, Source, read

MAX_DIRECTORY = 32 << 20

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")


class Archive:
    """The members of a zip file: where the bytes of each stand, how many, and their checksum."""

    def __init__(self, source: Source, *, later: bool = False) -> None:
        self.source = source
        self._index: dict[str, int] = {}  # in small letters: torch does not tell Data.pkl from data.pkl
        self._names: list[str] = []
        self._at, self._size, self._crc = array("Q"), array("Q"), array("I")
        self._central, self._local, self._flags = array("Q"), array("Q"), array("H")
        self.later = array("Q")  # members whose headers are checked after their bytes
        start, size, count = _find_directory(source)
        self._parse(read(source, start, size), start, count, later)
        self._check_overlap(start)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._index

    def names(self) -> list[str]:
        return list(self._names)

    def place(self, name: str) -> tuple[int, int, int]:
        """Offset, size and CRC of a member's bytes."""
        i = self._index[name.lower()]
        return self._at[i], self._size[i], self._crc[i]

    def crc_places(self, name: str) -> list[int]:
        """Every offset at which the member's CRC is written: local header, directory, and behind the data."""
        i = self._index[name.lower()]
        places = [self._local[i] + 14, self._central[i] + 16]
        behind = self._at[i] + self._size[i]
        if behind + 16 <= self.source.size and read(self.source, behind, 4) == b"PK\7\10":
            places.append(behind + 4)
        return places

    def _parse(self, data: bytes, start: int, count: int, later: bool) -> None:
        at, following = 0, _ask_for_headers(self.source, data, start, count, later)
        for _ in range(count):
            if at + _CENTRAL.size > len(data):
                raise damaged("the zip directory ends early")
            (mark, _, _, flags, method, _, _, crc, packed, size, n, m, k, _, _, _, header) = _CENTRAL.unpack_from(
                data, at
            )
            if mark != b"PK\1\2" or at + _CENTRAL.size + n + m + k > len(data):
                raise damaged("the zip directory does not fit together")
            raw = data[at + 46 : at + 46 + n]
            packed, size, header = _wide(data[at + 46 + n : at + 46 + n + m], packed, size, header)
            name = _member_name(raw)
            if method != 0:
                raise refused(f"member {name[:80]} is compressed; torch stores members plain, bombs compress them")
            if flags & 0x1:
                raise refused(f"member {name[:80]} is encrypted")
            if packed != size:
                raise damaged(f"member {name[:80]} has two sizes, {packed:,} and {size:,}")
            if name in self:
                raise refused(f"member {name[:80]} is there twice")
            self._index[name.lower()] = i = len(self._at)
            self._names.append(name)
            self._central.append(start + at)
            self._local.append(header)
            self._size.append(size)
            self._crc.append(crc)
            self._flags.append(flags)
            place = _foretell(following.get(header), header + _LOCAL.size + n, size, flags)
            if place is not None:
                self.later.append(i)
            self._at.append(self._data_offset(i, raw) if place is None else place)
            at += 46 + n + m + k
        if at != len(data):
            raise damaged("the zip directory has more in it than it says")

    def confirm(self) -> bool:
        """Whether the members are where they were thought to be; reads the headers that did not come along."""
        where = [(self._local[i], _LOCAL.size + len(self._names[i].encode())) for i in self.later]
        if isinstance(self.source, RemoteFile):
            self.source.prefetch(where)
        return all(self._data_offset(i, self._names[i].encode()) == self._at[i] for i in self.later)

    def _data_offset(self, i: int, raw: bytes) -> int:
        name, header, size, crc, flags = self._names[i], self._local[i], self._size[i], self._crc[i], self._flags[i]
        local = read(self.source, header, _LOCAL.size + len(raw))
        mark, _, _, method, _, _, local_crc, local_packed, local_size, n, m = _LOCAL.unpack_from(local)
        if mark != b"PK\3\4" or method != 0 or n != len(raw) or local[_LOCAL.size :] != raw:
            raise damaged(f"member {name[:80]} is not where the zip directory says")
        at = header + _LOCAL.size + int(n) + int(m)
        later = bool(flags & 0x8)  # sizes and CRC follow the data instead
        wide = local_size == 0xFFFFFFFF or local_packed == 0xFFFFFFFF
        if not wide and (local_size, local_packed) not in ([(size, size), (0, 0)] if later else [(size, size)]):
            raise damaged(f"member {name[:80]} says {local_size:,} bytes, the zip directory {size:,}")
        if local_crc != crc and not (later and local_crc == 0):
            raise damaged(f"member {name[:80]} has two checksums")
        if at + size > self.source.size:
            raise damaged(f"member {name[:80]} ends beyond the file")
        return at

    def _check_overlap(self, directory: int) -> None:
        order = sorted(range(len(self._at)), key=self._at.__getitem__)
        last = 0
        for i in order:
            if self._at[i] < last:
                raise refused("two zip members share their bytes")
            last = self._at[i] + self._size[i]
        if last > directory:
            raise refused("a zip member reaches into the directory")


def _headers(data: bytes, count: int) -> list[tuple[int, int]]:
    """Where the headers in front of the members should be; what is wrong with the directory is said later."""
    found, at = [], 0
    with suppress(Flaw, struct.error):
        for _ in range(count):
            fields = _CENTRAL.unpack_from(data, at)
            packed, size, n, m, k, header = *fields[8:13], fields[16]
            _, _, header = _wide(data[at + 46 + n : at + 46 + n + m], packed, size, header)
            found.append((header, _LOCAL.size + n))
            at += _CENTRAL.size + n + m + k
    return found


def _ask_for_headers(source: Source, data: bytes, end: int, count: int, later: bool) -> dict[int, int]:
    """Of a file far away, get all headers at once; or have them come with the bytes.

    In that case returned is where the next member begins, by the place of each header that is not here.
    """
    if not isinstance(source, RemoteFile):
        return {}
    headers = _headers(data, count)
    if not later:
        source.prefetch(headers)
        return {}
    missing = [h for h in headers if source.known(*h) is None]
    source.bring(missing)
    following = dict(pairwise([*sorted(at for at, _ in headers), end]))
    return {at: following[at] for at, _ in missing}


def _foretell(following: int | None, header: int, size: int, flags: int) -> int | None:
    """Where a member's bytes begin if the next one follows without a gap and it is aligned as torch aligns them."""
    for behind in (16, 24) if flags & 0x8 else (0,):  # sizes and CRC that follow the data
        at = (following or 0) - behind - size
        if not at % 64 and 0 <= at - header < 1 << 16:
            return at
    return None


def _member_name(raw: bytes) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise damaged("a zip member has a name that is no text") from None
    if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/")):
        raise refused(f"a zip member is called {name[:80]!r}, which leaves the archive or is another's name")
    return name


def _wide(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """The 64-bit numbers of the extra field, where the 32-bit ones say to look there."""
    if 0xFFFFFFFF not in (packed, size, header):
        return packed, size, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = list(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            wanted = [n == 0xFFFFFFFF for n in (size, packed, header)]
            if len(numbers) < sum(wanted):
                break
            size, packed, header = (
                numbers.pop(0) if w else n for w, n in zip(wanted, (size, packed, header), strict=True)
            )
            return packed, size, header
        at += 4 + length
    raise damaged("the zip directory lacks the sizes of a large member")


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Start, size and number of entries of the central directory."""
    if source.size < _END.size:
        raise damaged("is too short for a zip file")
    last = read(source, source.size - _END.size, _END.size)
    # what follows the directory is looked for only where something does: a round trip for a file far away
    tail_at = source.size - _END.size if last.rfind(b"PK\5\6") == 0 else max(0, source.size - _END.size - 0xFFFF)
    tail = read(source, tail_at, source.size - tail_at)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or found + _END.size > len(tail):
        raise damaged("has no zip directory at its end: the file is cut off")
    _, disk, _, _, count, size, start, comment = _END.unpack_from(tail, found)
    end = tail_at + found
    if comment or end + _END.size != source.size or disk not in (0, 0xFFFF):
        raise damaged("has bytes after the end of the zip directory")
    end, count, size, start = _read_end64(source, end, count, size, start)
    if start + size != end:
        raise damaged(f"its zip directory should end at byte {start + size:,} and ends at {end:,}")
    if size > MAX_DIRECTORY or count * _CENTRAL.size > size:
        raise refused(f"claims {count:,} members in a directory of {size:,} bytes")
    return start, size, count


def _read_end64(source: Source, end: int, count: int, size: int, start: int) -> tuple[int, int, int, int]:
    """The 64-bit end record, which torch always writes; where both records speak, they must agree."""
    locator = read(source, end - _LOCATOR64.size, _LOCATOR64.size) if end >= _LOCATOR64.size else b""
    if locator[:4] != b"PK\6\7":
        return end, count, size, start
    at = _LOCATOR64.unpack(locator)[2]
    mark, _, _, _, _, _, _, count64, size64, start64 = _END64.unpack(read(source, at, _END64.size))
    if mark != b"PK\6\6" or at + _END64.size != end - _LOCATOR64.size:
        raise damaged("its zip directory has no 64-bit part where it points")
    pairs = ((count, count64, 0xFFFF), (size, size64, 0xFFFFFFFF), (start, start64, 0xFFFFFFFF))
    if any(narrow not in (wide, full) for narrow, wide, full in pairs):
        raise damaged("its two zip directories disagree")
    return at, count64, size64, start64
