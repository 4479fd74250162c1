"""Softmax over a row in which everything is masked."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, denied, either, flag, onset, pro, value

CAUSE = Cause(
    name="masked-row",
    title="every entry of a softmax row is masked",
    what="""Softmax over −inf only is 0/0. It happens where a sequence is all padding, where padding and causal
mask leave nothing, where no action is legal, where a node has no neighbour, or where the mask has the wrong sign.
It shows with padding or a batch above 1, in every precision, often at the first step.""",
    share=5.0,
    clues=(
        pro(NAMES, flag("only-with-padding"), "only with padding or a batch above 1"),
        pro(NAMES, about("all-masked"), "a row that is masked entirely is spoken of"),
        pro(
            POINTS,
            about("padding", "batch-above-one"),
            "padding or the batch size decides",
            unless=flag("only-with-padding"),
        ),
        pro(
            POINTS,
            about("masking"),
            "a mask is spoken of",
            unless=either(
                about("ignored-labels", "label-values", "no-targets", "where"),
                flag("grad-nan-loss-finite", "negative-loss"),
            ),
        ),
        pro(SUGGESTS, about("negative-infinity"), "−inf as a filling value is spoken of"),
        pro(NAMES, about("action-mask"), "masked actions are spoken of"),
        pro(HINTS, both(about("reinforcement"), flag("hard-error")), "sampling from a NaN distribution"),
        pro(HINTS, flag("depends-on-seq-len"), "it depends on the sequence length"),
        pro(HINTS, about("attention-op"), "anomaly mode names a softmax"),
        pro(
            HINTS,
            both(onset("step1", "data-dependent"), flag("fp32-also-nan", "nan-at-lr-0")),
            "at once and in every precision",
        ),
        pro(PROVES, value("mechanism", "masked-row"), "a replayed step had a row that is masked entirely"),
        pro(POINTS, value("lint", "NP216", "NP217"), "the code masks with −inf and can mask everything"),
        con(POINTS, denied("only-with-padding"), "it happens without padding too"),
        con(
            SUGGESTS,
            flag("loss-explodes-before-nan", "grad-norm-drift", "loss-scale-collapse", "nan-weights"),
            "it grew, which a mask does not",
        ),
        con(HINTS, onset("late", "random-late"), "it would have come earlier"),
    ),
    remedies=(
        Remedy(
            does="nanproof.ops.masked_softmax, or let each row keep one entry (its own position); a finite filling "
            "value (torch.finfo(dtype).min) instead of -inf; nanproof lint --select NP216,NP217 finds the "
            "places"
        ),
    ),
    verify="A batch with one row of padding only gives finite outputs and gradients.",
)
