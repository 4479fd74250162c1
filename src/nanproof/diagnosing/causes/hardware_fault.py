"""A machine that computes wrongly."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, denied, either, flag, onset, pro, value
from ..signs import AT_ONCE, IN_SOME_BATCHES

CAUSE = Cause(
    name="hardware-fault",
    title="one machine or GPU computes wrong results",
    what="""A defect GPU, memory, link or power supply flips bits: NaN or jumps at random times, from one node, not
reproducible elsewhere with the same seed and data. The kernel log may show Xid or ECC errors.""",
    share=2.0,
    clues=(
        pro(NAMES, flag("not-reproducible-elsewhere"), "it cannot be reproduced on other machines"),
        pro(
            NAMES,
            about("one-machine"),
            "the report mentions one machine, or errors of the hardware,",
            unless=either(flag("only-one-gpu-family"), both(flag("only-multi-gpu"), about("overlap"))),
        ),
        pro(PROVES, flag("xid-error"), "the kernel log shows a GPU memory error"),
        pro(SUGGESTS, onset("random", "random-late"), "it began at a random time"),
        pro(HINTS, flag("sudden-explosion", "seed-dependent", "only-multi-gpu"), "without warning"),
        pro(HINTS, both(about("large-scale"), onset("random", "random-late")), "many machines, random times"),
        pro(POINTS, value("origin", "transient"), "a replayed step was finite: the fault was transient"),
        con(SUGGESTS, denied("only-one-gpu-family"), "it is NaN on another GPU too"),
        con(SUGGESTS, either(IN_SOME_BATCHES, AT_ONCE), "it comes back in the same place"),
        con(
            SUGGESTS,
            flag("recovers", "lr-discontinuity", "same-epoch-every-run", "loss-explodes-before-nan", "grad-norm-drift"),
            "another sign",
        ),
        con(SUGGESTS, flag("only-one-gpu-family"), "a whole kind of GPU is not defect"),
    ),
    remedies=(
        Remedy(
            does="run the same hundred steps on another machine; check the kernel log for Xid errors and the GPU's ECC"
            " counters; take the node out"
        ),
    ),
    verify="The same seed and batches give bit-equal losses on two machines.",
)
