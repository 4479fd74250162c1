"""torch.save before 1.6 and plain pickles: pickles in a row, then the storages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .calls import Calls
from .contents import Contents, dtype_name, element
from .flaws import Flaw, damaged, refused, unreadable
from .inert import Storage, TensorRef
from .machine import MAX_PICKLE, Loaded, load, load_whole
from .opcodes import NeedMore
from .source import Memory, Source, read
from .torchzip import collect
from .tree import walk

MAGIC = 0x1950A86A20F9469CFC6C
_FIRST = 1 << 20


@dataclass(frozen=True, slots=True)
class _Legacy:
    """The pickles of a legacy torch file and where its storages stand."""

    body: Loaded
    start: int
    places: dict[str, tuple[int, int]]


def read_pickle(source: Source, seen: Calls) -> Contents:
    """A legacy torch file when it begins with torch's magic number, otherwise a plain pickle."""
    first = _load_at(source, 0, seen)
    if first.value != MAGIC:
        contents = Contents(format="pickle", tensors=[], tree=first.value)
        from .hidden import refuse_rest

        refuse_rest(source, first.end, source.size, seen)
        collect(contents, first.value, _no_storage, source.size)
        return contents
    file = _read_legacy(source, first, seen)
    contents = Contents(format="legacy torch", tensors=[], tree=file.body.value, patchable={"pickle": file.start})

    def locate(storage: Storage) -> tuple[int, int]:
        if storage.key not in file.places:
            raise damaged(f"the storage {storage.key[:40]} that a tensor needs is not in the file")
        return file.places[storage.key]

    collect(contents, file.body.value, locate, source.size)
    return contents


def read_storage(data: bytes) -> tuple[Storage, bytes] | None:
    """The one storage of a legacy torch file held in memory."""
    source = Memory(data)
    seen = Calls()  # what it would call is found by `hidden`, which looks at all nested files
    first = _load_at(source, 0, seen)
    if first.value != MAGIC:
        return None
    file = _read_legacy(source, first, seen)
    storage = file.body.value
    if not isinstance(storage, Storage) or storage.key not in file.places:
        return None
    at, size = file.places[storage.key]
    return storage, data[at : at + size]


def _read_legacy(source: Source, first: Loaded, seen: Calls) -> _Legacy:
    version = _load_at(source, first.end, seen)
    system = _load_at(source, version.end, seen)
    if version.value != 1001:
        raise unreadable(f"has the torch format {str(version.value)[:20]}, which is not known")
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise unreadable("was not written on a little-endian machine")
    body = _load_at(source, system.end, seen)
    keys = _load_at(source, body.end, seen)
    places = _storages(source, keys, _kinds(body.value))
    return _Legacy(body, system.end, places)


def _load_at(source: Source, at: int, seen: Calls) -> Loaded:
    """The pickle at ``at``; how long it is shows only on reading it, so the window grows."""
    size = _FIRST
    while True:
        size = min(size, source.size - at)
        try:
            loaded = load(read(source, at, size), seen=seen)
            return Loaded(loaded.value, at + loaded.end)
        except NeedMore:
            if at + size >= source.size:
                with suppress(Flaw):
                    load_whole(read(source, at, size), seen=seen)  # for what it would have called
                raise damaged("ends in the middle of a pickle: the file is cut off") from None
            if size >= MAX_PICKLE:
                raise refused(f"holds a pickle of more than {MAX_PICKLE >> 20} MB") from None
            size = min(2 * size, MAX_PICKLE)


def _kinds(root: Any) -> dict[str, str]:
    """Which dtype each storage key has, from the tensors that use it."""
    places = (ref.storage if isinstance(ref, TensorRef) else ref for _, ref in walk(root))
    return {place.key: place.kind for place in places if isinstance(place, Storage)}


def _storages(source: Source, keys: Loaded, kinds: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Where each storage stands: a count of elements, then the elements, one storage after another."""
    if not isinstance(keys.value, list):
        raise damaged("its list of storages is no list")
    places: dict[str, tuple[int, int]] = {}
    at = keys.end
    for key in keys.value:
        if not isinstance(key, str) or key in places:
            raise damaged("its list of storages makes no sense")
        kind = element(dtype_name(kinds.get(key, "")))
        if kind is None:
            raise unreadable(f"the type of storage {key[:40]} is not known")
        count = int.from_bytes(read(source, at, 8), "little", signed=True)
        size = count * kind.bits // 8
        if count < 0 or at + 8 + size > source.size:
            raise damaged(f"storage {key[:40]} should have {count:,} elements, but the file ends at {source.size:,}")
        places[key] = (at + 8, size)
        at += 8 + size
    if at != source.size:
        raise damaged(f"goes on for {source.size - at:,} bytes after its last storage")
    return places


def _no_storage(storage: Storage) -> tuple[int, int]:
    raise damaged(f"a tensor refers to storage {storage.key[:40]}, but a plain pickle has none")
