"""torch.where hides the value, not its gradient."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, pro, value
from ..signs import FP16, FP32, SEVERAL_MACHINES

CAUSE = Cause(
    name="where-gradient",
    title="a branch that torch.where discards still gives NaN gradients",
    what="""``torch.where(x > 0, torch.sqrt(x), 0)`` is right in the forward pass. In the backward pass the
gradient 0 of the discarded branch meets the infinite derivative of the root: 0 · inf = NaN. The loss stays finite,
the gradient does not. The input must be made safe too, not only the output.""",
    share=2.5,
    replayed=("where-gradient",),
    clues=(
        pro(
            "names",
            about("where"),
            "the report mentions a guarded or masked operation",
            unless=flag("only-with-padding"),
        ),
        pro("points", flag("grad-nan-loss-finite"), "gradients are NaN while the loss is finite"),
        pro("suggests", flag("grad-nan-loss-finite-first"), "gradients were NaN before the loss was"),
        pro("suggests", both(FP32, flag("grad-nan-loss-finite", "grad-nan-loss-finite-first")), "in fp32 too"),
        pro("names", value("lint", "NP210"), "the code selects after the risky operation"),
        pro(
            "names",
            flag("selects-after"),
            "the code selects after the risky operation",
            unless=value("lint", "NP210"),
        ),
        con(
            "suggests",
            either(FP16, SEVERAL_MACHINES, about("attention-kernel")),
            "precision, communication or a kernel is likelier",
        ),
        con(
            "suggests",
            flag("only-one-gpu-family", "cpu-fine", "nan-weights", "loss-explodes-before-nan"),
            "the same code is fine elsewhere",
        ),
    ),
    remedies=(
        Remedy(
            does="make the input safe first: torch.where(m, f(torch.where(m, x, 1.0)), 0.0), or nanproof.ops.select"
        ),
    ),
    verify="torch.autograd.gradcheck, or a backward pass on inputs that hit the guard: gradients 0 there, "
    "finite elsewhere.",
)
