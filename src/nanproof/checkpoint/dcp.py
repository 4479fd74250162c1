"""torch.distributed.checkpoint folders: ``.metadata`` says which bytes of which ``.distcp`` file hold what.

``.metadata`` is a plain pickle that torch's own reader executes; here it is taken apart like any other. Each
entry is a whole torch file of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .calls import Calls
from .contents import Contents, Stored
from .flaws import Flaw, damaged, refused, unreadable
from .formats import looks_like_safetensors
from .inert import Inert
from .machine import MAX_PICKLE, load_whole
from .safetensors import read_safetensors
from .source import BESIDE, TOGETHER, RemoteFile, Source, Window, read
from .torchzip import read_torch_zip


@dataclass(slots=True, kw_only=True)
class Entry:
    """One blob: the name in the state dict, where it begins in the whole tensor, and where its bytes are."""

    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    at: int
    length: int


@dataclass(slots=True, kw_only=True)
class Index:
    """What ``.metadata`` says, by file."""

    files: dict[str, list[Entry]] = field(default_factory=dict)


def read_index(source: Source, seen: Calls) -> Index:
    """The table of contents of a DCP folder."""
    from .hidden import refuse_rest

    if source.size > MAX_PICKLE:
        raise refused(f".metadata has {source.size >> 20} MB; more than {MAX_PICKLE >> 20} MB are not taken apart")
    loaded = load_whole(read(source, 0, source.size), seen=seen)
    refuse_rest(source, loaded.end, source.size, seen, ".metadata ")
    fields = loaded.value.fields if isinstance(loaded.value, Inert) else {}
    described, placed = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(placed, dict):
        raise unreadable(".metadata is not what torch.distributed.checkpoint writes")
    index = Index()
    volumes: dict[str, int] = {}
    pieces: set[tuple[str, tuple[int, ...] | None]] = set()
    chunks = {name: _chunks(value) for name, value in described.items() if isinstance(name, str)}
    for key, info in placed.items():
        entry, file = _entry(key, info, chunks)
        if (entry.name, entry.offsets) in pieces:  # counted twice, it would hide one that is missing
            raise damaged(f"{entry.name[:80]}: two entries hold the same piece of it")
        pieces.add((entry.name, entry.offsets))
        index.files.setdefault(file, []).append(entry)
        volumes[entry.name] = volumes.get(entry.name, 0) + (math.prod(entry.sizes) if entry.sizes is not None else 0)
    _check_complete(described, chunks, volumes)
    return index


def _check_complete(described: dict[Any, Any], chunks: dict[str, Any], volumes: dict[str, int]) -> None:
    for name, value in described.items():
        if name not in volumes:
            raise damaged(f"{str(name)[:80]}: no file holds it")
        size = value.fields.get("size") if isinstance(value, Inert) else None
        if chunks.get(name) is not None and isinstance(size, tuple):
            whole = math.prod(n for n in size if isinstance(n, int))
            if volumes[name] < whole:
                raise damaged(f"{name[:80]}: the files hold {volumes[name]:,} of its {whole:,} elements")


def _chunks(value: Any) -> dict[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the pieces of a tensor; None for what is not a tensor."""
    pieces = value.fields.get("chunks") if isinstance(value, Inert) else None
    if not isinstance(pieces, list):
        return None
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for piece in pieces:
        fields = piece.fields if isinstance(piece, Inert) else {}
        offsets, sizes = _numbers(fields.get("offsets")), _numbers(fields.get("sizes"))
        if offsets is None or sizes is None:
            raise damaged(".metadata describes a piece of a tensor that makes no sense")
        found[offsets] = sizes
    return found


def _numbers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, tuple) and len(value) < 65 and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return value
    return None


def _entry(key: Any, info: Any, chunks: dict[str, Any]) -> tuple[Entry, str]:
    where = info.fields if isinstance(info, Inert) else {}
    what = key.fields if isinstance(key, Inert) else {}
    name, file, at, length = what.get("fqn"), where.get("relative_path"), where.get("offset"), where.get("length")
    if not isinstance(name, str) or not isinstance(file, str) or type(at) is not int or type(length) is not int:
        raise damaged(".metadata has an entry that makes no sense")
    if where.get("transform_descriptors"):
        raise unreadable("its entries are compressed or encrypted by a storage transform")
    offsets = _numbers(what.get("offset")) if what.get("offset") is not None else None
    pieces = chunks.get(name)
    sizes = None
    if pieces is not None:
        sizes = pieces.get(offsets if offsets is not None else next(iter(pieces), ()))
        if sizes is None:
            raise damaged(f"{name[:80]}: a file holds a piece that .metadata does not describe")
    return Entry(name=name, offsets=offsets, sizes=sizes, at=at, length=length), file


def read_distcp(source: Source, entries: list[Entry], *, check: bool = True, seen: Calls | None = None) -> Contents:
    """The tensors of one ``.distcp`` file; the trees of its small objects are kept by name."""
    contents = Contents(format="DCP", tensors=[], tree={})
    entries = sorted(entries, key=lambda e: e.at)
    last = 0
    for i, entry in enumerate(entries):
        if isinstance(source, RemoteFile) and not i % TOGETHER:
            source.forget()
            source.prefetch(_ends(entries[i : i + TOGETHER]))
        if entry.at < last:
            raise damaged(f"{entry.name[:80]}: shares its bytes with another entry")
        last = entry.at + entry.length
        window = Window(source, entry.at, entry.length)
        try:
            inner = _read_blob(window, check, seen)
        except Flaw as flaw:
            raise Flaw(flaw.health, f"{entry.name[:80]}: {flaw.why}") from None
        _move(inner, entry, window.start)
        contents.tensors += inner.tensors
        contents.checksums.take(inner.checksums, window.start)
        contents.notes += [n for n in inner.notes if n not in contents.notes]
        contents.unread += inner.unread
        if entry.sizes is None:
            contents.tree[entry.name] = inner.tree
    return contents


def _ends(entries: list[Entry]) -> list[tuple[int, int]]:
    """The ranges around which entries begin and end: all that is read of them but their numbers."""
    found: list[tuple[int, int]] = []
    for entry in entries:
        end = entry.at + entry.length
        for at, stop in (entry.at, min(entry.at + BESIDE, end)), (max(end - BESIDE, entry.at), end):
            if found and at <= sum(found[-1]):
                at, stop = found[-1][0], max(stop, sum(found.pop()))
            found.append((at, stop - at))
    return found


def _read_blob(window: Window, check: bool, seen: Calls | None) -> Contents:
    head = read(window, 0, min(window.size, 16))
    if looks_like_safetensors(head, window.size):
        return read_safetensors(window)
    return read_torch_zip(window, check=check, seen=seen)


def _move(inner: Contents, entry: Entry, start: int) -> None:
    """From the blob's own offsets and names to those of the file and the state dict."""
    for stored in inner.tensors:
        stored.start += 0 if stored.inline is not None else start
        stored.name = entry.name if entry.sizes is not None else f"{entry.name}.{stored.name}"
        if entry.offsets is not None and any(entry.offsets):
            stored.name += f"@{','.join(map(str, entry.offsets))}"
    if entry.sizes is not None:
        _check_shape(inner.tensors, entry)


def _check_shape(tensors: list[Stored], entry: Entry) -> None:
    if len(tensors) != 1 or tensors[0].shape != entry.sizes:
        raise damaged(f"{entry.name[:80]}: its bytes are not the tensor of shape {entry.sizes} that .metadata says")
