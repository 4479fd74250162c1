"""What loading a pickle would call: names, with their arguments as text, gathered while it is taken apart.

>>> import os, pickle
>>> from .machine import load
>>> class Evil:
...     def __reduce__(self):
...         return os.system, ("touch /x",)
>>> seen = Calls()
>>> _ = load(pickle.dumps(Evil()), seen=seen)
>>> seen.reasons()
['would run `touch /x` through posix.system, which is known to be dangerous']
"""

from __future__ import annotations

from typing import Any

from ..text import plain
from .inert import ArrayRef, Global, Inert, Ordered, Storage, TensorRef
from .names import is_dangerous, is_ordinary

MAX_CALLS = 100  # an attack needs one; a report needs few
MAX_NESTED = 10_000
KNOWN = "which is known to be dangerous"
_RUNNERS = ("run", "system", "popen", "exec", "eval", "call", "spawn", "shell", "getoutput", "compile", "myeval")
_NO_RUNNERS = ("methodcaller",)  # its text is the name of a method


class Calls:
    """Every call and every name that is not ordinary, in all pickles of one file; survives the end of a bad pickle."""

    def __init__(self) -> None:
        self.called: dict[str, str] = {}
        """What would be called, with the sentence that says so."""
        self.named: set[str] = set()
        self.nested: list[bytes] = []
        """Bytes that a call would unpickle, or that look like a pickle among its arguments."""
        self.held: list[bytes] = []
        """Values that look like pickles: nothing unpickles them here, but their owner will."""
        self.where = ""
        self.ran = False
        """Whether a pickle of this file was taken apart already."""

    def call(self, function: Any, args: Any, through: str = "", why: str = "") -> None:
        """``function(*args)`` would run, and is not one of the calls that checkpoints need."""
        name = _callee(function)
        self._keep(args)
        if name in self.called or len(self.called) >= MAX_CALLS:
            return
        known = not isinstance(function, Global) or is_dangerous(name)
        why = KNOWN if known else why or "a name that checkpoints do not need"
        command = _command(name, args) if known and not through else ""
        between = "" if isinstance(function, Global) else " with "
        what = f"run `{command}` through {name}" if command else f"call {name}{between}({_listed(args)})"
        by = f" by way of {through}" if through else ""
        self.called[name] = f"{self.where}would {what}{by}, {why}"

    def hold(self, value: bytes) -> bytes:
        """A value of bytes, remembered if it looks like a pickle."""
        if value[:1] == b"\x80" and value[1:2] <= b"\5" and len(value) > 8 and len(self.held) < MAX_NESTED:
            self.held.append(value)
        return value

    def passed(self, name: str, args: Any) -> None:
        """An ordinary call with functions among its arguments: numpy's random states call the one they are given."""
        if isinstance(args, tuple):
            for arg in args:
                if isinstance(arg, Global) and not arg.ordinary:
                    self.call(arg, (), through=name)

    def changed(self, target: Any, what: str) -> None:
        """The state or the items of something change that no checkpoint changes."""
        name = _kind(target)
        if len(self.called) < MAX_CALLS:
            self.called.setdefault(
                f"{what} of {name}", f"{self.where}changes the {what} of {name}, which no checkpoint does"
            )

    def replaced(self, state: Any) -> None:
        """Attributes under the name of a method, which the next instruction or the object itself may call."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                for key, value in part.items():
                    if isinstance(value, Global | Inert) and _is_method(key) and not _is_data(value):
                        self.call(value, (), through=f"its {key}")

    def hooked(self, target: Inert | Ordered, words: tuple[str, ...], args: Any) -> None:
        """A method of an object about to be used, which the pickle may have replaced by a function of its choice."""
        for state in target.state if isinstance(target.state, tuple) else (target.state,):
            if isinstance(state, dict):
                for word in words:
                    if word in state:
                        self.called.pop(_callee(state[word]), None)  # told when it was set, but without arguments
                        self.call(state[word], (args,), through=f"its {word}")

    def name(self, names: list[Global]) -> None:
        """Names that a pickle mentions, called or not."""
        for one in names:
            if not one.ordinary and len(self.named) < 10 * MAX_CALLS:
                self.named.add(one.full)

    def reasons(self) -> list[str]:
        """The sentences that make a file suspect."""
        bare = sorted(n for n in self.named - set(self.called) if is_dangerous(n))
        return [*self.called.values(), *(f"names {plain(n[:80])}, {KNOWN}" for n in bare)]

    def notes(self) -> list[str]:
        """Names that are only mentioned, and not known to be dangerous."""
        odd = sorted(n for n in self.named - set(self.called) if not is_dangerous(n))
        if not odd:
            return []
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        return [f"names {', '.join(plain(n[:80]) for n in odd[:5])}{more}, without calling it"]

    def _keep(self, args: Any) -> None:
        for arg in args if isinstance(args, tuple) else (args,):
            if isinstance(arg, bytes) and len(self.nested) < MAX_NESTED:
                self.nested.append(arg)


# What Python, numpy and torch ask an object itself for, not its class: when it is iterated, appended to, or restored.
_METHODS = frozenset(dir(dict) + dir(list) + dir(set)) | {"setstate", "_patch_step_function", "_init_flat_weights"}
_ATTRIBUTES = frozenset(("__doc__", "__module__", "__name__", "__qualname__", "__orig_class__"))


def _is_method(key: Any) -> bool:
    if type(key) is not str or key in _ATTRIBUTES:
        return False
    return key in _METHODS or (key.startswith("__") and key.endswith("__"))


def _is_data(value: Global | Inert) -> bool:
    """Something that cannot be called, whatever it is named."""
    plain = ("pathlib.", "datetime.", "numpy.", "collections.", "builtins.", "__builtin__.", "omegaconf.")
    return isinstance(value, Inert) and value.kind is not None and value.kind.full.startswith(plain)


def _kind(value: Any) -> str:
    """What a value is, in a word."""
    if isinstance(value, TensorRef | Storage):
        return "a tensor" if isinstance(value, TensorRef) else "a storage"
    if isinstance(value, ArrayRef):
        return "a numpy array"
    if isinstance(value, Inert) and value.kind is not None:
        return plain(value.kind.full[:80])
    return "collections.OrderedDict" if isinstance(value, Ordered) else f"a {type(value).__name__.lower()}"


def _callee(function: Any) -> str:
    if isinstance(function, Global):
        return plain(function.full[:120])
    if isinstance(function, Inert) and function.kind is not None:
        return f"the result of {plain(function.kind.full[:120])}"
    return "a value of its own making"


def _command(name: str, args: Any) -> str:
    """The first text among the arguments of something that runs text."""
    last = name.rpartition(".")[2].lower()
    if not isinstance(args, tuple) or last in _NO_RUNNERS or not any(word in last for word in _RUNNERS):
        return ""
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first and all(isinstance(a, str) for a in first):
        first = " ".join(first)
    return plain(first[:120]) if isinstance(first, str) else ""


def _listed(args: Any) -> str:
    if not isinstance(args, tuple):
        return _shown(args)
    more = ", …" if len(args) > 4 else ""
    return ", ".join(_shown(a) for a in args[:4]) + more


def _shown(value: Any, depth: int = 0) -> str:
    """A value of a pickle in a few characters."""
    if isinstance(value, str | bytes):
        return plain(repr(value[:60])) + ("…" if len(value) > 60 else "")
    if value is None or isinstance(value, bool | int | float):
        return repr(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "a long number"
    if isinstance(value, Global):
        return plain(value.full[:80])
    if isinstance(value, Inert):
        return f"{plain(value.kind.full[:80])}(…)" if value.kind else "…"
    if isinstance(value, TensorRef | ArrayRef | Storage):
        return "a tensor"
    if depth > 1:
        return "…"
    if isinstance(value, dict):
        inner = [f"{_shown(k, depth + 1)}: {_shown(v, depth + 1)}" for k, v in list(value.items())[:3]]
        return "{" + ", ".join(inner) + (", …}" if len(value) > 3 else "}")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(v, depth + 1) for v in value[:3]) + (", …]" if len(value) > 3 else "]")
    return "…"


__all__ = ["Calls", "is_ordinary"]
