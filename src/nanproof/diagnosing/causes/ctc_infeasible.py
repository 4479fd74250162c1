"""A CTC target that does not fit into its input."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import BROKEN, IN_SOME_BATCHES

CAUSE = Cause(
    name="ctc-infeasible",
    title="a CTC target is longer than the frames it must fit into",
    what="""CTC needs at least one output frame per symbol, and one more between equal neighbors. When pooling, a
short clip or a long transcript leaves fewer, no alignment exists: the loss is infinite, its gradient NaN. A lower
rate only delays it, since it depends on the batch.""",
    share=3.0,
    clues=(
        pro("points", about("ctc"), "a CTC-like loss"),
        pro("points", both(about("ctc"), about("sequence-length")), "the report mentions lengths, with CTC"),
        pro(
            "suggests",
            both(
                about("ctc"),
                either(IN_SOME_BATCHES, flag("lower-lr-only-delays", "lower-lr-no-help", "depends-on-seq-len")),
            ),
            "it depends on the batch, not on the rate",
        ),
        pro("suggests", both(about("ctc"), about("loss-infinite")), "the loss is infinite first"),
        pro("hints", both(about("ctc"), flag("loss-nan", "intermittent-nan")), "NaN under CTC"),
        pro("points", both(flag("ctc-unguarded"), BROKEN), "CTC loss without zero_infinity=True"),
        pro("points", both(either(flag("ctc-unguarded"), about("ctc")), flag("loss-infinite-first")), "Inf before NaN"),
        pro("names", flag("ctc-term-bad"), "the CTC term broke first"),
        pro("proves", flag("ctc-lengths-infeasible"), "a scan of the data found targets longer than their inputs"),
        pro("hints", onset("data-length-dependent"), "it depends on the length of the data"),
        pro("replayed", value("located-op", "ctc_loss"), "a bad step failed in the CTC loss"),
        con("proves", denied("ctc"), "there is no CTC loss"),
        con(
            "suggests",
            flag("fp32-fine", "only-multi-gpu", "only-one-gpu-family", "only-larger-model", "loss-scale-collapse"),
            "lengths do not care for hardware or precision",
        ),
        con(
            "suggests",
            either(flag("loss-above-uniform", "nan-weights", "lr-discontinuity"), about("resuming")),
            "weights or a resume are likelier",
        ),
    ),
    remedies=(
        Remedy(
            does="F.ctc_loss(..., zero_infinity=True), and drop samples with input_length < target_length + repeats; "
            "less pooling or wider inputs keep them"
        ),
    ),
    verify="A scan of the data finds no infeasible pair; the loss is finite on the shortest clip with "
    "the longest text.",
)
