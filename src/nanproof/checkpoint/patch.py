"""A copy of a file with some bytes changed, and with the checksums of a zip made to agree again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO

from .archive import Archive
from .checksum import crc32
from .source import Source, Window

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes to put at ``start``: ``data`` repeated until ``size`` bytes are filled."""

    start: int
    size: int
    data: bytes


def copy_patched(source: Source, file: IO[bytes], patches: list[Patch], zips: list[tuple[int, int]]) -> None:
    """Copy all of ``source``, apply the patches, and correct the checksums of the zip files that ``zips`` places."""
    view = memoryview(bytearray(_CHUNK))
    for at in range(0, source.size, _CHUNK):
        piece = view[: min(_CHUNK, source.size - at)]
        source.read_into(piece, at)
        file.write(piece)
    for patch in patches:
        file.seek(patch.start)
        _fill(file, patch)
    for start, size in zips:
        if any(p.start < start + size and p.start + p.size > start for p in patches):
            _correct_checksums(Archive(Window(source, start, size)), start, file, patches)


def _fill(file: IO[bytes], patch: Patch) -> None:
    block = patch.data * max(1, _CHUNK // len(patch.data)) if patch.data else b""
    left = patch.size
    while left > 0:
        file.write(block[:left])
        left -= len(block)


def _correct_checksums(archive: Archive, base: int, file: IO[bytes], patches: list[Patch]) -> None:
    for name in archive.names():
        at, size, _ = archive.place(name)
        at += base
        if not any(p.start < at + size and p.start + p.size > at for p in patches):
            continue
        crc = 0
        file.seek(at)
        for start in range(0, size, _CHUNK):
            crc = crc32(file.read(min(_CHUNK, size - start)), crc)
        for place in archive.crc_places(name):
            file.seek(base + place)
            file.write(crc.to_bytes(4, "little"))
