"""The log does not show the NaN that is there."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, flag, onset, pro
from ..signs import FP16

CAUSE = Cause(
    name="logger-masks-nan",
    title="the log hides the NaN",
    what="""The HF Trainer's logging_nan_inf_filter leaves NaN out of the mean, so that a dead run logs 0.0 or a
smooth loss; DeepSpeed prints a constant norm (√2) when its groups overflowed; averages skip NaN, progress bars
round it. The log is no evidence then: something else broke the run, and the first task is to see when.""",
    share=1.5,
    clues=(
        pro("names", flag("nan-hidden-by-logger"), "the logger hides NaN"),
        pro("points", flag("constant-grad-norm"), "the logged gradient norm never changes"),
        pro("points", about("logging"), "the report mentions what the logger prints"),
        pro("suggests", both(onset("silent"), flag("grad-nan", "no-learning", "no-loss-symptom")), "no step shows it"),
        pro("hints", flag("loss-zero"), "0.0 in the log can stand for NaN"),
        con("hints", flag("loss-zero-grad-nan"), "the logged gradient norm shows the NaN"),
        pro("points", flag("loss-turned-zero"), "the Trainer's log prints 0.0 for NaN", unless=FP16),
        pro("suggests", flag("nan-filter-on"), "logging_nan_inf_filter is on"),
        con(
            "suggests",
            flag("loss-nan", "late-nan", "hard-error", "recovers", "replica-weights-differ"),
            "NaN is visible in the log",
        ),
    ),
    remedies=(
        Remedy(
            does="set logging_nan_inf_filter=False and look again; the cause of the NaN itself is the next candidate"
        ),
    ),
    verify="A NaN put into one batch on purpose appears in the log.",
)
