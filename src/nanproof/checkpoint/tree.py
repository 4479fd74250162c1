"""Walking the inert object of a pickle: every tensor with its dotted name, and no name twice in vain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .flaws import refused
from .inert import ArrayRef, Inert, Ordered, Storage, TensorRef
from .rebuild import array_of, is_nested

MAX_DEPTH = 200
MAX_NAME = 400
MAX_STEPS = 20_000_000
MAX_LIST = 1_000  # settings do not hide in longer lists

_HIDDEN = {"_modules", "_parameters", "_buffers"}  # a pickled module is named as its state dict would be


Found = TensorRef | ArrayRef | Storage | Inert


def walk(root: Any) -> Iterator[tuple[str, Found]]:
    """Every tensor, array and storage under ``root``; a container that is referred to many times is entered once.

    An `Inert` is among them where plain pickle keeps a storage as a torch file within the pickle.
    """
    seen: set[int] = set()
    steps = 0
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", root)])]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        name, value = step
        steps += 1
        if steps > MAX_STEPS:
            raise refused("the pickle refers to its parts too many times")
        if isinstance(value, TensorRef):
            yield name, value
            if value.quantizer is not None:
                stack.append(_children(f"{name}.quantizer", value.quantizer))
            continue
        if isinstance(value, Inert):
            array = array_of(value)
            if array is not None or is_nested(value):
                yield name, array or value
                continue
        elif not isinstance(value, dict | list | tuple):
            if isinstance(value, ArrayRef | Storage):
                yield name, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(stack) > MAX_DEPTH:
            raise refused(f"the pickle nests more than {MAX_DEPTH} levels deep")
        stack.append(_children(name, value))


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield join(name, key), item
            if type(key) is Inert:  # an optimizer saved whole has tensors for keys
                yield join(name, key), key
        if isinstance(value, Ordered) and value.state is not None:
            yield name, value.state
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield join(name, i), item
    elif isinstance(value, Inert):
        for part in (value.args, value.state, value.items, value.pairs):
            if isinstance(part, dict | list | tuple) and part:
                if isinstance(part, tuple) and len(part) == 1 and isinstance(part[0], dict | TensorRef | Inert):
                    yield name, part[0]
                else:
                    yield name, part
            elif isinstance(part, Inert | TensorRef | ArrayRef | Storage):
                yield name, part


def join(name: str, key: Any) -> str:
    """One level deeper: ``model`` and ``weight`` make ``model.weight``."""
    if isinstance(key, tuple):
        word = ".".join(str(part)[:100] for part in key)
    else:
        word = key if isinstance(key, str) else str(key) if isinstance(key, int) else getattr(key, "name", "?")
    if word in _HIDDEN:
        return name
    if len(word) > 120 or not word.isprintable():
        word = "".join(c if c.isprintable() else "?" for c in word[:120]) + "…"
    full = f"{name}.{word}" if name else word
    return full if len(full) <= MAX_NAME else full[: MAX_NAME - 1] + "…"


def dicts(root: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Every dictionary under ``root``, and the attributes of every inert object as one."""
    seen: set[int] = set()
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", root)])]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        name, value = step
        if not isinstance(value, dict | list | tuple | Inert) or id(value) in seen or len(stack) > MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, Inert):
            value = value.fields or value.pairs or {}
        if isinstance(value, dict):
            yield name, value
        if len(value) <= MAX_LIST or isinstance(value, dict):
            stack.append(_children(name, value))
