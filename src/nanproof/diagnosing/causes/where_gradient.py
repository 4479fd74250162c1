"""torch.where hides the value, not its gradient."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, either, flag, onset, pro, value
from ..signs import FP16, FP32, SEVERAL_MACHINES

CAUSE = Cause(
    name="where-gradient",
    title="a branch that torch.where threw away still gives NaN gradients",
    what="""``torch.where(x > 0, torch.sqrt(x), 0)`` is right in the forward pass. In the backward pass the
gradient 0 of the discarded branch meets the infinite derivative of the root: 0 · inf = NaN. The loss stays finite,
the gradient does not. The input must be made safe too, not only the output.""",
    share=2.5,
    clues=(
        pro(NAMES, about("where"), "a guarded or masked operation is spoken of", unless=flag("only-with-padding")),
        pro(POINTS, flag("grad-nan-loss-finite"), "gradients are NaN while the loss is finite"),
        pro(SUGGESTS, flag("grad-nan-loss-finite-first"), "gradients were NaN before the loss was"),
        pro(
            HINTS,
            both(either(flag("grad-nan"), about("backward-op")), onset("data-dependent")),
            "NaN in the backward pass of certain batches",
        ),
        pro(SUGGESTS, both(FP32, flag("grad-nan-loss-finite", "grad-nan-loss-finite-first")), "so in fp32"),
        pro(PROVES, value("mechanism", "where-gradient"), "a replayed step met 0 · inf in the backward pass"),
        pro(NAMES, value("lint", "NP210"), "the code selects after the risky operation"),
        con(
            SUGGESTS,
            either(FP16, SEVERAL_MACHINES, about("attention-kernel")),
            "precision, communication or a kernel is likelier",
        ),
        con(
            SUGGESTS,
            flag("only-one-gpu-family", "cpu-fine", "nan-weights", "loss-explodes-before-nan"),
            "the same code is fine elsewhere",
        ),
    ),
    remedies=(
        Remedy(
            does="nanproof.ops.select, or make the input safe first: torch.where(m, f(torch.where(m, x, 1.0)), 0.0); "
            "nanproof lint --fix --select NP210"
        ),
    ),
    verify="torch.autograd.gradcheck, or a backward pass on inputs that hit the guard: gradients 0 there, "
    "finite elsewhere.",
)
