"""A machine that computes wrongly."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import AT_ONCE, IN_SOME_BATCHES

CAUSE = Cause(
    name="hardware-fault",
    title="one machine or GPU computes wrong results",
    what="""A defect GPU, memory, link or power supply flips bits: NaN or jumps at random times, from one node, not
reproducible elsewhere with the same seed and data. The kernel log may show Xid or ECC errors.""",
    share=2.0,
    clues=(
        pro("names", flag("not-reproducible-elsewhere"), "it cannot be reproduced on other machines"),
        pro(
            "names",
            about("one-machine"),
            "the report mentions one machine, or errors of the hardware,",
            unless=either(flag("only-one-gpu-family"), both(flag("only-multi-gpu"), about("overlap"))),
        ),
        pro("proves", flag("not-repeatable"), "the same step, computed again, gave another result"),
        pro("proves", flag("xid-error"), "the kernel log shows a GPU memory error"),
        pro("suggests", onset("random", "random-late"), "it began at a random time"),
        pro("hints", flag("sudden-explosion", "seed-dependent", "only-multi-gpu"), "without warning"),
        pro("hints", both(about("large-scale"), onset("random", "random-late")), "many machines, random times"),
        pro("points", value("origin", "transient"), "a replayed step was finite: the fault was transient"),
        con("suggests", denied("only-one-gpu-family"), "it is NaN on another GPU too"),
        con("suggests", either(IN_SOME_BATCHES, AT_ONCE), "it comes back in the same place"),
        con(
            "suggests",
            flag("recovers", "lr-discontinuity", "same-epoch-every-run", "loss-explodes-before-nan", "grad-norm-drift"),
            "another sign",
        ),
        con("suggests", flag("only-one-gpu-family"), "a whole kind of GPU is not defect"),
    ),
    remedies=(
        Remedy(
            does="run the same hundred steps on another machine; check the kernel log for Xid errors and the GPU's ECC"
            " counters; take the node out"
        ),
    ),
    verify="The same seed and batches give bit-equal losses on two machines.",
)
