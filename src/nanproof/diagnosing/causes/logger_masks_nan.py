"""The log does not show the NaN that is there."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, SUGGESTS, about, both, con, flag, onset, pro, value

CAUSE = Cause(
    name="logger-masks-nan",
    title="the log hides the NaN",
    what="""The HF Trainer's logging_nan_inf_filter leaves NaN out of the mean, so that a dead run logs 0.0 or a
smooth loss; DeepSpeed prints a constant norm (√2) when its groups overflowed; averages skip NaN, progress bars
round it. The log is no evidence then: something else broke the run, and the first task is to see when.""",
    share=1.5,
    clues=(
        pro(NAMES, flag("nan-hidden-by-logger"), "the logger hides NaN"),
        pro(POINTS, flag("constant-grad-norm"), "the logged gradient norm never changes"),
        pro(POINTS, about("logging"), "what the logger prints is spoken of"),
        pro(SUGGESTS, both(onset("silent"), flag("grad-nan", "no-learning", "no-loss-symptom")), "no step shows it"),
        pro(HINTS, flag("loss-zero-grad-nan", "loss-zero"), "0.0 in the log can stand for NaN"),
        pro(SUGGESTS, flag("nan-filter-on"), "logging_nan_inf_filter is on"),
        pro(
            HINTS,
            both(flag("eval-only-nan"), value("framework", "transformers")),
            "training rows are filtered, evaluation rows are not",
        ),
        con(
            SUGGESTS,
            flag("loss-nan", "late-nan", "hard-error", "recovers", "replica-weights-differ"),
            "NaN is visible in the log",
        ),
    ),
    remedies=(
        Remedy(
            does="logging_nan_inf_filter=False (nanproof harden {config} --fact cause=logger-masks-nan), then "
            "look again; the cause of the NaN itself is the next candidate"
        ),
    ),
    verify="A NaN put into one batch on purpose appears in the log.",
)
