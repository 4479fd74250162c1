"""The learning rate is too high for this model, batch or phase."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, denied, either, flag, number, onset, pro, value
from ..signs import (
    AT_ONCE,
    BACK_TO_NORMAL,
    BROKEN,
    FP16,
    FROM_THE_START,
    GROWTH,
    IN_SOME_BATCHES,
    NO_UPDATE_YET,
    ONE_STEP,
    RESUMED,
    TURNED_NAN,
)

CAUSE = Cause(
    name="lr-too-high",
    title="the learning rate is too high",
    what="""Each update overshoots: gradient and activation norms drift upwards, the loss climbs, then overflows.
Typical are a rate made for a larger batch (8 GPUs) used on one, a rate from another optimizer or model size, and
reinforcement learning, where the policy runs away from its reference. A lower rate cures it; when a lower rate only
delays it, the cause is another one.""",
    share=7.0,
    clues=(
        pro("points", flag("diverges-as-lr-rises"), "it diverges while the learning rate rises"),
        pro("points", flag("lower-lr-helps"), "a lower learning rate helps"),
        pro("points", value("bad-leaf", "update"), "the optimizer's own update wrote the bad parameters"),
        pro("points", value("mechanism", "growth-overflow"), "in a replayed step values had outgrown even float32"),
        pro("points", value("lr-above-config"), "the rate in force is above the configured one"),
        # growth alone is also that of an unstable model or of ranks that disagree: never more than possible
        pro(1.9, flag("grad-norm-drift"), "gradient norms drift upwards"),
        pro("hints", flag("activation-norm-drift"), "activation norms drift upwards"),
        pro("suggests", flag("loss-explodes-before-nan", "grad-explosion"), "growth before NaN"),
        pro("suggests", flag("loss-jump-before", "loss-ran-away"), "the loss grew out of bounds", unless=FP16),
        pro("proves", both(value("lr-high", "absurd"), BROKEN), "no optimizer bears such a learning rate"),
        pro("names", both(value("lr-high", "extreme"), BROKEN), "the learning rate is far above the usual range"),
        pro("points", both(value("lr-high", "high"), BROKEN), "the learning rate is above the usual range"),
        pro("points", both(value("lr-high"), GROWTH), "growth at a high learning rate"),
        pro("faint", TURNED_NAN, "the loss turned NaN", unless=either(AT_ONCE, FROM_THE_START)),
        pro("hints", flag("degenerate-text"), "generated text degenerates"),
        pro("hints", flag("slow-divergence"), "the loss creeps upwards"),
        pro("hints", flag("huge-finite-loss", "sudden-explosion", "no-recovery-no-divergence"), "the loss ran away"),
        pro("suggests", onset("at-lr-peak"), "it began at the peak of the learning rate"),
        pro(
            "suggests",
            about("several-rates"),
            "several learning rates were tried with different outcomes",
            unless=flag("lower-lr-no-help", "lower-lr-only-delays"),
        ),
        pro("hints", either(value("tells", "lr"), about("learning-rate")), "the learning rate is part of the report"),
        pro(
            "suggests",
            both(about("large-batch"), either(value("tells", "lr"), about("learning-rate"))),
            "a rate made for another batch size",
        ),
        pro("hints", both(number("lr", above=1.1e-3), about("adam")), "a high rate for Adam"),
        pro("hints", both(number("lr", above=1.1e-3), value("optimizer", "adam", "adamw")), "a high rate for Adam"),
        pro(
            "suggests",
            number("lr", above=0.0499),
            "a rate of 0.05 or more",
            unless=either(value("lr-high"), value("optimizer", "sgd", "adadelta", "prodigy")),
        ),
        pro(
            "suggests",
            both(about("rlhf", "reinforcement"), either(flag("degenerate-text"), onset("random-late", "late"))),
            "a policy that runs away from its reference",
        ),
        pro("suggests", both(about("rlhf", "reinforcement"), flag("degenerate-text")), "its text degenerates"),
        pro(
            "hints",
            both(about("detection"), onset("early"), flag("loss-nan", "loss-explodes-before-nan", "hard-error")),
            "detectors at their 8-GPU rate break within the first iterations",
        ),
        pro("points", value("config-check", "NP703"), "the configured rate is out of the usual range"),
        con("suggests", denied("loss-explodes-before-nan"), "nothing grew before"),
        con(
            "proves",
            both(value("lr-high", "absurd", "extreme"), flag("learned-first"), denied("loss-explodes-before-nan")),
            "the loss fell for long, which it cannot at such a rate: a schedule may scale it",
        ),
        con("names", flag("lower-lr-no-help"), "a lower learning rate changes nothing"),
        con("points", flag("lower-lr-only-delays"), "a lower learning rate only delays it"),
        con("points", onset("step1"), "at the first step the rate has done nothing yet"),
        con("suggests", IN_SOME_BATCHES, "it comes with certain batches"),
        con("suggests", BACK_TO_NORMAL, "it recovers by itself"),
        con(
            "hints",
            flag("cpu-fine", "only-one-gpu-family", "only-multi-gpu", "fp32-fine", "nan-weights"),
            "a rate does not care for hardware",
        ),
        con("hints", both(ONE_STEP, FP16), "after one fp16 step the weights' dtype is likelier"),
        con(
            "suggests",
            both(RESUMED, flag("lr-discontinuity", "config-change-ignored")),
            "the rate in force is not the configured one",
        ),
        con("hints", flag("seed-change-moves-it", "only-larger-model"), "seed or size move it"),
    ),
    excluded=(Exclusion(when=NO_UPDATE_YET, says="it was NaN before any update, or at a rate of 0"),),
    remedies=(
        Remedy(
            does="lower the learning rate (try a tenth, or scale it with the batch size) and clip gradients; start "
            "from the last healthy checkpoint"
        ),
    ),
    verify="Over the next thousand steps the gradient norm stays within its old band and the loss falls; if it "
    "only fails later, the rate was not the cause.",
)
