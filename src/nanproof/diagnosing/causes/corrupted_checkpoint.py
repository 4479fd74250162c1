"""The weights that training began from are broken."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, onset, pro, value
from ..signs import AT_ONCE

CAUSE = Cause(
    name="corrupted-checkpoint",
    title="the loaded weights are broken, incomplete or the wrong ones",
    what="""A download cut short, a conversion or merge that went wrong, a checkpoint saved after the NaN, weights
of another model: the forward pass is NaN at once, or the first loss lies above chance level. BatchNorm buffers can
be NaN while all parameters are finite: then training looks right and evaluation is NaN.""",
    share=4.0,
    clues=(
        pro("points", flag("nan-weights"), "weights are NaN or absurd", unless=about("new-parameters")),
        pro("proves", flag("checkpoint-nonfinite"), "the checkpoint holds NaN or Inf"),
        pro("names", flag("checkpoint-damaged"), "the checkpoint is damaged"),
        pro("proves", flag("checkpoint-unreadable"), "a checkpoint is cut short or damaged"),
        pro("names", flag("loss-above-uniform"), "the first loss is above chance level"),
        pro("points", flag("loss-high-then-nan"), "the loss is high from the start"),
        pro("names", about("broken-weights"), "the report mentions merged, converted or broken weights"),
        pro(
            "points",
            both(AT_ONCE, about("pre-trained")),
            "NaN at once, and weights were loaded",
            unless=about(
                "new-parameters",
                "ignored-labels",
                "template",
                "all-masked",
                "padding",
                "unscale-error",
                "attention-kernel",
            ),
        ),
        pro(
            "suggests", both(onset("after-resume", "early-after-restart"), flag("loss-nan")), "NaN right after loading"
        ),
        pro("points", flag("nan-since-load"), "not one finite loss since the checkpoint was loaded"),
        pro("hints", both(AT_ONCE, flag("loss-nan", "val-also-nan")), "NaN before anything was learned"),
        pro("hints", flag("degenerate-text"), "one token repeated: the logits are NaN"),
        pro("hints", flag("eval-only-nan"), "buffers that only evaluation uses may be NaN"),
        pro("suggests", both(about("accuracy-zero"), AT_ONCE), "nothing right from the start"),
        pro("hints", both(flag("huge-finite-loss"), AT_ONCE), "a huge loss from the start"),
        pro("hints", both(flag("loss-zero-grad-nan"), AT_ONCE), "a hidden NaN from the start"),
        pro(
            "replayed", value("bad-leaf", "parameter"), "in a replayed step the parameters already contained NaN or Inf"
        ),
        con("suggests", flag("loss-first-step-finite"), "the first loss is finite"),
        con("names", flag("checkpoint-healthy"), "a scan found the checkpoint healthy"),
        con(
            "suggests",
            onset("mid", "late", "random-late", "intermittent", "data-dependent"),
            "loaded weights break at once",
        ),
        con(
            "suggests",
            flag("fp32-fine", "cpu-fine", "only-one-gpu-family", "only-with-padding", "recovers", "lr-discontinuity"),
            "the same weights are fine elsewhere",
        ),
        con(
            "hints",
            either(flag("hard-error", "seed-dependent"), onset("random-at-start")),
            "another sign",
            unless=flag("checkpoint-unreadable"),
        ),
    ),
    remedies=(
        Remedy(
            does="resume from the last healthy checkpoint",
            when=either(flag("checkpoint-nonfinite"), onset("after-resume")),
        ),
        Remedy(does="download or convert the weights again, and compare them with the ones that were loaded"),
    ),
    verify="The first loss is at or below chance level (ln of the number of classes), and a scan says "
    "that the checkpoint is healthy.",
)
