"""NP230: what nanmean and nansum leave out of the value is NaN in the gradient."""

from __future__ import annotations

from ..gradients import learned
from ..matching import Hit, call, in_loss, reported
from ..rule import Rule


def _of_learned(hit: Hit) -> bool:
    return learned(hit.operand, hit.module)


RULE = Rule(
    code="NP230",
    name="nan-left-out",
    what="""
Finds `torch.nanmean` and `torch.nansum` in a loss: values that are NaN, mostly where a label is missing, are left out
of the result.
""",
    why="""
The value is fine. Backward, the elements that were left out get a gradient of 0, and the chain rule multiplies it with
the slope of what made them NaN: for `(prediction - target) ** 2` with a NaN target that is 2 · NaN · 0 = NaN, in the
gradient of the prediction and of every weight.
""",
    bad="""
def regression_loss(prediction, target):
    return torch.nanmean((prediction - target) ** 2)
""",
    good="""
def regression_loss(prediction, target):
    known = ~torch.isnan(target)
    errors = (prediction - torch.where(known, target, 0.0)) ** 2
    return ops.masked_mean(errors, known)
""",
    miss="""
def regression_loss(prediction, target):
    errors = (prediction - target) ** 2
    errors[errors.isnan()] = 0  # the same mistake, by assignment
    return errors.mean()
""",
    false_alarm="What is NaN was selected by `torch.where` from a constant, so that nothing learned is behind it.",
    words=("nanmean", "nansum"),
    match=call("nanmean", "nansum"),
    where=in_loss,
    unless=(reported, lambda h: not _of_learned(h)),
    message="the elements that this leaves out are NaN in the gradient: 0 times NaN is NaN",
    help="replace what is NaN before it meets the prediction: torch.where(known, target, 0.0), and average over known",
    about=lambda h: h.node,
)
