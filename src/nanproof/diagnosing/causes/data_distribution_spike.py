"""The data changed under the model."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, onset, pro
from ..signs import LARGE_RUN

CAUSE = Cause(
    name="data-distribution-spike",
    title="a stretch of unusual data makes the loss spike or shift",
    what="""Batches of repeated text, another language, a new mixture, or an order that is not shuffled enough move
the loss while the model is healthy: spikes at irregular intervals, or another level that validation does not see.
The same batches may pass from another checkpoint.""",
    share=4.0,
    clues=(
        pro("points", flag("irregular-spikes"), "spikes at irregular intervals"),
        pro("names", flag("level-shift"), "the loss moved to another level"),
        pro("points", flag("val-flat"), "validation does not see it"),
        pro("suggests", about("data-order"), "the report mentions the order or mixture of the data"),
        pro(
            "suggests",
            both(
                about("data-order"),
                either(flag("irregular-spikes", "level-shift", "val-flat", "recovers"), about("spikes")),
            ),
            "the report mentions spikes or shifts, and the order of the data",
        ),
        pro("suggests", onset("after-data-change"), "it began after a change of the data"),
        pro("hints", both(LARGE_RUN, about("spikes")), "spikes in a large run"),
        pro(
            "hints",
            flag("slow-recovery", "keeps-training", "seed-change-moves-it", "sudden-explosion"),
            "it comes and goes",
        ),
        pro("hints", flag("nan-soon-after-data-change"), "soon after the data changed"),
        con("points", either(onset("step1", "step2", "before-training")), "too early for a shift of the data"),
        con(
            "suggests",
            flag("loss-nan", "nan-weights", "grad-nan", "loss-zero-grad-nan", "intermittent-nan"),
            "unusual data makes spikes, seldom NaN",
        ),
        con(
            "suggests", flag("update-norm-leads", "spike-at-each-resume", "grad-norm-drift"), "another sign came first"
        ),
        con("hints", flag("recovers", "grad-norm-leads"), "a single spike that recovers is benign"),
    ),
    remedies=(
        Remedy(
            does="go back a few hundred steps before the spike and skip 200 to 500 batches; shuffle with a real "
            "permutation; log the source of each batch"
        ),
    ),
    verify="The loss per data source is level across the spike; the run passes the place after the skip.",
)
