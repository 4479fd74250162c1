"""Is this step good? A pure function of what was read and what is normal.

>>> from nanproof.records import Reading
>>> str(judge(Reading(step=7, loss=float("nan"), grad_norm=1.0, lr=1e-4), Limits()))
'step 7: nonfinite loss nan'
>>> judge(Reading(step=8, loss=2.0, grad_norm=1.0, lr=1e-4), Limits(grad_norm=10.0)).ok
True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..records import Level, Reading, Verdict
from .window import Limits

# A reading names what it saw as "level" or "level:name"; the first of these that is bad names the verdict,
# because a bad input makes bad predictions makes a bad loss makes bad gradients.
LEVELS: tuple[Level, ...] = ("hyperparameter", "input", "prediction", "loss", "gradient", "parameter", "buffer")


def judge(reading: Reading, limits: Limits) -> Verdict:
    """The verdict on one step: non-finite first, then spikes of the gradient norm.

    A large loss alone is no spike: a step acts on the weights through its gradients, and near convergence one hard
    batch has many times the usual loss.

    A bad input or prediction alone is no harm (masks are full of −inf on purpose); it names the verdict when
    the loss, a gradient or the state is bad too.
    """
    bad = [b.partition(":")[::2] for b in reading.bad]
    bad += [("loss", "")] if not math.isfinite(reading.loss) else []
    bad += [("gradient", "")] if not math.isfinite(reading.grad_norm) else []
    if any(level not in ("input", "prediction") for level, _ in bad):
        level = next(known for known in LEVELS if any(known == found for found, _ in bad))
        names = tuple(name for found, name in bad if found == level and name)
        value = {"loss": reading.loss, "gradient": reading.grad_norm}.get(level)
        return Verdict(kind="nonfinite", step=reading.step, level=level, names=names, value=value)
    if reading.grad_norm > limits.grad_norm:
        return Verdict(
            kind="spike", step=reading.step, level="gradient", value=reading.grad_norm, limit=limits.grad_norm
        )
    return Verdict(kind="ok", step=reading.step)


def name_culprits(verdict: Verdict, bad: Sequence[str], norm: float, overflowed: bool) -> Verdict:
    """A non-finite gradient verdict after a close look: which parameters, or an overflow of the norm alone.

    The L2 norm of finite gradients can still be infinite, as squares overflow first; ``norm`` is the one
    computed without overflow.
    """
    if verdict.kind != "nonfinite" or verdict.level != "gradient":
        return verdict
    if overflowed:
        return dataclasses.replace(verdict, kind="overflow", value=norm)
    return dataclasses.replace(verdict, names=tuple(bad))
