"""`masked_cross_entropy` and `normalized_mse`: losses that survive an empty mask and a constant target."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ._formats import numbers_of, positive_eps
from ._masks import keep_of
from ._span import cast, drop_max, saturate, total
from .mean import masked_mean
from .norm import safe_norm

Reduction = Literal["mean", "sum", "none"]


def masked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int = -1,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy over the targets that are neither masked nor ``ignore_index``.

    >>> logits = torch.zeros(2, 3, 4, requires_grad=True)  # batch, tokens, classes
    >>> round(masked_cross_entropy(logits, torch.tensor([[0, 1, -100], [2, -100, -100]])).item(), 4)
    1.3863
    >>> masked_cross_entropy(logits, torch.full((2, 3), -100)).item()  # torch gives NaN
    0.0

    Classes lie along ``dim``; the target has the shape of the logits without it. With nothing left the mean is 0
    with a gradient of zero. ``weights`` weigh the targets: for class weights pass ``class_weights[target]``.
    A loss above the dtype's max saturates; its gradient stays softmax − one-hot.
    """
    numbers = numbers_of(logits, "logits")
    _check_classes(logits, target, dim, reduction)
    keep = (target != ignore_index) & keep_of(mask, target, "target")
    cared = torch.where(keep.unsqueeze(dim), logits, 0.0)
    shifted = drop_max(cast(cared, numbers.wide), dim)
    chosen = shifted.gather(dim, torch.where(keep, target, 0).unsqueeze(dim)).squeeze(dim)
    losses = torch.where(keep, shifted.exp().sum(dim).log() - chosen, 0.0)
    if reduction == "mean":
        return cast(masked_mean(losses, keep, weights=weights), logits.dtype)
    if weights is not None:
        raise UsageError(f'weights need reduction="mean", not "{reduction}"', hint="multiply the losses yourself")
    if reduction == "sum":
        dims = tuple(range(losses.ndim))
        return cast(total(losses, dims, losses.numel()).squeeze(dims), logits.dtype)
    return cast(losses, logits.dtype)


def _check_classes(logits: Tensor, target: Tensor, dim: int, reduction: str) -> None:
    place = dim % logits.ndim
    expected = [*logits.shape[:place], *logits.shape[place + 1 :]]
    if expected != list(target.shape):
        raise UsageError(
            f"target has shape {tuple(target.shape)}, and logits without dim {dim} have {tuple(expected)}",
            hint="say with dim= where the classes are",
        )
    if target.is_floating_point():
        raise UsageError(f"target is {target.dtype}, and holds class numbers", hint="pass target.long()")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction is {reduction!r}", hint='use "mean", "sum" or "none"')


class _NormalizedMSE(torch.autograd.Function):
    """mean(z²) for z = (pred − target) / unit. Written out: 2z/unit can overflow where upstream is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(pred: Tensor, target: Tensor, unit: Tensor, count: Tensor) -> Tensor:
        half = _half_difference(pred, target)
        z = saturate(half / unit * 2, half.isfinite() & unit.isfinite())
        root = safe_norm(z / count.sqrt())
        return saturate(root.square(), root.isfinite())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        pred, target, unit, count = ctx.saved_tensors
        half = _half_difference(pred, target)
        share = 4 * grads[0] / count
        # Shrinking steps first: then an overflow on the way is one of the result.
        grad = torch.where(unit < 1, half * share / unit / unit, half / unit / unit * share)
        grad = saturate(grad, half.isfinite() & unit.isfinite() & share.isfinite())
        return grad, -grad, None, None


def _half_difference(a: Tensor, b: Tensor) -> Tensor:
    """(a − b)/2: the difference of two finite numbers can overflow, that of their halves cannot."""
    return a / 2 - b / 2


def normalized_mse(pred: Tensor, target: Tensor, mask: Tensor | None = None, *, eps: float | None = None) -> Tensor:
    """mean((pred − target)²) / (var(target) + eps), over the elements that the mask keeps.

    >>> target = torch.tensor([1.0, 2.0, 3.0])
    >>> normalized_mse(torch.full((3,), 2.0), target)  # predicting the mean scores 1, whatever the scale
    tensor(1.0000)
    >>> normalized_mse(torch.zeros(3), torch.zeros(3))  # a constant target has no variance
    tensor(0.)

    The variance is a constant: a target that learns could otherwise lower the loss by growing. eps is 2⁻²³
    (2⁻⁵² for float64). An empty mask gives 0 with a gradient of zero. Value and gradient saturate at ±max.
    """
    if pred.shape != target.shape or pred.dtype != target.dtype:
        raise UsageError(
            f"pred is {pred.dtype} {tuple(pred.shape)} and target is {target.dtype} {tuple(target.shape)}",
            hint="give both the same shape and dtype: broadcasting a target is mostly a mistake",
        )
    numbers = numbers_of(pred, "pred")
    eps = positive_eps(eps, torch.finfo(numbers.wide).eps, numbers)
    keep = keep_of(mask, pred, "pred")
    wide_pred, wide_target = (cast(torch.where(keep, t, 0.0), numbers.wide) for t in (pred, target))
    count = keep.sum().clamp(min=1).to(numbers.wide)
    unit = _spread(wide_target.detach(), keep, count, eps)
    loss = _NormalizedMSE.apply(wide_pred, wide_target, unit, count)  # type: ignore[no-untyped-call]
    return cast(loss, pred.dtype)


def _spread(target: Tensor, keep: Tensor, count: Tensor, eps: float) -> Tensor:
    """sqrt(var + eps) over what is kept; as a root, so that it never leaves the dtype."""
    center = masked_mean(target, keep)
    halves = torch.where(keep, _half_difference(target, center), 0.0)
    half_std = safe_norm(halves / count.sqrt())  # the norm of many large numbers would saturate
    return safe_norm(torch.stack([half_std, half_std.new_tensor(eps**0.5 / 2)])) * 2
