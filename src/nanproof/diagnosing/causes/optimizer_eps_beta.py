"""Adam's own division: eps too small for the dtype, or beta2 too slow."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, either, flag, number, onset, pro, value
from ..signs import ADAM, FP16_WEIGHTS, FP32, NO_UPDATE_YET, ONE_STEP

CAUSE = Cause(
    name="optimizer-eps-beta",
    title="the optimizer's eps or beta2 does not fit",
    what="""Adam divides by √v + eps. In fp16 an eps of 1e-8 is exactly 0, so a parameter whose squared gradient
rounds to 0 becomes 0/0 after one step, although all gradients were finite. The other form is slow: with beta2 =
0.999 the second moment remembers thousands of steps, so that a quiet stretch followed by a larger gradient makes an
update many times too large; the update norm rises before the loss.""",
    share=3.0,
    clues=(
        pro(
            "names",
            both(flag("grads-finite"), either(ONE_STEP, flag("nan-weights"))),
            "gradients finite, weights NaN after the step",
        ),
        pro("suggests", both(ONE_STEP, either(FP16_WEIGHTS, flag("pure-half"))), "one step of Adam in fp16 made NaN"),
        pro("names", both(number("eps", below=6e-8), either(FP16_WEIGHTS, flag("pure-half"))), "this eps is 0 in fp16"),
        pro("names", flag("update-norm-leads"), "the update norm rises before the loss"),
        pro("names", about("second-moment"), "second moments or update sizes are reported as odd"),
        pro(
            "hints",
            both(
                number("beta2", above=0.98), flag("irregular-spikes", "slow-divergence", "spikes-that-stop-recovering")
            ),
            "beta2 remembers far longer than the spikes last",
        ),
        pro("suggests", number("eps", below=1e-10), "an unusually small eps"),
        pro("hints", both(flag("slow-divergence"), ADAM), "a slow drift under Adam"),
        pro("names", about("adam-epsilon"), "the report mentions Adam's eps"),
        pro("proves", value("lint", "NP306"), "the code trains half-precision parameters with such an eps"),
        pro("replayed", value("bad-leaf", "eps"), "the optimizer wrote the bad parameters: its eps is 0 there"),
        pro("points", value("bad-leaf", "update"), "the optimizer's own update wrote the bad parameters"),
        pro("hints", onset("step2"), "the first step is fine, the second is not"),
        con("points", value("optimizer", "sgd"), "SGD has no such division"),
        con("suggests", both(ONE_STEP, FP32), "eps 1e-8 is a number in fp32"),
    ),
    excluded=(Exclusion(when=NO_UPDATE_YET, says="it was NaN before any update"),),
    remedies=(
        Remedy(
            does="betas=(0.9, 0.95), and clip the update, not only the gradient",
            when=flag("update-norm-leads", "irregular-spikes", "slow-divergence"),
        ),
        Remedy(
            does="keep fp32 master weights (load in fp32); if they must stay fp16, `nanproof run --heal` finds an eps",
        ),
    ),
    verify="Take one step from a fresh start with finite gradients: all parameters must be finite after it.",
)
