"""Looking closely at one tensor: how many NaN, +Inf, −Inf, where the first is, what the finite rest spans.

>>> import torch
>>> print(facts_of("x", torch.tensor([1.0, float("nan"), 3.0])))
x [3] float32: 1 NaN of 3, finite 1 … 3

Reads the host, so it belongs on the path of an incident or a test, never on that of a healthy step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .floats import find_format
from .records import TensorFacts


def facts_of(name: str, tensor: Tensor, extra: Mapping[str, float] | None = None) -> TensorFacts:
    """The statistics of a tensor of any dtype and layout."""
    local = local_values(tensor)
    values = local if local.numel() else local.reshape(0)
    nan, posinf, neginf = _masks(values)
    bad = nan | posinf | neginf
    finite = values[~bad] if values.dtype != torch.bool else values[:0]
    first = torch.nonzero(bad)[0].tolist() if bool(bad.any()) else None  # host sync: incident path only
    span = (float(finite.double().min()), float(finite.double().max())) if finite.numel() else (None, None)
    return TensorFacts(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nan=int(nan.sum()),
        posinf=int(posinf.sum()),
        neginf=int(neginf.sum()),
        finite_min=span[0],
        finite_max=span[1],
        first_bad=tuple(first) if first is not None else None,
        extra=dict(extra or {}),
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether every element is finite; right for 8-bit floats too, where torch's own answer is not."""
    nan, posinf, neginf = _masks(local_values(tensor))
    return not bool((nan | posinf | neginf).any())  # host sync: incident path only


def local_values(tensor: Tensor) -> Tensor:
    """The values that this process holds, dense, real and detached: of a shard, of a sparse or complex tensor."""
    tensor = tensor.detach()
    tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _masks(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not values.is_floating_point():
        none = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
        return none, none, none
    if values.element_size() > 1:
        return torch.isnan(values), values == torch.inf, values == -torch.inf
    form = find_format(values.dtype)
    assert form is not None
    codes = values.cpu().contiguous().view(torch.uint8).numpy()
    if form.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1)
    nan, inf, negative = form.is_nan(codes), form.is_inf(codes), (codes & form.sign_bit) != 0
    masks = (nan, inf & ~negative, inf & negative)
    one, two, three = (torch.from_numpy(m).to(values.device) for m in masks)
    return one, two, three
