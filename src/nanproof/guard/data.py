"""Where an external loop's batches come from, and which of them a forward pass was trained on.

>>> class Loader: pass
>>> source, loader = DataSource(), Loader()
>>> _ = source.asked(loader, [4, 5, 6, 7]); source.delivered(loader, torch.ones(4))
>>> [d.about for d in source.recent]
['DataLoader batch 0 (dataset indices 4–7)']
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..tensors import bytes_of, is_finite, tensors_in
from .step import Pass

T = TypeVar("T")
KEPT, KEPT_BYTES = 8, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A batch that a loader has handed out, and which one it was."""

    batch: Any
    about: str


class DataSource:
    """Remembers a few batches: loaders may be some batches ahead of the training step."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Delivered]] = deque()
        self._asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._events = 0

    @property
    def number(self) -> int | None:
        """Counts fresh data: batches delivered, rollouts collected; None when neither was ever seen."""
        return self._events or None

    def made_new(self) -> None:
        """The loop has made data itself, by running the model without gradients."""
        self._events += 1

    def asked(self, loader: Any, indices: T) -> T:
        """A loader's iterator has drawn the indices of a batch to come; they are given back."""
        self._asked.setdefault(loader, deque()).append(indices)
        return indices

    def delivered(self, loader: Any, batch: Any) -> None:
        """A loader has handed a batch out: the one whose indices it drew first."""
        number = self._counts.get(loader, 0)
        self._counts[loader] = number + 1
        drawn = self._asked.get(loader)
        which = _words(drawn.popleft()) if drawn else ""
        self.add(batch, f"DataLoader batch {number:,}{which}")

    def pass_on(self, loader: Any, batch: T) -> T:
        """A batch on its way from the loader's iterator to the loop."""
        self.delivered(loader, batch)
        return batch

    def add(self, batch: Any, about: str) -> None:
        """A batch that somebody has handed out, in his words."""
        self._events += 1
        size = sum(bytes_of(t) for _, t in tensors_in(batch))
        self._recent.append((size, Delivered(batch=batch, about=about)))
        while len(self._recent) > 2 and (len(self._recent) > KEPT or sum(s for s, _ in self._recent) > KEPT_BYTES):
            self._recent.popleft()

    @property
    def recent(self) -> Sequence[Delivered]:
        return [d for _, d in self._recent]


def describe_batch(one: Pass, source: DataSource) -> None:
    """Name the batch of a pass, and keep it as it was delivered when that is sure."""
    inputs = one.batch if one.batch is not None else one.inputs
    found, sure = match(inputs, source.recent)
    bad = [t for _, t in tensors_in(inputs) if not is_finite(t)]
    if bad and sure:
        found = [d for d in found if any(not is_finite(t) for _, t in tensors_in(d.batch))] or found
    said = " and ".join(d.about for d in found)
    if not found:
        one.about = f"last delivered: {source.recent[-1].about}" if source.recent else ""
    elif not sure:
        one.about = f"ambiguous between {said}"
    elif bad and all(is_finite(t) for d in found for _, t in tensors_in(d.batch)):
        one.about = f"{said}, finite as delivered: the script made the bad values"
    else:
        one.about = said
    if sure and len(found) == 1:
        mine = {id(t) for _, t in tensors_in(found[0].batch)}
        if one.inputs is not None and any(id(t) in mine for _, t in tensors_in(one.inputs)):
            one.inputs = None  # the batch itself went in, not a copy of it
        one.batch = found[0].batch
    elif one.batch is None:
        one.batch, one.inputs = one.inputs, None


def match(inputs: Any, candidates: Sequence[Delivered]) -> tuple[list[Delivered], bool]:
    """The deliveries that a pass was trained on, and whether that is sure; else those that it may have been.

    The same memory decides. Copies (another device, another dtype) are compared by value, and only in tensors that
    differ between deliveries: an all-ones mask is in every batch.
    """
    known = [t for _, t in tensors_in(inputs)]
    if not known:
        return list(candidates[-1:]), bool(candidates)
    held = [(d, [t for _, t in tensors_in(d.batch)]) for d in candidates]
    same = [d for d, tensors in held if any(_overlap(a, b) for a in known for b in tensors)]
    if same:
        return same, True
    # of equal deliveries, such as those of two epochs over the same samples, the last one stands for all
    held = [(d, ts) for i, (d, ts) in enumerate(held) if not any(_all_equal(ts, other) for _, other in held[i + 1 :])]
    sure, unsure = list[Delivered](), list[Delivered]()
    for tensor in known:
        having = [d for d, tensors in held if any(_equal(tensor, t) for t in tensors)]
        if len(having) == 1:
            sure += having
        else:
            unsure += having
    chosen = sure or unsure
    return [d for d, _ in held if any(d is c for c in chosen)], bool(sure) or len({id(d) for d in chosen}) == 1


def _all_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(_equal(a, b) for a, b in zip(some, others, strict=True))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; views of one storage may not."""
    if a is b:
        return True
    if address_of(a) != address_of(b) or address_of(a)[0] == "object":
        return False
    (first, end), (other, other_end) = _range(a), _range(b)
    return first < other_end and other < end


def _range(tensor: Tensor) -> tuple[int, int]:
    length = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size() * (tensor.numel() > 0)


def address_of(tensor: Tensor) -> tuple[str, int]:
    """The memory that a tensor's values are in."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return "object", id(tensor)
    try:
        return str(tensor.device), tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return "object", id(tensor)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included; incident path only."""
    if a is b:
        return True
    if a.shape != b.shape or a.numel() == 0 or a.layout != torch.strided or b.layout != torch.strided:
        return False
    one, other = a.detach().cpu(), b.detach().cpu()
    if one.dtype != other.dtype:
        if not (one.is_floating_point() and other.is_floating_point()):
            return False
        narrow = min(one.dtype, other.dtype, key=lambda d: torch.finfo(d).bits)
        one, other = one.to(narrow), other.to(narrow)
    return bool(torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other))))


def _words(indices: Any) -> str:
    if not isinstance(indices, Sequence) or not indices or not all(isinstance(i, int) for i in indices):
        return ""
    first, last = indices[0], indices[-1]
    if list(indices) == list(range(first, last + 1)):
        return f" (dataset indices {first}–{last})" if last > first else f" (dataset index {first})"
    shown = ", ".join(map(str, indices[:16]))
    return f" (dataset indices {shown}{' …' if len(indices) > 16 else ''})"
