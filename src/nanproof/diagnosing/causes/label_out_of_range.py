"""Targets outside of what the loss is defined for."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, flag, onset, pro

CAUSE = Cause(
    name="label-out-of-range",
    title="targets are outside the range the loss is defined for",
    what="""Binary cross-entropy with targets of 0 and 255 goes below zero and has no bottom; IoU and dice pass 1;
class numbers from 1 to N, or a 255 for "ignore", index beyond the logits: a device-side assert on GPUs, garbage
elsewhere.""",
    share=3.0,
    clues=(
        pro("names", flag("negative-loss"), "a loss below zero that cannot be"),
        pro("names", flag("metric-above-bound"), "a metric is beyond its bound"),
        pro("names", flag("device-assert"), "a device-side assert: usually an index out of range"),
        pro("points", about("label-values"), "the report mentions values of labels or classes"),
        pro(
            "hints",
            both(about("segmentation"), onset("step1", "early"), flag("loss-nan", "huge-finite-loss", "val-also-nan")),
            "masks stored as 0 and 255, or a void class, are common here",
        ),
        pro("hints", flag("huge-finite-loss"), "a huge but finite loss"),
        pro("hints", both(about("own-data"), flag("hard-error")), "own data and an exception"),
        pro("proves", flag("labels-out-of-range"), "a scan of the data found labels out of range"),
        con(
            "suggests",
            flag("fp32-fine", "cpu-fine", "only-larger-model", "recovers"),
            "labels do not care for precision",
        ),
        con("hints", onset("late", "random-late", "after-resume"), "it would have come earlier"),
    ),
    remedies=(Remedy(does="bring the targets into range: masks / 255, class ids from 0, void as ignore_index"),),
    verify="min and max of the targets over one epoch lie within the loss's domain; the loss is never negative.",
)
