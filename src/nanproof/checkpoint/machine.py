"""The second pass over a pickle: a machine that runs its instructions and builds only inert objects.

>>> import pickle
>>> load(pickle.dumps({"a": [1, 2.5]}, protocol=2)).value
{'a': [1, 2.5]}
>>> import os
>>> seen = Calls()
>>> load(pickle.dumps(os.getcwd, protocol=2), seen=seen).value.full, seen.named
('posix.getcwd', {'posix.getcwd'})

Python's own ``pickle`` is not involved: there is no ``find_class`` to get wrong and nothing that could be called.
"""

from __future__ import annotations

import re
import struct
from sys import getrefcount, getsizeof
from typing import Any, NamedTuple

from ..text import plain
from .calls import Calls
from .flaws import Flaw, damaged, refused
from .inert import Global, Located, Ordered, Storage, TensorRef
from .opcodes import NAMES, NeedMore, Survey, survey, survey_cut
from .rebuild import build, check_hash, extend, fill, reduce

MAX_PICKLE = 32 << 20
MAX_DIGITS = 600
MAX_MEMORY = 80 << 20  # the pickle and all objects built from it, by the estimate of `_run`


_CALLING = (0x52, 0x81, 0x92, 0x69, 0x6F)  # REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ
_OURS = 2  # what getrefcount says of an object that only the caller holds: its own name and the argument


class Loaded(NamedTuple):
    """The inert object, and where its pickle ended."""

    value: Any
    end: int


def load(data: bytes, start: int = 0, *, seen: Calls | None = None) -> Loaded:
    """Run the pickle at ``start``; raises `Flaw`, or `NeedMore` when the bytes end before it does.

    What the pickle names and would call is in ``seen`` in any case.
    """
    return _load(data, start, survey(data, start), Calls() if seen is None else seen)


def load_whole(data: bytes, *, seen: Calls | None = None, start: int = 0) -> Loaded:
    """Like `load`, where these bytes are all there is."""
    seen = Calls() if seen is None else seen
    try:
        return load(data, start, seen=seen)
    except NeedMore:
        return _load(data, start, survey_cut(data, start), seen)


def _load(data: bytes, start: int, found: Survey, seen: Calls) -> Loaded:
    names: dict[tuple[str, str], Global] = {}
    at = [start]
    try:
        value = _run(data, start, found, names, at, seen)
    except Flaw:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, UnicodeError, RecursionError):
        if found.flaw is not None and at[0] >= found.end:
            raise found.flaw from None
        word = NAMES.get(data[at[0]], "?") if at[0] < len(data) else "?"
        raise damaged(f"the pickle does not fit together at byte {at[0]:,} ({word})") from None
    finally:
        seen.ran = True
        seen.name(list(names.values()))
    return Loaded(value, found.end)


def _stored(pid: Any, known: dict[str, Storage]) -> Storage | Global:
    """The storage behind torch's persistent id: ("storage", type, key, place, count, view).

    Legacy files also have ("module", class, file, source text) where a pickled module's class stands.
    """
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Global):
        return pid[1]
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], Global):
        raise refused("a persistent id that is not a torch storage")
    if not isinstance(pid[2], str) or type(pid[4]) is not int or pid[4] < 0 or (len(pid) > 5 and pid[5] is not None):
        raise damaged("a storage with a key or a count that makes no sense")
    found = known.get(pid[2])
    if found is None:
        found = known[pid[2]] = Storage(pid[1].name, pid[2], pid[4])
    elif (found.kind, found.numel) != (pid[1].name, pid[4]) and (found.numel or pid[4]):
        # torch would believe the first, wherever it is
        raise refused(f"storage {pid[2][:40]} has two types or sizes")
    return found


def _run(
    data: bytes, at: int, found: Survey, names: dict[tuple[str, str], Global], place: list[int], seen: Calls
) -> Any:
    end, fetched = found.end, found.fetched
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    count = 0  # the memo holds all numbers below this one, and those in ``beyond``: MEMOIZE takes as number its length
    beyond: set[int] = set()
    storages: dict[str, Storage] = {}
    function: Any = None  # of the last call
    weight = end  # bytes in memory: the pickle and all objects alive, estimated from above
    push = stack.append
    from_bytes = int.from_bytes

    def name(module: Any, attribute: Any) -> Global:
        if type(module) is not str or type(attribute) is not str:
            raise TypeError
        known = names.get((module, attribute))
        if known is None:
            nonlocal weight
            weight += 500 + 4 * (len(module) + len(attribute))
            known = names[module, attribute] = Global(module, attribute)
        return known

    while at < end:
        place[0] = at
        op = data[at]
        at += 1
        if op == 0x71 or op == 0x94 or op == 0x72:  # BINPUT, MEMOIZE, LONG_BINPUT
            if op == 0x71:
                key = data[at]
                at += 1
            elif op == 0x72:
                key = from_bytes(data[at : at + 4], "little")
                at += 4
            else:
                key = count + len(beyond)
            if key in fetched:
                memo[key] = stack[-1]
            if key == count and not beyond:
                count += 1
            else:
                count = _filled(key, count, beyond)
                weight += 64
        elif op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
            weight += 8
        elif op == 0x6A:  # LONG_BINGET
            push(memo[from_bytes(data[at : at + 4], "little")])
            at += 4
            weight += 8
        elif op == 0x28:  # MARK
            marks.append(stack)
            stack = []
            push = stack.append
            weight += 64
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
            weight += 8
        elif op == 0x74:  # TUPLE
            made = tuple(stack)
            stack = marks.pop()
            push = stack.append
            push(made)
            weight += 48 - 64
        elif op == 0x58 or op == 0x8C or op == 0x8D:  # BINUNICODE, SHORT_, 8
            width = 4 if op == 0x58 else 1 if op == 0x8C else 8
            length = from_bytes(data[at : at + width], "little")
            at += width
            text = data[at : at + length].decode("utf-8", "surrogatepass")
            push(text)
            at += length
            weight += 64 + (length if text.isascii() else getsizeof(text))
        elif op == 0x51:  # BINPERSID
            pid = stack.pop()
            push(_stored(pid, storages))
            weight += 72
            if getrefcount(pid) == _OURS:
                weight -= 48 + 8 * len(pid)
        elif op == 0x52:  # REDUCE
            args, function = stack.pop(), stack[-1]
            stack[-1] = made = reduce(function, args, seen)
            weight += 96 if made else 64
            if type(made) is not TensorRef:
                weight += _copied(args)
            elif getrefcount(args) == _OURS:  # nobody else keeps the arguments
                weight -= 48 + 8 * len(args)
                if type(args[-1]) is dict and getrefcount(args[-1]) == _OURS:  # nor the empty dict of hooks
                    weight -= 64
        elif op == 0x85 or op == 0x86 or op == 0x87:  # TUPLE1, 2, 3
            size = op - 0x84
            if len(stack) < size:
                raise IndexError
            stack[-size:] = [tuple(stack[-size:])]
            weight += 48
        elif op == 0x89 or op == 0x88 or op == 0x4E:  # NEWFALSE, NEWTRUE, NONE
            push(op == 0x88 if op != 0x4E else None)
            weight += 8
        elif op == 0x4A:  # BININT
            push(from_bytes(data[at : at + 4], "little", signed=True))
            at += 4
            weight += 40
        elif op == 0x4D:  # BININT2
            push(from_bytes(data[at : at + 2], "little"))
            at += 2
            weight += 40
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
            weight += 8
        elif op == 0x75:  # SETITEMS
            flat, stack = stack, marks.pop()
            push = stack.append
            fill(stack[-1], flat, seen)
            weight += 50 * len(flat) - 64
        elif op == 0x73:  # SETITEM
            flat = stack[-2:]
            del stack[-2:]
            fill(stack[-1], flat, seen)
            weight += 100
        elif op == 0x7D or op == 0x5D or op == 0x8F:  # EMPTY_DICT, EMPTY_LIST, EMPTY_SET
            push({} if op == 0x7D else [])
            weight += 72
        elif op == 0x65 or op == 0x90:  # APPENDS, ADDITEMS
            flat, stack = stack, marks.pop()
            push = stack.append
            if op == 0x90:
                check_hash(flat)
            extend(stack[-1], flat, seen)
            weight -= 64
        elif op == 0x61:  # APPEND
            last = stack.pop()
            extend(stack[-1], [last], seen)
            weight += 8
        elif op == 0x47:  # BINFLOAT
            number = struct.unpack_from(">d", data, at)[0]
            if stack and stack[-1] == "scale":  # the one float that a repair may have to find again
                number = Located(number)
                number.at = at
            push(number)
            at += 8
            weight += 40
        elif op == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            last = data.index(b"\n", middle + 1)
            push(name(data[at:middle].decode(), data[middle + 1 : last].decode()))
            at = last + 1
            weight += 8
        elif op == 0x93:  # STACK_GLOBAL
            attribute = stack.pop()
            stack[-1] = name(stack[-1], attribute)
        elif op == 0x62:  # BUILD
            state = stack.pop()
            if type(state) is dict and getrefcount(state) != _OURS:  # the object has it as it is now
                state = dict(state)
                weight += 100 * len(state)
            build(stack[-1], state, seen)
        elif op == 0x81:  # NEWOBJ
            args, function = stack.pop(), stack[-1]
            stack[-1] = reduce(function, args, seen)
            weight += 96 + _copied(args)
        elif op == 0x92:  # NEWOBJ_EX
            words, args, function = stack.pop(), stack.pop(), stack.pop()
            if words or not isinstance(words, dict):
                seen.call(function, (args, words))
            push(reduce(function, args, seen))
            weight += 96 + _copied(args)
        elif op in (0x42, 0x43, 0x8E, 0x96, 0x54, 0x55):  # bytes and, from Python 2, byte strings
            width = 1 if op in (0x43, 0x55) else 8 if op in (0x8E, 0x96) else 4
            length = from_bytes(data[at : at + width], "little")
            at += width
            raw = data[at : at + length]
            at += length
            push(raw.decode("latin1") if op in (0x54, 0x55) else seen.hold(raw))
            weight += 64 + length
        elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
            width = 1 if op == 0x8A else 4
            length = from_bytes(data[at : at + width], "little")
            at += width
            push(from_bytes(data[at : at + length], "little", signed=True))
            at += length
            weight += 48 + length
        elif op == 0x80:  # PROTO
            if data[at] > 5:
                raise damaged(f"pickle protocol {data[at]} does not exist")
            at += 1
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x2E:  # STOP
            if marks or len(stack) != 1:
                raise IndexError
            return stack[0]
        elif op in (0x6C, 0x64, 0x91):  # LIST, DICT, FROZENSET
            flat, stack = stack, marks.pop()
            push = stack.append
            push({} if op == 0x64 else flat)
            if op == 0x91:
                check_hash(flat)
            if op == 0x64:
                fill(stack[-1], flat, seen)
                weight += 50 * len(flat)
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                stack = marks.pop()
                push = stack.append
        elif op == 0x31:  # POP_MARK
            stack = marks.pop()
            push = stack.append
        elif op == 0x32:  # DUP
            push(stack[-1])
            weight += 8
        elif op == 0x69 or op == 0x6F:  # INST, OBJ: the calls of protocols 0 and 1
            flat, stack = stack, marks.pop()
            push = stack.append
            if op == 0x69:
                middle = data.index(b"\n", at)
                last = data.index(b"\n", middle + 1)
                flat.insert(0, name(data[at:middle].decode(), data[middle + 1 : last].decode()))
                at = last + 1
            args, function = tuple(flat[1:]), flat[0]
            push(reduce(function, args, seen))
            weight += 96 + _copied(args)
        elif op in (0x82, 0x83, 0x84):  # EXT1, 2, 4: a name by the number that a program registered it under
            width = {0x82: 1, 0x83: 2, 0x84: 4}[op]
            push(name("copyreg extension", str(from_bytes(data[at : at + width], "little", signed=width == 4))))
            at += width
            weight += 8
        elif op in (0x70, 0x67, 0x49, 0x4C, 0x46, 0x53, 0x56):  # PUT, GET, INT, LONG, FLOAT, STRING, UNICODE
            last = data.index(b"\n", at)
            value = _spelled(op, data[at:last])
            if op == 0x70:
                memo[value] = stack[-1]
                count = _filled(value, count, beyond)
            else:
                push(memo[value] if op == 0x67 else value)
            weight += 64 + 4 * (last - at)
            at = last + 1
        elif op == 0x50:  # PERSID
            raise refused("a persistent id that is not a torch storage")
        else:  # NEXT_BUFFER, READONLY_BUFFER
            raise refused("the pickle needs buffers that are not in the file")
        if weight > MAX_MEMORY:
            by = f", by calls of {plain(function.full[:80])}" if op in _CALLING and isinstance(function, Global) else ""
            raise refused(f"the pickle needs more than {MAX_MEMORY >> 20} MB of memory by byte {at:,}{by}")
    raise found.flaw or IndexError


_EACH: dict[type, int] = {
    list: 8,
    tuple: 8,
    dict: 100,
    Ordered: 100,
    str: 1,
    bytes: 1,
}  # bytes that a copy takes for each part


def _copied(args: Any) -> int:
    """The memory of what a call makes of its first argument, which a memo can hand to a thousand calls."""
    if type(args) is not tuple or not args or type(args[0]) not in _EACH:
        return 0
    return _EACH[type(args[0])] * len(args[0])


def _filled(key: int, count: int, beyond: set[int]) -> int:
    """A memo entry out of turn: how many numbers from 0 on are taken now."""
    if key > count:
        beyond.add(key)
    elif key == count:
        count += 1
        while count in beyond:
            beyond.discard(count)
            count += 1
    return count


_ESCAPE = re.compile(rb"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2})")
_NUMBER = re.compile(rb"-?(0|[1-9]\d*)L?")


def _spelled(op: int, text: bytes) -> Any:
    """A value in the text forms of protocol 0."""
    if len(text) > MAX_DIGITS and op not in (0x53, 0x56):
        raise ValueError
    if op in (0x49, 0x4C, 0x67, 0x70):  # INT, LONG, GET, PUT; INT also for booleans
        if op == 0x49 and text in (b"00", b"01"):
            return text == b"01"
        if not _NUMBER.fullmatch(text):  # Python would read 010 as eight
            raise damaged(f"the pickle spells a number {text[:20].decode('ascii', 'replace')!r}")
        return int(text.removesuffix(b"L"))
    if op == 0x46:
        return float(text)
    if op == 0x56:
        return text.decode("raw-unicode-escape")
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"\"'":
        raise ValueError
    if b"\\" in _ESCAPE.sub(b"", text):  # Python takes \\u in bytes for two characters
        raise damaged("the pickle spells a text in a way that no version of Python writes")
    return text[1:-1].decode("unicode-escape", "replace")
