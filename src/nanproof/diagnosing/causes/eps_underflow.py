"""An eps or a denominator that half precision rounds to zero."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, pro, value
from ..signs import BAD_GRADIENT, BF16, BROKEN, FP16, FP32, IN_SOME_BATCHES, ONE_STEP

CAUSE = Cause(
    name="eps-underflow",
    title="an eps or a small denominator is 0 in half precision",
    what="""The smallest positive fp16 number is 6e-8. An eps of 1e-8 or 1e-12 added to a denominator, given to
normalize, LayerNorm or log, is exactly 0 there: 0/0 or log 0 follows as soon as the rest is 0 too. bf16 keeps such
an eps but loses it when it is added to a number near 1.""",
    share=2.0,
    replayed=("underflow",),
    clues=(
        pro("suggests", both(FP16, flag("tiny-eps")), "the code adds an eps below 6e-8, which is 0 in fp16"),
        pro("suggests", both(FP16, flag("tiny-eps"), flag("half-weights")), "and the weights are fp16"),
        pro(
            "names",
            both(either(FP16, BF16), flag("tiny-eps-at-one"), either(BROKEN, BAD_GRADIENT)),
            "the code takes an eps from 1 that is lost in half precision",
        ),
        pro("names", both(FP16, about("epsilon")), "the report mentions an eps or a denominator, in fp16"),
        pro("suggests", flag("fp32-fine"), "the same is fine in fp32"),
        pro(
            "hints",
            both(FP16, either(about("contrastive", "constant-input", "poles"), IN_SOME_BATCHES)),
            "a normalization or a vector of zeros in fp16",
        ),
        pro("proves", value("lint", "NP307"), "the code adds an eps that vanishes in its dtype"),
        con("names", FP32, "in fp32 such an eps is a number"),
        con("suggests", ONE_STEP, "the first forward pass was finite"),
        con(
            "hints",
            flag("loss-jump-before", "only-larger-model", "loss-explodes-before-nan"),
            "large values, not small ones, came before it",
        ),
    ),
    remedies=(
        Remedy(
            does="use an eps that exists in the dtype (above 6e-8 in fp16), or run the operation in fp32 with "
            "torch.autocast(enabled=False)"
        ),
    ),
    verify="Run the operation on an all-zero input in the training dtype: output and gradient must be finite.",
)
