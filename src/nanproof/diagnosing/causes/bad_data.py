"""A sample is not what the training expects."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import AT_ONCE, BROKEN, FP16, FROM_THE_START, IN_SOME_BATCHES, LARGE_RUN, RESUMED, SPIKES, TURNED_NAN

CAUSE = Cause(
    name="bad-data",
    title="bad data: NaN, Inf or out-of-range values in some samples",
    what="""Missing values, corrupted files, boxes without area, silent clips normalized by their own energy, a
channel without variance: the batch is NaN or makes NaN in the first operation. It comes back with the same samples,
whatever the learning rate or the precision.""",
    share=9.0,
    clues=(
        pro("hints", flag("grad-nan-skipped"), "single gradients are NaN", unless=FP16),
        pro(
            "names",
            about("bad-samples"),
            "broken or out-of-range samples are reported",
            unless=about("ignored-labels", "new-parameters", "broken-weights"),
        ),
        pro(
            "points",
            about("constant-input"),
            "silent, blank or constant inputs are reported",
            unless=about("all-masked"),
        ),
        pro("points", flag("lower-lr-no-help"), "a lower learning rate changes nothing"),
        pro("points", flag("same-epoch-every-run"), "at the same place of the data every time"),
        pro("points", flag("nan-soon-after-data-change"), "NaN soon after the data changed"),
        pro("suggests", onset("after-data-change"), "it began after a change of the data"),
        pro("suggests", onset("data-dependent", "intermittent"), "it depends on the data"),
        pro("suggests", flag("intermittent-nan"), "NaN on isolated steps"),
        pro("points", flag("nan-in-preprocessing"), "NaN in preprocessing"),
        pro("suggests", flag("one-component-nan"), "one loss component is NaN first"),
        pro("suggests", about("own-data"), "own data, not the data the code was made for"),
        pro("hints", about("certain-samples", "data-words"), "the report mentions certain samples or the data"),
        pro("faint", TURNED_NAN, "the loss turned NaN", unless=either(AT_ONCE, FROM_THE_START)),
        pro("hints", both(AT_ONCE, flag("val-also-nan")), "training and validation are NaN alike"),
        pro(
            "hints",
            about("detection", "audio", "segmentation"),
            "tasks whose annotations and signals are often degenerate",
        ),
        pro("hints", flag("fp32-also-nan", "keeps-training", "cpu-fine"), "precision does not matter"),
        pro("hints", both(onset("early", "step1"), flag("loss-nan")), "NaN within the first pass over the data"),
        pro("proves", flag("data-degenerate"), "a scan of the data found boxes without area"),
        pro("suggests", flag("data-constant", "data-absurd", "data-empty"), "a scan of the data found odd samples"),
        pro("points", flag("preprocessing-warning"), "NumPy warned of an invalid value while preparing the data"),
        pro("points", both(flag("scales-by-itself"), BROKEN), "samples are divided by their own range or energy"),
        pro(
            "points",
            both(flag("data-constant"), flag("std-of-batch", "divides-by-std")),
            "a column is constant, and the code divides by deviations",
        ),
        pro("proves", flag("data-nonfinite"), "a scan of the data found NaN or Inf"),
        pro("replayed", value("bad-leaf", "input"), "in a replayed step the batch already contained NaN or Inf"),
        pro("suggests", denied("loss-explodes-before-nan"), "sudden: no growth in loss or gradient norm beforehand"),
        con("hints", denied("one-component-nan"), "all loss terms break together"),
        con("suggests", denied("same-epoch-every-run"), "it does not come back with the same batch"),
        con("points", value("mechanism", "loss-expression"), "in a replayed step the batch was finite"),
        con("points", flag("data-clean"), "a scan of the data found nothing"),
        con("suggests", flag("scale-fell-after-nan"), "NaN goes on with other batches while the scaler skips updates"),
        con(
            "suggests",
            flag("fp32-fine", "only-larger-model", "only-one-gpu-family", "only-multi-gpu", "cpu-fine"),
            "the same data is fine elsewhere",
        ),
        con("suggests", either(SPIKES, RESUMED), "spikes and resumes have other reasons", unless=IN_SOME_BATCHES),
        con(
            "suggests",
            flag("seed-change-moves-it", "grad-norm-drift", "loss-explodes-before-nan", "nan-weights"),
            "it grew or moved, which a bad sample does not",
        ),
        con("hints", LARGE_RUN, "a large run on much-used data", unless=onset("after-data-change")),
    ),
    remedies=(
        Remedy(
            does="find the bad rows, drop or repair them, and guard the normalization against constant samples "
            "(nanproof.ops.safe_div)"
        ),
    ),
    verify="A scan of the data finds no problems, and the steps that failed are finite with the repaired samples.",
)
