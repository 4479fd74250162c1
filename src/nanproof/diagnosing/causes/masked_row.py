"""Softmax over a row in which everything is masked."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import BROKEN, GROWTH

CAUSE = Cause(
    name="masked-row",
    title="every entry of a softmax row is masked",
    what="""Softmax over −inf only is 0/0. It happens where a sequence is all padding, where padding and causal
mask leave nothing, where no action is legal, where a node has no neighbor, or where the mask has the wrong sign.
It shows with padding or a batch above 1, in every precision, often at the first step.""",
    share=5.0,
    replayed=("masked-row",),
    clues=(
        pro("names", flag("only-with-padding"), "only with padding or a batch above 1"),
        pro("names", about("all-masked"), "the report mentions a row that is masked entirely"),
        pro(
            "points",
            about("padding", "batch-above-one"),
            "padding or the batch size decides",
            unless=flag("only-with-padding"),
        ),
        pro(
            "points",
            about("masking"),
            "the report mentions a mask",
            unless=either(
                about("ignored-labels", "label-values", "no-targets", "where"),
                flag("grad-nan-loss-finite", "negative-loss"),
            ),
        ),
        pro("suggests", about("negative-infinity"), "the report mentions −inf as a filling value"),
        pro("names", about("action-mask"), "the report mentions masked actions"),
        pro("hints", both(about("reinforcement"), flag("hard-error")), "sampling from a NaN distribution"),
        pro("hints", flag("depends-on-seq-len"), "it depends on the sequence length"),
        pro("hints", about("attention-op"), "anomaly mode names a softmax"),
        pro(
            "hints",
            both(onset("step1", "data-dependent"), flag("fp32-also-nan", "nan-at-lr-0")),
            "at once and in every precision",
        ),
        pro("points", value("lint", "NP216", "NP217"), "the code masks with −inf and can mask everything"),
        pro("suggests", both(value("lint", "NP216", "NP217"), BROKEN), "and the loss is NaN"),
        pro("points", both(flag("left-padding"), BROKEN), "left padding leaves rows whose first tokens see nothing"),
        pro("points", both(flag("masks-attention"), BROKEN), "a padding mask goes into attention", unless=GROWTH),
        pro(
            "points",
            both(flag("masks-with-infinity"), BROKEN),
            "scores are masked with −inf before a softmax",
            unless=either(GROWTH, value("lint", "NP216", "NP217")),
        ),
        con("points", denied("only-with-padding"), "it happens without padding too"),
        con(
            "suggests",
            flag("loss-explodes-before-nan", "grad-norm-drift", "loss-scale-collapse", "nan-weights"),
            "it grew, which a mask does not",
        ),
        con("hints", onset("late", "random-late"), "it would have come earlier"),
    ),
    remedies=(
        Remedy(
            does="pad on the right during training (tokenizer.padding_side = 'right'), or let each row keep one "
            "unmasked position",
            when=flag("left-padding"),
        ),
        Remedy(
            does="nanproof.ops.masked_softmax, or keep one unmasked entry per row; fill with torch.finfo(dtype).min "
            "instead of -inf"
        ),
    ),
    verify="A batch with one row of padding only gives finite outputs and gradients.",
)
