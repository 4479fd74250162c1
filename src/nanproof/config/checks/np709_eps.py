"""An eps that is nothing in the format it is used in."""

from __future__ import annotations

from collections.abc import Iterator

from ...floats import format_of
from ...records import Finding
from ..calls import OPTIMIZERS, is_arguments
from ..check import Check, report
from ..effective import find_effective
from ..meaning import Meaning
from ..optimizers import is_adam, optimizer_of
from ..project import Project
from ..value import Settings

SMALLEST_ADAM = 1e-16
"""1e-15 is in use for neural fields, whose gradients are tiny."""
SMALLEST_NORM = 1e-12
"""1e-12 is BERT's own."""


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    value, eps = meaning.get("eps"), meaning.number("eps")
    if value is not None and eps is not None and is_adam(optimizer_of(settings, meaning) or "adam"):
        found = find_effective(settings, project if _one_program(project) else Project(facts=project.facts))
        half = format_of("float16")
        if found.trained == "float16" and not found.quantized and eps < half.smallest_subnormal / 2:
            yield report(
                "NP709",
                value,
                f"{value.label} is {eps:g}, which is 0 in float16 (the smallest is 6e-08): 0/0 in Adam",
                "keep the trained weights in float32",
            )
        elif eps < SMALLEST_ADAM:
            yield report(
                "NP709",
                value,
                f"{value.label} is {eps:g}: a weight whose gradients are 0 divides 0 by about 0",
                "1e-8 is the default",
            )
    norm, size = meaning.get("norm_eps"), meaning.number("norm_eps")
    if norm is not None and size is not None and 0 <= size < SMALLEST_NORM:
        slope = f"{size**-0.5:.0e}" if size else "infinite"
        yield report(
            "NP709",
            norm,
            f"{norm.label} is {size:g}: at an all-zero row the gradient of the norm is {slope}",
            "1e-6 is usual, 1e-5 under half precision",
        )


def _one_program(project: Project) -> bool:
    """Whether only one file trains, so that what it says about weights is about this config."""
    return len({c.path for c in project.calls if c.name in OPTIMIZERS or is_arguments(c.name)}) <= 1


CHECK = Check(
    code="NP709",
    name="eps-for-dtype",
    what="Reports Adam's eps when it is 0 in the format of the trained weights, an eps for Adam below 1e-16, and an "
    "eps of a normalization below 1e-12.",
    why="eps stands in the denominator for the day when the rest of it is 0. In float16 everything under 3e-08 rounds "
    "to 0, so 1e-08 protects nothing. In RMSNorm the gradient at a zero row is eps^-0.5: with 1e-20 that is 1e10.",
    bad="model:\n  d_model: 512\n  rms_norm_eps: 1.0e-20\nlr: 1.0e-4\n",
    good="model:\n  d_model: 512\n  rms_norm_eps: 1.0e-6\nlr: 1.0e-4\n",
    false_alarm="When the normalization never sees a zero row.",
    check=check,
)
