"""Would ``torch.load(weights_only=True)`` accept the file? Its machine, followed with models of its objects.

It answers for torch 2.13 without ``add_safe_globals``, where the device that a storage was on exists. torch 2.15 also
refuses sparse tensors with indices beyond their size, whose values are not read here.
"""

from __future__ import annotations

import re
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable
from pickle import decode_long
from typing import Any

from .archive import Archive
from .legacy import MAGIC
from .machine import MAX_PICKLE
from .opcodes import NAMES as OPCODES
from .source import Source, read
from .torch_calls import MAX_MADE, NAMES, Storage, Unsure, build, call, check_key, create, dtype_of, element_size

UNSURE = "which is not followed here"
"""Ends a reason of which torch may think otherwise."""
_DEVICES = re.compile("cpu$|mps|meta$|(cuda|hpu|xpu|mtia|privateuseone)($|:|[0-9])")
MAX_MEMORY = 256 << 20  # of all objects, by the weights below: what is freed again counts too
_WEIGHTS = {
    ord("]"): 64,
    ord("}"): 72,
    0x8F: 224,
    ord("("): 64,
    ord("t"): 72,
    0x85: 56,
    0x86: 64,
    0x87: 72,
    ord("R"): 128,
}
_UNTYPED = NAMES["torch.storage.UntypedStorage"]
_WRONG = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    AssertionError,
    struct.error,
    NotImplementedError,
)


class Refused(Exception):
    """torch refuses the file, for this reason."""


def reasons(source: Source) -> list[str]:
    """Why torch would refuse a file, or may; nothing if it accepts it."""
    try:
        if read(source, 0, 4) == b"PK\3\4":
            _load_zip(source)
        else:
            _load_legacy(source)
    except Refused as why:
        return [str(why)]
    except Unsure as why:
        return [f"{why}, {UNSURE}"]
    except _WRONG as why:
        return [f"it does not fit together: {why}"[:200]]
    return []


def _load_zip(source: Source) -> None:
    archive = Archive(source)
    names = archive.names()
    prefix = names[0].partition("/")[0] + "/" if names else ""

    def record(name: str) -> bytes:
        if prefix + name not in archive:
            raise Refused(f"it has no {name}")
        at, size, _ = archive.place(prefix + name)
        if size > MAX_PICKLE:
            raise Unsure(f"its {name} has {size >> 20} MB")
        return read(source, at, size)

    version = record(".data/version" if prefix + ".data/version" in archive else "version")
    if not re.match(rb"\s*\+?0*([1-9]|10)(\D|$)", version):
        raise Refused("its version is not known")
    if prefix + "constants.pkl" in archive:
        raise Refused("it is a TorchScript archive")
    if prefix + "byteorder" in archive and record("byteorder") not in (b"little", b"big"):
        raise Refused("its byte order is not known")
    if prefix + ".storage_alignment" in archive:
        int(record(".storage_alignment"))
    loaded: dict[Any, Storage] = {}

    def persistent(pid: tuple[Any, ...]) -> Storage:
        kind, key, location, numel = pid[1:]
        dtype = "uint8" if kind is _UNTYPED else dtype_of(kind)
        if check_key(key) in loaded:
            return loaded[key]
        nbytes = _times(numel, element_size(dtype))
        name = f"{prefix}data/{key!s}" if isinstance(key, str | int | float | bytes | None) else ""
        if name not in archive or archive.place(name)[1] != nbytes:
            raise Refused(f"the storage {str(key)[:40]!r} is not in the file, or of another size")
        _check_location(location)
        storage = Storage(dtype, nbytes)
        if nbytes:
            loaded[key] = storage
        return storage

    _Machine(record("data.pkl"), persistent).load()


def _load_legacy(source: Source) -> None:
    data = read(source, 0, min(source.size, MAX_PICKLE))
    try:
        _follow_legacy(source, data)
    except EOFError:
        if len(data) == source.size:
            raise
        raise Unsure("its pickles are large") from None


def _follow_legacy(source: Source, data: bytes) -> None:
    loaded: dict[Any, Storage] = {}

    def persistent(pid: tuple[Any, ...]) -> Storage:
        kind, key, location, numel, view = pid[1:]
        if isinstance(location, bytes):
            location = location.decode("ascii")
        dtype = dtype_of(kind)
        nbytes = _times(numel, element_size(dtype))
        if check_key(key) not in loaded:
            if nbytes is None:
                raise Unsure("it makes a storage of what is no number")
            if not isinstance(nbytes, int) or nbytes < 0:
                raise Refused("a storage has a size that is none")
            if nbytes > source.size:
                raise Unsure("it makes a storage larger than the file")
            _check_location(location)
            found = loaded[key] = Storage(dtype, nbytes, grows=True)
        else:
            found = loaded[key] if loaded[key].nbytes else Storage(dtype, 0, grows=True)
        if view is not None:
            _, _, _ = view
            raise Unsure("it has a view of a storage")
        return found

    def refuse(_: object) -> Any:
        raise Refused("it has a storage where torch expects none")

    first = _Machine(data, refuse)
    if first.load() != MAGIC:
        raise Refused("it is a plain pickle, which torch.load does not read")
    second = _Machine(data, refuse, first.at)
    if second.load() != 1001:
        raise Refused("its format is not known")
    third = _Machine(data, refuse, second.at)
    third.load()
    body = _Machine(data, persistent, third.at)
    body.load()
    last = _Machine(data, refuse, body.at)
    keys, at = last.load(), last.at
    for key in keys:
        storage = loaded[check_key(key)]
        if at + 8 > source.size:
            raise Refused("it ends before its storages")
        count = int.from_bytes(read(source, at, 8), "little", signed=True)
        nbytes = count * element_size(storage.dtype)
        if nbytes != storage.nbytes or at + 8 + nbytes > source.size:
            raise Refused(f"the storage {str(key)[:40]!r} is not in the file, or of another size")
        at += 8 + nbytes


def _times(numel: Any, size: int) -> Any:
    """``numel * size``; None for a sequence, which would only be repeated."""
    return None if isinstance(numel, str | bytes | list | tuple) else numel * size


def _check_location(location: Any) -> None:
    if isinstance(location, bytes):
        location = location.decode("ascii")
    if not isinstance(location, str) or not _DEVICES.match(location):
        raise Refused(f"a storage is on the device {str(location)[:40]!r}")


class _Machine:
    """torch's unpickler, instruction by instruction."""

    def __init__(self, data: bytes, persistent: Callable[[tuple[Any, ...]], Storage], at: int = 0) -> None:
        self.data, self.persistent, self.at = data, persistent, at
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.made = self.weight = 0

    def load(self) -> Any:
        """The object, or a model of it; raises where torch does."""
        while True:
            place, code = self.at, self.take(1)
            if not code:
                raise EOFError("its pickle ends early")
            known = _INSTRUCTIONS.get(code[0])
            if known is None:
                raise Refused(f"its pickle uses {OPCODES.get(code[0], hex(code[0]))} at byte {place:,}")
            if code == b".":
                return self.stack.pop()
            self.weight += _WEIGHTS.get(code[0], 16)
            if self.weight > MAX_MEMORY:
                raise Unsure("it needs much memory")
            try:
                known(self)
            except _WRONG as why:
                word = OPCODES[code[0]]
                raise Refused(f"its pickle does not fit together at byte {place:,} ({word}): {why}"[:200]) from None

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        self.at += len(found)
        return found

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        return self.take(end + 1 - self.at if end >= 0 else len(self.data))[:-1].decode()

    def items(self) -> list[Any]:
        found, self.stack = self.stack, self.marked.pop()
        return found

    def name(self) -> None:
        module, name = self.line(), self.line()
        module, name = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        full = f"{module}.{name}"
        if full not in NAMES:
            raise Refused(f"it names {full[:120]}")
        self.stack.append(NAMES[full])

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.count(call(self.stack[-1], args))

    def new(self) -> None:
        args = self.stack.pop()
        self.stack.append(self.count(create(self.stack.pop(), args)))

    def count(self, made: Any) -> Any:
        """What calls copied, all in all."""
        self.made += len(made) if isinstance(made, bytes | bytearray | dict | set | tuple) else 0
        if self.made > MAX_MADE:
            raise Unsure("it fills more memory than is followed here")
        return made

    def state(self) -> None:
        state = self.stack.pop()
        self.count(state)
        build(self.stack[-1], state)

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter):
            raise TypeError(f"it sets an item of a {type(target).__name__}")
        for i in range(0, len(items), 2):
            target[check_key(items[i])] = items[i + 1]

    def pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def tuple_of_mark(self) -> None:
        items = self.items()
        self.stack.append((*items,))

    def tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("it takes more than there is")
        self.stack[-count:] = [(*self.stack[-count:],)]

    def persist(self) -> None:
        pid = self.stack.pop()
        kind = pid[0] if type(pid) is tuple else None
        if (kind.decode("ascii") if isinstance(kind, bytes) else kind) != "storage":
            raise Refused("it has a persistent id that is no storage")
        self.stack.append(self.persistent(pid))

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, length: int, errors: str) -> str:
        return str(self.take(length), "utf-8", errors)


def _pushed(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m))


_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): known
    for code, known in {
        "c": _Machine.name,
        "\x81": _Machine.new,
        "R": _Machine.reduce,
        "b": _Machine.state,
        "(": _Machine.mark,
        "Q": _Machine.persist,
        "t": _Machine.tuple_of_mark,
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.items()),
        "s": lambda m: m.set_items(m.pair()),
        "u": lambda m: m.set_items(m.items()),
        "\x85": lambda m: m.tuple(1),
        "\x86": lambda m: m.tuple(2),
        "\x87": lambda m: m.tuple(3),
        "N": _pushed(lambda m: None),
        "\x89": _pushed(lambda m: False),
        "\x88": _pushed(lambda m: True),
        ")": _pushed(lambda m: ()),
        "]": _pushed(lambda m: []),
        "}": _pushed(lambda m: {}),
        "\x8f": _pushed(lambda m: set()),
        "J": _pushed(lambda m: m.number("<i")),
        "K": _pushed(lambda m: m.take(1)[0]),
        "M": _pushed(lambda m: m.number("<H")),
        "G": _pushed(lambda m: m.number(">d")),
        "X": _pushed(lambda m: m.text(m.number("<I"), "surrogatepass")),
        "U": _pushed(lambda m: m.text(m.take(1)[0], "strict")),
        "h": _pushed(lambda m: m.memo[m.take(1)[0]]),
        "j": _pushed(lambda m: m.memo[m.number("<I")]),
        "q": lambda m: m.put(m.take(1)[0]),
        "r": lambda m: m.put(m.number("<I")),
        "\x8a": _pushed(lambda m: decode_long(m.take(m.take(1)[0]))),
        "\x80": lambda m: m.take(1)[0],
        ".": lambda m: None,
    }.items()
}
