"""Pickles where nobody looks: inside calls, archives, object arrays and files that are broken on purpose.

`search` reads whatever it can of some bytes, builds nothing, and tells `Calls` what their pickles would call. It gives
no verdict: a file whose structure is wrong gets that from its reader, and from here the names that explain it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, pairwise

from .calls import KNOWN, Calls
from .flaws import Flaw, damaged
from .inert import Global
from .machine import load_whole
from .names import is_dangerous, is_known_tool
from .opcodes import NeedMore, survey
from .source import Source, read
from .store import Store

MAX_SEARCH = 4 << 20  # bytes looked at in one file or member, and bytes that one compressed stream may become
MAX_DEPTH = 6
MAX_PICKLES = 1_000

_IDENTIFIER = rb"[A-Za-z_][\w.]{0,99}"
_TWO_LINES = re.compile(rb"[ci](" + _IDENTIFIER + rb")\n(" + _IDENTIFIER + rb")\r?\n")
_TEXTS = re.compile(
    rb"(?:[\x8cU](.)|[XT](.)\0{3}|\x8d(.)\0{7}|V(?=[\w.]+\n)|S(?=(['\"])[\w.]+\4))['\"]?(?=(" + _IDENTIFIER + rb"))",
    re.DOTALL,
)
# Files that are no pickles: code in a layer of Keras, operations of a TensorFlow graph that touch the disk or Python.
_OTHER_LIBRARIES = (
    (re.compile(rb'"class_name":\s*"Lambda"'), "keras.layers", "Lambda"),
    (re.compile(rb"\x12\x09WriteFile"), "tensorflow.io", "write_file"),
    (re.compile(rb"\x12\x08ReadFile"), "tensorflow.io", "read_file"),
    (re.compile(rb"\x12(\x06|\x0bEager)PyFunc"), "tensorflow", "py_function"),
)
_FIRST = frozenset(b"\x80c(]})liIVSNULdF")  # how a pickle can begin


def search(data: bytes, seen: Calls, where: str = "", *, depth: int = 0, run: bool = True) -> None:
    """Tell ``seen`` what the pickles in these bytes would call, archives and compressed streams opened.

    Without ``run`` only for names that are known to be dangerous: the pickles were taken apart before.
    """
    if depth > MAX_DEPTH or not data:
        return
    before, seen.where = seen.where, where or seen.where
    others, seen.nested = seen.nested, []  # of what is being read around this, to be searched under its own name
    try:
        inner = _opened(data)
        if inner is not None:
            for name, member in inner:
                search(member, seen, f"{name}: " if name else where, depth=depth + 1, run=run)
            return
        if run:
            _run_all(data, seen)
        _mentioned(data, seen)
        nested, seen.nested = seen.nested, []
        for one in nested:
            search(one, seen, where, depth=depth + 1)
    finally:
        seen.where = before
        seen.nested = others + seen.nested


def refuse_rest(source: Source, start: int, end: int, seen: Calls, name: str = "") -> None:
    """Raise if bytes follow a pickle where there should be none; another pickle among them is named."""
    if start < end:
        search(read(source, start, min(end - start, MAX_SEARCH)), seen)
        raise damaged(f"{name}goes on for {end - start:,} bytes after its pickle ends")


def search_file(source: Source, seen: Calls) -> None:
    """The same for a file that could not be read to its end."""
    with suppress(Flaw, MemoryError):
        search(read(source, 0, min(source.size, MAX_SEARCH)), seen, run=not seen.ran)


def holds_danger(store: Store, path: str, *, begins: tuple[bytes, ...] | None = None) -> bool:
    """Whether the first megabyte of a file that is no checkpoint names something known to be dangerous.

    With ``begins``, only if it begins in one of these ways.
    """
    seen = Calls()
    try:
        source = store.open(path)
    except Flaw:
        return False
    try:
        head = read(source, 0, min(source.size, 1 << 10))
        if begins is not None and not head.startswith(begins):
            return False
        if head[:6] != b"\x93NUMPY" or b"|O" in head:  # arrays of numbers hold nothing else
            search(read(source, 0, min(source.size, 1 << 20)), seen)
    except (Flaw, MemoryError):
        pass
    finally:
        source.close()
    return any(KNOWN in words for words in seen.reasons())


def looks_like_pickle(data: bytes) -> bool:
    """By its first bytes: a protocol number of 2 to 5."""
    return len(data) > 2 and data[0] == 0x80 and data[1] <= 5


def may_be_pickle(head: bytes) -> bool:
    """The same for protocols 0 and 1 too, which have no number in front: each byte must be an instruction."""
    if looks_like_pickle(head):
        return True
    try:
        return bool(head) and head[0] in _FIRST and survey(head).flaw is None
    except NeedMore:
        return True


def _run_all(data: bytes, seen: Calls) -> None:
    """Pickles in a row, as legacy torch files have them and attacks append them."""
    at = 0
    for _ in range(MAX_PICKLES):
        if at >= len(data) or data[at] not in _FIRST:
            return
        trusted = looks_like_pickle(data[at : at + 3])
        # text can look like a pickle of protocol 0 for a while: what it seems to name counts only if it ends as one
        trial = seen if trusted else Calls()
        trial.where = seen.where
        try:
            at = load_whole(data, seen=trial, start=at).end
        except Flaw:
            return
        finally:
            if trial is not seen and (at or any(map(is_dangerous, trial.called))):
                seen.called = {**trial.called, **seen.called}
                seen.named |= trial.named
                seen.nested += trial.nested


def _mentioned(data: bytes, seen: Calls) -> None:
    """Names known to be dangerous, in bytes that no pickle machine may get to: behind damage, or a raw array."""
    lines = ((m[1], m[2]) for m in _TWO_LINES.finditer(data))
    texts = pairwise(_texts(data)) if b"\x93" in data else ()  # STACK_GLOBAL takes two
    for module, name in chain(lines, texts):
        full = Global(module.decode("latin-1"), name.decode("latin-1"))
        if is_known_tool(full.full.removesuffix(f".{full.name}"), full.name) and full.full not in seen.called:
            seen.name([full])
    for pattern, module, name in _OTHER_LIBRARIES:
        if pattern.search(data):
            seen.name([Global(module, name)])


def _texts(data: bytes) -> Iterator[bytes]:
    """Texts of a pickle that can be a name; the length in front must be right, or weights would seem to name things."""
    for m in _TEXTS.finditer(data):
        length = next((g[0] for g in m.groups()[:3] if g), None)
        if length is None or 0 < length <= len(m[5]):
            yield m[5][:length]


def _opened(data: bytes) -> Iterator[tuple[str, bytes]] | None:
    """The members of an archive or the contents of a compressed stream; None for bytes that are neither."""
    head = data[:8]
    if b"PK\3\4" in data[:4096] or head[:4] in (b"PK\1\2", b"PK\5\6"):
        return _zip_members(data)
    if data[257:262] == b"ustar" or _is_old_tar(data):
        return _tar_members(data)
    if head[:6] == b"\x93NUMPY":
        wide = 2 if data[6:7] <= b"\1" else 4  # bytes that say how long the header is
        return iter([("", data[8 + wide + int.from_bytes(data[8 : 8 + wide], "little") :])])
    for magic, unpack in _STREAMS.items():
        if head.startswith(magic):
            return iter([("", unpack(data))])
    return None


def _zip_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """By the headers in front of the members: a directory can lie, and readers differ in which they believe."""
    starts = [m.start() for m in re.finditer(b"PK\3\4", data)][:MAX_PICKLES]
    for start, end in pairwise([*starts, len(data)]):
        if start + 30 > len(data):
            return
        method, length, n, m = *struct.unpack_from("<H", data, start + 8), *struct.unpack_from("<LHH", data, start + 22)
        name = data[start + 30 : start + 30 + n].decode("utf-8", "replace")
        body = data[start + 30 + n + m : end]
        if method == 8:
            body = _inflate(body, -15)
        elif 0 < length < len(body):
            body = body[:length]
        is_numbers = re.search(r"(^|/)data/\d+$", name) and not looks_like_pickle(body)
        if body and not is_numbers:
            yield name[:80], body
    if (end := data.rfind(b"PK\5\6")) >= 0:  # a comment, or what was appended
        yield "", data[end + 22 :]


def _is_old_tar(data: bytes) -> bool:
    """A tar header without a magic word: its checksum tells."""
    digits = data[148:156].strip(b" \0")
    if len(data) < 512 or not digits or not re.fullmatch(rb"[0-7]{1,7}", digits):
        return False
    return int(digits, 8) == sum(data[:148]) + 8 * 32 + sum(data[156:512])


def _tar_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at + 512 <= len(data):
        digits = data[at + 124 : at + 136].strip(b" \0")
        if not re.fullmatch(rb"[0-7]{1,11}", digits):
            return
        size = int(digits, 8)
        name = data[at : at + 100].rstrip(b"\0").decode("utf-8", "replace")
        if size:
            yield name[:80], data[at + 512 : at + 512 + size]
        at += 512 + -(-size // 512) * 512


def _inflate(data: bytes, bits: int) -> bytes:
    import zlib

    engine = zlib.decompressobj(bits)
    try:
        return engine.decompress(data, MAX_SEARCH)
    except zlib.error:
        return b""


def _bunzip(data: bytes) -> bytes:
    import bz2

    try:
        return bz2.BZ2Decompressor().decompress(data, MAX_SEARCH)
    except (OSError, EOFError, ValueError):
        return b""


def _unxz(data: bytes) -> bytes:
    import lzma

    try:
        return lzma.LZMADecompressor(memlimit=64 << 20).decompress(data, MAX_SEARCH)
    except (lzma.LZMAError, EOFError, ValueError):
        return b""


def _un7z(data: bytes) -> bytes:
    """The first block of a 7z archive, right behind its head: LZMA2, or LZMA with the usual settings."""
    import lzma

    for settings in ({"id": lzma.FILTER_LZMA2}, {"id": lzma.FILTER_LZMA1, "lc": 3, "lp": 0, "pb": 2}):
        engine = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[settings | {"dict_size": 32 << 20}])
        with suppress(lzma.LZMAError, EOFError, ValueError, MemoryError):
            if found := engine.decompress(data[32:], MAX_SEARCH):
                return found
    return data[32:]


_STREAMS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": lambda data: _inflate(data, 31),
    b"\x78\x01": lambda data: _inflate(data, 15),
    b"\x78\x5e": lambda data: _inflate(data, 15),
    b"\x78\x9c": lambda data: _inflate(data, 15),
    b"\x78\xda": lambda data: _inflate(data, 15),
    b"BZh": _bunzip,
    b"\xfd7zXZ\0": _unxz,
    b"\x5d\0\0": _unxz,
    b"7z\xbc\xaf\x27\x1c": _un7z,
}
