"""torch.save since 1.6: a zip with ``data.pkl`` and one member per storage. Lightning, accelerate, DeepSpeed too."""

from __future__ import annotations

import re
from typing import Any

from .archive import Archive
from .calls import Calls
from .checksum import crc32
from .contents import MAX_TENSORS, Contents, Stored, byte_size, dtype_name, element
from .flaws import damaged, refused, unreadable
from .inert import ArrayRef, Inert, Storage, TensorRef, sizes
from .machine import MAX_PICKLE, load_whole
from .rebuild import is_nested
from .source import Source, read
from .tree import walk

MAX_SHARED = 64  # times that tensors may reach over the bytes of a file, beside the first GB
MAX_VERSION = 10
_SMALL = 1 << 16  # members beside the storages: version, byte order, an id


def read_torch_zip(source: Source, *, check: bool = True, seen: Calls | None = None, later: bool = False) -> Contents:
    """The contents of a torch zip; ``check`` verifies the pickle's own checksum before it is looked at.

    With ``later``, headers of a remote file come along with the bytes behind them, and the caller asks ``confirm``.
    """
    from .hidden import refuse_rest

    seen = Calls() if seen is None else seen
    archive = Archive(source, later=later)
    pickles = [n for n in archive.names() if n.lower().endswith("data.pkl") and re.fullmatch("(?:[^/]+/)?.{8}", n)]
    if not pickles:
        raise unreadable("is a zip file without data.pkl, so torch did not write it")
    if len(pickles) > 1:
        raise refused("has more than one data.pkl")
    prefix = pickles[0][: -len("data.pkl")]
    if archive.names()[0].partition("/")[0].lower() != prefix.rstrip("/").lower():
        raise damaged("does not begin with the folder of data.pkl, so torch does not find it")
    at, size, crc = archive.place(pickles[0])
    if size > MAX_PICKLE:
        raise refused(f"data.pkl has {size >> 20} MB; more than {MAX_PICKLE >> 20} MB are not taken apart")
    data = read(source, at, size)
    if check and crc32(data) != crc:
        raise damaged("data.pkl fails its checksum")
    _check_byte_order(source, archive, prefix)
    loaded = load_whole(data, seen=seen)
    del data
    refuse_rest(source, at + loaded.end, at + size, seen, "data.pkl ")
    contents = Contents(
        format="torch zip",
        tensors=[],
        tree=loaded.value,
        patchable={"data.pkl": at},
        confirm=archive.confirm if archive.later else None,
    )
    used = {pickles[0]}

    def locate(storage: Storage) -> tuple[int, int]:
        name = f"{prefix}data/{storage.key}"
        used.add(name)
        if name not in archive:
            raise damaged(f"the storage {storage.key[:40]} that a tensor needs is not in the file")
        at, size, _ = archive.place(name)
        return at, size

    collect(contents, loaded.value, locate, source.size)
    _search_rest(source, archive, used, seen)
    _check_version(source, archive, prefix)
    for name in archive.names() if check else ():
        start, size, crc = archive.place(name)
        if name.startswith(f"{prefix}data/") or size > _SMALL:
            contents.checksums.add(start, size, crc)
        elif name != pickles[0] and crc32(read(source, start, size)) != crc:
            raise damaged(f"{name[:80]} fails its checksum")
    return contents


def _search_rest(source: Source, archive: Archive, used: set[str], seen: Calls) -> None:
    """Members that no tensor uses: torch.load does not read them, but other programs may, and pickles hide there."""
    from .hidden import may_be_pickle, search

    for name in archive.names():
        at, size, _ = archive.place(name)
        if name in used or not size:
            continue
        if size <= _SMALL or name.endswith((".pkl", ".pickle")) or may_be_pickle(read(source, at, _SMALL)):
            if size > MAX_PICKLE:
                raise refused(f"{name[:80]} is a pickle of {size >> 20} MB that no tensor needs")
            search(read(source, at, size), seen, f"{name[:80]}: ")


def _check_version(source: Source, archive: Archive, prefix: str) -> None:
    """torch reads versions 1 to 10, and nothing without one."""
    name = next((n for n in (f"{prefix}.data/version", f"{prefix}version") if n in archive), None)
    if name is None:
        raise damaged("has no version of the format, without which torch does not read it")
    at, size, _ = archive.place(name)
    version = re.match(rb"\s*\+?(\d{1,9})(?!\d)", read(source, at, min(size, 64)))
    if version is None or not 1 <= int(version[1]) <= MAX_VERSION:
        raise unreadable("has a version of the format that torch does not read")


def _check_byte_order(source: Source, archive: Archive, prefix: str) -> None:
    if f"{prefix}byteorder" in archive:
        at, size, _ = archive.place(f"{prefix}byteorder")
        if read(source, at, min(size, 16)) != b"little":
            raise unreadable("was written on a big-endian machine")


def collect(contents: Contents, root: Any, locate: Any, size: int) -> None:
    """Turn every tensor of the tree into a `Stored`, checked against the storage that holds it."""
    opened: dict[int, tuple[Storage, bytes] | None] = {}
    reach = 0
    for name, ref in walk(root):
        if len(contents.tensors) >= MAX_TENSORS:
            raise refused(f"holds more than {MAX_TENSORS:,} tensors")
        if reach > MAX_SHARED * size + (1 << 30):
            raise refused(f"its tensors reach over more than {reach >> 30} GB, the file has {size >> 20} MB")
        if isinstance(ref, ArrayRef):
            _add_array(contents, name or "array", ref)
            reach += len(ref.data)
            continue
        place = ref.storage if isinstance(ref, TensorRef) else ref
        if isinstance(place, Inert) and id(place) not in opened:  # many tensors can share one
            opened[id(place)] = read_nested(place)
        nested = opened.get(id(place))
        storage = nested[0] if nested else place
        if not isinstance(storage, Storage):
            contents.unread.append(name or "tensor")
            continue
        if not isinstance(ref, TensorRef):  # a storage that stands alone
            ref = TensorRef(storage, 0, sizes((storage.numel,)), None)
        at, held = (0, len(nested[1])) if nested else locate(storage)
        found = _stored(name or "tensor", ref, at, held, storage)
        found.inline = nested[1] if nested else None
        contents.tensors.append(found)
        reach += found.nbytes


def read_nested(value: Inert) -> tuple[Storage, bytes] | None:
    """The storage that plain pickle keeps as a torch file within the pickle."""
    from .legacy import read_storage

    if is_nested(value) and isinstance(value.args, tuple) and len(value.args) == 1 and isinstance(value.args[0], bytes):
        return read_storage(value.args[0])
    return None


def _stored(name: str, ref: TensorRef, at: int, size: int, storage: Storage) -> Stored:
    dtype = ref.dtype or dtype_name(storage.kind)
    found = element(dtype_name(storage.kind))
    if found is None:
        raise unreadable(f"{name}: the storage type {storage.kind[:40]} is not known")
    whole = storage.numel * max(found.bits, 8) // 8
    if whole != size:
        raise damaged(f"{name}: its storage should have {whole:,} bytes and has {size:,}")
    kind = element(dtype)
    if kind is None:
        raise unreadable(f"{name}: the dtype {dtype[:40]!r} is not known")
    width = max(kind.bits, 8) // 8
    span = extent(ref.shape, ref.stride)
    if (ref.offset + span) * width > size:
        raise damaged(f"{name}: reaches beyond its storage")
    return Stored(
        name=name, dtype=dtype, shape=ref.shape, start=at + ref.offset * width, nbytes=span * width, stride=ref.stride
    )


def extent(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> int:
    """From its first to behind its last element, how many elements a view reaches over."""
    span, empty = 1, False
    if stride is None:
        for n in shape:
            span *= n
        return span
    for n, step in zip(shape, stride, strict=True):
        empty = empty or n == 0
        span += (n - 1) * step
    return 0 if empty else span


def _add_array(contents: Contents, name: str, ref: ArrayRef) -> None:
    """A numpy array inside the pickle; only plain little-endian numbers are looked at."""
    kinds = {"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"}
    code = ref.dtype.lstrip("<|=")
    if code in kinds:
        size = 1
        for n in ref.shape:
            size *= n
        if byte_size(kinds[code], size) != len(ref.data):
            raise damaged(f"{name}: an array of {ref.shape} has {len(ref.data):,} bytes")
        contents.tensors.append(
            Stored(name=name, dtype=kinds[code], shape=ref.shape, start=0, nbytes=len(ref.data), inline=ref.data)
        )
    elif not code or code[0] not in "iub?SU":
        contents.unread.append(name)
