"""What the calls and the states in a pickle stand for, by the text of their names.

Only what real checkpoints do is followed. A name that they need, called in a way that they do not (a tensor of a list,
`bytearray` of a number), is told to `Calls` like one that they do not need: what it makes stands nowhere in the file.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from ..floats import find_format
from .calls import Calls
from .contents import dtype_name
from .flaws import damaged, refused
from .inert import ArrayRef, Global, Inert, Ordered, Storage, TensorRef, sizes, tensor
from .names import BARE, WEIGHTS_ONLY

_COPIES = frozenset(
    [f"{module}.{kind}" for module in ("builtins", "__builtin__") for kind in ("list", "tuple", "set", "frozenset")]
    + ["collections.deque", "torch.Size"]
)
_MAPPINGS = ("collections.OrderedDict", "collections.Counter", "builtins.dict", "__builtin__.dict")
_BYTES = ("builtins.bytes", "builtins.bytearray", "__builtin__.bytearray")
_SUBCLASSES = re.compile(
    r"(pytorch_)?lightning.*\.AttributeDict"
)  # of a dictionary; all that take items and are not it
_LISTS = ("collections.deque", "builtins.list", "__builtin__.list")


_NUMBERS = frozenset(
    [f"builtins.{kind}" for kind in ("bool", "complex", "int", "str")]
    + [f"__builtin__.{kind}" for kind in ("complex", "int", "long", "str", "unicode")]
)


def _is_plain(value: Any) -> bool:
    """A number or a short text."""
    if isinstance(value, int):
        return value.bit_length() <= 64
    return value is None or isinstance(value, float) or (isinstance(value, str | bytes) and len(value) <= 4_000)


def reduce(function: Any, args: Any, seen: Calls) -> Any:
    """What ``function(*args)`` stands for; a call that no checkpoint makes is told to ``seen``."""
    if not isinstance(function, Global):
        seen.call(function, args)
        return Inert(function.kind if isinstance(function, Inert) else None, (function, args))
    name = function.full
    if not function.ordinary or not isinstance(args, tuple):
        seen.call(function, args)
        return Inert(function, args)
    try:
        match name:
            case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor":
                return tensor(*args[:4])
            case "collections.OrderedDict" if not args:
                return Ordered()
            case "torch._utils._rebuild_parameter":
                return args[0]
            case _:
                found = _rebuilt(function, args, seen)
    except (IndexError, TypeError, ValueError, AttributeError, UnicodeError):
        raise damaged(f"{name} is called with arguments that do not fit it") from None
    if found is not None:
        return found
    seen.passed(name, args)
    return Inert(function, tuple(dict(a) if type(a) is dict else a for a in args))  # which may change later


def _rebuilt(function: Global, args: tuple[Any, ...], seen: Calls) -> Any:
    """The rarer calls; None for an object of which nothing is known but its parts."""
    name = function.full
    match name:
        case "torch._utils._rebuild_parameter_with_state":
            return _with_state(function, args[0], args[3], seen)
        case "torch._tensor._rebuild_from_type_v2":
            seen.passed(name, args[1:2])
            kind = args[1] if isinstance(args[1], Global) else function
            return _with_state(kind, reduce(args[0], args[2], seen), args[3], seen)
        case "torch._utils._rebuild_tensor_v3":
            found = tensor(*args[:4])
            if not isinstance(args[6], Global) or args[6].full not in WEIGHTS_ONLY:
                raise ValueError
            found.dtype = args[6].name
            return found
        case "torch._utils._rebuild_meta_tensor_no_storage":
            return TensorRef(None, 0, sizes(args[1]), None)  # without any numbers
        case "torch._utils._rebuild_qtensor":
            found = tensor(*args[:4])
            found.quantizer = tuple(map(_scale, args[4]))
            return found
        case "torch._utils._rebuild_device_tensor_from_cpu_tensor" | "torch._utils._rebuild_device_tensor_from_numpy":
            if not _fits(args[0], args[1]):
                seen.call(function, args, why="which can make Inf of the numbers")
        case "torch.storage._load_from_bytes":
            if not isinstance(args[0], bytes):
                raise ValueError
            seen.nested.append(args[0])
        case "copyreg.__newobj__" | "copy_reg.__newobj__":
            return reduce(args[0], args[1:], seen)
        case "copyreg._reconstructor" | "copy_reg._reconstructor":
            seen.passed(name, args)
            if args[2] is not None and args[0].full in BARE:
                seen.call(args[0], args[2:], why=_UNUSUAL)
            return Inert(args[0], args[2:])
        case "_codecs.encode" if type(args[0]) is str and args[1:] == ("latin1",):
            return seen.hold(args[0].encode("latin1"))
        case _ if name in _NUMBERS and not all(map(_is_plain, args)):
            seen.call(function, args, why=_UNUSUAL)  # a text or a hash of what holds itself many times takes for ever
        case "builtins.float" | "__builtin__.float" if args and type(args[0]) in (str, float):
            return float(args[0][:100] if type(args[0]) is str else args[0])
        case "numpy.core.numeric._frombuffer" | "numpy._core.numeric._frombuffer" if isinstance(args[0], bytes):
            return ArrayRef(_numpy_dtype(args[1]), sizes(args[2]), args[0])  # arrays since protocol 5
        case "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar":
            return ArrayRef(_numpy_dtype(args[0]), (), args[1] if isinstance(args[1], bytes) else b"")
        case "numpy.core.multiarray._reconstruct" | "numpy._core.multiarray._reconstruct" if args[1] == (0,):
            return None
        case "collections.defaultdict":
            seen.passed(name, args)
            return _copied(function, args[1:], seen)
        case _ if name in _MAPPINGS:
            return _copied(function, args, seen)
        case _ if name in _COPIES and args:
            return _listed(function, args, seen)
        case _ if name in _BYTES and args:
            if type(args[0]) is bytes and len(args) == 1:
                return args[0]
            if type(args[0]) is str and args[1:] in (("latin-1",), ("latin1",)):
                return seen.hold(args[0].encode("latin1"))
            seen.call(function, args, why=_UNUSUAL)
        case _ if name in BARE or name.endswith(("._frombuffer", "._reconstruct", "_codecs.encode", ".__newobj_ex__")):
            if args:
                seen.call(function, args, why=_UNUSUAL)
    return None


_UNUSUAL = "in a way that checkpoints do not need"


def _with_state(kind: Global, made: Any, state: Any, seen: Calls) -> Any:
    """A tensor whose attributes are set one by one, its data perhaps among them."""
    if isinstance(made, TensorRef) and not state:
        return made
    kept = Inert(kind, (made,))
    build(kept, state, seen)
    return kept


def _copied(function: Global, args: tuple[Any, ...], seen: Calls) -> dict[Any, Any]:
    """A dictionary of what is given: another one, or pairs as Python 2 wrote them. What is given may change later."""
    found: dict[Any, Any] = {} if function.name in ("dict", "defaultdict") else Ordered()
    given = args[0] if args else {}
    if type(given) in (dict, Ordered):
        found.update(given)
    elif type(given) in (list, tuple) and function.name != "Counter":
        fill(found, [part for key, value in given for part in (key, value)], seen)
    else:
        seen.call(function, args, why=_UNUSUAL)
    return found


def _listed(function: Global, args: tuple[Any, ...], seen: Calls) -> Any:
    """A copy of a list or tuple."""
    if type(args[0]) not in (list, tuple):
        seen.call(function, args, why=_UNUSUAL)
        return Inert(function, args)
    if function.name in ("set", "frozenset"):
        check_hash(list(args[0]))
    if function.name == "deque":
        return None
    return tuple(args[0]) if function.name in ("tuple", "Size") else list(args[0])


def _fits(value: Any, dtype: Any) -> bool:
    """Whether a tensor or an array can become another dtype without overflow."""
    if isinstance(value, TensorRef) and isinstance(value.storage, Storage):
        old = value.dtype or dtype_name(value.storage.kind)
    else:
        array = value if isinstance(value, ArrayRef) else array_of(value) if isinstance(value, Inert) else None
        old = {"f2": "float16", "f4": "float32", "f8": "float64"}.get(array.dtype.lstrip("<|="), "") if array else ""
    new = dtype.name if isinstance(dtype, Global) and dtype.full in WEIGHTS_ONLY else ""
    wide, narrow = find_format(old), find_format(new)
    return bool(old) and (old == new or (wide is not None and narrow is not None and narrow.max >= 0.99 * wide.max))


def _scale(value: Any) -> Any:
    """A part of a quantizer; a scale that is not finite is a number to report, like those of a tensor."""
    if isinstance(value, float) and not math.isfinite(value):
        return ArrayRef("<f8", (), struct.pack("<d", value))
    return value


def build(target: Any, state: Any, seen: Calls) -> None:
    """What ``target.__setstate__(state)`` stands for. That of an OrderedDict has versions of modules, no numbers."""
    if isinstance(target, Global):
        seen.call(target, ("__setstate__", state))  # the attributes of a class or function of the program change
        return
    if not isinstance(target, Inert | Ordered):
        seen.changed(target, "state")
        return
    if target.state is not None:
        seen.hooked(target, ("__setstate__",), state)
        seen.changed(target, "state")
    if isinstance(state, Inert | Ordered | Global):  # a dictionary or a tuple, but of whose making?
        seen.changed(target, "state")
        state = state.args if isinstance(state, Inert) else state
    if isinstance(state, tuple) and len(state) == 2:  # attributes in two parts; the dictionaries may change later
        state = tuple(dict(part) if type(part) is dict else part for part in state)
    seen.replaced(state)
    target.state = state


def fill(target: Any, flat: list[Any], seen: Calls) -> None:
    """What setting items stands for."""
    if isinstance(target, Inert):
        if target.kind is not None and target.kind.ordinary and not _SUBCLASSES.fullmatch(target.kind.full):
            seen.changed(target, "items")
        if target.pairs is None:
            target.pairs = {}
        target = target.pairs
    if not isinstance(target, dict):
        seen.changed(target, "items")
        raise TypeError
    if len(flat) % 2:
        raise TypeError
    for i in range(0, len(flat), 2):
        key = flat[i]
        target[key if type(key) is str else _key(key)] = flat[i + 1]


def extend(target: Any, items: list[Any], seen: Calls) -> None:
    """What appending stands for."""
    if isinstance(target, Inert | Ordered):
        seen.hooked(target, ("append", "extend", "add"), items[:1])
    if isinstance(target, Inert):
        if target.kind is not None and target.kind.ordinary and target.kind.full not in _LISTS:
            seen.changed(target, "items")
        if target.items is None:
            target.items = []
        target = target.items
    if type(target) is not list:
        seen.changed(target, "items")
        raise TypeError
    target.extend(items)


MAX_HASHED = 100
MAX_PARTS = 1_000_000
_COLLIDING = 1 << 60  # larger integers can be chosen to have one hash, and then each is compared with all before it


def _key(value: Any) -> Any:
    """A dictionary key that is cheap to hash: nested tuples could exhaust the stack of the interpreter."""
    if value is None or isinstance(value, str | float | bytes | Global | Inert):
        return value
    if isinstance(value, int) and -_COLLIDING < value < _COLLIDING:
        return value
    if type(value) is tuple and len(value) < 10 and all(v is None or type(v) is str or _is_small(v) for v in value):
        return value
    check_hash([value])
    return Inert(None, value)


def check_hash(values: list[Any]) -> None:
    """Raise for tuples whose hash takes for ever: one that holds another twice, and so on, is looked at 2^n times."""
    known: dict[int, int] = {}

    def cost(value: Any, depth: int) -> int:
        if type(value) is not tuple:
            return 1
        if id(value) not in known:
            if depth > MAX_HASHED:
                raise refused(f"the pickle has a key of more than {MAX_HASHED} tuples in one another")
            known[id(value)] = 1 + sum(cost(v, depth + 1) for v in value)
        return known[id(value)]

    if any(cost(v, 0) > MAX_PARTS for v in values):
        raise refused(f"the pickle has a key that refers to its parts more than {MAX_PARTS:,} times")


def _is_small(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_COLLIDING < value < _COLLIDING)


def is_nested(value: Any) -> bool:
    """Whether this is the call by which plain pickle keeps a storage as a torch file within the pickle."""
    return isinstance(value, Inert) and value.kind is not None and value.kind.full == "torch.storage._load_from_bytes"


def array_of(value: Inert) -> ArrayRef | None:
    """The numpy array that an inert ``_reconstruct`` call with its state describes; without a dtype if unclear."""
    if value.kind is None or not value.kind.full.endswith("multiarray._reconstruct"):
        return None
    state = value.state
    if isinstance(state, tuple) and len(state) == 5 and type(state[0]) is int:
        _, shape, dtype, _, data = state
        if isinstance(data, list):  # objects, walked one by one
            return None
        if isinstance(data, str) and max(map(ord, data), default=0) < 256:
            data = data.encode("latin1")
        if isinstance(data, bytes):
            return ArrayRef(_numpy_dtype(dtype), sizes(shape), data)
    return ArrayRef("", (), b"")


_CODE = re.compile(r"[<|=]?[a-zA-Z?]\d{0,9}")


def _numpy_dtype(value: Any) -> str:
    """``<f4`` for the inert form of ``numpy.dtype('f4')`` and its state; an empty string for all others."""
    if not isinstance(value, Inert) or value.kind is None or value.kind.full != "numpy.dtype":
        return ""
    code, state = value.args[0] if isinstance(value.args, tuple) and value.args else None, value.state
    order = "|"
    if state is not None:
        if not isinstance(state, tuple) or len(state) < 8 or type(state[0]) is not int or not isinstance(state[1], str):
            return ""
        order = state[1]
    return f"{order}{code}" if isinstance(code, str) and _CODE.fullmatch(code) else ""
