"""One flat view of every setting, with where each value was written and what it overrode.

>>> layers = Layers()
>>> layers.put(Value(key="optimizer.lr", value=1e-4, path="c.yaml", line=3, text="1e-4", origin="yaml"))
>>> layers.put(Value(key="optimizer.lr", value=5e-4, path="", line=0, text="5e-4", origin="command-line"))
>>> settings = layers.settings()
>>> settings["optimizer.lr"].value
0.0005
>>> settings.tell("optimizer.lr")
'c.yaml:3 says 0.0001, the command line overrides it with 0.0005'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from .code import Code

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | None"
Origin = Literal[
    "yaml",
    "json",
    "toml",
    "python",
    "dataclass",
    "argparse",
    "call",
    "accelerate",
    "deepspeed",
    "training-args",
    "environment",
    "command-line",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One setting as it was written in one place."""

    key: str
    value: Plain
    path: str
    line: int
    text: str
    """As it stands in the source, quotes included."""
    origin: Origin
    span: tuple[int, int] | None = None
    """The bytes of ``text`` in the file; None when it cannot be edited there."""
    column: int = 1
    known: bool = True
    """False when only running the code would tell the value; ``text`` is then all there is."""

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def label(self) -> str:
        """The key as it stands in its file."""
        return self.key.removeprefix("deepspeed.").removeprefix("accelerate.")

    @property
    def where(self) -> str:
        """The place in words: ``configs/a.yaml:31``, ``the command line``."""
        if self.path:
            return f"{self.path}:{self.line}" if self.line else self.path
        return {"environment": "the environment", "command-line": "the command line"}.get(self.origin, self.origin)

    @property
    def number(self) -> float | None:
        """The value as a number; a word such as '1e-4' counts, as its writer meant one."""
        return as_number(self.value)


def as_number(value: object) -> float | None:
    """A finite-size number behind a plain value, or None.

    >>> as_number("1e-4"), as_number(True), as_number("auto")
    (0.0001, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not (value.isascii() and "_" not in value):  # float() takes 1_0 and Arabic digits
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def show(value: Plain) -> str:
    """A value as people write it.

    >>> show(5e-05), show(True), show((0.9, 0.95)), show(None)
    ('5e-05', 'true', '[0.9, 0.95]', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) and float(f"{value:g}") == value else repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(show, value))}]"
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in force, by dotted key; ``history`` keeps what each of them overrode."""

    values: Mapping[str, Value] = field(default_factory=dict)
    history: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What could not be read or resolved, in sentences."""
    codes: tuple[Code, ...] = ()
    """The Python files among the sources."""

    def __iter__(self) -> Iterator[Value]:
        return iter(self.values.values())

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Value:
        return self.values[key]

    def get(self, key: str) -> Value | None:
        return self.values.get(key)

    def find(self, key: str) -> Value | None:
        """The value with this key, or the only one whose key ends in it."""
        if key in self.values:
            return self.values[key]
        found = [v for k, v in self.values.items() if k.endswith(f".{key}")]
        return found[0] if len(found) == 1 else None

    def overridden(self, key: str) -> tuple[Value, ...]:
        """What had a say before, oldest first."""
        return self.history.get(key, ())[:-1] if key in self.values else self.history.get(key, ())

    def tell(self, key: str) -> str:
        """The story of one key."""
        *before, last = self.history[key]
        if not before:
            return f"{last.where} says {show(last.value)}"
        first = "; ".join(f"{v.where} says {show(v.value)}" for v in before)
        return f"{first}, {last.where} overrides it with {show(last.value)}"

    def numbers(self) -> dict[str, float]:
        """Every number by dotted key; the items of a list count from 0."""
        found: dict[str, float] = {}
        for key, value in self.values.items():
            items = enumerate(value.value) if isinstance(value.value, tuple) else [(None, value.value)]
            for index, item in items:
                if (number := as_number(item)) is not None:
                    found[key if index is None else f"{key}.{index}"] = number
        return found


class Layers:
    """Settings being put together: a later word on a key overrides an earlier one, and both are kept."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.history: dict[str, list[Value]] = {}
        self.notes: list[str] = []
        self.codes: list[Code] = []
        self._parents: dict[str, set[str]] = {}

    def put(self, value: Value) -> None:
        """Set one value. A value in the place of a section replaces the whole section, and the other way round."""
        self.drop(value.key, keep_self=True)
        parent = value.key.rpartition(".")[0]
        while parent:
            held = self.values.get(parent)
            if held is not None and held.value != ():  # () stands for a list, whose items have keys of their own
                del self.values[parent]
            parent = parent.rpartition(".")[0]
        self.values[value.key] = value
        self.history.setdefault(value.key, []).append(value)
        key = value.key
        while key and (up := key.rpartition(".")[0]) is not None:
            if key in self._parents.setdefault(up, set()):
                break
            self._parents[up].add(key)
            key = up

    def drop(self, key: str, *, keep_self: bool = False) -> None:
        """Remove a key and everything below it; what was said stays in the history."""
        if not keep_self:
            self.values.pop(key, None)
        below = list(self._parents.pop(key, ()))
        while below:
            gone = below.pop()
            self.values.pop(gone, None)
            below += self._parents.pop(gone, ())

    def has(self, key: str) -> bool:
        """Whether there is a value or a section of this name."""
        return key in self.values or any(k.startswith(f"{key}.") for k in self._parents.get(key, ()))

    def settings(self) -> Settings:
        history = {k: tuple(v) for k, v in self.history.items()}
        return Settings(values=dict(self.values), history=history, notes=tuple(self.notes), codes=tuple(self.codes))


def rebase(values: Iterable[Value], prefix: str) -> Iterator[Value]:
    """The same values below a section."""
    for value in values:
        yield dataclasses.replace(value, key=f"{prefix}.{value.key}") if prefix else value
